"""infc::dequantize, infc::quantize_rows, infc::dequantize_rows: where a graph becomes low-bit, and where it is wide again."""
import torch
from torch import Tensor

from .codes import groups, row_codes, row_type, row_values, weight
from .registry import Cost, nbytes, operator, out_bytes


def _dequantize_cost(
    codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, group: int, k: int, out_dtype: torch.dtype = torch.float32,
) -> Cost:
    return Cost(flops=2 * codes.shape[0] * k,
                bytes=nbytes(codes) + nbytes(scale) + nbytes(offset) + out_bytes((codes.shape[0], k), out_dtype))


@operator("infc::dequantize", cost=_dequantize_cost)
def dequantize(
    codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, group: int, k: int, out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A weight [N, k] from its codes (compiler.ops.codes).  codes u8 [N, ceil(k * bits / 8)] or e4m3, scale, offset f16 [N, G]."""
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    return weight(codes, scale, offset, bits, group, k, wide).to(out_dtype)


@dequantize.register_fake
def _(
    codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, group: int, k: int, out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    return scale.new_empty((codes.shape[0], k), dtype=out_dtype)


def _quantize_cost(x: Tensor, bits: int, group: int, e4m3: bool = False) -> Cost:
    scales = out_bytes((*x.shape[:-1], groups(x.shape[-1], group)), torch.float32)
    return Cost(flops=3 * x.numel(), bytes=nbytes(x) + x.numel() * bits // 8 + scales)


@operator("infc::quantize_rows", cost=_quantize_cost)
def quantize_rows(x: Tensor, bits: int, group: int, e4m3: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., K] -> codes i8, i16 or e4m3 [..., K], scale f32 [..., G]: each group's largest value at 127 (32512, 448), ties to even."""
    return row_codes(x, bits, group, e4m3)


@quantize_rows.register_fake
def _(x: Tensor, bits: int, group: int, e4m3: bool = False) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=row_type(bits, e4m3))
    return codes, x.new_empty((*x.shape[:-1], groups(x.shape[-1], group)), dtype=torch.float32)


def _rows_cost(codes: Tensor, scale: Tensor, group: int, out_dtype: torch.dtype = torch.float32) -> Cost:
    return Cost(flops=codes.numel(), bytes=nbytes(codes) + nbytes(scale) + out_bytes(codes.shape, out_dtype))


@operator("infc::dequantize_rows", cost=_rows_cost)
def dequantize_rows(codes: Tensor, scale: Tensor, group: int, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i8, i16 or e4m3 [..., K] times the scale f32 [..., G] of their group -> [..., K]."""
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    return row_values(codes, scale, group, wide).to(out_dtype)


@dequantize_rows.register_fake
def _(codes: Tensor, scale: Tensor, group: int, out_dtype: torch.dtype = torch.float32) -> Tensor:
    return scale.new_empty(codes.shape, dtype=out_dtype)
