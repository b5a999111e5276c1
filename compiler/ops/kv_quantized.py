"""infc::kv_write_quantized, infc::rope_kv_write_quantized, infc::paged_attention_quantized: the paged cache held as codes.

Their meaning is that of the wide operators with infc::quantize_rows before the write and infc::dequantize_rows after the read, one
group a row: each token's K or V of one kv head is D codes and one scale, in a cache [P,Hkv,block,D] and one [P,Hkv,block,1] of f32.
"int8": codes i8, the largest value at 127. "fp8": codes e4m3, the largest value at 448.
"""
import torch
from torch import Tensor

from .attention import check_sinks, heads_per_group
from .codes import E4M3, row_codes
from .kv_write import write
from .paged_attention import attend
from .registry import Cost, compute_dtype, nbytes, operator, out_bytes
from .rope import rotate

FORMATS = {"int8": torch.int8, "fp8": E4M3}
"""Format -> the dtype of its codes."""


def stored(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (codes [..., D], scale f32 [..., 1]). In fp32 whatever x is; a row of zeros gets scale 0, a NaN a scale of NaN."""
    if format not in FORMATS: raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    return row_codes(x, 8, 0, FORMATS[format] == E4M3)


def read(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes [..., D] and their scale [..., 1] mean."""
    return codes.to(dtype) * scale.to(dtype)


def _write(x: Tensor, cache: Tensor, scales: Tensor, slots: Tensor, format: str) -> None:
    codes, scale = stored(x, format)
    write(codes, cache, slots)
    write(scale, scales, slots)


def _row(cache: Tensor, scale: Tensor) -> int | torch.SymInt:
    """Bytes of one token in all heads of one cache."""
    return cache.shape[1] * (cache.shape[3] * cache.element_size() + scale.element_size())


def kv_write_cost(
    k: Tensor, v: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor, format: str,
) -> Cost:
    written = k.shape[0] * (_row(k_cache, k_scale) + _row(v_cache, v_scale))
    return Cost(flops=3 * (k.numel() + v.numel()), bytes=nbytes(k) + nbytes(v) + nbytes(slots) + written, kv=written)


@operator("infc::kv_write_quantized", cost=kv_write_cost, mutates=("k_cache", "k_scale", "v_cache", "v_scale"))
def kv_write_quantized(
    k: Tensor, v: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor, format: str,
) -> None:
    """Write k, v [T,Hkv,D] as codes and scales at slots i32[T] (block index * block + offset; -1 is padding)."""
    _write(k, k_cache, k_scale, slots, format)
    _write(v, v_cache, v_scale, slots, format)


@kv_write_quantized.register_fake
def _(
    k: Tensor, v: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor, format: str,
) -> None:
    return None


def rope_kv_write_cost(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, format: str, out_dtype: torch.dtype | None = None,
) -> Cost:
    tokens, head = qkv.shape[0], qkv.shape[1] // (q_heads + 2 * kv_heads)
    written = out_bytes((tokens, q_heads, head), out_dtype or qkv.dtype)
    cached = tokens * (_row(k_cache, k_scale) + _row(v_cache, v_scale))
    return Cost(flops=6 * tokens * ((q_heads + kv_heads) * cos.shape[-1] + kv_heads * head),
                bytes=nbytes(qkv) + nbytes(cos) + nbytes(sin) + nbytes(slots) + written + cached, kv=cached)


@operator("infc::rope_kv_write_quantized", cost=rope_kv_write_cost, mutates=("k_cache", "k_scale", "v_cache", "v_scale"))
def rope_kv_write_quantized(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, format: str, out_dtype: torch.dtype | None = None,
) -> Tensor:
    """rope then kv_write_quantized on qkv [T,(Hq+2Hkv)*D] (q heads, k heads, v heads); cos, sin [T,R/2] -> q [T,Hq,D] in out_dtype."""
    q, k, v = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1)).split((q_heads, kv_heads, kv_heads), 1)
    cos, sin = cos[:, None], sin[:, None]
    _write(rotate(k, cos, sin, interleaved), k_cache, k_scale, slots, format)
    _write(v, v_cache, v_scale, slots, format)
    return rotate(q, cos, sin, interleaved).to(out_dtype or qkv.dtype).contiguous()


@rope_kv_write_quantized.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, format: str, out_dtype: torch.dtype | None = None,
) -> Tensor:
    head = qkv.shape[1] // (q_heads + 2 * kv_heads)
    return qkv.new_empty((qkv.shape[0], q_heads, head), dtype=out_dtype or qkv.dtype)


def paged_attention_cost(
    q: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, query_start: Tensor, context_len: Tensor,
    block_table: Tensor, scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Cost:
    tokens, heads, head = q.shape
    small = nbytes(query_start) + nbytes(context_len) + nbytes(block_table) + nbytes(sinks)
    written = out_bytes((tokens, heads * v_cache.shape[3]), out_dtype or q.dtype)
    return Cost(
        flops=0, bytes=nbytes(q) + small + written, window=window, key_bytes=_row(k_cache, k_scale) + _row(v_cache, v_scale),
        pair_flops=heads * (2 * head + 2 * v_cache.shape[3] + 7))     # as paged_attention, and a scale for each of k and v


@operator("infc::paged_attention_quantized", cost=paged_attention_cost)
def paged_attention_quantized(
    q: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, query_start: Tensor, context_len: Tensor,
    block_table: Tensor, scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """infc::paged_attention on what the codes mean.  q [T,Hq,D], caches [P,Hkv,block,D] and [P,Hkv,block,1] -> [T,Hq*D] in out_dtype."""
    wide = compute_dtype(q.dtype)

    def keys_values(blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        keys, k_scales, values, v_scales = (part[blocks, :, offsets] for part in (k_cache, k_scale, v_cache, v_scale))
        return read(keys, k_scales, wide), read(values, v_scales, wide)

    out = attend(q, keys_values, k_cache.shape, v_cache.shape[3], query_start, context_len, block_table, scale, window, softcap,
                 sinks)
    return out.to(out_dtype or q.dtype)


@paged_attention_quantized.register_fake
def _(
    q: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, query_start: Tensor, context_len: Tensor,
    block_table: Tensor, scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    heads_per_group(q.shape[1], k_cache.shape[1])
    check_sinks(sinks, q.shape[1])
    return q.new_empty((q.shape[0], q.shape[1] * v_cache.shape[3]), dtype=out_dtype or q.dtype)
