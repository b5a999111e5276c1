"""Loop regions in Triton: tiles of rows by columns. A reduction holds its rows in registers, or walks them in chunks once per depth.

The text of a kernel follows from its region alone; tile sizes are constants of the launch, run-time sizes are arguments (i32). A program
masks what lies past the live sizes, so a grid that was made for more does no harm. A bf16 or fp16 value is an fp32 that was rounded.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..index import Dim, Div, Expr, Mod, Var, expr
from ..loops import TORCH, Guard, Region, Stmt, behind, merge_axes, open_sides, parse, text
from .registry import Emit
from .tiles import columns_of, index_type, rows_of, tile, walks
from .worker import generated

VALUE = {"f32": "tl.float32", "bf16": "tl.float32", "f16": "tl.float32", "i64": "tl.int64", "i32": "tl.int32", "i16": "tl.int16",
         "i8": "tl.int8", "u8": "tl.uint8", "bool": "tl.int1"}
"""Triton's type of a value in a register."""
FLOATS = ("f32", "bf16", "f16")
BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8}

INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&",
         "or": "|", "xor": "^", "idiv": "//"}
OF_FLOATS = frozenset({"div", "exp", "log", "sin", "cos", "tan", "tanh", "sqrt", "pow", "erf", "expm1", "log1p", "atan", "atan2", "floor",
                       "ceil", "trunc", "round"})
OF_INTEGERS = frozenset({"idiv", "and", "or", "xor", "not", "shl", "shr"})
OF_BOOLS = frozenset({"load", "store", "const", "cast", "where", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not"})
"""Which primitives there are of what: floats alone; all but floats; bools too."""
THEIRS = {"abs": "tl.abs", "sin": "tl.sin", "cos": "tl.cos", "erf": "tl.erf", "sqrt": "tl.sqrt_rn", "div": "tl.div_rn", "where": "tl.where"}
OURS = {"max": "maximum", "min": "minimum", "not": "bit_not"}
"""What Triton has right, and what elementwise.py has under another name; it has the rest under their own."""
STACK = frozenset({"sin", "cos", "tan"})
"""libdevice reduces arguments past 105615 on a stack, beside which ptxas keeps a predicate or two (2 bytes on sm_80): a spill, it says."""
EXACT = frozenset({"load", "const", "where", "max", "min", "neg", "abs", "sign", "floor", "ceil", "trunc", "round"})
"""Of 16 bits they give the same 16 bits."""


def refuse(region: Region) -> str | None:
    """None where the region has a kernel, else why not."""
    for what, operands in (("input", region.inputs), ("output", region.outputs)):
        for i, o in enumerate(operands):
            if o.dtype not in VALUE: return f"{what} {i} is {o.dtype}: the kernels know floats up to fp32"
    for s in region.body:
        if s.op != "store" and s.dtype not in VALUE: return f"it computes {s.op} in {s.dtype}: the kernels know floats up to fp32"
        kinds = {s.dtype, *(region.body[a].dtype for a in s.args)}
        if s.op in OF_FLOATS and not kinds <= {*FLOATS}: return f"{s.op} of {' and '.join(sorted(kinds - {*FLOATS}))}"
        if s.op in OF_INTEGERS and kinds & {*FLOATS}: return f"{s.op} of floats"
        if s.op not in OF_BOOLS and "bool" in kinds: return f"{s.op} of bool"
    return None


def name(region: Region) -> str:
    """Readable: its operators and its space, like loop_cos_sin_Tx32."""
    ops = list(dict.fromkeys(s.op for s in region.body if s.op not in ("load", "store", "const", "cast", "index")))
    axes = [*region.rows, *([region.col] if region.col else [])]
    space = "x".join(str(v.size).replace("*", "").replace(" + ", "p") for v in axes)
    return re.sub(r"\W+", "_", "_".join(["loop", *(ops[:4] or ["copy"]), space or "1"]))


def lower(emit: Emit, region: Region, dims: Mapping[str, int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """inputs and outputs in the region's order, contiguous. dims: the largest value of each run-time size, at which the grid is made.

    The kernel's arguments are the inputs, the outputs, then the sizes in the order of region.dims.
    """
    region = merge_axes(region)
    rows, cols = (int(e.value(dims.__getitem__)) for e in (rows_of(region), columns_of(region)))
    tile_rows, tile_cols, warps = tile(region, rows, cols)
    programs = -(-rows // tile_rows) * (1 if region.reductions else -(-cols // tile_cols))
    emit(_function(source(region), name(region)), grid=(programs,), args=(*inputs, *outputs, *(dims[d] for d in region.dims)), warps=warps,
         spills_ok=any(s.op in STACK for s in region.body), ROWS=tile_rows, COLS=tile_cols, INDEX=index_type(region, dims))


@cache
def _function(text: str, symbol: str) -> Any:
    return getattr(generated(text), symbol)


# ---- text

def source(region: Region) -> str:
    """The module of a region whose axes are merged: one @triton.jit function."""
    out = [f'"""{name(region)}"""', "import triton", "import triton.language as tl", "",
           f"from {__package__} import elementwise", "", *(f"# {line}" for line in text(region).splitlines()), "@triton.jit"]
    args = [*(f"in{i}" for i in range(len(region.inputs))), *(f"out{i}" for i in range(len(region.outputs))),
            *(f"size_{d}" for d in region.dims), "ROWS: tl.constexpr", "COLS: tl.constexpr", "INDEX: tl.constexpr"]
    out.append(f"def {name(region)}({', '.join(args)}):")
    return "\n".join([*out, *(f"    {line}" for line in _body(region)), ""])


def _body(region: Region) -> list[str]:
    out = [f"size_{d} = size_{d}.to(INDEX)" for d in region.dims]
    out.append("program = tl.program_id(0).to(INDEX)")
    columns = number(columns_of(region))
    if region.reductions or not region.col: mine, chunk = "program", ""
    else:
        out += [f"chunks = ({columns} + COLS - 1) // COLS", "chunk = program % chunks"]
        mine, chunk = "(program // chunks)", "chunk"
    if region.rows:
        out.append(f"row = {mine} * ROWS + tl.arange(0, ROWS)[:, None]")
        out.append(f"in_rows = row < {number(rows_of(region))}")
    inner = expr(1)
    for k, v in reversed(list(enumerate(region.rows))):
        position = "row" if inner.constant == 1 else f"row // {_factor(inner)}"
        out.append(f"{v.name} = {position if k == 0 else f'{position} % {_factor(v.size)}'}")
        inner = inner * v.size
    if walks(region): return out + _walk(region)
    return out + (_column(region.col, chunk and f"{chunk} * COLS") if region.col else []) + _straight(region, range(len(region.body)))


def _column(col: Var, first: str) -> list[str]:
    here = f"{first} + tl.arange(0, COLS)[None, :]" if first else "tl.arange(0, COLS)[None, :]"
    return [f"{col.name} = ({here}).to(INDEX)", f"in_columns = {col.name} < {number(col.size)}"]


def _straight(region: Region, wanted: Iterable[int]) -> list[str]:
    """Statements in the order of the body."""
    out = []
    for i in wanted:
        s = region.body[i]
        if s.op == "store": out.append(_store(region, s))
        elif s.reduces: out.append(f"v{i} = {_rounded(s, f'elementwise.row_{s.op}({_masked(region, s, _start(s))})')}")
        else: out.append(_assign(region, i))
    return out


def _walk(region: Region) -> list[str]:
    """Per depth its row values and a pass over the columns, then a pass that stores."""
    out, body = [], region.body
    depth: list[int] = []
    for s in body: depth.append(max((depth[a] for a in s.args), default=0) + (1 if s.reduces else 0))
    for d in range(max(depth) + 1):
        out += _straight(region, [i for i, s in enumerate(body) if depth[i] == d and not s.element and not s.reduces and s.op != "store"])
        reductions = [i for i in region.reductions if depth[i] == d + 1]
        if not reductions: continue
        starts = {i: _start(body[i]) for i in reductions}
        out += [f"a{i} = tl.full((ROWS, COLS), {starts[i]}, {VALUE[body[i].dtype]})" for i in reductions]
        inside = _straight(region, behind(region, [body[i].args[0] for i in reductions]))
        inside += [f"a{i} = {_combine(body[i].op, f'a{i}', _masked(region, body[i], starts[i]))}" for i in reductions]
        out += _pass(region, inside)
        out += [f"v{i} = {_rounded(body[i], f'elementwise.row_{body[i].op}(a{i})')}" for i in reductions]
    out += [_store(region, s) for s in body if s.op == "store" and not s.element]
    stores = [s for s in body if s.op == "store" and s.element]
    if stores:
        inside = _straight(region, behind(region, [s.args[0] for s in stores])) + [_store(region, s) for s in stores]
        out += _pass(region, inside)
    return out


def _pass(region: Region, inside: list[str]) -> list[str]:
    assert region.col is not None
    return [f"for first in range(0, {number(region.col.size)}, COLS):", *(f"    {x}" for x in (*_column(region.col, "first"), *inside))]


def _combine(op: str, a: str, b: str) -> str:
    if op in ("max", "min"): return f"elementwise.{OURS[op]}({a}, {b})"
    return f"{a} {'+' if op == 'sum' else '*'} {b}"


def _masked(region: Region, s: Stmt, start: str) -> str:
    """What a reduction takes: a whole tile, with nothing past the end of its rows."""
    x, kind = f"v{s.args[0]}", VALUE[s.dtype]
    if VALUE[region.body[s.args[0]].dtype] != kind: x += f".to({kind})"
    return f"tl.where(in_columns, tl.broadcast_to({x}, (ROWS, COLS)), tl.full((), {start}, {kind}))"


def _start(s: Stmt) -> str:
    if s.op in ("sum", "prod"): return "0" if s.op == "sum" else "1"
    if s.dtype in FLOATS: return '-float("inf")' if s.op == "max" else 'float("inf")'
    low = 0 if s.dtype == "u8" else -(2 ** (BITS[s.dtype] - 1))
    return str(low if s.op == "max" else low + 2 ** BITS[s.dtype] - 1)


def _assign(region: Region, i: int) -> str:
    s = region.body[i]
    value = _value(region, s, [region.body[a].dtype for a in s.args])
    return f"v{i} = {_rounded(s, value) if s.op not in EXACT else value}"


def _rounded(s: Stmt, value: str) -> str:
    return f"elementwise.round_{s.dtype}({value})" if s.dtype in ("bf16", "f16") else value


def _value(region: Region, s: Stmt, kinds: list[str]) -> str:
    args = [f"v{a}" for a in s.args]
    if s.op == "load": return _load(region, s)
    if s.op == "const": return _constant(parse(s.value), s.dtype)
    if s.op == "index":
        e = s.offset or expr(0)
        return f"{_block(region, e, _walked(e, region.rows), _walked(e, [region.col]))}.to({VALUE[s.dtype]})"
    if s.op == "cast":
        if s.dtype == "bool": return f"{args[0]} != 0"
        return args[0] if VALUE[kinds[0]] == VALUE[s.dtype] else f"{args[0]}.to({VALUE[s.dtype]})"
    if s.op in INFIX: return f"{args[0]} {INFIX[s.op]} {args[1]}"
    if s.op in ("shl", "shr"): args.append(str(BITS[s.dtype]))
    return f"{THEIRS.get(s.op) or f'elementwise.{OURS.get(s.op, s.op)}'}({', '.join(args)})"


def _load(region: Region, s: Stmt) -> str:
    offset = s.offset or expr(0)
    exprs = [offset, *(e for g in s.guards for e in (g.index, g.low, g.high))]
    by_row, by_column = (any(_walked(e, axes) for e in exprs) for axes in (region.rows, [region.col]))
    mask = [c for c, needed in (("in_rows", by_row), ("in_columns", by_column)) if needed] + [c for g in s.guards for c in _conditions(g)]
    at = _block(region, offset, by_row, by_column)
    value = f"tl.load(in{s.slot} + {at}{''.join((', ', ' & '.join(mask), ', other=0')) if mask else ''})"
    return f"elementwise.widen({value})" if s.dtype in ("bf16", "f16") else value


def _store(region: Region, s: Stmt) -> str:
    mask = (["in_rows"] if region.rows else []) + (["in_columns"] if s.element else [])
    if region.col and not region.reductions and not s.element: mask.append("(chunk == 0)")
    value = f"elementwise.to_{s.dtype}(v{s.args[0]})" if s.dtype in ("bf16", "f16") else f"v{s.args[0]}"
    at = _block(region, s.offset or expr(0), bool(region.rows), s.element)
    return f"tl.store(out{s.slot} + {at}, {value}{', ' + ' & '.join(mask) if mask else ''})"


def _block(region: Region, e: Expr, by_row: bool, by_column: bool) -> str:
    """An index as a block of the shape that is wanted: what it does not depend on is repeated. Every value is a block, if of one number."""
    wanted, own = (by_row, by_column), (_walked(e, region.rows), _walked(e, [region.col]))
    if wanted == own != (False, False): return _nested(e)
    shape = f"({'ROWS' if by_row else '1'}, {'COLS' if by_column else '1'})"
    return f"tl.full({shape}, {e.constant}, INDEX)" if e.constant is not None else f"tl.broadcast_to({number(e)}, {shape})"


def _walked(e: Expr, axes: Iterable[Var | None]) -> bool:
    return any(v is not None and e.uses(v) for v in axes)


def _conditions(g: Guard) -> list[str]:
    """A guard without the sides that always hold."""
    low, high = open_sides(g)
    return [*([f"({number(g.index)} >= {number(g.low)})"] if low else []), *([f"({number(g.index)} < {number(g.high)})"] if high else [])]


def _nested(e: Expr) -> str:
    return f"({number(e)})" if len(e.terms) > 1 else number(e)


def number(e: Expr) -> str:
    """An index expression: every name in it is of type INDEX. Division is of what is not negative, or of what a guard leaves out."""
    parts = []
    for atoms, coef in e.terms:
        factors = [_atom(a) for a in atoms]
        if coef != 1 or not atoms: factors.insert(0, str(coef))
        parts.append(" * ".join(factors))
    return " + ".join(parts) or "0"


def _atom(a: object) -> str:
    if isinstance(a, Div): return f"({_nested(a.num)} // {_factor(a.den)})"
    if isinstance(a, Mod): return f"({_nested(a.num)} % {_factor(a.den)})"
    return f"size_{a}" if isinstance(a, Dim) else str(a)


def _factor(e: Expr) -> str:
    return number(e) if e.constant is not None else f"({number(e)})"


def _constant(value: bool | int | float, dtype: str) -> str:
    """A block of one number: the value in dtype, exactly. tl.full makes 0 of -0."""
    if dtype not in FLOATS: return f"tl.full((1, 1), {bool(value) if dtype == 'bool' else int(value)}, {VALUE[dtype]})"
    x = torch.tensor(float(value)).to(TORCH[dtype]).item()
    if x == 0 and math.copysign(1, x) < 0: return "elementwise.neg(tl.full((1, 1), 0.0, tl.float32))"
    literal = repr(x) if math.isfinite(x) else f'float("{x}")'
    return f"tl.full((1, 1), {literal}, tl.float32)"
