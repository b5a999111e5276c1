"""infc::rms_norm: one program a row, the row held in registers, fp32 inside."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import rms_norm
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import inverse_root, power_of_2, refuse_norm, warps_of


def refuse(x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse_norm(x, w, None, out_dtype)


@triton.jit
def _rms_norm(x_ptr, w_ptr, y_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N             # int64: offsets can pass 2**31
    col = tl.arange(0, BLOCK)
    mask = col < N
    x = tl.load(x_ptr + start + col, mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask, other=0.0).to(tl.float32)
    y = x * inverse_root(tl.sum(x * x, 0), N, eps) * w
    tl.store(y_ptr + start + col, narrow(y, y_ptr.dtype.element_ty), mask)


@kernel(rms_norm, refuse=refuse)
def lower(emit: Emit, y: Tensor, x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> None:
    """x [..., n], w [n] -> y [..., n]."""
    n = x.shape[-1]
    block = power_of_2(n)
    emit(_rms_norm, grid=(x.numel() // n,), args=(x, w, y, eps), warps=warps_of(block), N=n, BLOCK=block)
