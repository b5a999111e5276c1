"""A mask is recognised by what it is: evaluate it at several sizes and positions, compare it with each known kind."""
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx

from .ir import Graph, expression, same_size
from .ops.attention import visible
from .probe import Sizes, Unknown, concrete, constants, evaluate, shape_of, sources, symbols_of

POSITIONS = ("position_ids", "positions", "cache_position")
"""Inputs that hold positions: contiguous within a row, by the contract of capture (a packed row is another function)."""

LARGEST = 4_608
"""Longest sequence probed: 21 million mask entries, under a second. Larger constants stay unproved, the mask a bias."""

STARTS = (0, 11)
"""First position of a row in the probes; the rows after it start at other ones."""


@dataclass(frozen=True)
class MaskKind:
    """A known mask: the attributes of infc::attention that say the same."""

    mask: str
    window: int = 0

    def meet(self, other: "MaskKind") -> "MaskKind | None":
        """What is seen under both masks; None when that is no known kind."""
        if "none" in (self.mask, other.mask): return other if self.mask == "none" else self
        if self.mask != other.mask: return None
        windows = [w for w in (self.window, other.window) if w]
        return MaskKind(self.mask, min(windows, default=0))


def recognise(graph: Graph, node: fx.Node, queries: Any, keys: Any, *, hides: bool = False) -> MaskKind | str:
    """The kind of a mask node over [.., queries, keys], or the reason why it has none.

    bool: True = seen, or unseen where it `hides`; float: 0 = seen, -inf or finfo.min = unseen.
    """
    try:
        return _recognise(graph, node, queries, keys, hides)
    except Unknown as unknown:
        return str(unknown)


def _recognise(graph: Graph, node: fx.Node, queries: Any, keys: Any, hides: bool) -> MaskKind | str:
    beyond = max(constants(node), default=0) + 3
    if beyond > LARGEST: return f"it holds the constant {beyond - 3}, too large to probe"
    kinds: list[MaskKind] | None = None
    for sizes in reversed(_probes(node, queries, keys, beyond)):                # the longest first: it tells most apart
        rows, columns = int(concrete(queries, sizes)), int(concrete(keys, sizes))
        for start in STARTS:
            seen = _seen(evaluate(node, sizes, _positions(graph, node, sizes, start)), rows, columns, hides)
            if seen is None: return "its values are not just seen and unseen"
            kinds = _candidates(seen, same_size(queries, keys)) if kinds is None else kinds
            kinds = [kind for kind in kinds if torch.equal(seen, visible(kind.mask, kind.window, rows, columns).expand_as(seen))]
            if not kinds: return "it is none of the known kinds"
    return kinds[0] if kinds else "it was not evaluated"


def _probes(node: fx.Node, queries: Any, keys: Any, beyond: int) -> list[Sizes]:
    """Sizes to try, the longest last; where queries and keys have sizes of their own, both orders of them."""
    lengths = sorted(symbols_of(queries, keys), key=str)
    others = sorted(symbols_of(*(n.meta["val"] for n in sources(node))) - set(lengths), key=str)
    made: list[Sizes] = []
    for length in (1, 2, 3, 7, beyond):
        batch = 1 if length == beyond else 2
        for order in (lengths, lengths[::-1])[: max(1, len(lengths))]:
            sizes: dict[sympy.Symbol, int] = {symbol: length + 2 * i for i, symbol in enumerate(order)}
            made.append(sizes | {symbol: batch + i for i, symbol in enumerate(others)})
    return made if lengths else made[-1:]


def _positions(graph: Graph, node: fx.Node, sizes: Sizes, start: int) -> dict[fx.Node, Tensor]:
    given = {}
    for source in sources(node):
        if source.op == "placeholder" and source.target in graph.inputs and source.target in POSITIONS:
            shape = shape_of(source.meta["val"], sizes)
            first = start + 5 * torch.arange(shape[0])[:, None] if start and len(shape) == 2 else torch.tensor(start)
            given[source] = (first + torch.arange(shape[-1])).expand(shape).to(source.meta["val"].dtype).contiguous()
    return given


def _seen(mask: Tensor, rows: int, columns: int, hides: bool) -> Tensor | None:
    """bool [.., rows, columns]: True where seen; None when the values are more than seen (0) and unseen (-inf, finfo.min)."""
    if mask.dtype == torch.bool:
        seen = ~mask if hides else mask
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()): return None
    else:
        return None
    return seen.expand(*seen.shape[:-2], rows, columns) if seen.dim() > 1 else seen.expand(rows, columns)


def _candidates(seen: Tensor, square: bool) -> list[MaskKind]:
    """Every kind the first (longest) probe leaves open: the window is the most keys any row sees."""
    window = int(seen.sum(-1).max()) if seen.numel() else 0
    aligned = ["causal"] if square else ["causal", "causal_top_left"]
    return [MaskKind("none"), *(MaskKind(mask, w) for mask in aligned for w in (0, window) if w == 0 or w < seen.shape[-1])]


def constant(graph: Graph, node: Any) -> float | None:
    """The one number a node (or plain number) always is, weights of one element included; None when there is no such number."""
    if not isinstance(node, fx.Node): return float(node) if isinstance(node, int | float) and not isinstance(node, bool) else None
    val = node.meta["val"]
    if isinstance(val, SymInt): return float(expression(val)) if expression(val).is_number else None
    if not isinstance(val, Tensor) or any(s != 1 for s in val.shape): return None
    given = {n: w for n in sources(node) if (w := graph.weight(n)) is not None and w.numel() == 1}
    try:
        return float(evaluate(node, {}, given))
    except Unknown:
        return None
