"""infc::paged_attention, infc::paged_attention_quantized: one kernel for any mix of prefill and decode, its grid from the bucket alone.

A program takes a few tokens of one sequence with all the query heads of one kv head, so each byte of the cache is read once for all of
them. Which sequence, it finds in query_start: n's tiles begin at slot query_start[n] // tokens + n, padding being the last "sequence", so
T // tokens + N + 1 slots cover every mix. Few programs: the keys a tile sees are cut into equal parts by their live number, and a second
launch weighs the parts by their log-sum-exp (flash decoding). Keys beyond context_len or before every window of the tile are not read.
Probabilities are rounded to q's dtype before they meet the values, as tensor cores want them: a wider out_dtype makes no finer result.
"""
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import paged_attention
from ....compiler.ops.attention import heads_per_group
from ....compiler.ops.kv_quantized import paged_attention_quantized
from ....compiler.placement import Limit
from ..primitives import dot, narrow, signed_as, tanh
from ..registry import Emit, Work, kernel
from ..rows import FLOATS, power_of_2, refuse_out

CODE_TYPES = (torch.int8, torch.float8_e4m3fn)
LOG2_E = 1.4426950408889634

MAX_HEAD = 256
"""Widest head: q, a block of keys and one of values have to fit in shared memory together."""

MAX_GROUP = 128
"""Most query heads of a kv head: the rows of the largest tile."""

CTAS = 264
"""Programs wanted at least: two for each of the 132 SMs of an H100 or H200."""


def refuse(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype: return f"q is {q.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}"
    return _refuse(q, (k_cache, v_cache), (query_start, context_len, block_table), out_dtype, sinks)


def refuse_quantized(
    q: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, query_start: Tensor, context_len: Tensor,
    block_table: Tensor, scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    if k_cache.dtype not in CODE_TYPES or v_cache.dtype != k_cache.dtype:
        return f"caches of {k_cache.dtype} and {v_cache.dtype}: both i8 or both e4m3 are known"
    if k_scale.dtype != torch.float32 or v_scale.dtype != torch.float32: return f"scales of {k_scale.dtype}, {v_scale.dtype}: fp32 is known"
    return _refuse(q, (k_cache, v_cache, k_scale, v_scale), (query_start, context_len, block_table), out_dtype, sinks)


def _refuse(q: Tensor, caches: tuple[Tensor, ...], numbers: tuple[Tensor, ...], out_dtype: torch.dtype | None,
            sinks: Tensor | None) -> str | None:
    if q.dtype not in FLOATS: return f"q is {q.dtype}: bf16, fp16 and fp32 are known"
    if q.stride(-1) != 1: return "a head of q is not contiguous"
    if not all(t.is_contiguous() for t in (*caches, *numbers)): return "a cache, query_start, context_len or block_table is not contiguous"
    if any(t.dtype != torch.int32 for t in numbers): return "query_start, context_len or block_table is not i32"
    heads, kv_heads = q.shape[1], caches[0].shape[1]
    if kv_heads < 1 or heads % kv_heads: return f"{heads} query heads do not share {kv_heads} kv heads evenly"
    if (group := heads // kv_heads) > MAX_GROUP: return f"{group} query heads share a kv head: up to {MAX_GROUP} are known"
    if q.dtype == torch.float32 and group > 16: return f"{group} query heads share a kv head of fp32: up to 16 are known"
    if (head := max(q.shape[-1], caches[1].shape[-1])) > MAX_HEAD:
        return Limit(f"heads of {head} channels are not supported on this target: up to {MAX_HEAD} are")
    return refuse_out(out_dtype) or refuse_sinks(sinks, heads)


def refuse_sinks(sinks: Tensor | None, heads: int) -> str | None:
    """Why these sinks of so many query heads cannot be read, else None."""
    if sinks is None: return None
    if sinks.dtype not in FLOATS: return f"sinks are {sinks.dtype}: bf16, fp16 and fp32 are known"
    return None if tuple(sinks.shape) == (heads,) and sinks.is_contiguous() else f"sinks {list(sinks.shape)} are not one row of {heads}"


@triton.jit
def _attend(q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, start_ptr, context_ptr, table_ptr, sink_ptr, y_ptr, sum_ptr, tokens, sequences,
            blocks, scale, softcap, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
            Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CODES: tl.constexpr,
            SLOTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
            WIDE: tl.constexpr, WIDE_V: tl.constexpr):
    slot = tl.num_programs(0) - 1 - tl.program_id(0)               # later tiles see more keys: they go first
    kv_head, part = tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, SLOTS)
    starts = tl.load(start_ptr + i, i <= sequences, other=0)
    n = tl.sum(((i <= sequences) & (starts // TOKENS + i <= slot)).to(tl.int32), 0) - 1
    start = tl.load(start_ptr + n)
    first = start + (slot - start // TOKENS - n) * TOKENS           # of the tile's tokens
    row = tl.arange(0, ROWS)
    token = (first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    e = tl.arange(0, WIDE_V)
    place = (token * HEADS + head) * SPLIT + part
    out = y_ptr + place[:, None] * DV + e[None, :]
    fits = row < TOKENS * GROUP
    if n == sequences:                                              # padding
        fits = fits & (token < tokens)
        if SPLIT == 1: tl.store(out, tl.zeros((ROWS, WIDE_V), y_ptr.dtype.element_ty), fits[:, None] & (e < DV)[None, :])
        return
    end = tl.load(start_ptr + n + 1)
    if first >= end: return                                         # a slot its sequence does not fill
    fits = fits & (token < end)
    before = tl.load(context_ptr + n) - end                         # token t stands at position t + before
    position = token.to(tl.int32) + before
    high = tl.minimum(first + TOKENS, end) + before                 # keys low .. high - 1 are seen by some row
    low = 0
    if WINDOW > 0: low = tl.maximum(first + before - WINDOW + 1, 0)
    base = low // KEYS * KEYS
    each = tl.cdiv(tl.cdiv(high - base, KEYS), SPLIT) * KEYS
    begin = base + part * each
    stop = tl.minimum(begin + each, high)

    d = tl.arange(0, WIDE)
    q = tl.load(q_ptr + token[:, None] * Q_TOKEN + head[:, None] * Q_HEAD + d[None, :], fits[:, None] & (d < D)[None, :], other=0.0)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sink_ptr is not None:                                        # a score without a key: seen before the first, by one part
        sink = tl.load(sink_ptr + head, fits, other=0.0).to(tl.float32) * 1.4426950408889634
        largest, total = tl.where(part == 0, sink, largest), tl.where(part == 0, 1.0, total)
    acc = tl.zeros((ROWS, WIDE_V), tl.float32)
    for key0 in range(begin, stop, KEYS):
        key = key0 + tl.arange(0, KEYS)
        there = (key >= low) & (key < stop)
        block = tl.load(table_ptr + n.to(tl.int64) * blocks + key // BLOCK, there, other=0).to(tl.int64)
        at = (block * (HEADS // GROUP) + kv_head) * BLOCK + key % BLOCK
        k = tl.load(k_ptr + at[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :], other=0.0)
        s = dot(q, signed_as(k, q.dtype).T, tl.zeros((ROWS, KEYS), tl.float32))
        if CODES: s = s * tl.load(k_scale_ptr + at, there, other=0.0)[None, :]
        s = softcap * tanh(s * scale) if SOFTCAP else s * scale     # to base 2: softcap, or scale, holds log2(e)
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0: seen = seen & (position[:, None] - key[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(largest, tl.max(s, 1))
        level = tl.where(now == float("-inf"), 0.0, now)            # a row that has seen nothing yet
        p = tl.exp2(s - level[:, None])
        fade = tl.exp2(largest - level)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(v_ptr + at[:, None] * DV + e[None, :], there[:, None] & (e < DV)[None, :], other=0.0)
        if CODES: p = p * tl.load(v_scale_ptr + at, there, other=0.0)[None, :]
        acc = dot(narrow(p, q.dtype), signed_as(v, q.dtype), acc * fade[:, None])
        largest = now
    y = acc / tl.where(total == 0.0, 1.0, total)[:, None]           # a row that sees nothing gives 0
    tl.store(out, narrow(y, y_ptr.dtype.element_ty), fits[:, None] & (e < DV)[None, :])
    if SPLIT > 1:
        nothing = total == 0.0
        tl.store(sum_ptr + place, tl.where(nothing, float("-inf"), largest + tl.log2(tl.where(nothing, 1.0, total))), fits)


@triton.jit
def _combine(part_ptr, sum_ptr, start_ptr, y_ptr, sequences, HEADS: tl.constexpr, DV: tl.constexpr, SPLIT: tl.constexpr,
             WIDE_V: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, part = tl.arange(0, WIDE_V), tl.arange(0, SPLIT)
    live = token < tl.load(start_ptr + sequences)                   # padding was not computed
    place = (token * HEADS + head) * SPLIT + part
    sums = tl.load(sum_ptr + place, live & (part >= 0), other=float("-inf"))
    largest = tl.max(sums, 0)
    weight = tl.exp2(sums - tl.where(largest == float("-inf"), 0.0, largest))
    y = tl.load(part_ptr + place[:, None] * DV + e[None, :], (sums > float("-inf"))[:, None] & (e < DV)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    y = tl.sum(y * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(y_ptr + (token * HEADS + head) * DV + e, narrow(y, y_ptr.dtype.element_ty), e < DV)


@dataclass(frozen=True)
class Tiles:
    """How the work is cut: `rows` of (token, query head) pairs times `keys` at a time, the keys in `split` parts."""

    rows: int
    keys: int
    split: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys}, split {self.split}, {self.warps} warps, {self.stages} stages"


def cuts(
    tokens: int, sequences: int, longest: int, group: int, kv_heads: int, head: int, dtype: torch.dtype, codes: bool = False,
) -> list[Tiles]:
    """The rule's tiles, and others: of 16 rows, keys in fewer or more parts, or half as many at a time; of more, half as many rows."""
    rule = tiles(tokens, sequences, longest, group, kv_heads, head, dtype, codes)
    if dtype == torch.float32: return [rule]
    if rule.rows == 16:
        halves = [replace(rule, split=split) for split in (rule.split // 2, 2 * rule.split) if 1 <= split <= min(32, longest // rule.keys)]
        return [rule, *halves, replace(rule, keys=rule.keys // 2)]
    least = max(16, power_of_2(group))
    return [rule, replace(rule, stages=2), *([replace(rule, rows=rule.rows // 2, warps=4)] if rule.rows > max(least, 32) else [])]


def tiles(
    tokens: int, sequences: int, longest: int, group: int, kv_heads: int, head: int, dtype: torch.dtype, codes: bool = False,
) -> Tiles:
    """The rule's choice for a bucket. longest: keys a sequence can have.

    Rows follow the tokens a sequence has on average: decode gets the narrowest tile tensor cores know, prefill 128 rows, whose two
    products per byte of the cache are bounded by arithmetic. Decode is bounded by memory: 32 KB of keys and values a stage at head 128.
    """
    wide = dtype == torch.float32                                   # no tensor cores
    most = 16 if wide else 64 if head > 128 else 128
    rows = max(16, min(most, power_of_2(-(-tokens // sequences) * group)), power_of_2(group))
    keys = (64 if head <= 128 else 32) // (2 if wide else 1)
    programs = (tokens // (rows // group) + sequences) * kv_heads
    parts = min(32, max(1, longest // (2 * keys)), -(-CTAS // programs))
    split = 1 << (parts.bit_length() - 1)
    # What a thread holds of the sums, and of the addresses of the keys, spills over fewer warps.
    warps = 8 if wide or rows == 16 or rows * head > 64 * (64 if codes else 128) else 4
    # A stage waits for the block table, the next for the keys it names: 5 stages keep two blocks of keys and values on the way.
    return Tiles(rows, keys, split, warps, 2 if wide else 5 if rows == 16 and head <= 128 else 3)


def _lower(
    emit: Emit, y: Tensor, q: Tensor, caches: tuple[Tensor, ...], numbers: tuple[Tensor, Tensor, Tensor], scale: float, window: int,
    softcap: float, sinks: Tensor | None,
) -> None:
    query_start, context_len, block_table = numbers
    k_cache, v_cache = caches[:2]
    (tokens, heads, d), (kv_heads, block), dv = q.shape, k_cache.shape[1:3], v_cache.shape[3]
    sequences, group = context_len.shape[0], heads_per_group(heads, kv_heads)
    if not (tokens and sequences): raise ValueError(f"a bucket of {tokens} tokens and {sequences} sequences")
    longest = block_table.shape[1] * block
    cut = emit.choice(cuts(tokens, sequences, longest, group, kv_heads, max(d, dv), q.dtype, len(caches) > 2))
    part = y if cut.split == 1 else emit.empty(tokens, heads, cut.split, dv, dtype=torch.float32, like=q)
    sums = y if cut.split == 1 else emit.empty(tokens, heads, cut.split, dtype=torch.float32, like=q)
    per_tile = cut.rows // group
    wide_v = max(16, power_of_2(dv))
    emit(_attend, grid=(tokens // per_tile + sequences + 1, kv_heads, cut.split),
         args=(q, k_cache, v_cache, *(caches[2:] or (q, q)), query_start, context_len, block_table, sinks, part, sums, tokens, sequences,
               block_table.shape[1], scale / softcap if softcap else scale * LOG2_E, softcap * LOG2_E),
         warps=cut.warps, stages=cut.stages, HEADS=heads, GROUP=group, D=d, DV=dv, BLOCK=block, Q_TOKEN=q.stride(0), Q_HEAD=q.stride(1),
         WINDOW=window, SOFTCAP=bool(softcap), CODES=len(caches) > 2, SLOTS=power_of_2(sequences + 1), TOKENS=per_tile,
         spills_ok=True,                                             # none on sm_90a with Triton 3.7, which a test holds; up to 152 bytes
         work=work_of(cut, longest, d, dv, k_cache, q, part), ROWS=cut.rows, KEYS=cut.keys, SPLIT=cut.split,
         WIDE=max(16, power_of_2(d)), WIDE_V=wide_v)
    if cut.split > 1:
        parts = cut.split * (dv + 1) * part.element_size()
        emit(_combine, grid=(tokens, heads), args=(part, sums, query_start, y, sequences), warps=4,
             work=Work(warm=parts, stores=dv * y.element_size(), ahead=parts),
             HEADS=heads, DV=dv, SPLIT=cut.split, WIDE_V=wide_v)


def work_of(cut: Tiles, longest: int, d: int, dv: int, cache: Tensor, q: Tensor, part: Tensor) -> Work:
    """Of one tile that sees `longest` keys: each round but the first finds its keys, or their places in the block table, on their way."""
    rounds = -(-longest // (cut.keys * cut.split))
    block = cut.keys * (d + dv) * cache.element_size()
    flops = 2 * cut.rows * cut.keys * (max(16, power_of_2(d)) + max(16, power_of_2(dv)))
    return Work(cold=rounds * block, warm=cut.rows * d * q.element_size(), stores=cut.rows * dv * part.element_size(),
                ahead=max(1, (cut.stages - 1) // 2) * block, flops=rounds * flops, rounds=rounds)


@kernel(paged_attention, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> None:
    """q [T,Hq,D], caches [P,Hkv,block,D] -> y [T,Hq*D]."""
    _lower(emit, y, q, (k_cache, v_cache), (query_start, context_len, block_table), scale, window, softcap, sinks)


@kernel(paged_attention_quantized, refuse=refuse_quantized)
def lower_quantized(
    emit: Emit, y: Tensor, q: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, query_start: Tensor,
    context_len: Tensor, block_table: Tensor, scale: float, window: int = 0, softcap: float = 0.0, out_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> None:
    """q [T,Hq,D], caches of codes [P,Hkv,block,D] and scales [P,Hkv,block,1] -> y [T,Hq*D]."""
    _lower(emit, y, q, (k_cache, v_cache, k_scale, v_scale), (query_start, context_len, block_table), scale, window, softcap, sinks)
