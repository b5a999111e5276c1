"""infc::swiglu: act(gate) * up in fp32, each row in chunks."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import swiglu
from ....compiler.ops.swiglu import ACTIVATIONS
from ..primitives import activate, narrow
from ..registry import Emit, kernel
from ..rows import grid_of_chunks, refuse_dtypes, refuse_out


def refuse(gate_up: Tensor, act: str, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernel takes the call, else why not."""
    if act not in ACTIVATIONS: return f"activation {act!r} is none of {', '.join(ACTIVATIONS)}"
    if not gate_up.dim() or not gate_up.shape[-1] or gate_up.shape[-1] % 2: return f"{tuple(gate_up.shape)} has no two halves"
    return refuse_dtypes(gate_up=gate_up) or refuse_out(out_dtype)


@triton.jit
def _swiglu(gate_up_ptr, y_ptr, N: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(gate_up_ptr + row * (2 * N) + col, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * N) + N + col, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + col, narrow(activate(gate, ACT) * up, y_ptr.dtype.element_ty), mask)


@kernel(swiglu, refuse=refuse)
def lower(emit: Emit, y: Tensor, gate_up: Tensor, act: str, out_dtype: torch.dtype | None = None) -> None:
    """gate_up [..., 2F] -> y [..., F]."""
    n = y.shape[-1]
    grid, block = grid_of_chunks(y.numel() // n, n)
    emit(_swiglu, grid=grid, args=(gate_up, y), N=n, ACT=act, BLOCK=block)
