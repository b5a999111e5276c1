"""How each layer's KV cache is held: `int8`, `fp8:keep=2`, or a format a layer, `int8,none,fp8,none`."""
import re
from dataclasses import dataclass

from ..errors import UserError
from ..ops.kv_quantized import FORMATS

SPELLING = "none, int8 or fp8, with :keep=N for the first and last N layers wide; or one of none, int8, fp8 for each layer, with commas"


@dataclass(frozen=True)
class KvPlan:
    """format: of every layer but the first and last `keep`; or `each`: of each layer in order."""

    format: str = "int8"
    keep: int = 0
    each: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(self.each) if self.each else self.format + (f":keep={self.keep}" if self.keep else "")

    @property
    def used(self) -> set[str]:
        """The formats some layer may get."""
        return {format for format in self.each or (self.format,) if format != "none"}

    def formats(self, layers: int) -> tuple[str, ...]:
        """One format a layer. UserError where the plan does not fit a model of so many layers."""
        if self.each and len(self.each) != layers:
            raise UserError(f"--kv-quant {self} names {len(self.each)} layers, the model has {layers} with a KV cache: "
                            "give one format each")
        if not self.each and 2 * self.keep >= layers:
            raise UserError(f"--kv-quant {self} keeps the first and last {self.keep} layers wide, which are all {layers} layers of this "
                            "model: choose a smaller keep, or none")
        middle = (self.format,) * (layers - 2 * self.keep)
        return self.each or ("none",) * self.keep + middle + ("none",) * self.keep


def parse_kv(text: str) -> KvPlan | None:
    """The plan of its text, None for "none". UserError for any other text."""
    if text == "none": return None
    each = tuple(text.split(","))
    if len(each) > 1 and all(format in (*FORMATS, "none") for format in each):
        return KvPlan(each=each) if set(each) != {"none"} else None
    found = re.fullmatch(rf"({'|'.join(FORMATS)})(?::keep=(\d{{1,4}}))?", text)
    if not found: raise UserError(f"unknown KV format {text!r}: write {SPELLING}")
    return KvPlan(found[1], int(found[2] or 0))
