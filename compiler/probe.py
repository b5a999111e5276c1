"""Evaluate a part of a graph at concrete sizes: what a subgraph *is* is read off its values, not off its spelling."""
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from .ir import expression

aten = torch.ops.aten
Sizes = dict[sympy.Symbol, int]

# Read the shape and dtype of their first argument, never its values.
SHAPE_ONLY = {aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default, aten.zeros_like.default,
              aten.ones_like.default, aten.full_like.default, aten.empty_like.default}  # fmt: skip

SENTINEL = 1_000_000_000
"""Numbers this large mean "to the end" (INT64_MAX in slices) or are mask fills; they are no sizes."""


class Unknown(Exception):
    """The value depends on something that is not given; the message says on what."""


def concrete(value: object, sizes: Sizes) -> int | float | bool:
    """A size (or a number computed from sizes) at these sizes. Unknown when a symbol is missing."""
    if not isinstance(value, SymInt | SymFloat | SymBool): return value  # type: ignore[return-value]
    found: Any = sympy.sympify(expression(value).xreplace(sizes))
    if found.free_symbols: raise Unknown(f"the size {found} is not known")
    if isinstance(value, SymBool): return bool(found)
    return int(found) if isinstance(value, SymInt) else float(found)


def shape_of(value: Tensor, sizes: Sizes) -> tuple[int, ...]:
    """A fake tensor's shape at these sizes."""
    return tuple(int(concrete(s, sizes)) for s in value.shape)


def symbols_of(*values: object) -> set[sympy.Symbol]:
    """The free symbols of sizes and of fake tensors' shapes."""
    found: set[sympy.Symbol] = set()
    for value in values:
        parts = value.shape if isinstance(value, Tensor) else (value,)
        for part in parts:
            if isinstance(part, SymInt | SymFloat | SymBool): found |= expression(part).free_symbols  # type: ignore[arg-type]
    return found


def sources(node: fx.Node, stop: set[fx.Node] | None = None) -> list[fx.Node]:
    """The nodes whose values `node` needs, itself last, in graph order; sizes are left out (they follow from `Sizes`)."""
    stop = stop or set()
    seen, todo = {node}, [node]
    while todo:
        current = todo.pop()
        if current in stop: continue
        for used in current.all_input_nodes:
            if used in seen or not isinstance(used.meta["val"], Tensor | tuple | list): continue
            if current.target in SHAPE_ONLY and used is current.args[0]: continue
            seen.add(used)
            todo.append(used)
    return sorted(seen)


def evaluate(node: fx.Node, sizes: Sizes, given: dict[fx.Node, Tensor]) -> Tensor:
    """The value of `node` at these sizes from the values in `given`. Unknown when it needs another placeholder."""
    order = sources(node, set(given))
    last: dict[fx.Node, fx.Node] = {used: user for user in order for used in user.all_input_nodes}
    env: dict[fx.Node, Any] = dict(given)

    def value(used: fx.Node) -> Any:
        if used in env: return env[used]
        val = used.meta["val"]
        if isinstance(val, Tensor): return torch.empty(shape_of(val, sizes), dtype=val.dtype)    # only its shape is read
        return concrete(val, sizes)

    with torch.no_grad():
        for current in order:
            if current not in env:
                if current.op != "call_function": raise Unknown(f"it depends on %{current.name}")
                args, kwargs = fx.map_arg((current.args, current.kwargs), value)
                try:
                    env[current] = current.target(*args, **kwargs)  # type: ignore[operator]
                except (RuntimeError, IndexError) as error:
                    raise Unknown(f"%{current.name} fails at {sizes}: {error}") from error
            for used in current.all_input_nodes:                       # large intermediates die as soon as they can
                if last[used] is current and used not in given: env.pop(used, None)
    found = env[node]
    assert isinstance(found, Tensor)
    return found


def constants(node: fx.Node) -> set[int]:
    """Every number the subgraph contains below SENTINEL, also inside its size expressions, as whole numbers >= 0."""
    found: set[float] = set()

    def note(arg: object) -> None:
        if isinstance(arg, list | tuple):
            for part in arg: note(part)
        elif isinstance(arg, fx.Node):
            val = arg.meta["val"]
            for size in val.shape if isinstance(val, Tensor) else (val,):
                if isinstance(size, SymInt | SymFloat | SymBool):
                    found.update(float(atom) for atom in expression(size).atoms(sympy.Number) if atom.is_finite)
        elif isinstance(arg, int | float) and not isinstance(arg, bool) and arg == arg:
            found.add(float(arg))

    for current in sources(node):
        note(current.args)
        note(list(current.kwargs.values()))
    return {int(abs(number)) for number in found if abs(number) < SENTINEL}
