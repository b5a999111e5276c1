"""Find fused loop regions in a graph: each node joins its producers where the union is still one loop nest.

Views, and values that read nothing, are *light*: they are index arithmetic, computed again in every region that uses them
and stored only when a step outside all regions needs them. A region never grows around a node that it does not hold
(that would be a cycle), and never reads a buffer that some step writes in place.
"""
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx
import torch
from torch import fx

from ..compiler.ir import Graph
from ..compiler.placement import Claims, Unit, Value, is_alias, source_of
from .launch import Context, Launch
from .loop_ops import FREE, HANDLERS, SPLITS, Refused, lower, refuse
from .loops import Region


@dataclass(frozen=True)
class LoopUnit(Unit):
    """One region as one step. Every region computes the views it uses itself, though another may do so too."""

    region: Region

    @property
    def reads(self) -> set[Value]:
        return {source_of(operand.node) for operand in self.region.inputs}


@dataclass(frozen=True)
class Loops:
    """The backend of fused loops; `printer` turns a region into the text of a kernel."""

    printer: Callable[[Region, Context], Launch | tuple[Launch, ...]]
    refuse: Callable[[Region], str | None] = lambda region: None
    name: str = "loops"

    def claim(self, graph: Graph, free: Sequence[fx.Node], context: Context) -> Claims:
        plan = find(graph, free, context.symbols or graph.symbols)
        units: list[Unit] = []
        for region in plan.regions:
            if reason := self.refuse(region):
                plan.refused.update(dict.fromkeys((n for n in region.nodes if not is_alias(n)), reason))
                continue
            nodes = tuple(n for n in region.nodes if not is_alias(n))
            results = tuple(source_of(o.node) for o in region.outputs)
            units.append(LoopUnit(name_of(region), self.name, nodes, results,
                                  lambda c, r=region: self.printer(r, c), region))
        return Claims(units, plan.refused)


def name_of(region: Region) -> str:
    """"loop.cos.sin": the operators it computes, in order, views and duplicates left out."""
    names = [str(n.target).split(".")[1].strip("_") for n in region.nodes if n.target not in FREE | SPLITS]
    return ".".join(["loop", *dict.fromkeys(names)]) if names else "loop.copy"


@dataclass
class Plan:
    """regions: in an order in which they can run. refused: why a node of `free` is in none."""

    regions: list[Region] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)


def find(graph: Graph, free: Iterable[fx.Node], symbols: Mapping[str, str]) -> Plan:
    """Regions over the nodes in `free` (and the reshapes between them)."""
    flow = _flow(graph, set(free), symbols)
    group: dict[fx.Node, int] = {}
    groups: dict[int, set[fx.Node]] = {}
    for node in flow.heavy:
        near = list(dict.fromkeys(group[p] for p in sorted(flow.producers(node), key=flow.position.__getitem__) if p in group))
        for joined in [near, *([g] for g in reversed(near) if len(near) > 1), []]:
            members = {node}.union(*(groups[g] for g in joined))
            if (not joined or flow.convex(members, group, groups)) and flow.region(members) is not None:
                for g in joined: del groups[g]
                number = flow.position[node]
                groups[number] = members
                group.update(dict.fromkeys(members, number))
                break
        else:                                    # fine alone, not with the views it reads: those must be stored, so start over
            plan = find(graph, set(free) - {node}, symbols)
            plan.refused[node] = "not one loop nest together with the views it reads"
            return plan
    plan = Plan([], flow.refused)
    for number in flow.order(group):
        region = flow.region(groups[number])
        assert region is not None, f"{groups[number]} was one region when it was joined"
        plan.regions.append(region)
    return plan


@dataclass
class _Flow:
    """Who needs what, with light nodes looked through."""

    symbols: Mapping[str, str]
    position: dict[fx.Node, int]
    light: set[fx.Node]
    heavy: list[fx.Node]
    stored: set[fx.Node]                        # needed outside all regions
    after: dict[fx.Node, set[fx.Node]]          # heavy or opaque node -> heavy or opaque nodes that must run later
    refused: dict[fx.Node, str]

    def producers(self, node: fx.Node) -> set[fx.Node]:
        return _behind(node, self.light)

    def region(self, members: set[fx.Node]) -> Region | None:
        """The region of these members, or None when they are not one loop nest."""
        outputs = [n for n in sorted(members, key=self.position.__getitem__)
                   if n in self.stored or not self.after[n] or not self.after[n] <= members]
        try:
            return lower(outputs, frozenset(members | self.light), self.symbols)
        except Refused:
            return None

    def convex(self, members: set[fx.Node], group: Mapping[fx.Node, int], groups: Mapping[int, set[fx.Node]]) -> bool:
        """True if no path leaves the members and comes back, where every other region is entered as a whole."""
        last = max(self.position[n] for n in members)
        pending = [s for n in members for s in self.after[n] if s not in members]
        seen: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node in seen: continue
            for n in groups[group[node]] if node in group else (node,):
                seen.add(n)
                for s in self.after.get(n, ()):
                    if s in members: return False
                    if self.position[s] <= last or s in group: pending.append(s)
        return True

    def order(self, group: Mapping[fx.Node, int]) -> list[int]:
        """Region numbers in an order in which they can run."""
        whole = networkx.DiGraph()
        for node, later in self.after.items():
            number = group.get(node, self.position[node])
            whole.add_node(number)
            whole.add_edges_from((number, group.get(s, self.position[s])) for s in later if group.get(s, self.position[s]) != number)
        numbers = set(group.values())
        return [n for n in networkx.lexicographical_topological_sort(whole) if n in numbers]


def _flow(graph: Graph, free: set[fx.Node], symbols: Mapping[str, str]) -> _Flow:
    nodes = list(graph.module.graph.nodes)
    written = _written(nodes)
    refused: dict[fx.Node, str] = {}
    usable: set[fx.Node] = set()
    for node in nodes:
        if node not in free and not (is_alias(node) and _is_view(node)): continue
        reason = _reason(node, written, symbols)
        if reason is None: usable.add(node)
        elif node in free: refused[node] = reason
    light = {n for n in usable if n.target in FREE or n.target in SPLITS}
    stored: set[fx.Node] = set()
    for node in reversed(nodes):
        opaque = node.op in ("call_function", "output") and node not in usable and not _is_number(node)
        renames = node in stored and is_alias(node) and node.target is not operator.getitem
        if opaque or renames: stored.update(node.all_input_nodes)
    kept = {n for n in light if n in stored and (not is_alias(n) or n.target is operator.getitem)}
    light -= kept
    heavy = [n for n in nodes if n in usable and n not in light]
    after: dict[fx.Node, set[fx.Node]] = {n: set() for n in nodes if n not in light}
    for node in after:
        for source in _behind(node, light): after[source].add(node)
    for users in written.values():
        for a, b in pairwise(users): after[a].add(b)
    return _Flow(symbols, {n: i for i, n in enumerate(nodes)}, light, heavy, stored & set(heavy), after, refused)


def _behind(node: fx.Node, light: set[fx.Node]) -> set[fx.Node]:
    """What a node reads, light nodes looked through."""
    found: set[fx.Node] = set()
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        source = pending.pop()
        if source in seen: continue
        seen.add(source)
        if source in light: pending += source.all_input_nodes
        else: found.add(source)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem: return getattr(node.args[0], "target", None) in SPLITS
    return node.target in FREE


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)


def _reason(node: fx.Node, written: Mapping[fx.Node, list[fx.Node]], symbols: Mapping[str, str]) -> str | None:
    for source in (source_of(n)[0] for n in node.all_input_nodes):
        if source in written: return f"reads {source.name}, which is written in place"
    if node.target in SPLITS: return None
    if node.target is operator.getitem: return _reason(node.args[0], written, symbols)  # type: ignore[arg-type]
    return refuse(node, symbols) if node.target in HANDLERS else f"{node.target} has no loop form"


def _written(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Buffers that some node writes in place -> all nodes that use them, in order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        for position, argument in enumerate(schema.arguments if schema is not None and node.op == "call_function" else ()):
            value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
                found.setdefault(source_of(value)[0], [])
    for node in nodes:
        for source in {source_of(n)[0] for n in node.all_input_nodes} & found.keys():
            if not is_alias(node): found[source].append(node)
    return found
