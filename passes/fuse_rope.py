"""Rotate q and k in one operator per layer, with cos and sin at half width, computed once for all layers."""
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler import probe
from ..compiler.columns import Columns
from ..compiler.ir import Graph, drop_dead_nodes, same_type
from ..compiler.layout import MOVES, Layout, NotMoves, sources
from ..compiler.ops import aten, infc
from ..compiler.probe import Unknown, evaluate, shape_of, symbols_of
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit

SCORES = {aten.scaled_dot_product_attention.default, infc.attention.default, aten.matmul.default, aten.bmm.default}
"""Where q and k meet: q is argument 0, k argument 1."""
ON_THE_WAY = MOVES | {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten._to_copy.default}
ANGLES = {aten.cos.default, aten.sin.default, aten.polar.default}
UNKNOWN_TURN = ("a value on its way to an attention is multiplied by cos or sin of something, but it is no rotation that is known: "
                "x * cos + turned(x) * sin, or a * cos - b * sin and b * cos + a * sin put back in the places of a and b")
POSITIONS = (4096, 64, 8)                                   # largest position to try: tables may be shorter


@dataclass(frozen=True)
class Rotation:
    """`node` is `x` with its first `width` channels rotated by the angles behind cos and sin."""

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    width: int
    interleaved: bool
    doubled: bool                                           # cos and sin have `width` columns, to be proved two equal halves


def run(graph: Graph, report: Report) -> int:
    layout, angles, fired = Layout(graph), Angles(graph), 0
    meetings: dict[fx.Node, dict[int, Rotation]] = {}
    rotations = [found for node in graph.nodes if (found := _rotation(layout, node))]
    for node in _unknown_turns(graph, rotations):
        report.refuse(node, UNKNOWN_TURN)
    for rotation in rotations:
        meeting, side = _meeting(rotation.node)
        if meeting is None:
            report.refuse(rotation.node, "the rotated value meets no other in an attention")
        elif side in meetings.setdefault(meeting, {}):
            report.refuse(rotation.node, f"%{meetings[meeting][side].node.name} is rotated for the same attention already")
        else:
            meetings[meeting][side] = rotation
    for meeting, pair in meetings.items():
        if len(pair) < 2:
            only = next(iter(pair.values()))
            report.refuse(only.node, f"only {'k' if 1 in pair else 'q'} of %{meeting.name} is rotated here")
            continue
        reason = _objection(pair[0], pair[1], angles)
        if reason:
            report.refuse(pair[0].node, reason)
        elif report.may_fire():
            _fuse(graph, angles, pair[0], pair[1])
            fired += 1
        else:
            break
    if fired:
        drop_dead_nodes(graph)
    return fired


# ----------------------------------------------------------------------------------------------- what rotates a value

def _rotation(layout: Layout, node: fx.Node) -> Rotation | None:
    """The rotation that ends at `node`, in any of its spellings, with the channels that pass through."""
    if node.op != "call_function":
        return None
    found = _as_sum(layout, node) or _as_pairs(layout, node)
    return _with_rest(layout, found) if found and node.users else None


def _as_sum(layout: Layout, node: fx.Node) -> Rotation | None:
    """x * cos + turned(x) * sin, where turned(x) is x with its pairs (a, b) made (-b, a)."""
    for direct, swung in _orders(node, aten.add.Tensor):
        for x, cos in _orders(direct, aten.mul.Tensor):
            for turned, sin in _orders(swung, aten.mul.Tensor):
                if turned.target not in MOVES or x.meta["val"].dim() == 0 or x.meta["val"].shape[-1] % 2:
                    continue
                numbers = layout.numbered(x)
                try:
                    found = layout.run(turned, {x: numbers})
                except NotMoves:
                    continue
                a, b = numbers.chunk(2, -1)
                if torch.equal(found, torch.cat((-b, a), -1)):
                    return Rotation(node, x, cos, sin, numbers.shape[-1], interleaved=False, doubled=True)
                a, b = numbers[..., 0::2], numbers[..., 1::2]
                if torch.equal(found, torch.stack((-b, a), -1).flatten(-2)):
                    return Rotation(node, x, cos, sin, numbers.shape[-1], interleaved=True, doubled=True)
    return None


def _as_pairs(layout: Layout, node: fx.Node) -> Rotation | None:
    """a * cos - b * sin and b * cos + a * sin put back in the places of a and b, cos and sin at half width."""
    joined = next((n for n in sources(node) if n.target in (aten.cat.default, aten.stack.default)), None)
    parts: Any = joined.args[0] if joined else ()
    if len(parts) < 2:
        return None
    first, second = parts[:2]
    if first.target is not aten.sub.Tensor or arguments(first)[2] != 1:
        return None
    for a, cos in _orders(first.args[0], aten.mul.Tensor):
        for b, sin in _orders(first.args[1], aten.mul.Tensor):
            if not any(set(arguments(p)) == {b, cos} and set(arguments(q)) == {a, sin} and p.target is q.target is aten.mul.Tensor
                       for p, q in _orders(second, aten.add.Tensor)):
                continue
            for x in (n for n in sources(a) if n in sources(b) and same_type(n.meta["val"], node.meta["val"])):
                numbers = layout.numbered(x)
                one, other = layout.run(a, {x: numbers}), layout.run(b, {x: numbers})
                half = one.shape[-1]
                try:
                    if not torch.equal(layout.run(node, {x: numbers, first: one, second: other}), numbers):
                        continue
                except NotMoves:
                    continue
                for interleaved in (False, True):
                    turned = numbers[..., : 2 * half]
                    want = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
                    if torch.equal(one, want[0]) and torch.equal(other, want[1]):
                        return Rotation(node, x, cos, sin, 2 * half, interleaved, doubled=False)
    return None


def _unknown_turns(graph: Graph, rotations: list[Rotation]) -> list[fx.Node]:
    """Products with an angle that belong to no rotation found but reach an attention; one for each place in the model."""
    angles: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.all_input_nodes
        if node.target in ANGLES or (given and node.target in ON_THE_WAY and all(n in angles or n.op == "placeholder" for n in given)
                                     and any(n in angles for n in given)):
            angles.add(node)
    known = {node for rotation in rotations for node in _between(rotation)}
    turns = [n for n in graph.nodes if n.target is aten.mul.Tensor and n not in known and n not in angles
             and any(a in angles for a in n.all_input_nodes) and not all(a in angles for a in n.all_input_nodes)]
    first = {tuple(n.meta.get("origin") or ()): n for n in reversed(turns) if _reaches_attention(n)}
    return sorted(first.values())


def _between(rotation: Rotation) -> set[fx.Node]:
    """The nodes that a rotation is made of."""
    found, stack = {rotation.node}, [rotation.node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in found and n not in (rotation.x, rotation.cos, rotation.sin)
               and rotation.x < n]
        found.update(new)
        stack += new
    return found


def _reaches_attention(node: fx.Node) -> bool:
    """Through moves, casts, sums and scales: not through a product with a weight."""
    queue, seen = [node], {node}
    for at in queue:                                        # grows while it is walked
        for user in at.users:
            if user.target in SCORES and at in user.args[:2]:
                return True
            if user not in seen and (user.target in ON_THE_WAY or user.target in (aten.add.Tensor, aten.sub.Tensor)):
                seen.add(user)
                queue.append(user)
    return False


def _with_rest(layout: Layout, found: Rotation) -> Rotation:
    """Partial rotary width: x and the result with the channels that pass through, where they are put together again."""
    user = next(iter(found.node.users))
    parts: Any = user.args[0] if user.target is aten.cat.default else ()
    if len(found.node.users) != 1 or len(parts) != 2 or parts[0] is not found.node:
        return found
    rest = parts[1]
    above = set(sources(rest))
    for x in sources(found.x):
        if x in above and same_type(x.meta["val"], user.meta["val"]):
            numbers = layout.numbered(x)
            if (layout.is_moved(found.x, x, numbers[..., : found.width], numbers)
                    and layout.is_moved(rest, x, numbers[..., found.width :], numbers)):
                return replace(found, node=user, x=x)
    return found


def _orders(node: Any, target: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Both orders of the two tensors of a commutative call (of `target`, unscaled); none for anything else."""
    if isinstance(node, fx.Node) and node.target is target:
        a, b, *scale = arguments(node)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and scale in ([], [1]):
            yield a, b
            if a is not b:
                yield b, a


def _meeting(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The attention (or product) a value reaches by being moved and scaled, and at which argument."""
    queue, seen = [node], {node}
    for at in queue:                                        # grows while it is walked: breadth first
        for user in at.users:
            if user.target in SCORES and at in user.args[:2]:
                return user, user.args.index(at)
            if user.target in ON_THE_WAY and user not in seen:
                seen.add(user)
                queue.append(user)
    return None, 0


# ------------------------------------------------------------------------------------------------------ what forbids it

def _objection(q: Rotation, k: Rotation, angles: "Angles") -> str | None:
    if (q.width, q.interleaved) != (k.width, k.interleaved):
        return f"q and k are rotated in different styles: {_style(q)} and {_style(k)}"
    if q.cos is not k.cos or q.sin is not k.sin:
        return f"q and k are rotated by different angles: %{q.cos.name}, %{q.sin.name} and %{k.cos.name}, %{k.sin.name}"
    dtypes = {n.meta["val"].dtype for n in (q.x, k.x, q.node, k.node, q.cos, q.sin)}
    if len(dtypes) > 1:
        return f"q, k, cos and sin have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    for node in (q.cos, q.sin):
        if q.doubled and not angles.repeat(node, q):
            return f"the two columns of a pair are not proved equal in %{node.name}"
    return "k is computed from the rotated q" if _depends(k.x, q.node) or _depends(q.x, k.node) else None


def _style(rotation: Rotation) -> str:
    return f"{'interleaved' if rotation.interleaved else 'half-split'} over {rotation.width}"


class Angles:
    """cos and sin: proved to repeat themselves, then reduced to half width."""

    def __init__(self, graph: Graph):
        self.graph, self.columns = graph, Columns(graph)
        self.proved: dict[tuple[fx.Node, bool], bool] = {}

    def half(self, node: fx.Node, rotation: Rotation) -> fx.Node:
        step = 2 if rotation.interleaved and rotation.doubled else 1
        return self.columns.take(node, step, rotation.width // 2)

    def repeat(self, node: fx.Node, rotation: Rotation) -> bool:
        """Are the two columns of every pair equal, whatever the positions? By value, at two sets of sizes and positions."""
        key = (node, rotation.interleaved)
        if key not in self.proved:
            self.proved[key] = node.meta["val"].shape[-1] == rotation.width and self._repeat(node, rotation.interleaved)
        return self.proved[key]

    def _repeat(self, node: fx.Node, interleaved: bool) -> bool:
        for limit in POSITIONS:
            try:
                values = [_value(self.graph, node, limit, smallest) for smallest in (2, 3)]
            except Unknown:                                 # a table shorter than the positions tried
                continue
            pairs = [(v[..., 0::2], v[..., 1::2]) if interleaved else v.chunk(2, -1) for v in values]
            return all(torch.equal(a, b) for a, b in pairs)
        return False


def _value(graph: Graph, node: fx.Node, limit: int, smallest: int) -> Tensor:
    """The value of `node` with its real weights at random inputs: whole numbers below `limit`, others normal."""
    generator = torch.Generator().manual_seed(limit + smallest)
    needed = probe.sources(node)
    symbols = sorted(symbols_of(*(n.meta["val"] for n in needed)), key=str)
    sizes: probe.Sizes = {symbol: smallest + 2 * i for i, symbol in enumerate(symbols)}
    given: dict[fx.Node, Tensor] = {}
    for n in needed:
        if n.op == "placeholder" and (weight := graph.weight(n)) is not None:
            given[n] = weight
        elif n.op == "placeholder":
            shape, dtype = shape_of(n.meta["val"], sizes), n.meta["val"].dtype
            given[n] = (torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point
                        else torch.randint(0, limit, shape, generator=generator).to(dtype))
    return evaluate(node, sizes, given)


def _depends(node: fx.Node, on: fx.Node) -> bool:
    seen, stack = set(), [node]
    while stack:
        n = stack.pop()
        if n is on:
            return True
        if n not in seen and on < n:                        # what stands before `on` cannot depend on it
            seen.add(n)
            stack += n.all_input_nodes
    return False


# ----------------------------------------------------------------------------------------------------------- the change

def _fuse(graph: Graph, angles: "Angles", q: Rotation, k: Rotation) -> None:
    place = min(q.node, k.node)
    for x in (q.x, k.x):
        _hoist(x, place)
    fused = emit(graph, infc.rope.default, (q.x, k.x, angles.half(q.cos, q), angles.half(q.sin, q), q.interleaved), like=place)
    for index, rotation in enumerate((q, k)):
        rotation.node.replace_all_uses_with(emit(graph, operator.getitem, (fused, index), like=place))


def _hoist(node: fx.Node, place: fx.Node) -> None:
    """Move a node, with what it needs, before `place`."""
    if place < node:
        for needed in node.all_input_nodes:
            _hoist(needed, place)
        place.prepend(node)


PASS = Pass("fuse_rope", run, EXACT, requires=("canonicalize",))
