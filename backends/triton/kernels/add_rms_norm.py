"""infc::add_rms_norm, infc::add_rms_norm_quantized: one program a row; the sum is rounded and written, and so rounded it is normalised."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import add_rms_norm, add_rms_norm_quantized
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import codes_of_norm, inverse_root, limits, power_of_2, refuse_codes, refuse_dtypes, refuse_norm, warps_of, write_codes


def refuse(x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    if residual.shape != x.shape: return f"the residual is {tuple(residual.shape)}, x is {tuple(x.shape)}"
    return refuse_norm(x, w, None, out_dtype) or refuse_dtypes(residual=residual)


def refuse_quantized(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse(x, residual, w, eps, out_dtype) or refuse_codes(x, group)


@triton.jit
def _normed(x_ptr, residual_ptr, w_ptr, h_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    col = tl.arange(0, BLOCK)
    mask = col < N
    x = tl.load(x_ptr + start + col, mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + start + col, mask, other=0.0).to(tl.float32)
    rounded = narrow(x + residual, h_ptr.dtype.element_ty)
    tl.store(h_ptr + start + col, rounded, mask)
    h = rounded.to(tl.float32)
    w = tl.load(w_ptr + col, mask, other=0.0).to(tl.float32)
    return h * inverse_root(tl.sum(h * h, 0), N, eps) * w


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    at, col = y_ptr + tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    y = _normed(x_ptr, residual_ptr, w_ptr, h_ptr, eps, N, BLOCK)
    tl.store(at + col, narrow(y, y_ptr.dtype.element_ty), col < N)


@triton.jit
def _add_rms_norm_quantized(x_ptr, residual_ptr, w_ptr, codes_ptr, scale_ptr, h_ptr, eps, tiny, limit, N: tl.constexpr,
                            GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    y = _normed(x_ptr, residual_ptr, w_ptr, h_ptr, eps, N, BLOCK)
    write_codes(y, codes_ptr, scale_ptr, tiny, limit, N, GROUP, WIDE, BLOCK)


@kernel(add_rms_norm, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, h: Tensor, x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None,
) -> None:
    """x, residual [..., n], w [n] -> y, h [..., n]."""
    n = x.shape[-1]
    block = power_of_2(n)
    emit(_add_rms_norm, grid=(x.numel() // n,), args=(x, residual, w, y, h, eps), warps=warps_of(block), N=n, BLOCK=block)


@kernel(add_rms_norm_quantized, refuse=refuse_quantized)
def lower_quantized(
    emit: Emit, codes: Tensor, scale: Tensor, h: Tensor, x: Tensor, residual: Tensor, w: Tensor, eps: float, group: int, e4m3: bool,
    out_dtype: torch.dtype | None = None,
) -> None:
    """x, residual [..., n], w [n] -> codes [..., n], scale [..., G], h [..., n]."""
    constants = codes_of_norm(x, group, out_dtype)
    emit(_add_rms_norm_quantized, grid=(x.numel() // constants["N"],), args=(x, residual, w, codes, scale, h, eps, *limits(e4m3)),
         warps=warps_of(constants["BLOCK"]), **constants)
