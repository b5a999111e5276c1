"""infc::layer_norm, infc::layer_norm_quantized: one program a row, mean first, then the variance around it and what the mean was off by."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import layer_norm, layer_norm_quantized
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import codes_of_norm, inverse_root, limits, power_of_2, refuse_codes, refuse_norm, warps_of, write_codes


def refuse(x: Tensor, w: Tensor, b: Tensor | None, eps: float, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse_norm(x, w, b, out_dtype)


def refuse_quantized(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse_norm(x, w, b, out_dtype) or refuse_codes(x, group)


@triton.jit
def _normed(x_ptr, w_ptr, b_ptr, eps, N: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    col = tl.arange(0, BLOCK)
    mask = col < N
    x = tl.load(x_ptr + start + col, mask, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x, 0), tl.full((), N, tl.float32))
    away = tl.where(mask, x - mean, 0.0)
    off = tl.div_rn(tl.sum(away, 0), tl.full((), N, tl.float32))          # far from 0 the mean is rounded more than the row is wide
    scale = inverse_root(tl.sum(away * away, 0) - N * off * off, N, eps)
    y = (away - off) * scale * tl.load(w_ptr + col, mask, other=0.0).to(tl.float32)
    if BIAS: y += tl.load(b_ptr + col, mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, eps, N: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at, col = y_ptr + tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    tl.store(at + col, narrow(_normed(x_ptr, w_ptr, b_ptr, eps, N, BIAS, BLOCK), y_ptr.dtype.element_ty), col < N)


@triton.jit
def _layer_norm_quantized(x_ptr, w_ptr, b_ptr, codes_ptr, scale_ptr, eps, tiny, limit, N: tl.constexpr, BIAS: tl.constexpr,
                          GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    write_codes(_normed(x_ptr, w_ptr, b_ptr, eps, N, BIAS, BLOCK), codes_ptr, scale_ptr, tiny, limit, N, GROUP, WIDE, BLOCK)


@kernel(layer_norm, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None, eps: float, out_dtype: torch.dtype | None = None,
) -> None:
    """x [..., n], w, b [n] -> y [..., n]."""
    n = x.shape[-1]
    block = power_of_2(n)
    emit(_layer_norm, grid=(x.numel() // n,), args=(x, w, w if b is None else b, y, eps), warps=warps_of(block),     # an absent b: not read
         spills_ok=n % 16 > 0, N=n, BIAS=b is not None, BLOCK=block)  # rows that are loaded number by number


@kernel(layer_norm_quantized, refuse=refuse_quantized)
def lower_quantized(
    emit: Emit, codes: Tensor, scale: Tensor, x: Tensor, w: Tensor, b: Tensor | None, eps: float, group: int, e4m3: bool,
    out_dtype: torch.dtype | None = None,
) -> None:
    """x [..., n], w, b [n] -> codes [..., n], scale [..., G]."""
    constants = codes_of_norm(x, group, out_dtype)
    emit(_layer_norm_quantized, grid=(x.numel() // constants["N"],), args=(x, w, w if b is None else b, codes, scale, eps, *limits(e4m3)),
         warps=warps_of(constants["BLOCK"]), spills_ok=constants["N"] % 16 > 0, BIAS=b is not None, **constants)
