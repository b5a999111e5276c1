"""infc::rope_kv_write: several heads of one token a program; q heads go to the result, k and v heads to their slot of the cache."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import rope_kv_write
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import power_of_2, refuse_dtypes, refuse_out
from .kv_write import place


def refuse(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, out_dtype: torch.dtype | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    width = qkv.shape[1] // (q_heads + 2 * kv_heads)
    if not 0 < 2 * cos.shape[-1] <= width: return f"rotary width {2 * cos.shape[-1]}, head size {width}"
    if k_cache.dtype != v_cache.dtype: return f"keys are kept as {k_cache.dtype}, values as {v_cache.dtype}"
    if not slots.is_contiguous(): return "slots is not contiguous"
    return refuse_dtypes(qkv=qkv, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache) or refuse_out(out_dtype)


@triton.jit
def _store(x, at, head, mask, slot, q_ptr, k_ptr, v_ptr, token, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
           PAGE: tl.constexpr):
    """x [heads, channels] to q [T, Q_HEADS, WIDTH], or to its cache; `at` are channels."""
    tl.store(q_ptr + (token * Q_HEADS + head) * WIDTH + at, narrow(x, q_ptr.dtype.element_ty), mask & (head < Q_HEADS))
    k_head, v_head = head - Q_HEADS, head - Q_HEADS - KV_HEADS
    kept = narrow(x, k_ptr.dtype.element_ty)
    mask = mask & (slot >= 0)
    tl.store(k_ptr + place(slot, k_head, KV_HEADS, WIDTH, PAGE) + at, kept, mask & (k_head >= 0) & (v_head < 0))
    tl.store(v_ptr + place(slot, v_head, KV_HEADS, WIDTH, PAGE) + at, kept, mask & (v_head >= 0) & (v_head < KV_HEADS))


@triton.jit
def rotated(qkv_ptr, cos_ptr, sin_ptr, token, head, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
            INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Channels of heads [heads, 1] of a token that turn: firsts and seconds [heads, BLOCK] in fp32; which they are, and which are there."""
    i = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + token * HALF + i, i < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + i, i < HALF, other=0.0).to(tl.float32)[None, :]
    start = qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head) * WIDTH
    first = (2 * i if INTERLEAVED else i)[None, :]
    second = (2 * i + 1 if INTERLEAVED else i + HALF)[None, :]
    mask = (head < Q_HEADS + 2 * KV_HEADS) & (i[None, :] < HALF)
    a = tl.load(start + first, mask, other=0.0).to(tl.float32)
    b = tl.load(start + second, mask, other=0.0).to(tl.float32)
    turned = head < Q_HEADS + KV_HEADS                    # values are not
    return tl.where(turned, a * cos - b * sin, a), tl.where(turned, b * cos + a * sin, b), first, second, mask


@triton.jit
def _rope_kv_write(qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, slots_ptr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                   WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
                   BLOCK: tl.constexpr, REST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    x, y, first, second, mask = rotated(                            # pyright: ignore[reportGeneralTypeIssues]
        qkv_ptr, cos_ptr, sin_ptr, token, head, Q_HEADS, KV_HEADS, WIDTH, HALF, INTERLEAVED, BLOCK)
    _store(x, first, head, mask, slot, q_ptr, k_ptr, v_ptr, token, Q_HEADS, KV_HEADS, WIDTH, PAGE)
    _store(y, second, head, mask, slot, q_ptr, k_ptr, v_ptr, token, Q_HEADS, KV_HEADS, WIDTH, PAGE)
    if REST:
        at = 2 * HALF + tl.arange(0, REST)[None, :]
        mask = (head < Q_HEADS + 2 * KV_HEADS) & (at < WIDTH)
        x = tl.load(qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head) * WIDTH + at, mask, other=0.0).to(tl.float32)
        _store(x, at, head, mask, slot, q_ptr, k_ptr, v_ptr, token, Q_HEADS, KV_HEADS, WIDTH, PAGE)


@kernel(rope_kv_write, refuse=refuse)
def lower(
    emit: Emit, q: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, out_dtype: torch.dtype | None = None,
) -> None:
    """qkv [T, (Hq + 2 Hkv) D], cos, sin [T, R/2] -> q [T, Hq, D]; k and v into their caches [P, Hkv, block, D] at slots [T]."""
    heads = q_heads + 2 * kv_heads
    width, half = qkv.shape[1] // heads, cos.shape[-1]
    block = power_of_2(half)
    each = min(power_of_2(heads), max(1, 256 // block))      # 4 heads of 128: one warp has 16 numbers a thread
    emit(_rope_kv_write, grid=(qkv.shape[0], -(-heads // each)), args=(qkv, cos, sin, q, k_cache, v_cache, slots),
         warps=max(1, each * block // 256), Q_HEADS=q_heads, KV_HEADS=kv_heads, WIDTH=width, HALF=half, INTERLEAVED=interleaved,
         PAGE=k_cache.shape[2], HEADS=each, BLOCK=block, REST=power_of_2(width - 2 * half) if width > 2 * half else 0)
