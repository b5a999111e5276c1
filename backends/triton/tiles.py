"""How much of a loop region one Triton program does: its tile, its warps, and whether a row fits into registers."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..index import Div, Expr, Mod, Var, expr, product
from ..loops import Region
from .rows import MAX_COLS, power_of_2, warps_of

TILE = 1024                    # numbers of a program without reductions: 8 a thread of 4 warps
SQUARE = 32                    # columns of a tile that turns rows into columns
CHUNK = 4096                   # columns at a time of rows too long for registers
PROGRAMS = 256                 # a program takes several short rows only where this many programs are left: two for each of 132 SMs
REGISTERS = 128                # numbers a thread may hold at once by our count; the compiler has 255 for them and its addresses


def rows_of(region: Region) -> Expr:
    """How many rows it has."""
    return product(v.size for v in region.rows)


def columns_of(region: Region) -> Expr:
    """How many columns; 1 where it has no such axis."""
    return region.col.size if region.col else expr(1)


def walks(region: Region) -> bool:
    """True where a row is read in chunks, once per depth of reduction: it is too long to hold, or its length is known only at run time."""
    cols = columns_of(region).constant
    return bool(region.reductions) and (cols is None or cols > MAX_COLS or _warps(region, power_of_2(cols)) is None)


def tile(region: Region, rows: int, cols: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps."""
    if walks(region):
        block = min(power_of_2(cols), CHUNK)
        while (warps := _warps(region, block)) is None: block //= 2
        return 1, block, warps
    limit = TILE
    while limit > 128 and limit // 128 * alive(region) > REGISTERS: limit //= 2
    block = power_of_2(cols) if region.reductions else min(power_of_2(cols), SQUARE if _crosses(region) else limit)
    spare = power_of_2(max(1, rows // PROGRAMS) + 1) // 2
    several = max(1, min(limit // block, spare if region.reductions else power_of_2(rows)))
    if not region.reductions: return several, block, min(4, max(1, several * block // 32))
    warps = _warps(region, several * block)
    assert warps is not None
    return several, block, warps


def _crosses(region: Region) -> bool:
    """True where something lies in memory along the rows: it is read in whole lines only by a tile of several rows."""
    return any(s.offset is not None and region.col is not None and s.offset.uses(region.col) and ((region.col,), 1) not in s.offset.terms
               and ((row,), 1) in s.offset.terms for s in region.body for row in region.rows[-1:])


def _warps(region: Region, numbers: int) -> int | None:
    """Warps that hold a tile with this many numbers in registers; None where 16 are too few."""
    warps = warps_of(numbers)
    while warps < 16 and numbers // (32 * warps) * alive(region) > REGISTERS: warps *= 2
    return warps if numbers // (32 * warps) * alive(region) <= REGISTERS or numbers <= 32 * warps else None


def alive(region: Region) -> int:
    """The most registers that the values of one point take at a time, in the order of the body."""
    last = {a: i for i, s in enumerate(region.body) for a in s.args}
    most = held = 0
    for i, s in enumerate(region.body):
        if s.element and s.op not in ("store", "const"): held += 2 if s.dtype == "i64" else 1
        most = max(most, held)
        for a in set(s.args):
            if last[a] == i and region.body[a].element and region.body[a].op != "const": held -= 2 if region.body[a].dtype == "i64" else 1
    return max(most, 1)


def index_type(region: Region, dims: Mapping[str, int]) -> Any:
    """Triton's i32 where no index can pass it, else i64."""
    from triton import language as tl

    exprs = [rows_of(region), *(o.numel for o in (*region.inputs, *region.outputs)), *(v.size for v in region.rows), columns_of(region)]
    for s in region.body:
        exprs += [] if s.offset is None else [s.offset]
        for g in s.guards: exprs += [g.index, g.low, g.high]
    return tl.int32 if max(_reach(e, dims) for e in exprs) < 2**31 - 2 * max(TILE, MAX_COLS) else tl.int64


def _reach(e: Expr, dims: Mapping[str, int]) -> int:
    """No part of e passes this, in size."""
    total, inside = 0, 0
    for atoms, coef in e.terms:
        term = abs(coef)
        for a in atoms:
            if isinstance(a, Div | Mod):
                inside = max(inside, _reach(a.num, dims), _reach(a.den, dims))
                term *= max(1, _reach(a.num if isinstance(a, Div) else a.den, dims))
            else: term *= max(1, _reach(a.size, dims) if isinstance(a, Var) else dims[a.name])
        total += term
    return max(total, inside)
