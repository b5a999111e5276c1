"""Codes and scales of a weight by itself: round to nearest, or with the range that loses least (Banner et al., 2019).

Scales and offsets are rounded to f16 first, and codes are chosen for them as they are stored. A scale of the whole weight is that of the
weight as one row.
"""
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UserError, not_finite
from ..ops.codes import E4M3, groups, pack_codes, spread, weight
from .scheme import Scheme

F16_MAX = torch.finfo(torch.float16).max
F16_TINY = 2.0 ** -24              # the smallest f16 above 0
SHRINK = tuple(1 - 0.04 * step for step in range(13))
"""Shares of a group's range that are tried: 1.0 down to 0.52."""

CHUNK = 1 << 17
"""Values that `mse` looks at together."""

WORST = 2.0
"""How much further than rounding to nearest the codes of a row may be from it (root of the sum of squares). A choice that is better
for a product's results may be a worse one for its weight (GPTQ: 1.1 to 1.7 times, matrices of SmolLM2); a wrong scale is off by far
more."""


@dataclass(frozen=True)
class Quantized:
    """A weight [N, K] as codes; see compiler.ops.codes."""

    codes: Tensor                  # u8 [N, ceil(K * bits / 8)], or e4m3 [N, K]
    scale: Tensor                  # f16 [N, G], or [1, 1]
    offset: Tensor | None          # f16 [N, G]
    scheme: Scheme
    k: int

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the codes mean."""
        return weight(self.codes, self.scale, self.offset, self.scheme.bits, self.scheme.group, self.k, dtype)


def check_finite(w: Tensor, name: str) -> None:
    """UserError, naming the tensor, where a value is NaN or infinite."""
    if not bool(w.isfinite().all()):
        raise UserError(f"{name}: {not_finite(w)}; such a weight cannot be quantized: leave it wide with a recipe, or mend the checkpoint")


def round_to_nearest(w: Tensor, scheme: Scheme, name: str = "weight") -> Quantized:
    """Each group's largest value (range, where asymmetric) at the end of the code range. w f32 [N, K]."""
    check_finite(w, name)
    if scheme.tensor: return _of_one_row(round_to_nearest(w.reshape(1, -1), replace(scheme, tensor=False), name), w, scheme)
    low, high = _ranges(w, scheme)
    return encode(w, *scales(low, high, scheme, name), scheme)


def least_squares(w: Tensor, scheme: Scheme, name: str = "weight", importance: Tensor | None = None) -> Quantized:
    """Each group's range shrunk to where the squared error is least. importance f32 [K] weighs the columns."""
    check_finite(w, name)
    if scheme.tensor:
        of_each, plain = None if importance is None else importance.repeat(len(w)), round_to_nearest(w, scheme, name)
        found = _of_one_row(least_squares(w.reshape(1, -1), replace(scheme, tensor=False), name, of_each), w, scheme)
        return found if bool((row_errors(w, found) <= WORST * row_errors(w, plain)).all()) else plain        # one scale: no row has its own
    count = max(1, CHUNK // w.shape[1])                                   # a few rows at a time stay in the cache: half the time
    parts = [_best_ranges(rows, scheme, name, importance) for rows in w.split(count)]
    scale = torch.cat([scale for scale, _ in parts])
    offsets = [offset for _, offset in parts if offset is not None]
    return encode(w, scale, torch.cat(offsets) if offsets else None, scheme)


def _of_one_row(found: Quantized, w: Tensor, scheme: Scheme) -> Quantized:
    """The codes of a weight that was rounded as one row."""
    return Quantized(found.codes.reshape(w.shape), found.scale, None, scheme, w.shape[1])


def best_range(w: Tensor, scheme: Scheme, name: str, importance: Tensor) -> tuple[Tensor, Tensor | None]:
    """f16 scale and offset [N] of one group w f32 [N, n]. importance f32 [n] weighs the columns."""
    scale, offset = _best_ranges(w, replace(scheme, group=0), name, importance)
    return scale[:, 0], None if offset is None else offset[:, 0]


def _best_ranges(w: Tensor, scheme: Scheme, name: str, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    low, high = _ranges(w, scheme)
    values = _grouped(w, scheme)
    weights = _grouped((torch.ones(w.shape[1]) if importance is None else importance)[None], scheme)      # 0 behind a short last group
    best_scale, best_offset = scales(low, high, scheme, name)
    best = torch.full_like(low, torch.inf)
    for share in SHRINK:
        scale, offset = scales(low * share, high * share, scheme, name)
        error = (values - _rounded(values, scale[..., None], None if offset is None else offset[..., None], scheme)).square_()
        better = (total := error.mul_(weights).sum(-1)) < best
        best, best_scale = torch.where(better, total, best), torch.where(better, scale, best_scale)
        if offset is not None and best_offset is not None: best_offset = torch.where(better, offset, best_offset)
    return best_scale, best_offset


def _rounded(w: Tensor, scale: Tensor, offset: Tensor | None, scheme: Scheme) -> Tensor:
    """What the nearest codes of values mean."""
    codes = nearest(w, scale, offset, scheme).float()
    if offset is not None: return codes * scale.float() + offset.float()
    return (codes if scheme.e4m3 else codes - 2 ** (scheme.bits - 1)) * scale.float()


def bounded(w: Tensor, found: Quantized, plain: Quantized, take: Tensor | None = None) -> Quantized:
    """`found`, but `plain` (rounded to nearest) in rows where `found` is too far from w (WORST), or that `take` (bool [N]) leaves out."""
    near = row_errors(w, found) <= WORST * row_errors(w, plain)
    if take is not None: near &= take
    parts = [None if a is None or b is None else torch.where(near[:, None], a, b)
             for a, b in zip((found.codes, found.scale, found.offset), (plain.codes, plain.scale, plain.offset), strict=True)]
    return Quantized(parts[0], parts[1], parts[2], found.scheme, found.k)             # type: ignore[arg-type]


def row_errors(w: Tensor, found: Quantized) -> Tensor:
    """How far codes are from each row of w: f32 [N], root of the sum of squares."""
    return (found.dequantized() - w).norm(dim=1)


def encode(w: Tensor, scale: Tensor, offset: Tensor | None, scheme: Scheme) -> Quantized:
    """Codes for given scales [N, G] (and offsets)."""
    each = [None if part is None else spread(part, w.shape[1], scheme.group) for part in (scale, offset)]
    codes = nearest(w, each[0], each[1], scheme)       # type: ignore[arg-type]
    return Quantized(pack_codes(codes, scheme.bits), scale, offset, scheme, w.shape[1])


def nearest(w: Tensor, scale: Tensor, offset: Tensor | None, scheme: Scheme) -> Tensor:
    """Codes of values, u8 or e4m3, given each one's own scale and offset; any shape."""
    if scheme.e4m3: return (w / scale.float()).clamp(-scheme.top, scheme.top).to(E4M3)
    top, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    if offset is None: return ((w / scale.float()).round() + middle).clamp(0, top).to(torch.uint8)
    return ((w - offset.float()) / scale.float()).round().clamp(0, top).to(torch.uint8)


def scales(low: Tensor, high: Tensor, scheme: Scheme, name: str) -> tuple[Tensor, Tensor | None]:
    """f16 scales, finite and above 0, and offsets, for ranges [N, G]. UserError where f16 cannot hold one."""
    wanted = torch.maximum(-low, high) / scheme.top if scheme.symmetric else (high - low) / (2**scheme.bits - 1)
    largest = max(float(wanted.max()), 0.0 if scheme.symmetric else float(low.abs().max()))
    if largest > F16_MAX:
        raise UserError(f"{name}: a scale of {largest:.3g} is beyond f16 ({F16_MAX:.0f}): leave this weight wide with a recipe")
    scale = torch.where(wanted > 0, wanted.clamp(min=F16_TINY), 1.0).half()      # all zeros, or one value: any scale will do
    if scheme.e4m3:                                                              # up: nothing is cut off, and a float loses nothing by it
        scale = torch.where(scale.float() < wanted, (scale.view(torch.int16) + 1).view(torch.float16), scale)
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
