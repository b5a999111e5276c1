"""What a chain of views does, read off by running it on numbered elements: whatever its spelling, it moves what it moves."""
import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .ir import Graph, arguments, expression
from .probe import symbols_of
from .rewrite import emit

aten = torch.ops.aten

# Operators that place elements and at most negate them: their effect on numbered elements is their whole meaning.
MOVES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.t.default,
    aten.permute.default, aten.slice.Tensor, aten.select.int, aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unbind.int, aten.expand.default, aten.cat.default, aten.stack.default, aten.neg.default,
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.repeat_interleave.self_int,
    operator.getitem,
}  # fmt: skip

# Stand-ins for symbolic sizes: small, above 1 (1 would broadcast and squeeze), and different, so no two dims are confused.
SIZES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


class NotMoves(Exception):
    """A value is not the given ones moved about: it passes through some other operator, or comes from elsewhere."""


@dataclass
class Layout:
    """Runs chains of views of one graph at fixed small sizes."""

    graph: Graph
    _sizes: dict[sympy.Symbol, int] = field(default_factory=dict)

    def size(self, size: Any) -> int:
        """The concrete stand-in of a size."""
        for symbol in sorted(symbols_of(size) - self._sizes.keys(), key=str):
            self._sizes[symbol] = SIZES[len(self._sizes) % len(SIZES)]
        return int(expression(size).xreplace(self._sizes))  # type: ignore[arg-type]

    def numbered(self, node: fx.Node) -> Tensor:
        """1, 2, 3, ... in the shape of a node's value: from 1, so that a sign shows."""
        shape = torch.Size(self.size(s) for s in node.meta["val"].shape)
        return torch.arange(1, 1 + shape.numel()).reshape(shape)

    def run(self, node: fx.Node, given: dict[fx.Node, Tensor]) -> Any:
        """The value of `node` where `given` are known. Raises NotMoves when it is not made of them by MOVES alone."""
        known: dict[fx.Node, Any] = dict(given)

        def value(n: fx.Node) -> Any:
            if n not in known:
                val = n.meta.get("val")
                if isinstance(val, int | torch.SymInt):
                    known[n] = self.size(val)
                elif n.op == "call_function" and n.target in MOVES:
                    args, kwargs = fx.map_arg((n.args, n.kwargs), value)
                    known[n] = n.target(*args, **kwargs)  # type: ignore[operator]
                else:
                    raise NotMoves(n.name)
            return known[n]

        return value(node)

    def is_moved(self, node: fx.Node, source: fx.Node, expected: Tensor, numbers: Tensor | None = None) -> bool:
        """Does `node` hold exactly `expected` when `source` holds its numbers? The shape counts."""
        try:
            found = self.run(node, {source: self.numbered(source) if numbers is None else numbers})
        except NotMoves:
            return False
        return isinstance(found, Tensor) and found.shape == expected.shape and bool((found == expected).all())


def sources(node: fx.Node) -> list[fx.Node]:
    """The node, then what it is moved from, up its first argument for as long as only MOVES lie between."""
    found = [node]
    while node.op == "call_function" and node.target in MOVES and node.all_input_nodes:
        node = node.all_input_nodes[0]
        found.append(node)
    return found


def stray_reader(source: fx.Node, ends: set[fx.Node]) -> fx.Node | None:
    """Something other than `ends` that reads a value or a part of it."""
    stack, seen = [source], {source}
    while stack:
        for user in stack.pop().users:
            if user in ends or user in seen: continue
            if user.op != "call_function" or user.target not in MOVES: return user
            seen.add(user)
            stack.append(user)
    return None


def column_order(numbers: Tensor, found: Tensor) -> Tensor | None:
    """The permutation with found == numbers[:, order], both [rows, columns]; None when there is none."""
    if found.shape != numbers.shape:
        return None
    order = (found[0] - numbers[0, 0]) % numbers.shape[1]
    is_order = torch.equal(order.sort().values, torch.arange(len(order))) and torch.equal(numbers[:, order], found)
    return order if is_order else None


def cannot_reorder(graph: Graph, linear: fx.Node) -> str | None:
    """Why the output columns of a product cannot be put in another order for good; None when they can."""
    if linear.target not in (aten.linear.default, torch.ops.infc.linear.default):
        return f"%{linear.name} is no product with a weight"
    _, w, bias, *more = arguments(linear)
    if any(more):
        return f"%{linear.name} adds a residual"
    for node in (w, bias):
        if node is not None and (graph.weight(node) is None or len(node.users) > 1):
            return f"%{node.name} is " + ("computed" if graph.weight(node) is None else "shared")
    return None


def reorder_columns(graph: Graph, linear: fx.Node, order: Tensor) -> fx.Node:
    """The product with its output columns in another order: the rows of its weight and bias move, once and for all.

    The old product stays, for whoever still reads it.
    """
    x, w, bias = arguments(linear)[:3]
    rows = [graph.add_weight(n.name, graph.weights[str(n.target)][order], before=n) for n in (w, bias) if n is not None]
    return emit(graph, linear.target, (x, *rows), like=linear)  # type: ignore[arg-type]


def drop_weights(graph: Graph, weights: list[fx.Node]) -> None:
    """Let go of those weights that nobody reads any more."""
    for node in weights:
        if not node.users: graph.drop_weight(node)
