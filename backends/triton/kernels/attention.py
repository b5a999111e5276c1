"""infc::attention: dense attention of any mask and bias, tiled like infc::paged_attention: the query heads of a kv head share its bytes."""
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import attention
from ....compiler.ops.attention import MASKS, heads_per_group
from ..primitives import dot, narrow, tanh
from ..registry import Emit, kernel
from ..rows import FLOATS, power_of_2
from .paged_attention import LOG2_E, MAX_GROUP, MAX_HEAD, cuts, refuse_sinks, work_of


def refuse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0, mask: str = "none",
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    if q.dtype not in FLOATS: return f"q is {q.dtype}: bf16, fp16 and fp32 are known"
    if k.dtype != q.dtype or v.dtype != q.dtype: return f"q is {q.dtype}, k and v are {k.dtype} and {v.dtype}"
    if bias is not None and bias.dtype not in (*FLOATS, torch.bool): return f"bias is {bias.dtype}: bf16, fp16, fp32 and bool are known"
    if mask not in MASKS: return f"mask {mask!r} is none of {', '.join(MASKS)}"
    if any(t.stride(-1) != 1 for t in (q, k, v)): return "a head of q, k or v is not contiguous"
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]: return f"{q.shape[1]} query heads do not share {k.shape[1]} kv heads evenly"
    most = 16 if q.dtype == torch.float32 else MAX_GROUP
    if (group := q.shape[1] // k.shape[1]) > most: return f"{group} query heads of {q.dtype} share a kv head: up to {most} are known"
    if (head := max(q.shape[-1], v.shape[-1])) > MAX_HEAD: return f"heads of {head}: up to {MAX_HEAD} are known"
    return refuse_sinks(sinks, q.shape[1])


@triton.jit
def _attention(q_ptr, k_ptr, v_ptr, bias_ptr, sink_ptr, y_ptr, queries, keys, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch,
               v_head, v_row, bias_batch, bias_head, bias_row, bias_key, scale, softcap, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
               D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
               TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS        # later tiles see more keys: they go first
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    row, d, e = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    query = first + row // GROUP
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    fits = (row < TOKENS * GROUP) & (query < queries)
    shift = 0 if MASK == "causal_top_left" else keys - queries
    position = query + shift
    low, high = 0, keys                                             # keys low .. high - 1 are seen by some row
    if MASK != "none": high = tl.minimum(keys, tl.minimum(first + TOKENS, queries) + shift)
    if WINDOW > 0: low = tl.maximum(first + shift - WINDOW + 1, 0) // KEYS * KEYS
    q_at = q_ptr + batch * q_batch + head[:, None] * q_head + query.to(tl.int64)[:, None] * q_row + d[None, :]
    q = tl.load(q_at, fits[:, None] & (d < D)[None, :], other=0.0)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sink_ptr is not None:                                        # a score without a key: seen before the first
        largest = tl.load(sink_ptr + head, fits, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros((ROWS, WIDE_V), tl.float32)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        there, at = key < high, key.to(tl.int64)
        k_at = k_ptr + batch * k_batch + kv_head.to(tl.int64) * k_head + at[:, None] * k_row + d[None, :]
        k = tl.load(k_at, there[:, None] & (d < D)[None, :], other=0.0)
        s = dot(q, k.T, tl.zeros((ROWS, KEYS), tl.float32))
        s = softcap * tanh(s * scale) if SOFTCAP else s * scale     # to base 2: softcap, or scale, holds log2(e)
        seen = there[None, :] & fits[:, None]
        if MASK != "none": seen = seen & (key[None, :] <= position[:, None])
        if WINDOW > 0: seen = seen & (position[:, None] - key[None, :] < WINDOW)
        if BIAS != "none":
            bias_at = batch * bias_batch + head[:, None] * bias_head + query.to(tl.int64)[:, None] * bias_row + at[None, :] * bias_key
            bias = tl.load(bias_ptr + bias_at, seen, other=0)
            if BIAS == "bool": seen = seen & (bias != 0)
            else: s += bias.to(tl.float32) * 1.4426950408889634
        s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(largest, tl.max(s, 1))
        level = tl.where(now == float("-inf"), 0.0, now)            # a row that has seen nothing yet
        p = tl.exp2(s - level[:, None])
        fade = tl.exp2(largest - level)
        total = total * fade + tl.sum(p, 1)
        v_at = v_ptr + batch * v_batch + kv_head.to(tl.int64) * v_head + at[:, None] * v_row + e[None, :]
        v = tl.load(v_at, there[:, None] & (e < DV)[None, :], other=0.0)
        acc = dot(narrow(p, q.dtype), v, acc * fade[:, None])
        largest = now
    y = acc / tl.where(total == 0.0, 1.0, total)[:, None]           # a row that sees nothing gives 0
    out = ((batch * KV_HEADS * GROUP + head) * queries + query)[:, None] * DV + e[None, :]
    tl.store(y_ptr + out, narrow(y, y_ptr.dtype.element_ty), fits[:, None] & (e < DV)[None, :])


@kernel(attention, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0, mask: str = "none",
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> None:
    """q [B,Hq,S,D], k [B,Hkv,L,D], v [B,Hkv,L,Dv], bias broadcast to [B,Hq,S,L] -> y [B,Hq,S,Dv]."""
    (batch, heads, queries, d), (kv_heads, keys), dv = q.shape, k.shape[1:3], v.shape[3]
    if not y.numel(): return
    group = heads_per_group(heads, kv_heads)
    cut = emit.choice([replace(cut, split=1, warps=8) for cut in cuts(queries, 1, keys, group, kv_heads, max(d, dv), q.dtype)])
    block = 32 if bias is not None and max(d, dv) > 64 else cut.keys     # a tile of the bias is as large as one of the scores
    per_tile = cut.rows // group
    strides = (0, 0, 0, 0) if bias is None else bias.expand(batch, heads, queries, keys).stride()
    held = q if bias is None else bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    emit(_attention, grid=(-(-queries // per_tile), batch * kv_heads),
         args=(q, k, v, held, sinks, y, queries, keys, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides,
               scale / softcap if softcap else scale * LOG2_E, softcap * LOG2_E),
         work=work_of(replace(cut, keys=block), keys, d, dv, k, q, y), warps=cut.warps, stages=cut.stages,
         spills_ok=True,                                            # none on sm_90a, which a test holds
         KV_HEADS=kv_heads, GROUP=group, D=d, DV=dv, MASK=mask, WINDOW=window,
         SOFTCAP=bool(softcap), BIAS="none" if bias is None else "bool" if bias.dtype == torch.bool else "float", TOKENS=per_tile,
         ROWS=cut.rows, KEYS=block, WIDE=max(16, power_of_2(d)), WIDE_V=max(16, power_of_2(dv)))
