"""Loop forms of reductions over one axis (or several, walked as one): sums in fp32 at least, NaN wins a maximum."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from .index import ONE, ZERO, expr
from .loop_build import OPMATH, Call, Refused, axes_of, handles, reduced_space
from .loop_pointwise import Math
from .loop_views import unravel

aten = torch.ops.aten


def _rows(c: Call) -> tuple[fx.Node, list[int], Callable[[str, int, str], int], Callable[..., int]]:
    """(source, axes, reduce, element): what a reduction needs, after checking that it is read once per row."""
    b, source = c.build, c.node.args[0]
    assert isinstance(source, fx.Node)
    shape = b.shape(source)
    axes = axes_of(c, len(shape))
    if b.col is None: raise Refused("a reduction in a region without columns")
    keeps = len(c.shape) == len(shape)                              # keepdim, or a softmax
    own = [i for d, i in enumerate(c.index) if not (keeps and d in axes)]
    rows = [i for i, s in zip(own, (s for d, s in enumerate(shape) if d not in axes), strict=True) if s != ONE]
    if rows != [expr(v) for v in b.rows] or c.guards or reduced_space(c.node, b.symbols) != (
            tuple(v.size for v in b.rows), b.col.size):
        raise Refused(f"{c.node.name} is reduced over other rows than the region's")
    inner = iter(unravel(ZERO if b.col.size == ONE else expr(b.col), [shape[d] for d in axes]))
    outer = iter(own)
    full = [next(inner) if d in axes else next(outer) for d in range(len(shape))]

    def element(dtype: str) -> int: return b.cast(c.at(source, full), dtype)

    def reduce(op: str, x: int, dtype: str) -> int: return b.emit(op, x, dtype=dtype)

    return source, axes, reduce, element


def _accumulator(dtype: str) -> str:
    return OPMATH.get(dtype, dtype)


@handles(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default,
         aten.any.dim, aten.any.default, aten.all.dim, aten.all.default, aten.prod.dim_int, reduces=True)
def _reduction(c: Call) -> int:
    _, _, reduce, element = _rows(c)
    name = str(c.node.target).split(".")[1]
    if name in ("any", "all"):
        bit = c.build.cast(element("bool"), "i32")
        return c.build.cast(reduce("max" if name == "any" else "min", bit, "i32"), c.dtype)
    dtype = _accumulator(c.dtype)
    op = {"mean": "sum", "amax": "max", "amin": "min"}.get(name, name)
    total = reduce(op, element(dtype), dtype)
    if name == "mean": total = c.build.emit("div", total, _count(c, dtype), dtype=dtype)
    return c.result(total)


def _count(c: Call, dtype: str) -> int:
    assert c.build.col is not None
    return c.build.cast(c.build.emit("index", dtype="i64", offset=c.build.col.size), dtype)


@handles(aten.var.correction, reduces=True)
def _var(c: Call) -> int:
    """Two passes: the mean, then the mean square distance from it."""
    _, _, reduce, element = _rows(c)
    dtype = _accumulator(c.dtype)
    m, x, correction = Math(c.build, dtype), element(dtype), c.arg("correction")
    n = _count(c, dtype)
    far = m.sub(x, m.div(reduce("sum", x, dtype), n))
    below = m.max(m.sub(n, float(1 if correction is None else correction)), 0.0)
    return c.result(m.div(reduce("sum", m.mul(far, far), dtype), below))


@handles(aten._softmax.default, aten.softmax.int, aten._log_softmax.default, aten.log_softmax.int, reduces=True)
def _softmax(c: Call) -> int:
    """exp(x - max) / sum, or x - max - log(sum), in fp32 at least."""
    b, dtype = c.build, _accumulator(c.dtype)
    source, _, reduce, element = _rows(c)
    m, x = Math(b, dtype), element(dtype)
    far = m.sub(x, reduce("max", x, dtype))
    total = reduce("sum", m.exp(far), dtype)
    here = m.sub(b.cast(c.at(source, c.index), dtype), reduce("max", x, dtype))
    if "log_softmax" in str(c.node.target): return c.result(m.sub(here, m.log(total)))
    return c.result(m.div(m.exp(here), total))


@handles(aten.logsumexp.default, reduces=True)
def _logsumexp(c: Call) -> int:
    _, _, reduce, element = _rows(c)
    dtype = _accumulator(c.dtype)
    m, x = Math(c.build, dtype), element(dtype)
    top = reduce("max", x, dtype)
    base = m.where(m.eq(m.abs(top), math.inf), 0.0, top)
    return c.result(m.add(m.log(reduce("sum", m.exp(m.sub(x, base)), dtype)), base))
