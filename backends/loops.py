"""The loop IR: a fused pointwise/reduction region as one loop nest in SSA, with its text, its interpreter and its cost.

A region iterates over `rows` (any number of axes) and at most one inner axis `col`. A statement is a *row* statement (once
per row) or an *element* statement (once per row and column). A reduction takes an element value to a row value, over all
columns. `regions.py` finds regions in a graph; printers turn them into C++ or Triton.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from .index import Expr, Var, expr, interval, product

DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.int32: "i32",
          torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool"}
TORCH = {name: dtype for dtype, name in DTYPES.items()}

REDUCTIONS = ("sum", "prod", "max", "min")
EXPENSIVE = frozenset({"exp", "log", "sin", "cos", "tanh", "pow", "erf", "expm1", "log1p", "tan", "atan", "atan2"})
"""Never computed again to save a store."""


@dataclass(frozen=True)
class Guard:
    """A load happens only where low <= index < high; elsewhere its value is 0 and unused."""

    index: Expr
    low: Expr
    high: Expr

    def __str__(self) -> str:
        return f"{self.low} <= {self.index} < {self.high}"


@dataclass(frozen=True)
class Stmt:
    """One value (or one store).

    op: "load" | "store" (slot, offset, guards), "const" (value), "index" (offset), "cast", "sum" | "prod" | "max" | "min", or a
    pointwise primitive of PRIMITIVES. args are positions of earlier statements.
    """

    op: str
    args: tuple[int, ...] = ()
    dtype: str = ""
    element: bool = False                  # one value per column, not one per row
    slot: int = -1                         # load: input; store: output
    offset: Expr | None = None             # load, store: element offset in the contiguous buffer; index: the value
    guards: tuple[Guard, ...] = ()
    value: str = ""                        # const: repr of a bool, int or float (text, so that nan equals nan)

    @property
    def reduces(self) -> bool:
        """True for a reduction: "max" and "min" of two values are pointwise."""
        return self.op in REDUCTIONS and len(self.args) == 1

    def __str__(self) -> str:
        args = ", ".join(f"v{a}" for a in self.args)
        when = "".join(f" if {g}" for g in self.guards)
        if self.op == "load": return f"{self.dtype} load in{self.slot}[{self.offset}]{when}"
        if self.op == "store": return f"store out{self.slot}[{self.offset}] = {args}"
        if self.op == "const": return f"{self.dtype} {self.value}"
        return f"{self.dtype} {self.op} {self.offset if self.op == 'index' else args}"


@dataclass(frozen=True)
class Operand:
    """What is read or written: a graph node, its dtype and its number of elements."""

    node: fx.Node
    dtype: str
    numel: Expr


@dataclass(frozen=True)
class Region:
    """One loop nest. `nodes` are the graph nodes it computes, in graph order; absorbed views are among them."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    rows: tuple[Var, ...]
    col: Var | None
    body: tuple[Stmt, ...]
    dims: tuple[str, ...] = field(default=())      # run-time sizes it mentions

    @property
    def reductions(self) -> list[int]:
        """Positions of its reductions."""
        return [i for i, s in enumerate(self.body) if s.reduces]


def text(region: Region) -> str:
    """Canonical text: no node names, so equal kernels have equal text."""
    space = ", ".join(f"{v}<{v.size}" for v in region.rows)
    lines = [f"rows [{space}] col [{f'{region.col}<{region.col.size}' if region.col else ''}]"]
    lines += [f"in{i}: {o.dtype}[{o.numel}]" for i, o in enumerate(region.inputs)]
    lines += [f"out{i}: {o.dtype}[{o.numel}]" for i, o in enumerate(region.outputs)]
    for i, s in enumerate(region.body):
        lines.append(f"{'    ' if s.element else '  '}{s}" if s.op == "store" else f"{'    ' if s.element else '  '}v{i} = {s}")
    return "\n".join(lines)


def behind(region: Region, wanted: Iterable[int]) -> list[int]:
    """The element statements behind some values, in order."""
    needed, pending = set(), list(wanted)
    while pending:
        i = pending.pop()
        if i not in needed and region.body[i].element:
            needed.add(i)
            pending += region.body[i].args
    return sorted(needed)


def open_sides(g: Guard) -> tuple[bool, bool]:
    """Must index >= low be tested, and index < high? Not where the index can be nothing else."""
    bounds, low, high = interval(g.index), g.low.constant, g.high.constant
    return (not (bounds and low is not None and bounds[0] >= low), not (bounds and high is not None and bounds[1] < high))


def merge_axes(region: Region) -> Region:
    """Neighbouring axes that every offset walks as one become one: fewer divisions, longer inner loops."""
    k = len(region.rows) - 1
    while k >= 0:
        outer = region.rows[k]
        inner = region.rows[k + 1] if k + 1 < len(region.rows) else region.col
        if inner is not None and (inner is not region.col or not region.reductions):
            region = _merged(region, k, outer, inner) or region
        k -= 1
    return region


def _merged(region: Region, k: int, outer: Var, inner: Var) -> Region | None:
    both = Var(inner.name, outer.size * inner.size)
    new = {outer: expr(both) // inner.size, inner: expr(both) % inner.size}
    body = []
    for s in region.body:
        offset = None if s.offset is None else s.offset.replace(new)
        guards = tuple(Guard(g.index.replace(new), g.low, g.high) for g in s.guards)
        exprs = [*([] if offset is None else [offset]), *(g.index for g in guards)]
        if any(e.divides(both) for e in exprs): return None
        body.append(replace(s, offset=offset, guards=guards))
    if inner is region.col: return replace(region, rows=region.rows[:k], col=both, body=tuple(body))
    return replace(region, rows=(*region.rows[:k], both, *region.rows[k + 2:]), body=tuple(body))


# --- interpreter -------------------------------------------------------------------------------------------------------

PRIMITIVES = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh,
    "sqrt": torch.sqrt, "pow": torch.pow, "erf": torch.erf, "expm1": torch.expm1, "log1p": torch.log1p, "atan": torch.atan,
    "atan2": torch.atan2, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round,
    "sign": torch.sign, "max": torch.maximum, "min": torch.minimum, "where": torch.where,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "idiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "fmod": torch.fmod,
}
"""Pointwise primitives and their meaning. "max" and "min" propagate NaN; "idiv" truncates; both are also reductions."""

_REDUCE = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}


def evaluate(region: Region, inputs: Sequence[Tensor], dims: Mapping[str, int] | None = None) -> list[Tensor]:
    """What the region computes, as flat tensors: every statement over the whole iteration space at once.

    inputs: one tensor per region.inputs, row-major. dims: the live value of each run-time size.
    """
    values: dict[str, int | Tensor] = dict(dims or {})
    axes = [*region.rows, *([region.col] if region.col else [])]
    sizes = [int(v.size.value(values.__getitem__)) for v in axes]
    for i, (var, size) in enumerate(zip(axes, sizes, strict=True)):
        values[var.name] = torch.arange(size).reshape([size if i == k else 1 for k in range(len(axes))])
    rows = [*sizes[:len(region.rows)], *([1] if region.col else [])]

    def number(e: Expr, shape: list[int]) -> Tensor:
        return torch.as_tensor(e.value(values.__getitem__)).expand(shape)

    out = [torch.empty(int(o.numel.value(values.__getitem__)), dtype=TORCH[o.dtype]) for o in region.outputs]
    done: list[Tensor] = []
    for s in region.body:
        shape = sizes if s.element else rows
        args = [done[a] for a in s.args]
        if s.op in ("load", "store", "index"):
            assert s.offset is not None
            offset = number(s.offset, shape)
        else: offset = torch.empty(0)
        if s.op == "load": done.append(_load(inputs[s.slot].reshape(-1), offset, s.guards, lambda e, shape=shape: number(e, shape)))
        elif s.op == "store":
            out[s.slot][offset.reshape(-1)] = args[0].expand(shape).reshape(-1)
            done.append(args[0])
        elif s.op == "index": done.append(offset.to(TORCH[s.dtype]))
        elif s.op == "const": done.append(torch.tensor(parse(s.value), dtype=TORCH[s.dtype]).expand(shape))
        elif s.op == "cast": done.append(args[0].to(TORCH[s.dtype]))
        elif s.reduces: done.append(_reduce(s, args[0].expand(sizes)))
        else: done.append(PRIMITIVES[s.op](*args))
    return out


def _load(flat: Tensor, offset: Tensor, guards: tuple[Guard, ...], number) -> Tensor:
    if not guards: return flat[offset]
    inside = torch.ones_like(offset, dtype=torch.bool)
    for g in guards: inside &= (number(g.index) >= number(g.low)) & (number(g.index) < number(g.high))
    result = torch.zeros(offset.shape, dtype=flat.dtype)
    result[inside] = flat[offset[inside]]
    return result


def _reduce(s: Stmt, x: Tensor) -> Tensor:
    if s.op == "sum": return x.sum(-1, keepdim=True, dtype=TORCH[s.dtype])
    if s.op == "prod": return x.prod(-1, keepdim=True, dtype=TORCH[s.dtype])
    return _REDUCE[s.op](x, -1, keepdim=True)


def parse(value: str) -> bool | int | float:
    """The Python number a const statement holds."""
    if value in ("True", "False"): return value == "True"
    return int(value) if value.lstrip("-").isdigit() else float(value)


# --- cost --------------------------------------------------------------------------------------------------------------

BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1}
_FREE = frozenset({"load", "store", "const", "index", "cast"})


def cost(region: Region, dims: Mapping[str, int] | None = None) -> tuple[int, int]:
    """(flops, bytes): one flop per primitive and point; each input read once at most, each output written once."""
    names = dict(dims or {}).__getitem__

    def count(e: Expr) -> int:
        return int(e.value(names))

    rows = count(product(v.size for v in region.rows))
    points = rows * (count(region.col.size) if region.col else 1)
    flops = sum(points if s.element or s.reduces else rows for s in region.body if s.op not in _FREE)
    touched = sum(min(count(o.numel), _loads(region, i, rows, points)) * BYTES[o.dtype] for i, o in enumerate(region.inputs))
    written = sum(count(o.numel) * BYTES[o.dtype] for o in region.outputs)
    return flops, touched + written


def _loads(region: Region, slot: int, rows: int, points: int) -> int:
    return sum(points if s.element else rows for s in region.body if s.op == "load" and s.slot == slot)


def dims_of(e: Expr) -> set[str]:
    """Names of the run-time sizes in an expression."""
    found: set[str] = set()

    def visit(e: Expr) -> None:
        for atoms, _ in e.terms:
            for a in atoms:
                if isinstance(a, Var): visit(a.size)
                elif hasattr(a, "num"): visit(a.num); visit(a.den)  # noqa: E702  # pyright: ignore[reportAttributeAccessIssue]
                else: found.add(a.name)  # pyright: ignore[reportAttributeAccessIssue]

    visit(expr(e))
    return found
