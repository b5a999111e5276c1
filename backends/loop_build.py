"""Graph nodes to one loop nest: values are pulled from the outputs back to what the region reads, index by index.

Each operator's loop form is a handler: it sees its node at one index and asks for its operands at theirs. `lower` raises
`Refused`, with the reason, when the nodes do not make one loop nest.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from ..compiler.ir import expression
from .index import ONE, ZERO, Dim, Expr, Var, expr, product
from .loops import DTYPES, Guard, Operand, Region, Stmt, dims_of

MAX_STATEMENTS = 256                  # longer bodies compile slowly and spill registers
OPMATH = {"bf16": "f32", "f16": "f32"}    # PyTorch computes operators of 16 bits in fp32 and rounds each result

Index = tuple[Expr, ...]


class Refused(Exception):
    """These nodes are not one loop nest; the message is the reason."""


def size(value: Any, symbols: Mapping[str, str]) -> Expr:
    """A size of a FakeTensor (int or SymInt) as an Expr over public dim names. Raises Refused for s0 // 2 and the like."""
    if isinstance(value, int): return expr(value)
    e = expression(value)
    if e.is_Integer: return expr(int(e))
    if e.is_Symbol: return expr(Dim(symbols.get(str(e), str(e))))
    free = sorted(e.free_symbols, key=str)
    if e.has(sympy.Function) or not e.is_polynomial(*free): raise Refused(f"size {e} is not a polynomial of the dims")
    total = ZERO
    for powers, coef in sympy.Poly(e, *free).terms():
        if not coef.is_Integer: raise Refused(f"size {e} is not a whole number of dims")
        term = expr(int(coef))
        for symbol, power in zip(free, powers, strict=True):
            for _ in range(power): term = term * expr(Dim(symbols.get(str(symbol), str(symbol))))
        total = total + term
    return total


def dtype_of(node: fx.Node) -> str:
    """Short dtype name of a node's value."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor): raise Refused(f"{node.name} is not a tensor")
    if val.dtype not in DTYPES: raise Refused(f"dtype {val.dtype} has no loop form")
    return DTYPES[val.dtype]


@dataclass
class Lowering:
    """The region in the making: statements are shared (equal statements are one)."""

    members: frozenset[fx.Node]
    symbols: Mapping[str, str]
    rows: tuple[Var, ...] = ()
    col: Var | None = None
    body: list[Stmt] = field(default_factory=list)
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    computed: set[fx.Node] = field(default_factory=set)
    whole: dict[fx.Node, Index] = field(default_factory=dict)    # nodes reached once per element, and at which index
    _known: dict[Stmt, int] = field(default_factory=dict)
    _values: dict[tuple[fx.Node, Index, tuple[Guard, ...]], int] = field(default_factory=dict)

    # what handlers use ------------------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> Index:
        return tuple(size(s, self.symbols) for s in node.meta["val"].shape)

    def number(self, arg: Any) -> Expr:
        """An int argument, or a node that holds a size, as an Expr."""
        return size(arg.meta["val"] if isinstance(arg, fx.Node) else arg, self.symbols)

    def emit(self, op: str, *args: int, dtype: str, **attributes: Any) -> int:
        element = any(self.body[a].element for a in args) and not Stmt(op, args).reduces
        if self.col is not None:
            exprs = [attributes["offset"]] if attributes.get("offset") is not None else []
            exprs += [g.index for g in attributes.get("guards", ())]
            element = element or any(e.uses(self.col) for e in exprs)
        stmt = Stmt(op, args, dtype, element, **attributes)
        if stmt not in self._known:
            if len(self.body) >= MAX_STATEMENTS: raise Refused(f"more than {MAX_STATEMENTS} statements")
            self._known[stmt] = len(self.body)
            self.body.append(stmt)
        return self._known[stmt]

    def const(self, value: bool | int | float, dtype: str) -> int:
        if dtype in ("f64", "f32", *OPMATH): value = float(value)
        elif dtype == "bool": value = bool(value)
        elif int(value) != value: raise Refused(f"the constant {value} is not a {dtype}")
        else: value = int(value)
        return self.emit("const", dtype=dtype, value=repr(value))

    def cast(self, value: int, dtype: str) -> int:
        stmt = self.body[value]
        if stmt.dtype == dtype: return value
        if stmt.op == "const" and dtype not in OPMATH and stmt.dtype not in OPMATH:
            number = {"True": 1, "False": 0}.get(stmt.value)
            number = float(stmt.value) if number is None else number
            if math.isfinite(number) and (dtype in ("f64", "f32") or number == int(number)): return self.const(number, dtype)
        return self.emit("cast", value, dtype=dtype)

    # the walk -----------------------------------------------------------------------------------------------------------

    def value(self, node: fx.Node, index: Index, guards: tuple[Guard, ...] = (), whole: bool = True) -> int:
        """The statement that holds node[index]. `whole`: over the iteration space, each element is reached exactly once."""
        key = (node, index, guards)
        if whole and not guards: self.whole.setdefault(node, index)
        if key not in self._values:
            self._values[key] = self._value(node, index, guards, whole)
        return self._values[key]

    def _value(self, node: fx.Node, index: Index, guards: tuple[Guard, ...], whole: bool) -> int:
        handler = HANDLERS.get(node.target) if node.op == "call_function" else None
        if node not in self.members or handler is None:
            return self._load(node, index, guards)
        self.computed.add(node)
        return handler(Call(self, node, index, guards, whole))

    def _load(self, node: fx.Node, index: Index, guards: tuple[Guard, ...]) -> int:
        slot = self.inputs.setdefault(node, len(self.inputs))
        return self.emit("load", dtype=dtype_of(node), slot=slot, offset=self.offset(node, index), guards=guards)

    def offset(self, node: fx.Node, index: Index) -> Expr:
        offset = ZERO
        for i, s in zip(index, self.shape(node), strict=True): offset = offset * s + i
        return offset

    def store(self, slot: int, node: fx.Node, index: Index) -> None:
        value = self.value(node, index)
        offset = self.offset(node, index)
        element = self.col is not None and offset.uses(self.col)
        if self.body[value].element and not element: raise Refused(f"{node.name} needs one value per row")
        self.body.append(Stmt("store", (value,), dtype_of(node), element, slot, offset))


@dataclass(frozen=True)
class Call:
    """One operator call at one index: what a handler sees."""

    build: Lowering
    node: fx.Node
    index: Index
    guards: tuple[Guard, ...]
    whole: bool

    @property
    def shape(self) -> Index:
        return self.build.shape(self.node)

    @property
    def dtype(self) -> str:
        return dtype_of(self.node)

    def arg(self, name: str) -> Any:
        """An argument by its schema name, default filled in."""
        for position, a in enumerate(self.node.target._schema.arguments):  # type: ignore[union-attr]
            if a.name == name:
                if position < len(self.node.args): return self.node.args[position]
                return self.node.kwargs.get(name, a.default_value)
        raise KeyError(name)

    def at(self, source: fx.Node, index: Sequence[Expr], *, whole: bool = True, guards: tuple[Guard, ...] = ()) -> int:
        """source[index]. whole=False when not every element of source is reached exactly once."""
        return self.build.value(source, tuple(index), self.guards + guards, self.whole and whole)

    def operand(self, arg: Any, dtype: str) -> int:
        """A broadcast operand, in dtype: a tensor node, a size, or a Python number."""
        b = self.build
        if not isinstance(arg, fx.Node): return b.const(arg, dtype)
        if not isinstance(arg.meta["val"], torch.Tensor):
            return b.cast(b.emit("index", dtype="i64", offset=b.number(arg)), dtype)
        shape = b.shape(arg)
        own = self.index[len(self.index) - len(shape):]
        index = [ZERO if s == ONE else i for s, i in zip(shape, own, strict=True)]
        whole = [s for s in shape if s != ONE] == [s for s in self.shape if s != ONE]
        return b.cast(self.at(arg, index, whole=whole), dtype)

    def rounded(self, arg: Any, dtype: str) -> int:
        """A broadcast operand rounded to dtype, then held in its opmath: what PyTorch does to all but a scalar of + - * /."""
        return self.build.cast(self.operand(arg, dtype), OPMATH.get(dtype, dtype))

    def operands(self, *args: Any) -> list[int]:
        """Operands of an arithmetic operator: tensors rounded to the result's dtype, Python numbers not."""
        opmath = OPMATH.get(self.dtype, self.dtype)
        return [self.rounded(a, self.dtype) if isinstance(a, fx.Node) else self.operand(a, opmath) for a in args]

    def result(self, value: int) -> int:
        return self.build.cast(value, self.dtype)


Handler = Callable[[Call], int]
HANDLERS: dict[Any, Handler] = {}
VIEWS: set[Any] = set()               # move elements, compute nothing
FREE: set[Any] = set()                # views, and values that read nothing: computed again wherever they are used
REDUCES: set[Any] = set()             # fix the rows and the columns of their region


def handles(*targets: Any, view: bool = False, free: bool = False, reduces: bool = False) -> Callable[[Handler], Handler]:
    """Registers the loop form of operators."""
    def register(handler: Handler) -> Handler:
        for target in targets: HANDLERS[target] = handler
        if view: VIEWS.update(targets)
        if view or free: FREE.update(targets)
        if reduces: REDUCES.update(targets)
        return handler

    return register


def axes_of(c: Call, rank: int) -> list[int]:
    names = [a.name for a in c.node.target._schema.arguments]  # type: ignore[union-attr]
    dims = c.arg("dim") if "dim" in names else None
    if rank == 0: raise Refused("a reduction of one number")
    if dims is None or dims == []: return list(range(rank))
    return sorted(d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims))


def reduced_space(node: fx.Node, symbols: Mapping[str, str]) -> tuple[Index, Expr] | None:
    """(rows, columns) a reduction iterates over, size-1 rows dropped; None for any other node."""
    if node.target not in REDUCES: return None
    build = Lowering(frozenset(), symbols)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = build.shape(source)
    axes = axes_of(Call(build, node, (), (), True), len(shape))
    rows = tuple(s for d, s in enumerate(shape) if d not in axes and s != ONE)
    return rows, product(shape[d] for d in axes)


def lower(outputs: Sequence[fx.Node], members: frozenset[fx.Node], symbols: Mapping[str, str]) -> Region:
    """One loop nest that computes `outputs`, recomputing no node outside `members`. Raises Refused with the reason.

    outputs: in graph order. members: nodes that may be computed here; all others are read.
    """
    reasons: list[str] = []
    for rows, col in _spaces(outputs, members, symbols):
        try:
            return _lower(outputs, members, symbols, rows, col)
        except Refused as refusal:
            reasons.append(str(refusal))
    raise Refused(reasons[0])


def _spaces(outputs: Sequence[fx.Node], members: frozenset[fx.Node], symbols: Mapping[str, str]) -> list[tuple[Index, Expr | None]]:
    """Iteration spaces to try: a reduction's own, else each output's shape, the last output's first."""
    found: dict[tuple[Index, Expr | None], None] = {}
    for node in members:
        if (space := reduced_space(node, symbols)) is not None: found[space] = None
    if len(found) > 1: raise Refused("reductions over different rows or columns")
    if found: return list(found)
    for node in reversed(outputs):
        dtype_of(node)
        shape = tuple(s for s in Lowering(members, symbols).shape(node) if s != ONE)
        found[shape[:-1], shape[-1] if shape else None] = None
    return list(found)


def _lower(outputs: Sequence[fx.Node], members: frozenset[fx.Node], symbols: Mapping[str, str], rows: Index, col: Expr | None) -> Region:
    build = Lowering(members, symbols, tuple(Var(f"i{k}", s) for k, s in enumerate(rows)),
                     Var("j", col) if col is not None else None)
    for slot, node in reversed(list(enumerate(outputs))):
        build.store(slot, node, _home(build, node))
    operands = [Operand(n, dtype_of(n), product(build.shape(n))) for n in (*build.inputs, *outputs)]
    sizes = [*rows, *([col] if col is not None else []), *(o.numel for o in operands)]
    names = set().union(*(dims_of(s) for s in sizes), *(dims_of(s.offset) for s in build.body if s.offset is not None))
    position = {n: i for i, n in enumerate(outputs[0].graph.nodes)}
    return Region(tuple(sorted(build.computed, key=position.__getitem__)), tuple(operands[:len(build.inputs)]),
                  tuple(operands[len(build.inputs):]), build.rows, build.col, tuple(build.body), tuple(sorted(names)))


def _home(build: Lowering, node: fx.Node) -> Index:
    """The index of `node` in the region's loop variables: where it was already computed, else its own axes."""
    if node in build.whole: return build.whole[node]
    shape = build.shape(node)
    kept = [s for s in shape if s != ONE]
    row_sizes = [v.size for v in build.rows]
    if build.col is not None and kept == [*row_sizes, build.col.size]: axes = [*build.rows, build.col]
    elif kept == row_sizes: axes = list(build.rows)
    else: raise Refused(f"{node.name} has another shape than the region's loop")
    variables = iter(axes)
    return tuple(ZERO if s == ONE else expr(next(variables)) for s in shape)


def refuse(node: fx.Node, symbols: Mapping[str, str] | None = None) -> str | None:
    """None when the node has a loop form of its own, else the reason."""
    if node.op != "call_function" or node.target not in HANDLERS: return f"{node.target} has no loop form"
    try:
        lower([node], frozenset([node]), symbols or {})
    except Refused as refusal:
        return str(refusal)
    return None
