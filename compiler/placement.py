"""Who runs what, and why not: every node of an optimized graph goes to the first backend that does not refuse it."""
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import networkx
import torch
from torch import fx

from .errors import CheckFailed, UserError
from .ir import Graph, target_name

Value = tuple[fx.Node, int]                          # the i-th result of a node that is no alias

_aten = torch.ops.aten
_RESHAPES = {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default, _aten.alias.default, _aten.detach.default,
}


class Limit(str):
    """A reason about the model's sizes: nothing but another target can help, so the user is told just this."""

    __slots__ = ()


@dataclass(frozen=True)
class Unit:
    """One step to be: the nodes it computes, the values it leaves behind, and how its backend lowers it.

    Units may compute the same view; a value is left behind by one unit only.
    """

    op: str
    backend: str
    nodes: tuple[fx.Node, ...]
    results: tuple[Value, ...]
    lower: Callable[[Any], Any]                      # backends.launch.Context -> backends.launch.Launch

    @property
    def reads(self) -> set[Value]:
        """The values it takes from other units, weights and inputs."""
        values = {source_of(value) for node in self.nodes for value in node.all_input_nodes}
        return {value for value in values if value[0] not in self.nodes}

    @property
    def origin(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for node in self.nodes for path in node.meta.get("origin", ())))

    @property
    def passes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.meta.get("passes", ())))


class Backend(Protocol):
    """Claims units of a graph. `claim` gets the nodes nobody has taken yet, and says no with a reason per node."""

    @property
    def name(self) -> str: ...

    def claim(self, graph: Graph, free: Sequence[fx.Node], context: Any) -> "Claims": ...


@dataclass
class Claims:
    units: list[Unit] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)


def claim_each(
    backend: str, free: Sequence[fx.Node], context: Any, refuse: Callable[[fx.Node, Any], str | None], lower: Callable[[fx.Node, Any], Any],
) -> Claims:
    """The claims of a backend that takes nodes one by one: a unit for each that it does not refuse."""
    found = Claims()
    for node in free:
        reason = refuse(node, context)
        if reason is None:
            found.units.append(Unit(target_name(node.target), backend, (node,), _results(node), lambda ctx, node=node: lower(node, ctx)))
        else:
            found.refused[node] = reason
    return found


def _results(node: fx.Node) -> tuple[Value, ...]:
    value = node.meta["val"]
    if isinstance(value, (tuple, list)): return tuple((node, i) for i in range(len(value)))
    return ((node, 0),) if isinstance(value, torch.Tensor) else ()


@dataclass
class Placement:
    """units run in this order. refused: node name -> {backend: reason}, for every node some backend said no to."""

    units: list[Unit]
    refused: dict[str, dict[str, str]]

    def count(self, backend: str) -> int:
        return sum(unit.backend == backend for unit in self.units)


def is_alias(node: fx.Node) -> bool:
    """True for a node that only renames memory: values are contiguous, so a reshape moves nothing."""
    return node.op == "call_function" and (node.target in _RESHAPES or node.target is operator.getitem)


def source_of(node: fx.Node) -> Value:
    """The value an alias stands for: through reshapes, and through getitem to the i-th result."""
    index = 0
    while is_alias(node):
        if node.target is operator.getitem:
            index = int(node.args[1])                # type: ignore[arg-type]
        node = node.args[0]                          # type: ignore[assignment]
    return node, index


def place(graph: Graph, backends: Sequence[Backend], context: Any) -> Placement:
    """Offers every node to the backends in order of preference. Raises CheckFailed when one is left over, UserError when
    the target's limits are why."""
    free = [n for n in graph.module.graph.nodes if n.op == "call_function" and not is_alias(n) and not _is_size(n)]
    units: list[Unit] = []
    refused: dict[str, dict[str, str]] = {}
    for backend in backends:
        claims = backend.claim(graph, free, context)
        units += claims.units
        for node, reason in claims.refused.items():
            refused.setdefault(node.name, {})[backend.name] = reason
        taken = {node for unit in claims.units for node in unit.nodes}
        free = [node for node in free if node not in taken]
    if free:
        node = free[0]
        limit = next((reason for n in free for reason in refused.get(n.name, {}).values() if isinstance(reason, Limit)), None)
        if limit:
            raise UserError(limit)
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.get(node.name, {}).items())
        raise CheckFailed(
            f"no backend runs {len(free)} of the graph's nodes; the first is {node.target} ({node.name}, "
            f"{' '.join(node.meta.get('origin', ())) or 'no module'}): {why}")
    return Placement(_in_order(graph, units), refused)


def _is_size(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list, type(None)))


def _in_order(graph: Graph, units: list[Unit]) -> list[Unit]:
    """Units sorted by their dependences; ties, and every use of one cache, keep the graph's own order."""
    position = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    producer = {value: i for i, unit in enumerate(units) for value in unit.results}
    owner = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    start = [max(position[node] for node in unit.nodes) for unit in units]
    order = networkx.DiGraph()
    order.add_nodes_from(range(len(units)))
    for i, unit in enumerate(units):
        order.add_edges_from((producer[value], i) for value in unit.reads if producer.get(value, i) != i)
    for name in graph.kv:
        cache = next(n for n in graph.module.graph.nodes if n.op == "placeholder" and n.name == name)
        users = sorted({owner[user] for user in cache.users if user in owner}, key=lambda i: start[i])
        networkx.add_path(order, users)
    try:
        ranked = list(networkx.lexicographical_topological_sort(order, key=lambda i: start[i]))
    except networkx.NetworkXUnfeasible as error:
        raise CheckFailed(f"the steps depend on each other in a circle: {error}") from error
    return [units[i] for i in ranked]


__all__ = ["Backend", "Claims", "Limit", "Placement", "Unit", "Value", "claim_each", "is_alias", "place", "source_of"]
