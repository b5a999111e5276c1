"""infc::paged_attention: causal attention of a mixed batch over the paged KV cache."""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention import check_sinks, heads_per_group, visible, weigh
from .registry import Cost, compute_dtype, nbytes, operator, out_bytes


def cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Cost:
    tokens, heads, head = q.shape
    kv_heads, head_v = k_cache.shape[1], v_cache.shape[3]
    small = nbytes(query_start) + nbytes(context_len) + nbytes(block_table) + nbytes(sinks)
    written = out_bytes((tokens, heads * head_v), out_dtype or q.dtype)
    return Cost(                                           # context lengths are data: what a key costs is a rate
        flops=0, bytes=nbytes(q) + small + written, window=window,
        pair_flops=heads * (2 * head + 2 * head_v + 5),    # two products; scale, mask, softmax
        key_bytes=kv_heads * (head * k_cache.element_size() + head_v * v_cache.element_size()))


def attend(
    q: Tensor, keys_values: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], cache: Sequence[int], head_v: int, query_start: Tensor,
    context_len: Tensor, block_table: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None = None,
) -> Tensor:
    """[T,Hq*head_v] in the compute dtype. keys_values: (blocks, offsets) of a sequence's tokens -> its keys and values [context,Hkv,D];
    cache: shape of the K cache."""
    check_sinks(sinks, q.shape[1])
    wide, block, group = compute_dtype(q.dtype), cache[2], heads_per_group(q.shape[1], cache[1])
    out = torch.zeros(q.shape[0], q.shape[1], head_v, dtype=wide, device=q.device)
    starts = query_start.tolist()
    for n, context in enumerate(context_len.tolist()):
        first, last = starts[n], starts[n + 1]
        if first == last: continue                         # a padded sequence
        position = torch.arange(context, device=q.device)
        keys, values = (t.transpose(0, 1).repeat_interleave(group, 0)                   # [Hq, context, D]
                        for t in keys_values(block_table[n, position // block].long(), position % block))
        scores = q[first:last].to(wide).transpose(0, 1) @ keys.transpose(-1, -2) * scale
        seen = visible("causal", window, last - first, context, q.device)
        out[first:last] = (weigh(scores, seen, softcap, sinks=sinks) @ values).transpose(0, 1)
    return out.flatten(1)


@operator("infc::paged_attention", cost=cost)
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each token attends to its own sequence's keys.  q [T,Hq,D], caches [P,Hkv,block,D] -> [T,Hq*D] in out_dtype.

    Sequence n owns tokens query_start[n] .. query_start[n+1]-1 (i32[N+1]); context_len[n] (i32[N]) counts its keys,
    this step's tokens included, so its last token stands at position context_len[n]-1 and sees keys 0..that, or only the
    last `window` of them. Key p lies in block block_table[n, p // block], offset p % block. Tokens of no sequence
    (padding) give 0; nothing beyond context_len is read. sinks [Hq]: as in infc::attention.
    Sums in fp32 (fp64 for fp64).
    """
    wide = compute_dtype(q.dtype)

    def keys_values(blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache[blocks, :, offsets].to(wide), v_cache[blocks, :, offsets].to(wide)

    out = attend(q, keys_values, k_cache.shape, v_cache.shape[3], query_start, context_len, block_table, scale, window, softcap,
                 sinks)
    return out.to(out_dtype or q.dtype)


@paged_attention.register_fake
def _(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    heads_per_group(q.shape[1], k_cache.shape[1])
    check_sinks(sinks, q.shape[1])
    return q.new_empty((q.shape[0], q.shape[1] * v_cache.shape[3]), dtype=out_dtype or q.dtype)
