"""infc::kv_write_quantized: each token's keys and values as codes and one scale a head, to its slot; slot -1 writes nowhere."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops.kv_quantized import FORMATS, kv_write_quantized
from ..registry import Emit, kernel
from ..rows import codes_of, inverse_scale, largest_of, limits, power_of_2, refuse_dtypes
from .kv_write import place


def refuse(
    k: Tensor, v: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor, format: str,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    return refuse_caches(k_cache, k_scale, v_cache, v_scale, slots, format) or refuse_dtypes(k=k, v=v)


def refuse_caches(k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor, format: str) -> str | None:
    """Why not, of caches of codes."""
    if format not in FORMATS: return f"format {format!r} is none of {', '.join(FORMATS)}"
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        if cache.dtype != FORMATS[format] or scale.dtype != torch.float32: return f"{name} is kept as {cache.dtype} and {scale.dtype}"
        if not (cache.is_contiguous() and scale.is_contiguous()): return f"the cache of {name} is not contiguous"
    return None if slots.is_contiguous() else "slots is not contiguous"


@triton.jit
def _write(x_ptr, codes_ptr, scale_ptr, token, slot, head, tiny, limit, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
           PAGE: tl.constexpr, FORMAT: tl.constexpr):
    at = tl.arange(0, BLOCK)[None, :]
    mask = (head < KV_HEADS)[:, None] & (at < WIDTH)
    x = tl.load(x_ptr + (token * KV_HEADS + head)[:, None] * WIDTH + at, mask, other=0.0).to(tl.float32)
    largest = largest_of(x)
    codes = codes_of(x, inverse_scale(largest, tiny, limit)[:, None], limit, FORMAT == "fp8")     # pyright: ignore[reportGeneralTypeIssues]
    tl.store(codes_ptr + place(slot, head, KV_HEADS, WIDTH, PAGE)[:, None] + at, codes, mask)
    tl.store(scale_ptr + place(slot, head, KV_HEADS, 1, PAGE), tl.div_rn(largest, tl.zeros_like(largest) + limit), head < KV_HEADS)


@triton.jit
def _kv_write(k_ptr, v_ptr, k_codes_ptr, k_scale_ptr, v_codes_ptr, v_scale_ptr, slots_ptr, tiny, limit, KV_HEADS: tl.constexpr,
              K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr,
              K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        _write(k_ptr, k_codes_ptr, k_scale_ptr, token, slot, head, tiny, limit, KV_HEADS, K_WIDTH, K_BLOCK, PAGE, FORMAT)
        _write(v_ptr, v_codes_ptr, v_scale_ptr, token, slot, head, tiny, limit, KV_HEADS, V_WIDTH, V_BLOCK, PAGE, FORMAT)


@kernel(kv_write_quantized, refuse=refuse)
def lower(
    emit: Emit, k: Tensor, v: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor, format: str,
) -> None:
    """k, v [T, Hkv, D] into codes [P, Hkv, block, D] and scales [P, Hkv, block, 1] at slots [T]."""
    tokens, heads, width = k.shape
    k_block, v_block = power_of_2(width), power_of_2(v.shape[-1])
    each = min(power_of_2(heads), max(1, 512 // max(k_block, v_block)))
    emit(_kv_write, grid=(tokens, -(-heads // each)), args=(k, v, k_cache, k_scale, v_cache, v_scale, slots, *limits(format == "fp8")),
         warps=max(1, min(8, each * max(k_block, v_block) // 256)), KV_HEADS=heads, K_WIDTH=width, V_WIDTH=v.shape[-1],
         PAGE=k_cache.shape[2], FORMAT=format, HEADS=each, K_BLOCK=k_block, V_BLOCK=v_block)
