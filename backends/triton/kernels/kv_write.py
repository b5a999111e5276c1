"""infc::kv_write: each token's keys and values to its slot of the paged cache; slot -1 is padding and writes nowhere."""
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import kv_write
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import grid_of_chunks, refuse_dtypes


def refuse(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> str | None:
    """None where the kernel takes the call, else why not."""
    if not slots.is_contiguous(): return "slots is not contiguous"
    return refuse_dtypes(k=k, v=v, k_cache=k_cache, v_cache=v_cache)


@triton.jit
def place(slot, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    """Where a head of the token in `slot` starts in a cache [pages, HEADS, PAGE, WIDTH]. slot is i64."""
    return ((slot // PAGE * HEADS + head) * PAGE + slot % PAGE) * WIDTH


@triton.jit
def _write(x_ptr, cache_ptr, token, slot, col, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    mask = col < HEADS * WIDTH
    x = tl.load(x_ptr + token * (HEADS * WIDTH) + col, mask, other=0.0)
    at = place(slot, col // WIDTH, HEADS, WIDTH, PAGE) + col % WIDTH
    tl.store(cache_ptr + at, narrow(x.to(tl.float32), cache_ptr.dtype.element_ty), mask)


@triton.jit
def _kv_write(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, HEADS: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
              PAGE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        _write(k_ptr, k_cache_ptr, token, slot, col, HEADS, K_WIDTH, PAGE)
        _write(v_ptr, v_cache_ptr, token, slot, col, HEADS, V_WIDTH, PAGE)


@kernel(kv_write, refuse=refuse)
def lower(emit: Emit, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, Hkv, D] into k_cache, v_cache [P, Hkv, block, D] at slots [T]."""
    tokens, heads, width = k.shape
    grid, block = grid_of_chunks(tokens, heads * max(width, v.shape[-1]))
    emit(_kv_write, grid=grid, args=(k, v, k_cache, v_cache, slots), HEADS=heads, K_WIDTH=width, V_WIDTH=v.shape[-1],
         PAGE=k_cache.shape[2], BLOCK=block)
