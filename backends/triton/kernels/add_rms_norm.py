"""infc::add_rms_norm: one program a row; the sum is rounded and written, and its rounded form is what is normalised."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import add_rms_norm
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import inverse_root, power_of_2, refuse_dtypes, refuse_norm, warps_of


def refuse(x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    if residual.shape != x.shape: return f"the residual is {tuple(residual.shape)}, x is {tuple(x.shape)}"
    return refuse_norm(x, w, None, out_dtype) or refuse_dtypes(residual=residual)


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    col = tl.arange(0, BLOCK)
    mask = col < N
    x = tl.load(x_ptr + start + col, mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + start + col, mask, other=0.0).to(tl.float32)
    rounded = narrow(x + residual, h_ptr.dtype.element_ty)
    tl.store(h_ptr + start + col, rounded, mask)
    h = rounded.to(tl.float32)
    w = tl.load(w_ptr + col, mask, other=0.0).to(tl.float32)
    y = h * inverse_root(tl.sum(h * h, 0), N, eps) * w
    tl.store(y_ptr + start + col, narrow(y, y_ptr.dtype.element_ty), mask)


@kernel(add_rms_norm, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, h: Tensor, x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None,
) -> None:
    """x, residual [..., n], w [n] -> y, h [..., n]."""
    n = x.shape[-1]
    block = power_of_2(n)
    emit(_add_rms_norm, grid=(x.numel() // n,), args=(x, residual, w, y, h, eps), warps=warps_of(block), N=n, BLOCK=block)
