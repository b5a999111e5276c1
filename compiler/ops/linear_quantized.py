"""infc::linear_quantized, infc::linear_swiglu_quantized, infc::embedding_quantized: products and lookups of weights held as codes.

Their meaning is that of the wide operator on what the codes mean (compiler.ops.codes). act_bits > 0: the rows of x are
rounded to codes of so many bits first, act_group columns to a scale (0: one scale a row); act_bits 0 takes x as it is. They become
e4m3 where the weight is e4m3. With x_scale f32 [..., G], x is such codes already, and the result is fp32 unless out_dtype says otherwise.
bf16_rows > 0: with so many rows or more, x and the weight are rounded to bf16 instead: a weight that is bf16 once serves all rows.
"""
from collections.abc import Mapping

import torch
from torch import Tensor

from .codes import rounded_rows, row_values, weight
from .registry import Cost, compute_dtype, nbytes, operator, out_bytes
from .swiglu import activation

BF16_MAX_K = 16_384
"""Longest rows that bf16_rows is given for: 32 columns of the weight in bf16 are then 1 MiB; a CPU thread's scratch holds two such."""


def bf16_rows_of(target: Mapping[int, int], act_bits: int, k: int) -> int:
    """A product's bf16_rows on a target that has such products from target[bits of x's codes] rows on. Long rows have no room."""
    return target.get(act_bits, 0) if k <= BF16_MAX_K else 0


def _product(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, group: int, act_bits: int, act_group: int,
    out_dtype: torch.dtype, x_scale: Tensor | None, bf16_rows: int,
) -> Tensor:
    """x wᵀ summed in fp32 (fp64 for fp64) and left there."""
    wide, k = compute_dtype(x.dtype if x_scale is None else out_dtype), x.shape[-1]
    e4m3 = codes.is_floating_point()
    if bf16_rows and x.numel() >= bf16_rows * k:
        return x.bfloat16().to(wide) @ weight(codes, scale, offset, bits, group, k, torch.float32).bfloat16().to(wide).T
    rows = rounded_rows(x, act_bits, act_group, e4m3) if x_scale is None else row_values(x, x_scale, act_group, wide)
    return rows @ weight(codes, scale, offset, bits, group, k, wide).T


def _out(x: Tensor, out_dtype: torch.dtype | None, x_scale: Tensor | None) -> torch.dtype:
    """The dtype of the result."""
    return out_dtype or (x.dtype if x_scale is None else torch.float32)


def _read(x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, x_scale: Tensor | None) -> int | torch.SymInt:
    return nbytes(x) + nbytes(x_scale) + nbytes(codes) + nbytes(scale) + nbytes(offset)


def cost(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> Cost:
    written = out_bytes((*x.shape[:-1], codes.shape[0]), _out(x, out_dtype, x_scale))
    read = _read(x, codes, scale, offset, x_scale) + nbytes(bias) + nbytes(residual)
    return Cost(flops=2 * x.numel() * codes.shape[0], bytes=read + written)


@operator("infc::linear_quantized", cost=cost)
def linear_quantized(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> Tensor:
    """x wᵀ + bias + residual.  x [..., K], codes u8 [N, ceil(K * bits / 8)] or e4m3, scale, offset f16 [N, G] -> [..., N] in out_dtype.

    out_dtype is x's by default. Summed in fp32 (fp64 for fp64), rounded once at the end.
    """
    out = _out(x, out_dtype, x_scale)
    y = _product(x, codes, scale, offset, bits, group, act_bits, act_group, out, x_scale, bf16_rows)
    if bias is not None: y = y + bias.to(y.dtype)
    if residual is not None: y = y + residual.to(y.dtype)
    return y.to(out).contiguous()


@linear_quantized.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=_out(x, out_dtype, x_scale))


def swiglu_cost(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, act: str,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> Cost:
    rows, width = x.numel() // x.shape[-1], codes.shape[0]
    written = out_bytes((*x.shape[:-1], width // 2), _out(x, out_dtype, x_scale))
    return Cost(flops=2 * x.numel() * width + 3 * rows * width, bytes=_read(x, codes, scale, offset, x_scale) + written)


@operator("infc::linear_swiglu_quantized", cost=swiglu_cost)
def linear_swiglu_quantized(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, act: str,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> Tensor:
    """act(g) * u with g, u = halves of x wᵀ.  Rows 0..F-1 of the weight are gate, F..2F-1 up -> [..., F] in out_dtype (x.dtype)."""
    out = _out(x, out_dtype, x_scale)
    gate, up = _product(x, codes, scale, offset, bits, group, act_bits, act_group, out, x_scale, bf16_rows).chunk(2, -1)
    return (activation(act)(gate) * up).to(out).contiguous()


@linear_swiglu_quantized.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, act: str,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> Tensor:
    activation(act)
    return x.new_empty((*x.shape[:-1], codes.shape[0] // 2), dtype=_out(x, out_dtype, x_scale))


def embedding_cost(
    codes: Tensor, scale: Tensor, offset: Tensor | None, indices: Tensor, bits: int, group: int, k: int,
    out_dtype: torch.dtype = torch.float32,
) -> Cost:
    picked = indices.numel() * (codes.shape[1] + scale.shape[1] * scale.element_size() * (1 if offset is None else 2))
    written = out_bytes((*indices.shape, k), out_dtype)
    return Cost(flops=2 * indices.numel() * k, bytes=picked + nbytes(indices) + written, table=picked)


@operator("infc::embedding_quantized", cost=embedding_cost)
def embedding_quantized(
    codes: Tensor, scale: Tensor, offset: Tensor | None, indices: Tensor, bits: int, group: int, k: int,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows `indices` of the weight [V, k] that the codes mean -> [..., k] in out_dtype."""
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    at = indices.flatten()
    scales = scale if len(scale) == 1 else scale[at]
    rows = weight(codes[at], scales, None if offset is None else offset[at], bits, group, k, wide)
    return rows.to(out_dtype).unflatten(0, indices.shape)


@embedding_quantized.register_fake
def _(
    codes: Tensor, scale: Tensor, offset: Tensor | None, indices: Tensor, bits: int, group: int, k: int,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    return scale.new_empty((*indices.shape, k), dtype=out_dtype)


PRODUCTS = frozenset((torch.ops.infc.linear_quantized.default, torch.ops.infc.linear_swiglu_quantized.default))
"""The products of weights held as codes."""
