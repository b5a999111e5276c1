"""Take columns where they are made: x[..., ::step][..., :width] pushed up through the operators that compute x.

Used where a wide value is known to repeat itself (rotary angles: cos of cat(f, f)): its columns are then computed once.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .ir import Graph, same_size
from .rewrite import arguments, emit

aten = torch.ops.aten

VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default)
LOOKUPS = {aten.index.Tensor: (0, 1), aten.embedding.default: (0, 1), aten.index_select.default: (0, 2)}
"""Row lookups: positions of the table and of the rows among the arguments."""


@dataclass
class Columns:
    """Rewrites one graph; `take` twice of the same columns gives the same node."""

    graph: Graph
    _taken: dict[tuple[fx.Node, int, int], fx.Node] = field(default_factory=dict)
    _made: dict[str, fx.Node] = field(default_factory=dict)

    def take(self, node: fx.Node, step: int, width: int) -> fx.Node:
        """A node that computes node[..., ::step][..., :width]; `node` itself where that is all of it."""
        key = (node, step, width)
        if key not in self._taken:
            self._taken[key] = self._push(node, step, width) or self._whole(node, step, width)
        return self._taken[key]

    def _whole(self, node: fx.Node, step: int, width: int) -> fx.Node:
        last = node.meta["val"].dim() - 1
        if step == 1 and same_size(node.meta["val"].shape[-1], width):
            return node
        weight = self.graph.weight(node)
        if weight is not None:
            return self.graph.add_weight(f"{node.name}_columns", weight[..., ::step][..., :width].contiguous())
        return self._emit(aten.slice.Tensor, (node, last, 0, width * step, step), {}, node)

    def _push(self, node: fx.Node, step: int, width: int) -> fx.Node | None:
        """The columns computed from columns of the arguments; None where no rule says how, or nothing would change."""
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, Tensor) or val.dim() == 0:
            return None
        given, last = list(arguments(node)), val.dim() - 1
        target: Any = node.target
        inner: Any = given[0] if given else None
        if target is aten.cat.default and step == 1 and given[1] in (-1, last) and _columns(given[0][0]) >= width:
            return self.take(given[0][0], 1, width)
        if target is aten.repeat_interleave.self_int and step == given[1] and given[2] in (-1, last):
            return self.take(given[0], 1, width)
        if target in VIEWS and _is_stack(inner, step):
            return self.take(arguments(inner)[0][0], 1, width)
        if target is aten.slice.Tensor and given[1] in (-1, last):
            return self.take(inner, given[4] * step, width) if given[2] in (None, 0) else None
        args = self._arguments(target, node, last, step, width)
        return None if args is None or tuple(args) == node.args else self._emit(target, tuple(args), dict(node.kwargs), node)

    def _arguments(self, target: Any, node: fx.Node, last: int, step: int, width: int) -> list[Any] | None:
        args: list[Any] = list(node.args)
        full = node.meta["val"].shape[-1]
        if target in LOOKUPS:
            table, rows = LOOKUPS[target]
            if args[table].meta["val"].dim() != 2 or (target is aten.index.Tensor and len(args[rows]) != 1):
                return None
            args[table] = self.take(args[table], step, width)
        elif (target is aten.unsqueeze.default and args[1] not in (-1, last)) or target is aten.slice.Tensor:
            args[0] = self.take(args[0], step, width)
        elif target in VIEWS and _columns(args[0]) == full:
            args[0], args[1] = self.take(args[0], step, width), [*args[1][:-1], width]
        elif target is aten._to_copy.default or torch.Tag.pointwise in getattr(target, "tags", ()):
            for i, arg in enumerate(args):
                if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], Tensor) and _columns(arg) != 1:
                    args[i] = self.take(arg, step, width)
        else:
            return None
        return args

    def _emit(self, target: Callable, args: tuple, kwargs: dict, old: fx.Node) -> fx.Node:
        key = repr((str(target), args, kwargs))
        if key not in self._made:
            like = old.next
            while like.op == "placeholder":
                like = like.next
            node = self._made[key] = emit(self.graph, target, args, kwargs, like=like)
            node.meta["origin"], node.meta["line"] = list(old.meta.get("origin") or ()), old.meta.get("line") or ""
        return self._made[key]


def _columns(node: fx.Node) -> Any:
    shape = node.meta["val"].shape
    return shape[-1] if len(shape) else 1


def _is_stack(node: Any, step: int) -> bool:
    """stack([a, b, ..], -1) of `step` tensors: flattened, every step-th column is a column of a."""
    if not isinstance(node, fx.Node) or node.target is not aten.stack.default:
        return False
    tensors, dim = arguments(node)[:2]
    return len(tensors) == step and dim in (-1, node.meta["val"].dim() - 1)

