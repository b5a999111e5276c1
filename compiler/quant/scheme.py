"""A quantization scheme as data: `w4a8:g64:asym` and back."""
import re
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import UserError
from ..ops.codes import E4M3, E4M3_MAX

GROUPS = (32, 64, 128)
"""Input channels that share a scale. A kernel's inner loop is 32 of them."""

ACT_GROUP = 32
"""Of 8-bit activations: a scale per token alone costs 8 points of top-1 agreement on SmolLM2 (per-channel int8 weights).

16-bit ones have one a token: the squared error of a row of K is at most K max^2 / (12 * 32512^2) <= K * 7.9e-11 * sum(x^2), and
bf16's is 2.2e-6 * sum(x^2) on average, so up to K = 27,000 a row loses less than by bf16, whatever its outliers.
"""

SPELLING = ("w8 or w4, then a8 or a16, then :g32 :g64 :g128 or :channel, then :token, then :asym; like w8, w8a8, w4:g128, w4a8:g64:asym; "
            "or fp8 or fp8a8, then :g32 :g64 :g128 or :tensor")


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored and how the rows it meets are rounded."""

    bits: int                      # of a weight's code: 8 or 4
    group: int = 32                # input channels to a scale; 0: the whole row (per channel)
    symmetric: bool = True         # else an offset per group beside the scale
    act_bits: int = 16             # of an activation's code, finer than bf16 at 16; 0: left as it is
    act_group: int = ACT_GROUP     # columns to a scale, of 8-bit codes; 0: one a row (per token)
    e4m3: bool = False             # codes of weights and activations are floats of 8 bits
    tensor: bool = False           # one scale for the whole weight; group is 0

    def __post_init__(self) -> None:
        # without 8-bit rows it has no meaning: what it would be with them, so that equal schemes are equal
        if self.act_bits != 8: object.__setattr__(self, "act_group", 0 if self.e4m3 else ACT_GROUP)

    def __str__(self) -> str:
        if self.e4m3: return f"fp8{'a8' if self.act_bits else ''}{':tensor' if self.tensor else f':g{self.group}' if self.group else ''}"
        acts = {16: "", 8: "a8", 0: "a32"}[self.act_bits]
        group = "" if self.group == 32 else f":g{self.group}" if self.group else ":channel"
        token = ":token" if self.act_bits == 8 and self.act_group == 0 else ""
        return f"w{self.bits}{acts}{group}{token}{'' if self.symmetric else ':asym'}"

    @property
    def row_group(self) -> int:
        """Columns to a scale of what the product reads; 0: one a row."""
        return self.act_group if self.act_bits == 8 else 0

    @property
    def top(self) -> float:
        """The largest number a code stands for, before its scale."""
        return E4M3_MAX if self.e4m3 else 2 ** (self.bits - 1) - 1

    def stored_bits(self, k: int) -> float:
        """Bits per weight of a row of k, scales and offsets counted; of a whole tensor's scale, none."""
        groups = 0 if self.tensor else -(-k // self.group) if self.group else 1
        return (-(-k * self.bits // 8) * 8 + groups * (16 if self.symmetric else 32)) / k


def e4m3(group: int = 0, act_bits: int = 0, tensor: bool = False) -> Scheme:
    """Weights in e4m3, a scale a row where no group is given; rows as they are, or e4m3 with a scale each."""
    return Scheme(8, group, True, act_bits, 0, True, tensor)


def stored_as(codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, group: int) -> Scheme:
    """The scheme of a weight as it is stored, its activations left at their default."""
    if codes.dtype != E4M3: return Scheme(bits, group, offset is None)
    return e4m3(group, tensor=scale.shape[0] < codes.shape[0])


_SCHEME = re.compile(r"(?P<kind>w4|w8|fp8)(?:a(?P<acts>8|16|32))?(?P<rest>(?::[a-z0-9]+)*)")


def parse(text: str) -> Scheme | None:
    """The scheme of its text, None for "none". Raises UserError for any other text."""
    if text == "none": return None
    found = _SCHEME.fullmatch(text)
    floats = found is not None and found["kind"] == "fp8"
    if not found or (floats and found["acts"] not in (None, "8")): raise UserError(f"unknown quantization {text!r}: write {SPELLING}")
    scheme = Scheme(int(found["kind"][1]), act_bits={"8": 8, "32": 0}.get(found["acts"] or "", 16)) if not floats else e4m3(
        act_bits=int(found["acts"] or 0))
    parts = found["rest"].split(":")[1:]
    kinds = ["group" if part[0] == "g" or part in ("channel", "tensor") else part for part in parts]
    twice = next((part for part, kind in zip(parts, kinds, strict=True) if kinds.count(kind) > 1), None)
    if twice:
        what = twice if twice in ("asym", "token") else "which group"
        raise UserError(f"quantization {text!r} says {what} twice: keep one of them")
    for part in parts:
        if part == "asym" and floats:
            raise UserError(f"quantization {text!r}: e4m3 codes have a sign of their own and no offset: leave :asym out")
        if part == "asym": scheme = replace(scheme, symmetric=False)
        elif part == "tensor" and floats: scheme = replace(scheme, tensor=True)
        elif part == "channel": scheme = replace(scheme, group=0)
        elif part == "token": scheme = replace(scheme, act_group=0)
        elif part[0] == "g" and part[1:].isdigit() and int(part[1:]) in GROUPS: scheme = replace(scheme, group=int(part[1:]))
        else: raise UserError(f"unknown quantization {text!r} at {part!r}: write {SPELLING}")
    return scheme
