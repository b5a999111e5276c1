"""infc::linear, infc::linear_swiglu: a row is streamed through plain multiplies, more rows through tensor cores.

One row: a program reads whole rows of w, 16 bytes a load, with several loads of a thread in flight, and keeps its partial sums apart
until the end: one launch, bounded by memory alone. More rows: tiles [w rows, x rows], so that a few rows of x are the narrow side of the
tensor core's tile; where the tiles are fewer than the card holds, K is split, the parts lie in scratch, and a second launch adds them.
"""
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import linear, linear_swiglu
from ....compiler.ops.swiglu import ACTIVATIONS
from ..primitives import activate, dot, narrow
from ..registry import Emit, Work, kernel
from ..rows import power_of_2, refuse_dtypes, refuse_out

CTAS = 264
"""Programs wanted at least: two for each of the 132 SMs of an H100 or H200."""


def refuse(
    x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> str | None:
    """None where the kernels take the call, else why not."""
    if x.dtype != w.dtype: return f"x is {x.dtype}, w is {w.dtype}"
    if not all(w.shape): return f"a weight of {tuple(w.shape)} is empty"
    return refuse_dtypes(x=x, w=w, bias=bias, residual=residual) or refuse_out(out_dtype)


def refuse_swiglu(x: Tensor, w: Tensor, act: str, out_dtype: torch.dtype | None = None) -> str | None:
    """None where the kernels take the call, else why not."""
    if act not in ACTIVATIONS: return f"activation {act!r} is none of {', '.join(ACTIVATIONS)}"
    return refuse(x, w, out_dtype=out_dtype)


@triton.jit
def epilogue(acc, up, bias_ptr, residual_ptr, y_ptr, m, n, mask, N: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
             RESIDUAL: tl.constexpr):
    """Bias, residual and activation of a tile [m, n] of fp32 sums, rounded once into y [rows, N]. m is i64."""
    if BIAS: acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
    if ACT != "": acc = activate(acc, ACT) * up
    at = m * N + n
    if RESIDUAL: acc += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, narrow(acc, y_ptr.dtype.element_ty), mask)


@triton.jit
def _one_row(x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, N: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
             RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]          # int64: offsets can pass 2**31
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)               # a lane's own sums: nothing is exchanged before the end
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        seen = k + start < K
        x = tl.load(x_ptr + start + k, seen, other=0.0).to(tl.float32)[None, :]
        acc += x * tl.load(at + start, seen[None, :], other=0.0).to(tl.float32)
        if ACT != "": up += x * tl.load(at + N * K + start, seen[None, :], other=0.0).to(tl.float32)
    epilogue(tl.sum(acc, 1), tl.sum(up, 1), bias_ptr, residual_ptr, y_ptr, tl.zeros((BLOCK_N,), tl.int64), n, n < N, N, ACT, BIAS, RESIDUAL)


@triton.jit
def _rows(x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, rows, N: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
          RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    tile_m, tile_n = tile(rows, N, BLOCK_M, BLOCK_N)                # pyright: ignore[reportGeneralTypeIssues]
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    each: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K     # columns of a part
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, K)
    # A row past the end reads the last one and is not stored: loads need no mask along m and n.
    x_at = x_ptr + tl.minimum(m, rows - 1)[:, None] * K + k[None, :]
    w_at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_K):
        if K % BLOCK_K == 0:
            x, w = tl.load(x_at + start), tl.load(w_at + start)
        else:
            x, w = tl.load(x_at + start, k[None, :] + start < K, other=0.0), tl.load(w_at + start, k[None, :] + start < K, other=0.0)
        acc = dot(w, x.T, acc)
        if ACT != "":
            w = tl.load(w_at + N * K + start, k[None, :] + start < K, other=0.0)
            up = dot(w, x.T, up)
    mask = (m[:, None] < rows) & (n[None, :] < N)
    if SPLIT == 1:
        epilogue(acc.T, up.T, bias_ptr, residual_ptr, y_ptr, m[:, None], n[None, :], mask, N, ACT, BIAS, RESIDUAL)
    else:
        store_part(acc, up, y_ptr, rows, m, n, mask, N, ACT)


@triton.jit
def tile(rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which tile of y this program makes. Eight tiles of rows stand together, so that what runs at once shares x and w in the L2."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_m - group * 8, 8)
    place = tl.program_id(0) % (8 * tiles_n)
    return group * 8 + place % height, place // height


@triton.jit
def store_part(acc, up, part_ptr, rows, m, n, mask, N: tl.constexpr, ACT: tl.constexpr):
    """Sums [n, m] of one part of K into scratch [SPLIT, rows, N], or [SPLIT, rows, 2N] gate before up."""
    width: tl.constexpr = N if ACT == "" else 2 * N
    at = part_ptr + (tl.program_id(1) * rows + m)[:, None] * width + n[None, :]
    tl.store(at, acc.T, mask)
    if ACT != "": tl.store(at + N, up.T, mask)


@triton.jit
def combine(part_ptr, bias_ptr, residual_ptr, y_ptr, rows, N: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
            RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y [rows, N] from the sums of the parts [SPLIT, rows, N or 2N], always added in the same order."""
    width: tl.constexpr = N if ACT == "" else 2 * N
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        at = part_ptr + (part * rows + m) * width + n
        acc += tl.load(at, n < N, other=0.0)
        if ACT != "": up += tl.load(at + N, n < N, other=0.0)
    epilogue(acc, up, bias_ptr, residual_ptr, y_ptr, m, n, n < N, N, ACT, BIAS, RESIDUAL)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: block_n rows of w times block_m rows of x, block_k columns at a time, K in `split` parts."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}, split {self.split}, {self.warps} warps, {self.stages} stages"


def cuts(rows: int, n: int, k: int, dtype: torch.dtype, pair: bool) -> list[Tiles]:
    """The rule's tiles, and others: up to 64 rows K in fewer or more parts, or larger tiles; then more stages, other shapes of a tile."""
    rule = tiles(rows, n, k, dtype, pair)
    if dtype == torch.float32: return [rule]
    if rows <= 64:
        larger = replace(rule, block_n=2 * rule.block_n, warps=8, stages=3)
        return [rule, *splits(rule, rule.block_k, k), replace(larger, split=_parts(rows, n, k, larger))]
    others = [replace(rule, stages=4), replace(rule, block_m=64, warps=4, stages=4)]
    if not pair: others.append(replace(rule, block_m=128, block_n=256 if rule.block_m == 128 else 128))
    return [rule, *(replace(cut, split=_parts(rows, n, k, cut)) for cut in others)]


def splits(rule: Any, block_k: int, k: int) -> list[Any]:
    """The same tiles with K in half and in twice as many parts, of at least two steps each."""
    return [replace(rule, split=split) for split in (rule.split // 2, 2 * rule.split) if 1 <= split <= max(1, k // block_k // 2)]


def tiles(rows: int, n: int, k: int, dtype: torch.dtype, pair: bool) -> Tiles:
    """The rule's choice. pair: two weights' rows a tile (gate and up).

    Up to 16 rows memory decides: 16 KB of w a stage, three stages ahead, two programs an SM keep about 100 KB on the way, more than
    the 25 KB an SM that 4.8 TB/s need at 700 ns. From 128 rows the tensor cores decide: 128 x 128 (or x 256) a program.
    """
    wide = dtype == torch.float32                            # no tensor cores: multiplies, from tiles that fit the registers
    if wide: block_m, block_n, block_k, warps, stages = (16 if rows <= 16 else 32), 32, 32, 4, 2
    elif rows <= 32: block_m, block_n, block_k, warps, stages = (16 if rows <= 16 else 32), 64, 64 if pair else 128, 4, 4
    elif rows <= 64: block_m, block_n, block_k, warps, stages = 64, 64, 64, 4, 4
    elif rows <= 512 or pair: block_m, block_n, block_k, warps, stages = 128, 128, 64, 8, 3
    else: block_m, block_n, block_k, warps, stages = 256, 128, 64, 8, 3
    cut = Tiles(block_m, block_n, min(block_k, max(16, power_of_2(k))), 1, warps, stages)
    return replace(cut, split=_parts(rows, n, k, cut))


def _parts(rows: int, n: int, k: int, cut: Tiles) -> int:
    return parts(-(-rows // cut.block_m) * -(-n // cut.block_n), k // cut.block_k, CTAS if rows <= 64 else CTAS // 2)


def parts(programs: int, steps: int, wanted: int) -> int:
    """Into how many parts to cut K so that about `wanted` programs run: a power of 2, each part at least four steps long.

    Parts are written and read once more in fp32, so never more than fill the card.
    """
    return 1 << (max(1, min(16, steps // 4, wanted // programs)).bit_length() - 1)


@dataclass(frozen=True)
class OneRow:
    """How a product with one row is cut: block_n rows of w a program, block_k columns at a time."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3

    def __str__(self) -> str:
        return f"1x{self.block_n}x{self.block_k}, {self.warps} warps, {self.stages} stages"


def one_row_cuts(n: int, k: int, pair: bool) -> list[OneRow]:
    """The rule's: 4096 numbers a step, four loads of 16 bytes a thread of two-byte weights, the width that pads K least; half, a quarter
    and twice as many rows of w a program."""
    block_k = min((1024, 512, 256), key=lambda b: (-(-k // b) * b, -b))
    rule = OneRow(4096 // block_k // (2 if pair else 1), block_k)
    return [rule, *(replace(rule, block_n=rule.block_n // less) for less in (2, 4) if rule.block_n >= less),
            replace(rule, block_n=2 * rule.block_n, warps=8)]


def lower_product(emit: Emit, y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, act: str) -> None:
    """y [..., N] from x [..., K] and w [N, K], or [2N, K] with an activation."""
    n, k = y.shape[-1], x.shape[-1]
    rows = x.numel() // k
    if not rows: return
    extras = (x if bias is None else bias, x if residual is None else residual)     # one that is absent is never read
    flags = {"N": n, "K": k, "ACT": act, "BIAS": bias is not None, "RESIDUAL": residual is not None}
    weights, size = 2 if act else 1, w.element_size()
    if rows == 1:
        row = emit.choice(one_row_cuts(n, k, bool(act)))
        padded = -(-k // row.block_k) * row.block_k
        work = Work(cold=weights * row.block_n * k * size, warm=k * size, stores=row.block_n * y.element_size(),
                    ahead=(row.stages - 1) * weights * row.block_n * row.block_k * size, flops=2 * weights * row.block_n * padded,
                    rounds=padded // row.block_k)
        emit(_one_row, grid=(-(-n // row.block_n),), args=(x, w, *extras, y), warps=row.warps, work=work, **flags, BLOCK_N=row.block_n,
             BLOCK_K=row.block_k, STAGES=row.stages)
        return
    cut = emit.choice(cuts(rows, n, k, x.dtype, bool(act)))
    part = y if cut.split == 1 else emit.empty(cut.split, rows, w.shape[0], dtype=torch.float32, like=x)
    emit(_rows, grid=(-(-rows // cut.block_m) * -(-n // cut.block_n), cut.split), args=(x, w, *extras, part, rows), warps=cut.warps,
         stages=cut.stages, work=work_of(cut, weights * cut.block_n * size, cut.block_m * size, cut.block_m, weights, part, k), **flags,
         BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, SPLIT=cut.split,
         spills_ok=cut.block_m >= 128 or bool(act) or k % 16 > 0)    # none at real sizes on sm_90a, which a test holds; 28 bytes, odd K 120
    if cut.split > 1: lower_combine(emit, y, part, extras, rows, flags, cut.split)


def work_of(cut: Any, cold: float, warm: float, columns: int, weights: int, part: Tensor, k: int) -> Work:
    """Of one tile. cold, warm: bytes of w and of x a column of K; columns: multiplied with each row of w, padding included.

    weights: 2 where a tile is of gate and up, which are apart in `part` and one in y.
    """
    rounds = -(-k // (cut.block_k * cut.split))
    deep = rounds * cut.block_k
    numbers = cut.block_m * cut.block_n * (weights if cut.split > 1 else 1)
    return Work(cold=int(cold * deep), warm=int(warm * deep), stores=numbers * part.element_size(), rounds=rounds,
                ahead=int((cut.stages - 1) * cut.block_k * (cold + warm)), flops=2 * columns * weights * cut.block_n * deep)


def lower_combine(emit: Emit, y: Tensor, part: Tensor, extras: tuple[Tensor, Tensor], rows: int, flags: dict, split: int) -> None:
    """The launch that adds the parts of a split."""
    n = y.shape[-1]
    block = min(1024, power_of_2(n))
    loads = split * block * part.element_size() * (2 if flags["ACT"] else 1)
    emit(combine, grid=(rows, -(-n // block)), args=(part, *extras, y, rows), warps=4,
         work=Work(warm=loads, stores=block * y.element_size(), ahead=loads),
         **{name: value for name, value in flags.items() if name != "K"}, SPLIT=split, BLOCK=block)


@kernel(linear, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """x [..., K], w [N, K] -> y [..., N]."""
    lower_product(emit, y, x, w, bias, residual, "")


@kernel(linear_swiglu, refuse=refuse_swiglu)
def lower_swiglu(emit: Emit, y: Tensor, x: Tensor, w: Tensor, act: str, out_dtype: torch.dtype | None = None) -> None:
    """x [..., K], w [2F, K] (gate rows, then up rows) -> y [..., F]."""
    lower_product(emit, y, x, w, None, None, act)
