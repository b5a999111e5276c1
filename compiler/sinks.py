"""Attention sinks, told by what they do: one logit a query head joins the sum of each softmax, and no value belongs to it.

Two spellings are known. A column beside the scores, cut off again behind the softmax: softmax(cat(scores, sinks))[..., :-1] (gpt-oss).
And a factor on the result, sigmoid(logsumexp(scores) - sinks) (Granite): of a sum with the sink in it, the share that is not the sink's.
"""
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .heads import MOVES
from .ir import arguments, same_size, same_type
from .ops import aten
from .probe import Unknown, concrete, evaluate, symbols_of
from .tokens import CASTS, COPIES

KEEPS = {*CASTS, *COPIES}
"""Leave every value as it is, but for rounding."""


@dataclass(frozen=True)
class Sunk:
    """A softmax of `scores` with sinks, one for each head: a node of that many elements. `path`: what spells it."""

    scores: fx.Node
    sinks: fx.Node
    path: list[fx.Node]


def column(node: Any, cut: fx.Node | None) -> Sunk | None:
    """softmax's argument `node` as cat(scores, sinks), whose last column alone `cut` takes off again. None: it is something else."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default or cut is None: return None
    parts, dim = arguments(node)
    val, (_, axis, start, _, step) = node.meta["val"], arguments(cut)
    last = (-1, val.dim() - 1)
    if len(parts) != 2 or dim not in last or axis not in last or start not in (None, 0) or step != 1: return None
    scores, sinks = parts
    kept = scores.meta["val"].shape[-1]
    if not same_size(cut.meta["val"].shape[-1], kept) or not same_size(sinks.meta["val"].shape[-1], 1): return None
    found = per_head(sinks, (*val.shape[:-1], 1))
    return Sunk(scores, found, [node]) if found is not None else None


def gate(product: fx.Node) -> tuple[fx.Node, Sunk] | None:
    """(the node that holds product * sigmoid(logsumexp(scores) - sinks), its parts); None where `product` is used otherwise."""
    if len(product.users) != 1: return None
    (site,) = product.users
    if site.target is not aten.mul.Tensor or not same_type(site.meta["val"], product.meta["val"]): return None
    node: Any = next((arg for arg in site.args if arg is not product), None)
    shape = (*product.meta["val"].shape[:-1], 1)
    path: list[fx.Node] = []
    if not isinstance(node, fx.Node) or not _is(node, shape): return None

    def under(*targets: Any) -> bool:
        """Go down past casts, and to `node` where it is one of these."""
        nonlocal node
        while isinstance(node, fx.Node) and node.target in KEEPS:
            path.append(node)
            node = node.args[0]
        return isinstance(node, fx.Node) and node.target in targets

    while under(aten.unsqueeze.default, aten.reshape.default, aten.view.default):
        path.append(node)
        node = node.args[0]
        if not _is(node, shape) and not _is(node, shape[:-1]): return None         # all keep the order: the shape says which view
    if not under(aten.sigmoid.default): return None
    path.append(node)
    node = node.args[0]
    if not under(aten.sub.Tensor) or node.kwargs.get("alpha", 1) != 1: return None
    path.append(node)
    whole, (node, sinks) = node.meta["val"].shape, node.args
    if not under(aten.logsumexp.default) or not _is(node, whole) or not isinstance(sinks, fx.Node): return None
    path.append(node)
    node, dims, keepdim = arguments(node)
    if list(dims) not in ([-1], [node.meta["val"].dim() - 1]) or not _alike(whole, shape if keepdim else shape[:-1]): return None
    under()
    found = per_head(sinks, whole)
    return (site, Sunk(node, found, path)) if found is not None else None


def unshifted(node: Any) -> tuple[Any, list[fx.Node]]:
    """(what is below casts and the subtraction of the row's largest, which no softmax sees; the nodes that did it)."""
    path: list[fx.Node] = []
    while isinstance(node, fx.Node):
        if node.target in KEEPS: path.append(node)
        elif node.target is aten.sub.Tensor and (most := _largest(node)): path += [node, *most]
        else: break
        node = node.args[0]
    return node, path


def _largest(node: fx.Node) -> list[fx.Node]:
    """The nodes that take the row's largest value in x - max(x); none where it is not that."""
    x, most = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(most, fx.Node) or node.kwargs.get("alpha", 1) != 1: return []
    path = [most]
    if most.target is operator.getitem and most.args[1] == 0: path.append(most.args[0])    # type: ignore[arg-type]   # of (values, indices)
    if path[-1].target not in (aten.max.dim, aten.amax.default): return []
    of, dims, keepdim = arguments(path[-1])
    last = x.meta["val"].dim() - 1
    return path if of is x and dims in (-1, last, [-1], [last]) and keepdim else []


def per_head(node: fx.Node, shape: Sequence[Any]) -> fx.Node | None:
    """The value of one element a head whose every element `node`, broadcast to `shape` [B,Hq,...], repeats for its head; else None.

    Told by running the repetition on numbered heads. Of several such values, the first one in the graph.
    """
    heads, found = shape[1], None
    current: Any = node
    sizes = {symbol: 2 + i for i, symbol in enumerate(sorted(symbols_of(*shape, node.meta["val"]), key=str))}
    if not isinstance(heads, int): return None
    full = tuple(int(concrete(size, sizes)) for size in shape)
    while True:
        val = current.meta["val"]
        if not symbols_of(val) and val.numel() == heads and _repeats(node, current, heads, full, sizes): found = current
        if current.op != "call_function" or current.target not in {*MOVES, *KEEPS}: return found
        current = current.args[0]


def _repeats(node: fx.Node, base: fx.Node, heads: int, full: tuple[int, ...], sizes: dict) -> bool:
    numbered = torch.arange(heads)
    try:
        made = evaluate(node, sizes, {base: numbered.reshape(base.meta["val"].shape)})
        return torch.equal(made.long().broadcast_to(full), numbered.reshape(-1, *(1 for _ in full[2:])).expand(full))
    except (Unknown, RuntimeError):                                                    # it broadcasts to another shape
        return False


def _is(node: Any, shape: Sequence[Any]) -> bool:
    return _alike(node.meta["val"].shape, shape)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))
