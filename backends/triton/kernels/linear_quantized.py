"""infc::linear_quantized, infc::linear_swiglu_quantized: codes are read as they lie, multiplied as whole numbers, scaled per group in fp32.

Codes are exact in every operand dtype, so nothing is rounded before the sums. A group's sum must be scaled by itself: several groups share
one product of tiles by standing in columns of their own, column (g, m) holding row m of x inside group g and zeros elsewhere. With offsets,
a group's sum of x times its offset is added. Few rows: codes are read as words of two bytes, whose four (two) parts are spread in place
and each meet every fourth (second) column of x. Many rows: bytes, of which the low halves meet the even columns and the high the odd.

act_bits 8: a first launch rounds the rows of x to codes (compiler.ops.codes.row_codes, the same codes), unless they come as codes with
x_scale, and codes meet codes: in int8 (e4m3) tensor cores where a tile is deep enough for them.

e4m3 codes go the same way. Hopper's tensor cores keep some 13 bits of a sum of e4m3 products: no more than BLOCK_K of them are summed
there, the rest in fp32.
"""
# ruff: noqa: RET505, SIM108  # Triton compiles what follows a constant `if`; only an `else` leaves it out
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import linear_quantized
from ....compiler.ops.codes import E4M3, groups, row_type
from ....compiler.ops.linear_quantized import linear_swiglu_quantized
from ....compiler.ops.swiglu import ACTIVATIONS
from ..primitives import bytes_as, dot, e4m3_as, e4m3_pairs_of, halves_as, pairs_of, quarters_of
from ..registry import Emit, Work, kernel
from ..rows import GROUPS, limits, power_of_2, refuse_dtypes, refuse_out, round_groups
from .linear import CTAS, epilogue, lower_combine, parts, splits, store_part, tile, work_of

MAX_ROW = 32_768
"""Longest row that one program rounds to codes with one scale."""


def refuse(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> str | None:
    """None where the kernels take the call, else why not."""
    k = x.shape[-1]
    if bits not in (4, 8): return f"codes of {bits} bits: 4 and 8 are known"
    if codes.dtype not in (torch.uint8, E4M3): return f"codes are {codes.dtype}: u8 and e4m3 are known"
    if codes.dtype == E4M3 and (bits != 8 or offset is not None): return "e4m3 codes have 8 bits and no offset"
    if 0 < group < k and group not in GROUPS: return f"groups of {group}: {', '.join(map(str, GROUPS))} and whole rows are known"
    if bf16_rows: return f"rounded to bf16 from some number of rows on ({bf16_rows}): products here are the same for all rows"
    if act_bits not in (0, 8): return f"rows rounded to {act_bits} bits: 8 is known, and rows as they are"
    if act_bits and act_group not in (0, group) and act_group < k: return f"rows in groups of {act_group}, the weight in groups of {group}"
    if act_bits and groups(k, act_group) == 1 and k > MAX_ROW: return f"rows of {k}: up to {MAX_ROW} are rounded with one scale"
    for name, value in (("scale", scale), ("offset", offset)):
        if value is not None and value.dtype != torch.float16: return f"{name} is {value.dtype}: fp16 is known"
    if not codes.numel() or not codes.is_contiguous(): return f"a weight of {tuple(codes.shape)} codes is empty or not contiguous"
    return (_refuse_rows(x, codes, act_bits, act_group, x_scale)
            or refuse_dtypes(scale=scale, offset=offset, bias=bias, residual=residual) or refuse_out(out_dtype))


def _refuse_rows(x: Tensor, codes: Tensor, act_bits: int, act_group: int, x_scale: Tensor | None) -> str | None:
    if x_scale is None: return refuse_dtypes(x=x)
    kind, shape = row_type(8, codes.dtype == E4M3), (*x.shape[:-1], groups(x.shape[-1], act_group))
    if act_bits != 8: return f"x comes with scales, and act_bits is {act_bits}: 8 is known"
    if x.dtype != kind: return f"x is {x.dtype} with scales, of a weight whose rows are {kind}"
    if x_scale.dtype != torch.float32 or x_scale.shape != shape:
        return f"x_scale is {x_scale.dtype} {tuple(x_scale.shape)}: fp32 {shape} fits"
    return None if x.is_contiguous() and x_scale.is_contiguous() else "x or x_scale is not contiguous"


def refuse_swiglu(
    x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, act: str,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> str | None:
    """None where the kernels take the call, else why not."""
    if act not in ACTIVATIONS: return f"activation {act!r} is none of {', '.join(ACTIVATIONS)}"
    return refuse(x, codes, scale, offset, None, None, bits, group, act_bits, act_group, out_dtype, x_scale, bf16_rows)


@triton.jit
def _round_rows(x_ptr, codes_ptr, scale_ptr, tiny, limit, K: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
                BLOCK_G: tl.constexpr, FLOATS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    i = tl.arange(0, WIDE)
    k = g[:, None] * GROUP + i[None, :]
    seen = (i < GROUP)[None, :] & (k < K)
    x = tl.load(x_ptr + row * K + k, seen, other=0.0).to(tl.float32)
    codes, scale = round_groups(x, tiny, limit, FLOATS)             # pyright: ignore[reportGeneralTypeIssues]
    tl.store(codes_ptr + row * K + k, codes, seen)
    tl.store(scale_ptr + row * G + g, scale, g < G)


@triton.jit
def _group_sums(codes, x, sums, BITS: tl.constexpr, WORDS: tl.constexpr, FLOATS: tl.constexpr):
    """Codes [N, words or bytes] less half their range (e4m3 as they are), times columns x [C, K]: [N, C] in fp32."""
    if FLOATS and WORDS:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        low, high = e4m3_pairs_of(codes, x.dtype)                   # pyright: ignore[reportGeneralTypeIssues]
        return dot(high, odd.T, dot(low, even.T, sums))
    elif FLOATS:
        return dot(e4m3_as(codes, x.dtype), x.T, sums)
    elif BITS == 8 and WORDS:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        low, high = pairs_of(codes, x.dtype)                        # pyright: ignore[reportGeneralTypeIssues]
        return dot(high, odd.T, dot(low, even.T, sums))
    elif BITS == 8:
        if x.dtype == tl.int8: return tl.dot(bytes_as(codes, x.dtype), x.T, out_dtype=tl.int32).to(tl.float32)
        else: return dot(bytes_as(codes, x.dtype), x.T, sums)
    elif WORDS:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        c0, c1, c2, c3 = quarters_of(codes, x.dtype)                # pyright: ignore[reportGeneralTypeIssues]
        return dot(c3, x3.T, dot(c2, x2.T, dot(c1, x1.T, dot(c0, x0.T, sums))))
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        low, high = halves_as(codes, x.dtype)                       # pyright: ignore[reportGeneralTypeIssues]
        if x.dtype == tl.int8: return tl.dot(high, odd.T, tl.dot(low, even.T, out_dtype=tl.int32), out_dtype=tl.int32).to(tl.float32)
        else: return dot(high, odd.T, dot(low, even.T, sums))


@triton.jit
def _scaled(sums, x_sum, x_scale, scale, offset, half, OFFSET: tl.constexpr, X_SCALES: tl.constexpr):
    """Sums [N, G, M] of signed codes times x -> of what the codes mean times what x means."""
    y = sums * scale
    if OFFSET: y += x_sum * (offset + half * scale)                 # codes stand `half` lower than they were stored
    if X_SCALES == "group": y = y * x_scale
    return y


@triton.jit
def _codes(x_ptr, x_scale_ptr, codes_ptr, scale_ptr, offset_ptr, bias_ptr, residual_ptr, y_ptr, rows, N: tl.constexpr, K: tl.constexpr,
           BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, ONE_SCALE: tl.constexpr, OFFSET: tl.constexpr,
           X_SCALES: tl.constexpr, CODES: tl.constexpr, WORDS: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           BLOCK_G: tl.constexpr, SPLIT: tl.constexpr):
    COLUMNS: tl.constexpr = BLOCK_G * BLOCK_M
    SPAN: tl.constexpr = BLOCK_K // BLOCK_G                         # columns of x of one scale in a step
    UNIT: tl.constexpr = 8 * (1 + WORDS)                            # bits of what codes are read as
    UNITS: tl.constexpr = (K * BITS + UNIT - 1) // UNIT             # of a row of codes
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    ROW_G: tl.constexpr = G * (1 - ONE_SCALE)                       # scales from one row to the next
    STEP: tl.constexpr = BLOCK_K * BITS // UNIT
    EACH: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K
    half = 2 ** (BITS - 1)
    tile_m, tile_n = tile(rows, N, BLOCK_M, BLOCK_N)                # pyright: ignore[reportGeneralTypeIssues]
    column = tl.arange(0, COLUMNS)
    own = column // BLOCK_M                                         # the group of the step that a column holds
    m = (tile_m * BLOCK_M + column % BLOCK_M).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    k, b = tl.arange(0, BLOCK_K), tl.arange(0, STEP)
    first = tl.program_id(1) * EACH
    last = tl.minimum(first + EACH, K)
    row = tl.minimum(n, N - 1).to(tl.int64)                         # a row past the end reads the last one and is not stored
    x_at = x_ptr + tl.minimum(m, rows - 1)[:, None] * K + k[None, :]
    x_scale_at = x_scale_ptr + tl.minimum(m, rows - 1) * G + own
    if WORDS: codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint16))
    else: codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8))
    if FLOATS and X_SCALES != "": x_at = x_at.to(tl.pointer_type(tl.uint8))
    codes_at = codes_ptr + row[:, None] * UNITS + b[None, :]
    scale_at = row[:, None, None] * ROW_G + g[None, :, None]
    inside = (k // SPAN)[None, :] == own[:, None]
    zeros = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_G, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_G, BLOCK_M), tl.float32)
    # Scales are too narrow to be copied ahead by the pipeline: each step loads those of the next.
    there = (first // GROUP + g < G)[None, :, None]
    scale = tl.load(scale_ptr + scale_at + first // GROUP, there, other=0.0)
    scale_up, offset, offset_up = scale, scale, scale
    if OFFSET: offset = tl.load(offset_ptr + scale_at + first // GROUP, there, other=0.0)
    if ACT != "":
        scale_up = tl.load(scale_ptr + N * ROW_G + scale_at + first // GROUP, there, other=0.0)
        if OFFSET: offset_up = tl.load(offset_ptr + N * G + scale_at + first // GROUP, there, other=0.0)
    for start in range(first, last, BLOCK_K):
        now, now_up = scale.to(tl.float32), scale_up.to(tl.float32)
        shift, shift_up = offset.to(tl.float32), offset_up.to(tl.float32)
        later = (start + BLOCK_K) // GROUP
        there = (later + g < G)[None, :, None]
        scale = tl.load(scale_ptr + scale_at + later, there, other=0.0)
        if OFFSET: offset = tl.load(offset_ptr + scale_at + later, there, other=0.0)
        if ACT != "":
            scale_up = tl.load(scale_ptr + N * ROW_G + scale_at + later, there, other=0.0)
            if OFFSET: offset_up = tl.load(offset_ptr + N * G + scale_at + later, there, other=0.0)
        if BLOCK_G > 1: x = tl.load(x_at + start, inside & (k[None, :] + start < K), other=0)
        elif K % BLOCK_K: x = tl.load(x_at + start, k[None, :] + start < K, other=0)
        else: x = tl.load(x_at + start)
        unit = start * BITS // UNIT
        x_sum, x_scale = now, now                                   # read only where they are set below
        if OFFSET: x_sum = tl.reshape(tl.sum(x.to(tl.float32), 1), (1, BLOCK_G, BLOCK_M))
        if X_SCALES == "group":
            x_scale = tl.load(x_scale_at + start // GROUP, start // GROUP + own < G, other=0.0)
            x_scale = tl.reshape(x_scale, (1, BLOCK_G, BLOCK_M))
        if FLOATS and X_SCALES != "": x = x.to(tl.float8e4nv, bitcast=True)
        if X_SCALES != "" and not CODES: x = x.to(tl.float32).to(tl.bfloat16)
        if K % BLOCK_K: codes = tl.load(codes_at + unit, unit + b[None, :] < UNITS, other=0)
        else: codes = tl.load(codes_at + unit)
        sums = tl.reshape(_group_sums(codes, x, zeros, BITS, WORDS, FLOATS), (BLOCK_N, BLOCK_G, BLOCK_M))
        acc += _scaled(sums, x_sum, x_scale, now, shift, half, OFFSET, X_SCALES)
        if ACT != "":
            if K % BLOCK_K: codes = tl.load(codes_at + N * UNITS + unit, unit + b[None, :] < UNITS, other=0)
            else: codes = tl.load(codes_at + N * UNITS + unit)
            sums = tl.reshape(_group_sums(codes, x, zeros, BITS, WORDS, FLOATS), (BLOCK_N, BLOCK_G, BLOCK_M))
            up += _scaled(sums, x_sum, x_scale, now_up, shift_up, half, OFFSET, X_SCALES)
    y, up = tl.sum(acc, 1), tl.sum(up, 1)
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    if X_SCALES == "row":
        x_scale = tl.load(x_scale_ptr + m, m < rows, other=0.0)[None, :]
        y, up = y * x_scale, up * x_scale
    mask = (m[:, None] < rows) & (n[None, :] < N)
    if SPLIT == 1:
        epilogue(y.T, up.T, bias_ptr, residual_ptr, y_ptr, m[:, None], n[None, :], mask, N, ACT, BIAS, RESIDUAL)
    else:
        store_part(y, up, y_ptr, rows, m, n, mask, N, ACT)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: block_n rows of codes, times block_m rows of x in block_g groups side by side, K in `split` parts."""

    block_m: int
    block_n: int
    block_k: int
    block_g: int
    split: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return (f"{self.block_m}x{self.block_n}x{self.block_k}, {self.block_g} groups, split {self.split}, {self.warps} warps, "
                f"{self.stages} stages")


def cuts(rows: int, n: int, k: int, bits: int, group: int, more: bool, wide: bool, offset: bool = False) -> list[Tiles]:
    """The rule's tiles, and others: K in fewer or more parts, twice or half as many rows of codes."""
    rule = tiles(rows, n, k, bits, group, more, wide, offset)
    if wide: return [rule]
    few = rule.block_m <= 16
    other = replace(rule, block_n=2 * rule.block_n, warps=8) if rule.block_n == 64 else replace(rule, block_n=64, warps=4)
    programs = -(-rows // other.block_m) * -(-n // other.block_n)
    return [rule, *splits(rule, rule.block_k, k), replace(other, split=parts(programs, k // other.block_k, 2 * CTAS if few else CTAS // 2))]


def tiles(rows: int, n: int, k: int, bits: int, group: int, more: bool, wide: bool, offset: bool = False) -> Tiles:
    """The rule's choice. Few rows: 128 bytes of each row of codes a step where 32 columns allow it; many rows: one group a step.

    more: two sums an element (gate and up), or offsets besides scales of both sides: half as many elements, or they spill.
    wide: fp32 operands, which no tensor core takes: smaller tiles, or the multiplies spill.
    """
    block_m = max(2, min(16 if wide else 128, power_of_2(rows)))
    want = (32 if more else 64) if wide else 1024 // bits if block_m <= 16 else 64 if bits == 8 or offset else 128    # columns of x a step
    block_g = max(1, min(want // group, 32 // block_m)) if group < k else 1
    block_k = min(want, group * block_g) if group < k else min(want, max(32, power_of_2(k)))
    block_m = max(block_m, 16 // block_g)                           # tensor cores know no fewer than 16 columns in Triton
    block_n = 32 if wide else 128 if block_m >= 64 and not more else 64
    warps = 8 if block_m * block_n * (2 if more else 1) >= 64 * 128 else 4
    split = parts(-(-rows // block_m) * -(-n // block_n), k // block_k, 2 * CTAS if block_m <= 16 else CTAS // 2)
    return Tiles(block_m, block_n, block_k, block_g, split, warps, 4 if block_m <= 32 else 3)


def _lower(
    emit: Emit, y: Tensor, x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    act: str, bits: int, group: int, act_bits: int, act_group: int, x_scale: Tensor | None,
) -> None:
    n, k = y.shape[-1], x.shape[-1]
    rows = x.numel() // k
    if not rows: return
    group = k if groups(k, group) == 1 else group
    more = bool(act) or (offset is not None and bool(act_bits) and groups(k, act_group) > 1)
    cut = emit.choice(cuts(rows, n, k, bits, group, more, x.dtype == torch.float32 and not act_bits, offset is not None))
    if act_bits and x_scale is None: x, x_scale = _rounded(emit, x, rows, act_group, codes.dtype == E4M3)
    x_scales = "" if x_scale is None else "row" if x_scale.shape[-1] == 1 else "group"
    extras = (x if bias is None else bias, x if residual is None else residual)     # one that is absent is never read
    flags = {"N": n, "K": k, "ACT": act, "BIAS": bias is not None, "RESIDUAL": residual is not None}
    part = y if cut.split == 1 else emit.empty(cut.split, rows, codes.shape[0], dtype=torch.float32, like=x)
    whole = bool(act_bits) and cut.block_k * bits // 8 >= 32         # as deep as a tensor core's tile of codes
    each = 16 // bits                                               # codes of a word: the columns of each are 16 at least
    words = not whole and cut.block_m <= 16 and cut.block_k // each >= 16 and k % each == 0
    weights = 2 if act else 1
    scales = 2 * (1 if offset is None else 2) / group               # bytes of fp16 a code
    work = work_of(cut, weights * cut.block_n * (bits / 8 + scales), cut.block_m * x.element_size(),
                   cut.block_m * cut.block_g, weights, part, k)
    emit(_codes, work=work, grid=(-(-rows // cut.block_m) * -(-n // cut.block_n), cut.split),
         args=(x, scale if x_scale is None else x_scale, codes, scale, scale if offset is None else offset, *extras, part, rows),
         warps=cut.warps, stages=cut.stages, **flags, BITS=bits, FLOATS=codes.dtype == E4M3, GROUP=group,
         ONE_SCALE=scale.shape[0] < codes.shape[0], OFFSET=offset is not None, X_SCALES=x_scales, CODES=whole, WORDS=words,
         spills_ok=True,                                             # none on sm_90a, which a test holds; a few bytes on others
         BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, BLOCK_G=cut.block_g, SPLIT=cut.split)
    if cut.split > 1: lower_combine(emit, y, part, extras, rows, flags, cut.split)


def _rounded(emit: Emit, x: Tensor, rows: int, group: int, e4m3: bool) -> tuple[Tensor, Tensor]:
    """The launch that rounds x: its codes i8 or e4m3 [rows, K] and their scales f32 [rows, G]."""
    k = x.shape[-1]
    count = groups(k, group)
    group = k if count == 1 else group
    codes, scale = emit.empty(rows, k, dtype=row_type(8, e4m3), like=x), emit.empty(rows, count, dtype=torch.float32, like=x)
    wide = power_of_2(group)
    block_g = min(power_of_2(count), max(1, 2048 // wide))
    emit(_round_rows, grid=(rows, -(-count // block_g)), warps=8 if wide > 4096 else 4,
         args=(x, codes, scale, *limits(e4m3)),
         K=k, GROUP=group, G=count, WIDE=wide, BLOCK_G=block_g, FLOATS=e4m3,
         work=Work(warm=block_g * group * x.element_size(), stores=block_g * (group + 4), ahead=block_g * group * x.element_size()))
    return codes, scale


@kernel(linear_quantized, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> None:
    """x [..., K], codes u8 [N, ceil(K * bits / 8)] or e4m3, scale, offset f16 [N, G] -> y [..., N]."""
    _lower(emit, y, x, codes, scale, offset, bias, residual, "", bits, group, act_bits, act_group, x_scale)


@kernel(linear_swiglu_quantized, refuse=refuse_swiglu)
def lower_swiglu(
    emit: Emit, y: Tensor, x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, act: str,
    bits: int, group: int, act_bits: int, act_group: int, out_dtype: torch.dtype | None = None, x_scale: Tensor | None = None,
    bf16_rows: int = 0,
) -> None:
    """x [..., K], codes of [2F, K] (gate rows, then up rows) -> y [..., F]."""
    _lower(emit, y, x, codes, scale, offset, None, None, act, bits, group, act_bits, act_group, x_scale)
