"""A quantization scheme as data: `w4a8:g64:asym` and back."""
import re
from dataclasses import dataclass, replace

from ..errors import UserError

GROUPS = (32, 64, 128)
"""Input channels that share a scale. A kernel's inner loop is 32 of them."""

ACT_GROUP = 32
"""Of 8-bit activations: a scale per token alone costs 8 points of top-1 agreement on SmolLM2 (per-channel int8 weights).

16-bit ones have one a token: the squared error of a row of K is at most K max^2 / (12 * 32512^2) <= K * 7.9e-11 * sum(x^2), and
bf16's is 2.2e-6 * sum(x^2) on average, so up to K = 27,000 a row loses less than by bf16, whatever its outliers.
"""

SPELLING = "w8 or w4, then a8 or a16, then :g32 :g64 :g128 or :channel, then :token, then :asym; like w8, w8a8, w4:g128, w4a8:g64:asym"


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored and how the rows it meets are rounded."""

    bits: int                      # of a weight's code: 8 or 4
    group: int = 32                # input channels to a scale; 0: the whole row (per channel)
    symmetric: bool = True         # else an offset per group beside the scale
    act_bits: int = 16             # of an activation's code, finer than bf16 at 16; 0: left as it is
    act_group: int = ACT_GROUP     # columns to a scale, of 8-bit codes; 0: one a row (per token), as the others have

    def __post_init__(self) -> None:
        if self.act_bits != 8: object.__setattr__(self, "act_group", 0)

    def __str__(self) -> str:
        acts = {16: "", 8: "a8", 0: "a32"}[self.act_bits]
        group = "" if self.group == 32 else f":g{self.group}" if self.group else ":channel"
        token = ":token" if self.act_bits == 8 and self.act_group == 0 else ""
        return f"w{self.bits}{acts}{group}{token}{'' if self.symmetric else ':asym'}"

    def stored_bits(self, k: int) -> float:
        """Bits per weight of a row of k, scales and offsets counted."""
        groups = -(-k // self.group) if self.group else 1
        return (-(-k * self.bits // 8) * 8 + groups * (16 if self.symmetric else 32)) / k


_SCHEME = re.compile(r"w(?P<bits>[48])(?:a(?P<acts>8|16|32))?(?P<rest>(?::[a-z0-9]+)*)")


def parse(text: str) -> Scheme | None:
    """The scheme of its text, None for "none". Raises UserError for any other text."""
    if text == "none": return None
    found = _SCHEME.fullmatch(text)
    if not found: raise UserError(f"unknown quantization {text!r}: write {SPELLING}")
    scheme = Scheme(int(found["bits"]), act_bits={"8": 8, "32": 0}.get(found["acts"] or "", 16))
    parts = found["rest"].split(":")[1:]
    kinds = ["group" if part[0] == "g" or part == "channel" else part for part in parts]
    twice = next((part for part, kind in zip(parts, kinds, strict=True) if kinds.count(kind) > 1), None)
    if twice:
        what = twice if twice in ("asym", "token") else "which group"
        raise UserError(f"quantization {text!r} says {what} twice: keep one of them")
    for part in parts:
        if part == "asym": scheme = replace(scheme, symmetric=False)
        elif part == "channel": scheme = replace(scheme, group=0)
        elif part == "token": scheme = replace(scheme, act_group=0)
        elif part[0] == "g" and part[1:].isdigit() and int(part[1:]) in GROUPS: scheme = replace(scheme, group=int(part[1:]))
        else: raise UserError(f"unknown quantization {text!r} at {part!r}: write {SPELLING}")
    return scheme
