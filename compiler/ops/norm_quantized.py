"""infc::rms_norm_quantized, infc::add_rms_norm_quantized, infc::layer_norm_quantized: norms whose result is made codes as it is written.

Each is the norm of that name, its result in out_dtype, then infc::quantize_rows of it with 8 bits: the same codes and scales to the bit.
"""
from dataclasses import replace

import torch
from torch import Tensor

from .add_rms_norm import add_rms_norm
from .add_rms_norm import cost as cost_of_add_rms_norm
from .codes import groups, row_codes, row_type
from .layer_norm import cost as cost_of_layer_norm
from .layer_norm import layer_norm
from .registry import Cost, operator, out_bytes
from .rms_norm import cost as cost_of_rms_norm
from .rms_norm import rms_norm

BITS = 8


def _cost(norm: Cost, x: Tensor, group: int, out_dtype: torch.dtype | None) -> Cost:
    """Of a norm that writes codes and scales in place of its result."""
    scales = out_bytes((*x.shape[:-1], groups(x.shape[-1], group)), torch.float32)
    return replace(norm, flops=norm.flops + 3 * x.numel(), bytes=norm.bytes - out_bytes(x.shape, out_dtype or x.dtype) + x.numel() + scales)


def _like(x: Tensor, group: int, e4m3: bool) -> tuple[Tensor, Tensor]:
    scales = (*x.shape[:-1], groups(x.shape[-1], group))
    return x.new_empty(x.shape, dtype=row_type(BITS, e4m3)), x.new_empty(scales, dtype=torch.float32)


def rms_norm_quantized_cost(x: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None) -> Cost:
    return _cost(cost_of_rms_norm(x, w, eps, out_dtype), x, group, out_dtype)


@operator("infc::rms_norm_quantized", cost=rms_norm_quantized_cost)
def rms_norm_quantized(
    x: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x [..., n], w [n] -> codes i8 or e4m3 [..., n] of the RMSNorm, scale f32 [..., G], `group` columns to a scale (0: one a row)."""
    return row_codes(rms_norm(x, w, eps, out_dtype), BITS, group, e4m3)


@rms_norm_quantized.register_fake
def _(x: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return _like(x, group, e4m3)


def add_rms_norm_quantized_cost(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> Cost:
    return _cost(cost_of_add_rms_norm(x, residual, w, eps, out_dtype), x, group, out_dtype)


@operator("infc::add_rms_norm_quantized", cost=add_rms_norm_quantized_cost)
def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., n], w [n] -> codes and scale of the RMSNorm of h = x + residual, and h itself [..., n]."""
    y, h = add_rms_norm(x, residual, w, eps, out_dtype)
    return *row_codes(y, BITS, group, e4m3), h


@add_rms_norm_quantized.register_fake
def _(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_like(x, group, e4m3), x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def layer_norm_quantized_cost(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> Cost:
    return _cost(cost_of_layer_norm(x, w, b, eps, out_dtype), x, group, out_dtype)


@operator("infc::layer_norm_quantized", cost=layer_norm_quantized_cost)
def layer_norm_quantized(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x [..., n], w, b [n] -> codes i8 or e4m3 [..., n] of the LayerNorm, scale f32 [..., G]."""
    return row_codes(layer_norm(x, w, b, eps, out_dtype), BITS, group, e4m3)


@layer_norm_quantized.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return _like(x, group, e4m3)
