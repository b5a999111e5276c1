"""infc::rope_kv_write_quantized: as infc::rope_kv_write, but k and v go to their slot as codes, with one scale a head."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops.kv_quantized import rope_kv_write_quantized
from ..primitives import narrow
from ..registry import Emit, kernel
from ..rows import codes_of, inverse_scale, largest_of, limits, power_of_2, refuse_dtypes, refuse_out
from .kv_write import place
from .kv_write_quantized import refuse_caches
from .rope_kv_write import rotated


def refuse(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, format: str, out_dtype: torch.dtype | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    width = qkv.shape[1] // (q_heads + 2 * kv_heads)
    if not 0 < 2 * cos.shape[-1] <= width: return f"rotary width {2 * cos.shape[-1]}, head size {width}"
    return (refuse_caches(k_cache, k_scale, v_cache, v_scale, slots, format) or refuse_dtypes(qkv=qkv, cos=cos, sin=sin)
            or refuse_out(out_dtype))


@triton.jit
def _store(x, at, head, mask, slot, inverse, limit, q_ptr, k_ptr, v_ptr, token, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
           WIDTH: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr):
    """x [heads, channels] to q [T, Q_HEADS, WIDTH], or as codes to its cache; `at` are channels."""
    tl.store(q_ptr + (token * Q_HEADS + head) * WIDTH + at, narrow(x, q_ptr.dtype.element_ty), mask & (head < Q_HEADS))
    k_head, v_head = head - Q_HEADS, head - Q_HEADS - KV_HEADS
    kept = codes_of(x, inverse[:, None], limit, FORMAT == "fp8")
    mask = mask & (slot >= 0)
    tl.store(k_ptr + place(slot, k_head, KV_HEADS, WIDTH, PAGE) + at, kept, mask & (k_head >= 0) & (v_head < 0))
    tl.store(v_ptr + place(slot, v_head, KV_HEADS, WIDTH, PAGE) + at, kept, mask & (v_head >= 0) & (v_head < KV_HEADS))


@triton.jit
def _rope_kv_write(qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, slots_ptr, tiny, limit, Q_HEADS: tl.constexpr,
                   KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
                   FORMAT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    x, y, first, second, mask = rotated(                            # pyright: ignore[reportGeneralTypeIssues]
        qkv_ptr, cos_ptr, sin_ptr, token, head, Q_HEADS, KV_HEADS, WIDTH, HALF, INTERLEAVED, BLOCK)
    worst = tl.where((x == x) & (y == y), tl.maximum(tl.abs(x), tl.abs(y)), float("nan"))
    largest = largest_of(worst)
    if REST:
        at = 2 * HALF + tl.arange(0, REST)[None, :]
        rest_mask = (head < Q_HEADS + 2 * KV_HEADS) & (at < WIDTH)
        z = tl.load(qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head) * WIDTH + at, rest_mask, other=0.0).to(tl.float32)
        more = largest_of(z)
        largest = tl.where((largest == largest) & (more == more), tl.maximum(largest, more), float("nan"))
    inverse = inverse_scale(largest, tiny, limit)
    _store(x, first, head, mask, slot, inverse, limit, q_ptr, k_ptr, v_ptr, token, Q_HEADS, KV_HEADS, WIDTH, PAGE, FORMAT)
    _store(y, second, head, mask, slot, inverse, limit, q_ptr, k_ptr, v_ptr, token, Q_HEADS, KV_HEADS, WIDTH, PAGE, FORMAT)
    if REST: _store(z, at, head, rest_mask, slot, inverse, limit, q_ptr, k_ptr, v_ptr, token, Q_HEADS, KV_HEADS, WIDTH, PAGE, FORMAT)
    row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    k_head, v_head = row - Q_HEADS, row - Q_HEADS - KV_HEADS
    scale = tl.div_rn(largest, tl.zeros_like(largest) + limit)
    tl.store(k_scale_ptr + place(slot, k_head, KV_HEADS, 1, PAGE), scale, (slot >= 0) & (k_head >= 0) & (v_head < 0))
    tl.store(v_scale_ptr + place(slot, v_head, KV_HEADS, 1, PAGE), scale, (slot >= 0) & (v_head >= 0) & (v_head < KV_HEADS))


@kernel(rope_kv_write_quantized, refuse=refuse)
def lower(
    emit: Emit, q: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor,
    slots: Tensor, q_heads: int, kv_heads: int, interleaved: bool, format: str, out_dtype: torch.dtype | None = None,
) -> None:
    """qkv [T, (Hq + 2 Hkv) D], cos, sin [T, R/2] -> q [T, Hq, D]; k and v as codes and scales at slots [T]."""
    heads = q_heads + 2 * kv_heads
    width, half = qkv.shape[1] // heads, cos.shape[-1]
    block = power_of_2(half)
    each = min(power_of_2(heads), max(1, 256 // block))
    emit(_rope_kv_write, grid=(qkv.shape[0], -(-heads // each)),
         args=(qkv, cos, sin, q, k_cache, k_scale, v_cache, v_scale, slots, *limits(format == "fp8")), warps=max(1, each * block // 256),
         Q_HEADS=q_heads, KV_HEADS=kv_heads, WIDTH=width, HALF=half, INTERLEAVED=interleaved, PAGE=k_cache.shape[2], FORMAT=format,
         HEADS=each, BLOCK=block, REST=power_of_2(width - 2 * half) if width > 2 * half else 0)
