"""Loop regions in C++: rows (or columns, when rows are few) shared by threads, an inner loop that gcc vectorises.

A kernel walks its rows; per row, one pass over the columns for each depth of reduction (softmax: maximum, then sum of
exponentials), then one pass that stores. Sums of fp32 are kept in fp64 and rounded once.
"""
from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ...runtime.program import DIMS
from ..index import Div, Expr, Mod, expr, product
from ..launch import Context, Launch, Out
from ..loops import Guard, Region, Stmt, behind, merge_axes, open_sides, parse, text

LANES = 32                     # independent partial results of a reduction: two AVX-512 registers of fp32
BLOCK = 64                     # threads split columns at multiples of this: no cache line is written by two

VALUE = {"f64": "double", "f32": "float", "bf16": "float", "f16": "float", "i64": "int64_t", "i32": "int32_t", "i16": "int16_t",
         "i8": "int8_t", "u8": "uint8_t", "bool": "bool"}
"""C++ type of a value in a register; a bf16 or fp16 value is a float that was rounded."""
NARROW = ("bf16", "f16")
MEMORY = {**VALUE, **dict.fromkeys(NARROW, "uint16_t")}

INFIX = {"div": "/", "idiv": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
         "xor": "^"}
ACCUMULATOR: dict[str, str] = dict.fromkeys(("f32", *NARROW), "double")       # of sums and products


def launch(region: Region, context: Context) -> Launch:
    """The step of a region: inputs at b[0..], then outputs."""
    args = (*(o.node for o in region.inputs), *(Out(i) for i in range(len(region.outputs))))
    return Launch(name(region), body(region), args, ("loops.h",))


def name(region: Region) -> str:
    """Readable: its operators and its space, like loop_cos_sin_Tx32."""
    ops = list(dict.fromkeys(s.op for s in region.body if s.op not in ("load", "store", "const", "cast", "index")))
    axes = [*region.rows, *([region.col] if region.col else [])]
    space = "x".join(str(v.size).replace("*", "").replace(" + ", "p") for v in axes)
    return "_".join(["loop", *(ops[:4] or ["copy"]), space or "1"])


def body(region: Region, dims: Iterable[str] = DIMS) -> str:
    """The C++ body of `void k(void* const* b, const infc_run* r)`. dims: the names of r->dims, in order."""
    region = merge_axes(region)
    live = list(dims)
    out = [f"// {line}" for line in text(region).splitlines()]
    out.append("namespace loop = infc::loop;")
    out += [f"const int64_t {d} = r->dims[{live.index(d)}];" for d in region.dims]
    for i, o in enumerate(region.inputs):
        out.append(f"const {MEMORY[o.dtype]}* __restrict__ in{i} = (const {MEMORY[o.dtype]}*)b[{i}];")
    for i, o in enumerate(region.outputs):
        out.append(f"{MEMORY[o.dtype]}* __restrict__ out{i} = ({MEMORY[o.dtype]}*)b[{len(region.inputs) + i}];")
    columns = number(region.col.size) if region.col else "1"
    out.append(f"const int64_t rows = {number(product(v.size for v in region.rows))}, columns = {columns};")
    if region.reductions or not region.col:
        out.append("const auto my_rows = loop::share(rows, r->thread, r->threads, 1);")
        out.append("const loop::range my_columns = {0, columns};")
    else:
        out.append("const bool by_column = rows < r->threads;")
        out.append("const auto my_rows = by_column ? loop::range{0, rows} : loop::share(rows, r->thread, r->threads, 1);")
        out.append("const auto my_columns = by_column "
                   f"? loop::share(columns, r->thread, r->threads, {BLOCK}) : loop::range{{0, columns}};")
    out.append("for (int64_t row = my_rows.begin; row < my_rows.end; ++row) {")
    out += [f"  {line}" for line in _row(region)]
    return "\n".join([*out, "}"])


def _row(region: Region) -> list[str]:
    """One row: for each depth its row values and its pass, then the stores."""
    out, inner = [], expr(1)
    for k in reversed(range(len(region.rows))):
        v = region.rows[k]
        position = "row" if inner.constant == 1 else f"row / ({number(inner)})"
        out.insert(0, f"const int64_t {v.name} = {position if k == 0 else f'{position} % ({number(v.size)})'};")
        inner = inner * v.size
    depth = _depths(region)
    for d in range(max(depth, default=0) + 1):
        out += [_assign(region, i) for i, s in enumerate(region.body)
                if depth[i] == d and not s.element and s.op != "store" and not s.reduces]
        out += _reduction_pass(region, [i for i in region.reductions if depth[i] == d + 1])
    out += [_store(s) for s in region.body if s.op == "store" and not s.element]
    stores = [s for s in region.body if s.op == "store" and s.element]
    if stores:
        out.append("for (int64_t j = my_columns.begin; j < my_columns.end; ++j) {")
        out += [f"  {_assign(region, i)}" for i in behind(region, [s.args[0] for s in stores])]
        out += [f"  {_store(s)}" for s in stores] + ["}"]
    return out


def _depths(region: Region) -> list[int]:
    """How many passes over the columns must be done before each statement."""
    depth: list[int] = []
    for s in region.body:
        depth.append(max((depth[a] for a in s.args), default=0) + (1 if s.reduces else 0))
    return depth


def _reduction_pass(region: Region, reductions: list[int]) -> list[str]:
    if not reductions: return []
    assert region.col is not None
    out, step = [], []
    for i in reductions:
        s = region.body[i]
        kind = _accumulator(s)
        out.append(f"{kind} a{i}[{LANES}];")
        out.append(f"for (int l = 0; l < {LANES}; ++l) a{i}[l] = {_start(s, kind)};")
        step.append(f"a{i}[l] = {_combine(s.op, f'({kind})v{s.args[0]}', f'a{i}[l]', kind)};")
    inside = [_assign(region, i) for i in behind(region, [region.body[i].args[0] for i in reductions])] + step
    out += ["{", "  int64_t first = 0;", f"  for (; first + {LANES} <= columns; first += {LANES})",
            f"    for (int l = 0; l < {LANES}; ++l) {{", "      const int64_t j = first + l;", *(f"      {x}" for x in inside), "    }",
            "  for (int l = 0; first + l < columns; ++l) {", "    const int64_t j = first + l;", *(f"    {x}" for x in inside),
            "  }", "}"]
    for i in reductions:
        s = region.body[i]
        kind = _accumulator(s)
        out.append(f"for (int h = {LANES // 2}; h; h /= 2) for (int l = 0; l < h; ++l) "
                   f"a{i}[l] = {_combine(s.op, f'a{i}[l]', f'a{i}[l + h]', kind)};")
        out.append(f"const {VALUE[s.dtype]} v{i} = ({VALUE[s.dtype]})a{i}[0];")
    return out


def _accumulator(s: Stmt) -> str:
    return ACCUMULATOR.get(s.dtype, VALUE[s.dtype]) if s.op in ("sum", "prod") else VALUE[s.dtype]


def _start(s: Stmt, kind: str) -> str:
    if s.op in ("sum", "prod"): return f"({kind}){0 if s.op == 'sum' else 1}"
    if kind in ("float", "double"): return "-loop::inf" if s.op == "max" else "loop::inf"
    return f"std::numeric_limits<{kind}>::{'lowest' if s.op == 'max' else 'max'}()"


def _combine(op: str, a: str, b: str, kind: str) -> str:
    return f"loop::{ {'sum': 'add', 'prod': 'mul'}.get(op, op)}<{kind}>({a}, {b})"


def _assign(region: Region, i: int) -> str:
    s = region.body[i]
    return f"const {VALUE[s.dtype]} v{i} = {_value(s, [region.body[a].dtype for a in s.args])};"


def _value(s: Stmt, kinds: list[str]) -> str:
    args = [f"v{a}" for a in s.args]
    kind = VALUE[s.dtype]
    if s.op == "load": return _load(s)
    if s.op == "const": return constant(parse(s.value), s.dtype)
    if s.op == "index": return f"({kind})({number(s.offset or expr(0))})"
    if s.op == "cast": return _cast(args[0], kinds[0], s.dtype)
    if s.op == "where": return f"{args[0]} ? {args[1]} : {args[2]}"
    if s.op == "not": return f"!{args[0]}" if s.dtype == "bool" else f"({kind})~{args[0]}"
    if s.op in INFIX: return f"({kind})({args[0]} {INFIX[s.op]} {args[1]})"
    return f"loop::{s.op}<{kind}>({', '.join(args)})" if s.op in TEMPLATES else f"loop::{s.op}({', '.join(args)})"


TEMPLATES = frozenset({"add", "sub", "mul", "neg", "abs", "sign", "max", "min", "round"})


def _cast(x: str, old: str, new: str) -> str:
    if new == "bool": return f"{x} != 0"
    if new in NARROW: return f"loop::round_{new}((float){x})"
    return x if VALUE[old] == VALUE[new] else f"({VALUE[new]}){x}"


def _load(s: Stmt) -> str:
    item = f"in{s.slot}[{number(s.offset or expr(0))}]"
    if s.dtype in NARROW: item = f"loop::from_{s.dtype}({item})"
    conditions = [c for g in s.guards for c in _conditions(g)]
    return f"({' & '.join(conditions)}) ? {item} : ({VALUE[s.dtype]})0" if conditions else item


def _conditions(g: Guard) -> list[str]:
    """A guard in C++, without the sides that always hold."""
    low, high = open_sides(g)
    return [*([f"({number(g.index)} >= {number(g.low)})"] if low else []), *([f"({number(g.index)} < {number(g.high)})"] if high else [])]


def _store(s: Stmt) -> str:
    value = f"loop::to_{s.dtype}(v{s.args[0]})" if s.dtype in NARROW else f"v{s.args[0]}"
    return f"out{s.slot}[{number(s.offset or expr(0))}] = {value};"


def number(e: Expr) -> str:
    """An index expression in C++: every name in it is an int64_t."""
    parts = []
    for atoms, coef in e.terms:
        factors = [_atom(a) for a in atoms]
        if coef != 1 or not atoms: factors.insert(0, f"INT64_C({coef})" if abs(coef) >= 2**31 else str(coef))
        parts.append(" * ".join(factors))
    return " + ".join(parts) or "0"


def _atom(a: object) -> str:
    if isinstance(a, Div): return f"(({number(a.num)}) / ({number(a.den)}))"
    if isinstance(a, Mod): return f"(({number(a.num)}) % ({number(a.den)}))"
    return str(a)


def constant(value: bool | int | float, dtype: str) -> str:
    """A literal of the register type of dtype."""
    if dtype == "bool": return "true" if value else "false"
    if dtype not in ("f64", "f32", *NARROW):
        return f"({VALUE[dtype]})INT64_C({value})" if value != -2**63 else "INT64_MIN"
    x = float(value)
    if dtype != "f64":
        with np.errstate(over="ignore"): x = float(np.float32(x))
    if math.isnan(x): return "loop::nan"
    if math.isinf(x): return "loop::inf" if x > 0 else "-loop::inf"
    literal = f"({VALUE[dtype]}){x.hex()}" if dtype == "f64" else f"{x.hex()}f"
    return f"loop::round_{dtype}({literal})" if dtype in NARROW else literal


