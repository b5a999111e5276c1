"""Codes and scales of a weight by itself: round to nearest, or with the range that loses least (Banner et al., 2019).

Scales and offsets are rounded to f16 first, and codes are chosen for them as they are stored.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..ops.codes import groups, pack_codes, spread, weight
from .scheme import Scheme

F16_MAX = torch.finfo(torch.float16).max
F16_TINY = 2.0 ** -24              # the smallest f16 above 0
SHRINK = tuple(1 - 0.02 * step for step in range(26))
"""Ranges that `mse` tries, as shares of the largest value: 1.0 down to 0.5."""


@dataclass(frozen=True)
class Quantized:
    """A weight [N, K] as codes; see compiler.ops.codes."""

    codes: Tensor                  # u8 [N, ceil(K * bits / 8)]
    scale: Tensor                  # f16 [N, G]
    offset: Tensor | None          # f16 [N, G]
    scheme: Scheme
    k: int

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the codes mean."""
        return weight(self.codes, self.scale, self.offset, self.scheme.bits, self.scheme.group, self.k, dtype)


def check_finite(w: Tensor, name: str) -> None:
    """UserError, naming the tensor, where a value is NaN or infinite."""
    bad = ~w.isfinite()
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise UserError(f"{name}: {int(bad.sum())} values are not finite, the first at [{row}, {column}] is {float(w[row, column])}: "
                        "a weight with NaN or inf cannot be quantized; leave it wide with a recipe, or mend the checkpoint")


def round_to_nearest(w: Tensor, scheme: Scheme, name: str = "weight") -> Quantized:
    """Each group's largest value (range, where asymmetric) at the end of the code range. w f32 [N, K]."""
    check_finite(w, name)
    low, high = _ranges(w, scheme)
    return encode(w, *scales(low, high, scheme, name), scheme)


def least_squares(w: Tensor, scheme: Scheme, name: str = "weight", importance: Tensor | None = None) -> Quantized:
    """Each group's range shrunk to where the squared error is least. importance f32 [K] weighs the columns."""
    check_finite(w, name)
    low, high = _ranges(w, scheme)
    best_scale = best_offset = best = None
    for share in SHRINK:
        scale, offset = scales(low * share, high * share, scheme, name)
        error = (encode(w, scale, offset, scheme).dequantized() - w).square()
        error = _grouped(error if importance is None else error * importance, scheme).sum(-1)
        if best is None or best_scale is None:
            best, best_scale, best_offset = error, scale, offset
            continue
        better = error < best
        best, best_scale = torch.where(better, error, best), torch.where(better, scale, best_scale)
        if offset is not None and best_offset is not None: best_offset = torch.where(better, offset, best_offset)
    assert best_scale is not None
    return encode(w, best_scale, best_offset, scheme)


def encode(w: Tensor, scale: Tensor, offset: Tensor | None, scheme: Scheme) -> Quantized:
    """Codes for given scales [N, G] (and offsets)."""
    each = [None if part is None else spread(part, w.shape[1], scheme.group) for part in (scale, offset)]
    codes = nearest(w, each[0], each[1], scheme)       # type: ignore[arg-type]
    return Quantized(pack_codes(codes, scheme.bits), scale, offset, scheme, w.shape[1])


def nearest(w: Tensor, scale: Tensor, offset: Tensor | None, scheme: Scheme) -> Tensor:
    """u8 codes of values, given each one's own scale and offset; any shape."""
    top, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    if offset is None: return ((w / scale.float()).round() + middle).clamp(0, top).to(torch.uint8)
    return ((w - offset.float()) / scale.float()).round().clamp(0, top).to(torch.uint8)


def scales(low: Tensor, high: Tensor, scheme: Scheme, name: str) -> tuple[Tensor, Tensor | None]:
    """f16 scales, finite and above 0, and offsets, for ranges [N, G]. UserError where f16 cannot hold one."""
    wanted = torch.maximum(-low, high) / (2 ** (scheme.bits - 1) - 1) if scheme.symmetric else (high - low) / (2**scheme.bits - 1)
    largest = max(float(wanted.max()), 0.0 if scheme.symmetric else float(low.abs().max()))
    if largest > F16_MAX:
        raise UserError(f"{name}: a scale of {largest:.3g} is beyond f16 ({F16_MAX:.0f}): leave this weight wide with a recipe")
    scale = torch.where(wanted > 0, wanted.clamp(min=F16_TINY), 1.0).half()      # all zeros, or one value: any scale will do
    return scale, None if scheme.symmetric else low.half()


def _grouped(t: Tensor, scheme: Scheme) -> Tensor:
    """[N, K] -> [N, G, group], zeros behind a short last group."""
    k = t.shape[1]
    count, size = groups(k, scheme.group), scheme.group or k
    return torch.nn.functional.pad(t, (0, count * size - k)).unflatten(1, (count, size))


def _ranges(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Least and largest value of each group, [N, G] each."""
    k = w.shape[1]
    count, size = groups(k, scheme.group), scheme.group or k
    missing = count * size - k
    ends = torch.cat((w, w[:, -1:].expand(-1, missing)), 1) if missing else w     # repeats the last value: the range stays
    return ends.unflatten(1, (count, size)).aminmax(dim=-1)                       # type: ignore[return-value]
