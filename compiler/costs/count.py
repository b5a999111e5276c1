"""What one step must move and multiply, counted from its nodes, and as a formula over the live sizes.

A formula is plain data (phases.Terms): a list of terms [coefficient, name, name, ...], each the product of the coefficient and the named
sizes. Names are dims ("T", "N", "R", "M"), "pairs:W" and "keys:W" (see compiler.phases), W being the window, 0 without one.
"""
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from ..ops.gather import COSTS as GATHERS
from ..ops.kv_write import BLOCK
from ..ops.registry import Cost, arguments, operator_of
from ..placement import Unit
from .phases import Terms, value

RegionCost = Callable[[Unit, Mapping[str, int]], tuple[int, int] | None]
"""flops and bytes of a unit that a backend can count better than its nodes can, at these dims; None for any other."""


@dataclass(frozen=True)
class Count:
    """Of one step at given sizes; bytes by kind. The last three are rates, as in ops.registry.Cost."""

    flops: int
    weights: int
    kv: int
    activations: int
    pair_flops: int = 0
    key_bytes: int = 0
    window: int = 0


def count(unit: Unit, context: Any, weights: Collection[str], region: RegionCost) -> Count:
    """Count a unit at the sizes of context.bucket.

    An operator's declared cost; a region's exact one; else each input read once, each result written once, and one flop per
    element of every node. weights: names of the placeholders that are weights.
    """
    held = sum(_nbytes(concrete(_value(n, i), context.maximum)) for n, i in unit.reads if n.name in weights)
    if len(unit.nodes) == 1 and (cost := _declared(unit.nodes[0], context)) is not None:
        if cost.table and held: held = int(cost.table)       # what a gather reads of weights is its table
        return Count(int(cost.flops), held, int(cost.kv), int(cost.bytes) - held - int(cost.kv),
                     int(cost.pair_flops), int(cost.key_bytes), cost.window)
    counted = region(unit, context.bucket)
    if counted is None:
        moved = sum(_nbytes(concrete(_value(n, i), context.maximum)) for n, i in [*unit.reads, *unit.results])
        counted = sum(_numel(concrete(node.meta["val"], context.maximum)) for node in unit.nodes), moved
    held = min(held, counted[1])
    return Count(counted[0], held, 0, counted[1] - held)


def totals(found: Count, dims: Mapping[str, int]) -> tuple[int, int]:
    """flops and bytes where every block table is full: a bucket's maxima."""
    keys = dims.get("M", 0) * BLOCK
    flops = found.flops + found.pair_flops * dims.get("T", 0) * keys
    return flops, found.weights + found.kv + found.activations + found.key_bytes * dims.get("N", 0) * keys


def formulas(at: Callable[[Mapping[str, int]], Count], names: Sequence[str], largest: Mapping[str, int]) -> dict[str, Any]:
    """{"flops", "weights", "kv", "activations": terms, "exact": bool} of a step that mentions the dims `names`.

    at: the count at given dims. Exact says that the formulas also give the counts at two other points, one of them the
    largest sizes; a step that reads a table only in part can fail that.
    """
    first = at(dict.fromkeys(names, 1))
    found: dict[str, Any] = {}
    for kind in ("flops", "weights", "kv", "activations"):
        found[kind] = _fit(lambda dims, kind=kind: getattr(at(dims), kind), names)
    points = (dict(zip(names, (7, 5, 11, 13), strict=False)), {n: largest[n] for n in names})
    exact = all(value(found[kind], dims) == getattr(at(dims), kind) for dims in points for kind in found)
    if first.pair_flops: found["flops"].append([first.pair_flops, f"pairs:{first.window}"])
    if first.key_bytes: found["kv"].append([first.key_bytes, f"keys:{first.window}"])
    return found | {"exact": exact}


def _fit(f: Callable[[Mapping[str, int]], int], names: Sequence[str]) -> Terms:
    """The polynomial, at most quadratic in each name, through f at 1, 2 and 3: what a product of sizes is, exactly."""
    terms = _polynomial(f, tuple(names))
    return [[int(c) if c.denominator == 1 else float(c), *m] for m, c in terms.items() if c]


def _polynomial(f: Callable[[Mapping[str, int]], int], names: tuple[str, ...]) -> dict[tuple[str, ...], Fraction]:
    if not names: return {(): Fraction(f({}))}
    name, rest = names[0], names[1:]
    at = [_polynomial(lambda dims, x=x: f({name: x, **dims}), rest) for x in (1, 2, 3)]
    out: dict[tuple[str, ...], Fraction] = {}
    for monomial in dict.fromkeys(m for p in at for m in p):
        one, two, three = (p.get(monomial, Fraction(0)) for p in at)
        square = (one - 2 * two + three) / 2
        slope = two - one - 3 * square
        out[monomial] = out.get(monomial, Fraction(0)) + one - slope - square
        out[(*monomial, name)] = slope
        out[(*monomial, name, name)] = square
    return out


def concrete(fake: Any, maximum: Callable[[Any], int]) -> Any:
    """A meta tensor of the fake's dtype, its symbolic sizes replaced by `maximum(size)`. Tuples are mapped."""
    if isinstance(fake, (tuple, list)):
        return tuple(concrete(f, maximum) for f in fake)
    if not isinstance(fake, torch.Tensor):
        return fake
    return torch.empty([maximum(size) for size in fake.shape], dtype=fake.dtype, device="meta")


def _declared(node: fx.Node, context: Any) -> Cost | None:
    """The cost of an operator that says what it costs."""
    operator = operator_of(node)
    declared = GATHERS.get(str(node.target)) if operator is None else operator.cost
    if declared is None: return None
    given = {name: fx.map_arg(value, lambda n: concrete(n.meta["val"], context.maximum)) for name, value in arguments(node).items()}
    return declared(**given)


def _value(node: fx.Node, index: int) -> Any:
    fake = node.meta["val"]
    return fake[index] if isinstance(fake, (tuple, list)) else fake


def _nbytes(fake: Any) -> int:
    if isinstance(fake, tuple):
        return sum(_nbytes(v) for v in fake)
    return fake.numel() * fake.element_size() if isinstance(fake, torch.Tensor) else 0


def _numel(fake: Any) -> int:
    if isinstance(fake, tuple):
        return sum(_numel(v) for v in fake)
    return fake.numel() if isinstance(fake, torch.Tensor) else 0
