"""aten._to_copy: one number type to another, in chunks; to and from bf16 and fp16 by way of fp32."""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import CHUNK, FLOATS

_WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def refuse(self: Tensor, **how: Any) -> str | None:
    """None where the kernel takes the call, else why not. A device or pinning says where, which is not for a kernel to say."""
    dtype = how.get("dtype") or self.dtype
    for what, kind in (("from", self.dtype), ("to", dtype)):
        if kind not in (*FLOATS, *_WHOLE): return f"a cast {what} {kind}"
    if not self.is_contiguous(): return "it is not contiguous"
    if how.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format): return f"to {how['memory_format']}"
    if how.get("layout") not in (None, torch.strided): return f"to {how['layout']}"
    return None


@triton.jit
def _cast(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count)
    if x_ptr.dtype.element_ty == y_ptr.dtype.element_ty: y = x
    elif y_ptr.dtype.element_ty == tl.int1: y = x != 0
    elif y_ptr.dtype.element_ty.is_floating(): y = narrow(x.to(tl.float32), y_ptr.dtype.element_ty)
    else: y = x.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, at < count)


@kernel(torch.ops.aten._to_copy.default, refuse=refuse)
def lower(emit: Emit, y: Tensor, self: Tensor, **how: Any) -> None:
    """self [...] -> y [...] of another dtype."""
    count = self.numel()
    emit(_cast, grid=(-(-count // CHUNK),), args=(self, y, count), BLOCK=CHUNK)
