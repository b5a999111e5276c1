"""infc::rms_norm: one program a row, the row held in registers, fp32 inside."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import rms_norm
from ..registry import Emit, kernel

MAX_COLS = 16_384                                # a longer row spills


def refuse(x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    if not 0 < x.shape[-1] <= MAX_COLS: return f"rows of {x.shape[-1]}: 1 to {MAX_COLS} are known"
    if not (x.is_contiguous() and w.is_contiguous()): return "x or w is not contiguous"
    return None


@triton.jit
def _rms_norm(x_ptr, w_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * n_cols        # int64: offsets can pass 2**31
    col = tl.arange(0, BLOCK)
    mask = col < n_cols
    x = tl.load(x_ptr + start + col, mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / n_cols + eps)
    tl.store(y_ptr + start + col, (x * scale * w).to(y_ptr.dtype.element_ty), mask)


@kernel(rms_norm, refuse=refuse)
def lower(emit: Emit, y: Tensor, x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> None:
    """x [..., n], w [n] -> y [..., n]."""
    n_cols = x.shape[-1]
    emit(_rms_norm, grid=(x.numel() // n_cols,), args=(x, w, y, n_cols, eps), BLOCK=triton.next_power_of_2(n_cols))
