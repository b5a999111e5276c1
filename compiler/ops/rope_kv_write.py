"""infc::rope_kv_write: split the merged projection, rotate q and k, put k and v into the paged cache."""
import torch
from torch import Tensor

from .kv_write import write
from .registry import Cost, nbytes, operator, out_bytes
from .rope import rotate


def cost(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, out_dtype: torch.dtype | None = None,
) -> Cost:
    tokens, head = qkv.shape[0], qkv.shape[1] // (q_heads + 2 * kv_heads)
    written = out_bytes((tokens, q_heads, head), out_dtype or qkv.dtype)
    cached = tokens * kv_heads * head * (k_cache.element_size() + v_cache.element_size())
    return Cost(flops=3 * tokens * (q_heads + kv_heads) * 2 * cos.shape[-1],
                bytes=nbytes(qkv) + nbytes(cos) + nbytes(sin) + nbytes(slots) + written + cached, kv=cached)


@operator("infc::rope_kv_write", cost=cost, mutates=("k_cache", "v_cache"))
def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, out_dtype: torch.dtype | None = None,
) -> Tensor:
    """rope then kv_write on qkv [T,(Hq+2Hkv)*D] (q heads, k heads, v heads); cos, sin [T,R/2] -> q [T,Hq,D].

    k and v are cast to the cache's dtype, q to out_dtype (qkv.dtype when None).
    """
    q, k, v = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1)).split((q_heads, kv_heads, kv_heads), 1)
    cos, sin = cos[:, None], sin[:, None]
    write(rotate(k, cos, sin, interleaved), k_cache, slots)
    write(v, v_cache, slots)
    return rotate(q, cos, sin, interleaved).to(out_dtype or qkv.dtype).contiguous()


@rope_kv_write.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_heads: int, kv_heads: int, interleaved: bool, out_dtype: torch.dtype | None = None,
) -> Tensor:
    head = qkv.shape[1] // (q_heads + 2 * kv_heads)
    return qkv.new_empty((qkv.shape[0], q_heads, head), dtype=out_dtype or qkv.dtype)
