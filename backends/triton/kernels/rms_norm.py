"""infc::rms_norm, infc::rms_norm_quantized: one program a row, the row held in registers, fp32 inside."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import rms_norm, rms_norm_quantized
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import codes_of_norm, inverse_root, limits, power_of_2, refuse_codes, refuse_norm, warps_of, write_codes


def refuse(x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse_norm(x, w, None, out_dtype)


def refuse_quantized(x: Tensor, w: Tensor, eps: float, group: int, e4m3: bool, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse_norm(x, w, None, out_dtype) or refuse_codes(x, group)


@triton.jit
def _normed(x_ptr, w_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N             # int64: offsets can pass 2**31
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + start + col, col < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, col < N, other=0.0).to(tl.float32)
    return x * inverse_root(tl.sum(x * x, 0), N, eps) * w


@triton.jit
def _rms_norm(x_ptr, w_ptr, y_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    at, col = y_ptr + tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    tl.store(at + col, narrow(_normed(x_ptr, w_ptr, eps, N, BLOCK), y_ptr.dtype.element_ty), col < N)


@triton.jit
def _rms_norm_quantized(x_ptr, w_ptr, codes_ptr, scale_ptr, eps, tiny, limit, N: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
                        BLOCK: tl.constexpr):
    write_codes(_normed(x_ptr, w_ptr, eps, N, BLOCK), codes_ptr, scale_ptr, tiny, limit, N, GROUP, WIDE, BLOCK)


@kernel(rms_norm, refuse=refuse)
def lower(emit: Emit, y: Tensor, x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> None:
    """x [..., n], w [n] -> y [..., n]."""
    n = x.shape[-1]
    block = power_of_2(n)
    emit(_rms_norm, grid=(x.numel() // n,), args=(x, w, y, eps), warps=warps_of(block), N=n, BLOCK=block)


@kernel(rms_norm_quantized, refuse=refuse_quantized)
def lower_quantized(
    emit: Emit, codes: Tensor, scale: Tensor, x: Tensor, w: Tensor, eps: float, group: int, e4m3: bool,
    out_dtype: torch.dtype | None = None,
) -> None:
    """x [..., n], w [n] -> codes [..., n], scale [..., G]."""
    constants = codes_of_norm(x, group, out_dtype)
    emit(_rms_norm_quantized, grid=(x.numel() // constants["N"],), args=(x, w, codes, scale, eps, *limits(e4m3)),
         warps=warps_of(constants["BLOCK"]), **constants)
