"""Loop forms of operators that move elements (other indices, nothing computed) and of values that read nothing."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .index import ONE, ZERO, Expr, expr, product
from .loop_build import Call, Index, Refused, handles, size
from .loops import Guard

aten = torch.ops.aten


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
         aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default, aten.flatten.using_ints,
         aten.unflatten.int, view=True)
def _reshape(c: Call) -> int:
    source = c.node.args[0]
    assert isinstance(source, fx.Node)
    return c.at(source, reindex(c.index, c.shape, c.build.shape(source)))


def reindex(index: Index, shape: Index, source: Index) -> list[Expr]:
    """The index into a tensor of shape `source` of the element at `index` in its row-major reshape to `shape`.

    Works on the shortest leading groups of axes with equal size, so that `[T, 9, 64] -> [T, 576]` never divides by T.
    """
    if ZERO in source: return [ZERO] * len(source)
    old, new, at, found = list(source), list(shape), list(index), []
    while old:
        right, left = [old.pop(0)], []
        linear = ZERO
        while product(left) != product(right):
            if new and (not left or not old or _divides(product(left), product(right))):
                left.append(new.pop(0))
                linear = linear * left[-1] + at.pop(0)
            elif old: right.append(old.pop(0))
            else: raise Refused(f"reshape of {[str(s) for s in source]} to {[str(s) for s in shape]}")
        found += unravel(linear, right)
    return found


def unravel(linear: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """The index of a row-major position."""
    found = []
    for k, s in enumerate(shape):
        position = linear // product(shape[k + 1:])
        found.append(ZERO if s == ONE else position % s if k else position)
    return found


def _divides(a: Expr, b: Expr) -> bool:
    return a != b and b % a == ZERO


@handles(aten.expand.default, view=True)
def _expand(c: Call) -> int:
    source = c.arg("self")
    shape = c.build.shape(source)
    own = c.index[len(c.index) - len(shape):]
    whole = [s for s in shape if s != ONE] == [s for s in c.shape if s != ONE]
    return c.at(source, [ZERO if s == ONE else i for s, i in zip(shape, own, strict=True)], whole=whole)


@handles(aten.permute.default, aten.transpose.int, aten.t.default, view=True)
def _permute(c: Call) -> int:
    rank = len(c.index)
    order = list(range(rank))
    if c.node.target == aten.permute.default: order = [d % rank for d in c.arg("dims")]
    elif c.node.target == aten.t.default: order.reverse()
    elif rank:
        a, b = c.arg("dim0") % rank, c.arg("dim1") % rank
        order[a], order[b] = b, a
    index = [ZERO] * rank
    for position, d in enumerate(order): index[d] = c.index[position]
    return c.at(c.node.args[0], index)  # type: ignore[arg-type]


def _start(c: Call, start: Any, length: Expr) -> Expr:
    """A slice start, wrapped from the end and clamped to the axis as PyTorch does."""
    if start is None: return ZERO
    if isinstance(start, int) and start < 0:
        if length.constant is None: return length + start
        return expr(max(length.constant + start, 0))
    if isinstance(start, int) and length.constant is not None: return expr(min(start, length.constant))
    return c.build.number(start)


@handles(aten.slice.Tensor, view=True)
def _slice(c: Call) -> int:
    source, dim, index = c.arg("self"), c.arg("dim"), list(c.index)
    length = c.build.shape(source)[dim]
    start = _start(c, c.arg("start"), length)
    index[dim] = start + index[dim] * c.arg("step")
    return c.at(source, index, whole=length == c.shape[dim])


@handles(aten.select.int, view=True)
def _select(c: Call) -> int:
    source, index = c.arg("self"), list(c.index)
    shape = c.build.shape(source)
    dim = c.arg("dim") % len(shape)
    index.insert(dim, _start(c, c.arg("index"), shape[dim]))
    return c.at(source, index, whole=shape[dim] == ONE)


@handles(operator.getitem, view=True)
def _getitem(c: Call) -> int:
    """One piece of a split: split and its kin are what their getitems read."""
    split, piece = c.node.args
    assert isinstance(split, fx.Node) and isinstance(piece, int)
    source, index = split.args[0], list(c.index)
    if not isinstance(source, fx.Node) or split.target not in SPLITS: raise Refused(f"an item of {split.target}")
    inner = Call(c.build, split, c.index, c.guards, c.whole)
    shape = c.build.shape(source)
    dim = inner.arg("dim") % len(shape)
    if split.target == aten.unbind.int: index.insert(dim, expr(piece))
    else:
        before = [v.shape[dim] for v in split.meta["val"][:piece]]
        index[dim] = index[dim] + sum((size(s, c.build.symbols) for s in before), start=ZERO)
    c.build.computed.add(split)
    return c.at(source, index, whole=len(split.meta["val"]) == 1)


SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default}


@handles(aten.flip.default, view=True)
def _flip(c: Call) -> int:
    index = list(c.index)
    for d in c.arg("dims"): index[d] = c.shape[d] - 1 - index[d]
    return c.at(c.arg("self"), index)


@handles(aten.repeat.default)
def _repeat(c: Call) -> int:
    source = c.arg("self")
    shape = c.build.shape(source)
    own = c.index[len(c.index) - len(shape):]
    return c.at(source, [i % s if s != ONE else ZERO for s, i in zip(shape, own, strict=True)], whole=False)


@handles(aten.cat.default, aten.stack.default)
def _cat(c: Call) -> int:
    """A select on the index: each piece is loaded only where it is the one."""
    stack = c.node.target == aten.stack.default
    dim, b = c.arg("dim") % len(c.index), c.build
    pieces = [(t, ONE if stack else b.shape(t)[dim]) for t in c.arg("tensors")
              if stack or len(b.shape(t)) == len(c.index)]                  # cat skips 1-d empty tensors of old
    pieces = [(t, s) for t, s in pieces if s != ZERO]
    low, value = ZERO, None
    for t, length in pieces:
        here = c.index[dim] - low
        index = [*c.index[:dim], *([] if stack else [here]), *c.index[dim + 1:]]
        guards = () if len(pieces) == 1 else (Guard(c.index[dim], low, low + length),)
        item = b.cast(c.at(t, index, whole=len(pieces) == 1, guards=guards), c.dtype)
        if value is None: value = item
        else:
            start = b.emit("index", dtype="i64", offset=low)
            inside = b.emit("ge", b.emit("index", dtype="i64", offset=c.index[dim]), start, dtype="bool")
            value = b.emit("where", inside, item, value, dtype=c.dtype)
        low = low + length
    return value if value is not None else b.const(0, c.dtype)


@handles(aten.constant_pad_nd.default, aten.pad.default)
def _pad(c: Call) -> int:
    if c.node.target == aten.pad.default and c.arg("mode") != "constant": raise Refused(f"padding by {c.arg('mode')}")
    b, source, pad, fill = c.build, c.arg("self"), list(c.arg("pad")), c.arg("value")
    shape, index, guards = b.shape(source), list(c.index), []
    for k in range(len(pad) // 2):
        d = len(index) - 1 - k
        guards.append(Guard(index[d], b.number(pad[2 * k]), b.number(pad[2 * k]) + shape[d]))
        index[d] = index[d] - b.number(pad[2 * k])
    value = c.at(source, index, whole=False, guards=tuple(guards))
    for g in guards:
        at = b.emit("index", dtype="i64", offset=g.index)
        for op, bound in (("ge", g.low), ("lt", g.high)):
            inside = b.emit(op, at, b.emit("index", dtype="i64", offset=bound), dtype="bool")
            value = b.emit("where", inside, value, b.const(fill or 0, c.dtype), dtype=c.dtype)
    return value


@handles(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, free=True)
def _full(c: Call) -> int:
    return c.operand(c.arg("s" if c.node.target == aten.scalar_tensor.default else "fill_value"), c.dtype)


@handles(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, free=True)
def _zeros(c: Call) -> int: return c.build.const(0, c.dtype)


@handles(aten.ones.default, aten.ones_like.default, aten.new_ones.default, free=True)
def _ones(c: Call) -> int: return c.build.const(1, c.dtype)


@handles(aten.arange.default, aten.arange.start, aten.arange.start_step, free=True)
def _arange(c: Call) -> int:
    names = [a.name for a in c.node.target._schema.arguments]  # type: ignore[union-attr]
    start = c.arg("start") if "start" in names else 0
    step = c.arg("step") if "step" in names else 1
    if any(isinstance(a, float) and a != int(a) for a in (start, step)): raise Refused("arange of fractions")
    as_int = [int(a) if isinstance(a, float) else a for a in (start, step)]
    value = c.build.number(as_int[0]) + c.index[0] * c.build.number(as_int[1])
    return c.build.cast(c.build.emit("index", dtype="i64", offset=value), c.dtype)


@handles(aten.tril.default, aten.triu.default)
def _triangle(c: Call) -> int:
    diagonal = c.index[-1] - c.index[-2]
    limit = c.build.const(c.arg("diagonal"), "i64")
    op = "le" if c.node.target == aten.tril.default else "ge"
    inside = c.build.emit(op, c.build.emit("index", dtype="i64", offset=diagonal), limit, dtype="bool")
    return c.build.emit("where", inside, c.operand(c.arg("self"), c.dtype), c.build.const(0, c.dtype), dtype=c.dtype)
