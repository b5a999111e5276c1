"""Rules and passes: what may be done to a graph, under which contract, and why it was not done.

Two forms, one protocol (`apply(graph, report=None) -> how often it fired`):
  Rule   a pattern, its replacement, and `refuse`: matching is done here
  Pass   a plain function `run(graph, report) -> count` for what a pattern cannot say; it calls
         `report.refuse(node, reason)` where it declines, and `report.may_fire()` before each rewrite

Neither prints, times, verifies or rolls back: the pipeline does. Each file of `passes/` exports one of them as `PASS`.
"""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.proxy import GraphAppendingTracer

from .ir import Graph, arguments, fake_mode, fake_propagate, impure, infer, same_type, target_name, type_text, where

aten = torch.ops.aten


class Contract(IntEnum):
    """What a pass promises, strongest first: a compile's ceiling admits every contract up to it."""

    EXACT = 0            # the same function; only the order of floating-point work changed
    DISTRIBUTION = 1     # the same law of samples
    APPROXIMATE = 2      # a stated bound, checked by the pass's own `check`

    @property
    def label(self) -> str:
        """The public name: exact, distribution or approximate."""
        return self.name.lower()


EXACT, DISTRIBUTION, APPROXIMATE = Contract


@dataclass
class NearMiss:
    """The deepest partial match of a pattern: how far it got and what stopped it."""

    site: str
    matched: int
    of: int
    reason: str
    expected: str = ""
    """The pattern's node that found no counterpart: an operator, a constant, or what it was matched with elsewhere."""
    found: str = ""
    """What the graph has in its place, with module path and source line."""
    root: fx.Node | None = field(default=None, repr=False, compare=False)


@dataclass
class Report:
    """What one pass did to one graph."""

    name: str
    fired: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """site -> reason"""
    misses: list[NearMiss] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """The compile's options, for passes that take any (read only)."""
    budget: int | None = None
    """Rewrites this pass may still apply (INFC_STOP); None for no limit."""
    _matched: dict[str, list[fx.Node]] = field(default_factory=dict, repr=False)

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Note that the pass declined at this node, and why."""
        self.refused[where(node)] = reason

    def miss(self, miss: NearMiss) -> None:
        """Note a near miss; of several patterns at one site, the one that came nearest."""
        known = next((m for m in self.misses if m.site == miss.site), None)
        if known is None:
            self.misses.append(miss)
        elif miss.matched / miss.of > known.matched / known.of:
            self.misses[self.misses.index(known)] = miss

    def settle_misses(self) -> None:
        """Forget misses at nodes that were rewritten after all, or that were refused; the nearest first."""
        self.misses = [m for m in self.misses if m.site not in self.refused and not (m.root and m.root._erased)]
        self.misses.sort(key=lambda m: m.matched / m.of, reverse=True)

    def may_fire(self) -> bool:
        """Ask before each rewrite: False once the budget is spent. Counts the rewrite."""
        if self.budget is not None and self.fired >= self.budget:
            return False
        self.fired += 1
        return True


@dataclass(frozen=True)
class Measured:
    """How far off a changed graph is, how far it may be, and what is counted: "of each row's largest value, in fp64"."""

    error: float
    bound: float
    promise: str


Check = Callable[[Graph, Graph], float | Measured | None]
"""check(before, after): raises CheckFailed, or returns the measured error (None where there is no number). A bare number is
judged as EXACT is."""


@dataclass(frozen=True)
class Pass:
    """A plain function over a graph. `run` returns how often it fired; 0 leaves the text of the graph unchanged.

    `check` replaces the contract's own check: needed when the pass changes inputs or outputs, or is APPROXIMATE.
    """

    name: str
    run: Callable[[Graph, Report], int]
    contract: Contract = EXACT
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    check: Check | None = None

    def apply(self, graph: Graph, report: Report | None = None) -> int:
        """Run it, complete the new nodes' meta, and return how often it fired."""
        report = report or Report(self.name)
        old = set(graph.nodes)
        report.fired = self.run(graph, report)
        complete(graph, self.name, old)
        return report.fired


def complete(graph: Graph, name: str, old: set[fx.Node]) -> None:
    """Give every node that is not in `old` its value, origin and the pass's stamp."""
    fake_propagate(graph, missing_only=True)
    for node in graph.nodes:
        if node in old or node.op == "output":
            continue
        meta = node.meta
        if not meta.get("origin"):
            kin = (*node.users, *node.all_input_nodes)
            meta["origin"] = next((list(n.meta["origin"]) for n in kin if n.meta.get("origin")), [])
        meta.setdefault("line", "")
        stamps = meta.setdefault("passes", [])
        if name not in stamps:
            stamps.append(name)


def emit(graph: Graph, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None, *,
         like: fx.Node) -> fx.Node:
    """A new call just before `like`, with its value inferred and `like`'s origin and line. Accepts custom_op objects."""
    target = getattr(target, "_opoverload", target)
    with graph.module.graph.inserting_before(like):
        node = graph.module.graph.call_function(target, tuple(args), kwargs or {})
    tidy_name(node)
    node.meta |= {"val": infer(node, fake_mode(graph)), "origin": list(like.meta.get("origin") or ()),
                  "line": like.meta.get("line") or "", "passes": list(like.meta.get("passes") or ())}
    return node


def set_arguments(node: fx.Node, **given: Any) -> None:
    """Give arguments by their schema names, positional where they were."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, value in given.items():
        place = names.index(name)
        if place < len(node.args): node.update_arg(place, value)
        else: node.update_kwarg(name, value)


def tidy_name(node: fx.Node) -> None:
    """`rms_norm`, `add_3` in place of fx's `rms_norm_default`, `add_tensor_3`."""
    if isinstance(node.target, OpOverload):
        node._rename(node.target._schema.name.split("::")[1])


# ------------------------------------------------------------------------------------------------------------ matching

COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default, aten.eq.Tensor, aten.ne.Tensor,
               aten.logical_and.default, aten.logical_or.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
               aten.__and__.Tensor, aten.__or__.Tensor}  # fmt: skip

# Move or relabel data without arithmetic: when such a step inside a match is also used elsewhere, keeping it there costs
# next to nothing, so it does not stop the rewrite (two norms over one upcast both fuse). Anything else that is used
# elsewhere does stop it: it would be computed twice.
SHAREABLE = {aten._to_copy.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
             aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int}  # fmt: skip


NOTHING = (0, "", "", "")
"""How far a match got: pattern operators, what was expected next, what was found, where that is."""


class _Matcher:
    """Matches one traced pattern, backtracking over the orders of commutative operators."""

    def __init__(self, pattern: Callable[..., Any]):
        self.graph = fx.symbolic_trace(pattern).graph
        self.params = [n for n in self.graph.nodes if n.op == "placeholder"]
        returned = self.graph.output_node().args[0]
        self.outputs: list[fx.Node] = list(returned) if isinstance(returned, tuple | list) else [returned]  # type: ignore
        self.root = max(self.outputs)
        self.size = sum(n.op == "call_function" for n in self.graph.nodes)
        self.deepest = NOTHING

    def match(self, node: fx.Node) -> dict[fx.Node, Any] | None:
        """Pattern node -> graph value, or None (then `deepest` says how far it got)."""
        self.deepest = NOTHING
        return next(self._unify([(self.root, node)], {}), None)

    def _unify(self, pairs: list[tuple[Any, Any]], bound: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
        if not pairs:
            yield bound
            return
        (pattern, value), rest = pairs[0], pairs[1:]
        if isinstance(pattern, fx.Node):
            if pattern in bound:
                if _same(bound[pattern], value):
                    yield from self._unify(rest, bound)
                else:
                    self._fail(bound, pattern, value, f"%{pattern.name} was already {_show(bound[pattern])}")
            elif pattern.op == "placeholder":
                yield from self._unify(rest, bound | {pattern: value})
            elif not isinstance(value, fx.Node) or value.target != pattern.target:
                self._fail(bound, pattern, value, f"expected {target_name(pattern.target)}")
            else:
                yield from self._orders(pattern, value, rest, bound | {pattern: value})
        elif isinstance(pattern, tuple | list):
            if isinstance(value, tuple | list) and len(value) == len(pattern):
                yield from self._unify([*zip(pattern, value, strict=True), *rest], bound)
            else:
                self._fail(bound, pattern, value, f"expected {pattern}")
        elif _same(pattern, value):
            yield from self._unify(rest, bound)
        else:
            self._fail(bound, pattern, value, f"expected {pattern}")

    def _orders(self, pattern: fx.Node, node: fx.Node, rest: list, bound: dict) -> Iterator[dict[fx.Node, Any]]:
        expected, given = arguments(pattern), arguments(node)
        if len(expected) != len(given):
            return
        yield from self._unify([*zip(expected, given, strict=True), *rest], bound)
        if node.target in COMMUTATIVE:
            swapped = (given[1], given[0], *given[2:])
            yield from self._unify([*zip(expected, swapped, strict=True), *rest], bound)

    def _fail(self, bound: dict[fx.Node, Any], pattern: Any, value: Any, expected: str) -> None:
        depth = sum(n.op == "call_function" for n in bound)
        if depth > self.deepest[0]:
            place = where(value).removeprefix(f"%{value.name}") if isinstance(value, fx.Node) else ""
            self.deepest = (depth, expected, _show(value), place)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    return a == b and (type(a) is type(b) or (_is_number(a) and _is_number(b)))


def _is_number(a: Any) -> bool:
    return isinstance(a, int | float) and not isinstance(a, bool)


def _show(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return repr(value)
    return f"%{value.name} = {target_name(value.target)}" if value.op == "call_function" else f"%{value.name}"


# --------------------------------------------------------------------------------------------------------------- rules

@dataclass(frozen=True)
class Rule:
    """pattern -> replacement wherever `refuse` has nothing against it.

    `pattern` and `replacement` are plain functions over the same parameters, traced with fx. A parameter matches anything:
    a node, a number, None; used twice, it must match the same thing twice. Both orders of commutative operators are tried,
    keyword and positional arguments are the same, and defaults are filled in. `refuse` gets what the parameters matched,
    FakeTensors for nodes, and returns a reason or None. Besides, the rewrite declines when a matched intermediate is
    used or returned elsewhere (unless it is a mere view or cast, which then stays), and when shape or dtype would change.
    A pattern may return a tuple; every returned value must feed into the last one.
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    refuse: Callable[..., str | None] | None = None
    contract: Contract = EXACT
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    check: Check | None = None

    @cached_property
    def _matcher(self) -> _Matcher:
        return _Matcher(self.pattern)

    def apply(self, graph: Graph, report: Report | None = None) -> int:
        """Rewrite every site; returns how many. `report` collects refusals and the nearest misses."""
        report = report or Report(self.name)
        before = report.fired
        for node in list(graph.nodes):
            if node._erased or node.op != "call_function" or node.target != self._matcher.root.target:
                continue
            bound = self._matcher.match(node)
            if bound is None:
                self._note_miss(node, report)
                continue
            reason = self._objection(graph, bound)
            if reason is None:
                if not report.may_fire():
                    break
                reason = self._replace(graph, bound, report.name)
                if reason is not None:
                    report.fired -= 1
            if reason is not None:
                report.refuse(node, reason)
                report._matched[where(node)] = [v for p, v in bound.items() if p.op == "call_function"]
        report.settle_misses()
        return report.fired - before

    def _note_miss(self, node: fx.Node, report: Report) -> None:
        depth, expected, found, place = self._matcher.deepest
        if depth >= 2 and 2 * depth >= self._matcher.size:            # less than half a match says nothing
            report.miss(NearMiss(where(node), depth, self._matcher.size, f"found {found}: {expected}",
                                 expected.removeprefix("expected "), f"{found}{place}", node))

    def _objection(self, graph: Graph, bound: dict[fx.Node, Any]) -> str | None:
        matched = {v for p, v in bound.items() if p.op == "call_function"}
        outputs = {bound[p] for p in self._matcher.outputs}
        for node in matched - outputs:
            if impure(node):
                return f"%{node.name} has a side effect"
            other = next((user for user in node.users if user not in matched), None)
            if other is not None and node.target not in SHAREABLE:
                return f"%{node.name} is also " + ("returned" if other.op == "output" else f"used by %{other.name}")
        if _place(bound, self._matcher) is None:
            return "no place where all inputs are known and no result is needed yet"
        if self.refuse is None:
            return None
        return self.refuse(*(_value(bound.get(p)) for p in self._matcher.params))

    def _replace(self, graph: Graph, bound: dict[fx.Node, Any], stamp: str) -> str | None:
        """Put the replacement in; None when done, else the reason why not (the graph is as before)."""
        place = _place(bound, self._matcher)
        assert place is not None                                      # _objection asked already
        outputs = [bound[p] for p in self._matcher.outputs]
        tracer = GraphAppendingTracer(graph.module.graph)
        given = [bound.get(p) for p in self._matcher.params]
        last = place.prev
        with graph.module.graph.inserting_before(place):
            result = self.replacement(*(fx.Proxy(v, tracer) if isinstance(v, fx.Node) else v for v in given))
            # several: from a tuple, or from one operator with several results
            results = [result] if len(outputs) == 1 else [result[i] for i in range(len(outputs))]
        new_outputs = [r.node if isinstance(r, fx.Proxy) else r for r in results]
        new = _between(last, place)
        mode = fake_mode(graph)
        passes = sorted({p for v in bound.values() if isinstance(v, fx.Node) and v not in given for p in v.meta.get("passes", ())})
        for node in new:
            tidy_name(node)
            node.meta |= {"val": infer(node, mode), "origin": list(outputs[-1].meta.get("origin") or ()),
                          "line": outputs[-1].meta.get("line") or "", "passes": [*passes, stamp]}
        for old, now in zip(outputs, new_outputs, strict=True):
            if not same_type(old.meta["val"], now.meta["val"]):
                for node in reversed(new):
                    graph.module.graph.erase_node(node)
                symbols = graph.symbols
                return f"would turn {type_text(old.meta['val'], symbols)} into {type_text(now.meta['val'], symbols)}"
        for old, now in zip(outputs, new_outputs, strict=True):
            old.replace_all_uses_with(now)
        for node in sorted((v for p, v in bound.items() if p.op == "call_function"), reverse=True):
            if not node.users and not node._erased:
                graph.module.graph.erase_node(node)
        return None


@dataclass(frozen=True)
class RuleSet:
    """Several rules that are one idea (the spellings of a norm): one name, one contract, one report."""

    name: str
    rules: tuple[Rule, ...]
    contract: Contract = EXACT
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    check: Check | None = None

    def apply(self, graph: Graph, report: Report | None = None) -> int:
        """Each rule in turn; returns how often they fired together. A site one rule refused and another took is no refusal."""
        report = report or Report(self.name)
        count = sum(rule.apply(graph, report) for rule in self.rules)
        for site, nodes in report._matched.items():
            if any(node._erased for node in nodes):
                report.refused.pop(site, None)
        return count


AnyPass = Pass | Rule | RuleSet


def _value(bound: Any) -> Any:
    if isinstance(bound, fx.Node):
        return bound.meta["val"]
    return type(bound)(map(_value, bound)) if isinstance(bound, tuple | list) else bound


def _place(bound: dict[fx.Node, Any], matcher: _Matcher) -> fx.Node | None:
    """The node to insert before: after every input, at or before the first use of a result; None where there is none."""
    outputs = [bound[p] for p in matcher.outputs]
    root = bound[matcher.root]
    matched = {v for p, v in bound.items() if p.op == "call_function"}
    users = [user for out in outputs for user in out.users if user not in matched and user < root]
    place = min([root, *users])
    inputs = [v for p, v in bound.items() if p.op == "placeholder" and isinstance(v, fx.Node)]
    return place if all(node < place for node in inputs) else None


def _between(first: fx.Node, end: fx.Node) -> list[fx.Node]:
    nodes, node = [], first.next
    while node is not end:
        nodes.append(node)
        node = node.next
    return nodes
