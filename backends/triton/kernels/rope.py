"""infc::rope: rows turned in fp32, several a program; cos and sin are read where broadcasting finds them."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import rope
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import power_of_2, refuse_dtypes

MAX_AXES = 3                             # before the head's own


def refuse(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> str | None:
    """None where the kernel takes the call, else why not."""
    for name, x in (("q", q), ("k", k)):
        if not 0 < x.dim() - 1 <= MAX_AXES: return f"{name} has {x.dim()} axes: 2 to {MAX_AXES + 1} are known"
        if 2 * cos.shape[-1] > x.shape[-1]: return f"rotary width {2 * cos.shape[-1]} > head size {x.shape[-1]}"
    if cos.shape != sin.shape: return f"cos is {tuple(cos.shape)}, sin is {tuple(sin.shape)}"
    if not cos.shape[-1]: return "the rotary width is 0"
    return refuse_dtypes(q=q, k=k, cos=cos, sin=sin)


@triton.jit
def _rope(x_ptr, cos_ptr, sin_ptr, y_ptr, rows, size_1, size_2, stride_0, stride_1, stride_2, WIDTH: tl.constexpr, HALF: tl.constexpr,
          INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    angle = row // (size_1 * size_2) * stride_0 + row // size_2 % size_1 * stride_1 + row % size_2 * stride_2
    i = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (i < HALF)
    cos = tl.load(cos_ptr + angle + i, mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + i, mask, other=0.0).to(tl.float32)
    a_at = row * WIDTH + (2 * i if INTERLEAVED else i)
    b_at = row * WIDTH + (2 * i + 1 if INTERLEAVED else i + HALF)
    a = tl.load(x_ptr + a_at, mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + b_at, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + a_at, narrow(a * cos - b * sin, y_ptr.dtype.element_ty), mask)
    tl.store(y_ptr + b_at, narrow(b * cos + a * sin, y_ptr.dtype.element_ty), mask)
    if REST:
        at = 2 * HALF + tl.arange(0, REST)[None, :]
        mask = (row < rows) & (at < WIDTH)
        tl.store(y_ptr + row * WIDTH + at, tl.load(x_ptr + row * WIDTH + at, mask), mask)


@kernel(rope, refuse=refuse)
def lower(emit: Emit, q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """q, k [..., D], cos, sin [..., R/2], broadcast -> q_out, k_out [..., D]."""
    for x, y in ((q, q_out), (k, k_out)):
        if x.numel(): _lower(emit, y, x, cos, sin, interleaved)


def _lower(emit: Emit, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    width, half = x.shape[-1], cos.shape[-1]
    sizes = (*[1] * (MAX_AXES + 1 - x.dim()), *x.shape[:-1])
    strides = torch.empty_strided(cos.shape, cos.stride(), device="meta").expand(*sizes, half).stride()
    block = power_of_2(half)
    rows = x.numel() // width
    each = min(power_of_2(rows), max(1, 512 // block))
    emit(_rope, grid=(-(-rows // each),), args=(x, cos, sin, y, rows, *sizes[1:], *strides[:-1]), WIDTH=width, HALF=half,
         INTERLEAVED=interleaved, ROWS=each, BLOCK=block, REST=power_of_2(width - 2 * half) if width > 2 * half else 0)
