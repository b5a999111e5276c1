"""Values in 16 bits, rounded where they are made."""
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .ir import Graph
from .layout import MOVES
from .ops import aten, infc
from .rewrite import emit, set_arguments

SELECTS = MOVES - {aten.cat.default, aten.stack.default, operator.getitem} | {aten.index_select.default}
"""Of one value; rounding before or after them is the same."""


@dataclass
class Casts:
    """Values in 16 bits, one cast for all who want it."""

    graph: Graph
    dtype: torch.dtype
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def of(self, x: Any, like: fx.Node) -> fx.Node:
        """x in the narrow dtype, before `like`."""
        if x.meta["val"].dtype == self.dtype:
            return x
        if x not in self.made:
            self.made[x] = emit(self.graph, aten._to_copy.default, (x,), {"dtype": self.dtype}, like=like)
        elif like < self.made[x]:
            like.prepend(self.made[x])
        return self.made[x]

    def absorb(self) -> None:
        """Let the operators that make the values round them, where they can."""
        for cast in self.made.values(): _absorb(cast)


def _absorb(cast: fx.Node) -> None:
    """Let the operator that makes the value round it, if the cast is its only reader (views and row selections between)."""
    x: Any = cast.args[0]
    node, reader = x, cast
    while list(node.users) == [reader] and node.target in SELECTS:
        node, reader = node.args[0], node
    if list(node.users) == [reader] and node.target is operator.getitem and node.args[1] == 0:
        first = node.args[0]
        if first.target is infc.add_rms_norm.default and sum(u.args[1] == 0 for u in first.users) == 1: node, reader = first, None
    known = isinstance(node.target, OpOverload) and any(a.name == "out_dtype" for a in node.target._schema.arguments)
    if not known or (reader is not None and list(node.users) != [reader]):
        return
    set_arguments(node, out_dtype=cast.kwargs["dtype"])
    cast.replace_all_uses_with(x)
    cast.graph.erase_node(cast)
