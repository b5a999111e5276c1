"""Quantized values as they lie in memory, and what they mean: codes, one scale a group, perhaps one offset a group.

A weight [N, K] of `bits` bits is codes u8 [N, ceil(K * bits / 8)] (4 bits: the even column in the low half of the byte), scale
f16 [N, G] and, where it is not symmetric, offset f16 [N, G]; G = ceil(K / group), the last group may be short, and group 0
means the whole row. Its value is scale * (code - 2**(bits - 1)), or scale * code + offset.

Codes of 8 bits may be e4m3 numbers instead, float8_e4m3fn [N, K] (or the same numbers in a wider float type): the value is scale * code,
and a scale of [1, 1] is that of the whole weight.
"""
import torch
from torch import Tensor

from .registry import compute_dtype

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite e4m3 (OCP 8-bit floating point specification, table 1)."""


def groups(k: int, group: int) -> int:
    """How many groups a row of k values has."""
    return -(-k // group) if group else 1


def spread(per_group: Tensor, k: int, group: int) -> Tensor:
    """[..., G] -> [..., k]: each value's group."""
    return per_group.repeat_interleave(group or k, -1)[..., :k]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes 0..2**bits-1 as u8 [N, K] -> as they are stored."""
    if bits == 8: return codes.contiguous()
    even, odd = codes[:, 0::2], codes[:, 1::2]
    packed = even.clone()
    packed[:, : odd.shape[1]] |= odd << 4
    return packed


def unpack_codes(codes: Tensor, bits: int, k: int) -> Tensor:
    """Stored codes -> u8 [N, k], values 0..2**bits-1."""
    if bits == 8: return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :k]


def weight(codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, group: int, k: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, k] that these codes mean, computed in `dtype` (fp32 or fp64)."""
    if bits not in (4, 8): raise ValueError(f"codes of {bits} bits; 4 and 8 are known")
    if codes.is_floating_point(): return codes.to(dtype) * spread(scale.to(dtype), k, group)
    if offset is None:
        signed = unpack_codes(codes, bits, k).to(dtype) - 2 ** (bits - 1)
        return signed * spread(scale.to(dtype), k, group)
    return unpack_codes(codes, bits, k).to(dtype) * spread(scale.to(dtype), k, group) + spread(offset.to(dtype), k, group)


ROW_LIMIT = {8: 127, 16: 127 * 256}
"""Largest code of an activation. A 16-bit code is two digits, 256 * high + low, and both must fit eight bits."""

TINY = 1e-30
"""A group of activations with no larger value gets codes of 0: its inverse scale could overflow."""


def row_codes(x: Tensor, bits: int, group: int, e4m3: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., K] in fp32 -> (codes i8, i16 or e4m3 [..., K], scale f32 [..., G]): to the nearest, ties to even, largest value at the limit.

    All in fp32 whatever x is, and in this order (1 / largest, times the limit, times x), so that kernels can give the same codes.
    """
    if e4m3 and bits != 8: raise ValueError(f"e4m3 codes of {bits} bits; they have 8")
    k, limit = x.shape[-1], E4M3_MAX if e4m3 else ROW_LIMIT[bits]
    x = x.float()
    count = groups(k, group)
    padded = torch.nn.functional.pad(x, (0, count * (group or k) - k)).unflatten(-1, (count, group or k))
    largest = padded.abs().amax(-1)
    inverse = torch.where(largest > TINY, largest.reciprocal() * limit, 0.0)
    codes = padded * inverse[..., None]
    codes = (codes if e4m3 else codes.round()).clamp(-limit, limit).flatten(-2)[..., :k]
    return codes.to(row_type(bits, e4m3)), largest / limit


def row_type(bits: int, e4m3: bool) -> torch.dtype:
    """Of an activation's codes."""
    return E4M3 if e4m3 else torch.int8 if bits == 8 else torch.int16


def row_values(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """What codes [..., K] of rows and their scales [..., G] mean, computed in `dtype` (fp32 or fp64)."""
    return codes.to(dtype) * spread(scale.to(dtype), codes.shape[-1], group)


def rounded_rows(x: Tensor, bits: int, group: int, e4m3: bool = False) -> Tensor:
    """x as its codes mean it, in x's compute dtype; bits 0 leaves it as it is."""
    wide = compute_dtype(x.dtype)
    if not bits: return x.to(wide)
    return row_values(*row_codes(x, bits, group, e4m3), group, wide)
