"""A program on the operators' own meaning: each step computed by eager PyTorch in the very buffers its kernel would use.

What a step reads, where it writes and when stay as they are; only the arithmetic is another. So a program that is right with
reference operators and wrong with kernels has a bad kernel, and one that is wrong with both has a bad graph or a bad memory plan.
"""
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import SymInt, Tensor, fx
from torch._ops import OpOverload

from ..compiler.contracts import row_error
from ..compiler.ir import Graph
from ..compiler.placement import Unit, Value, is_alias, source_of
from ..runtime.program import Program
from .launch import Arg, Context, Launch, Out, Scratch, Weight, launches_of
from .program import DTYPES

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class View(Protocol):
    """A buffer at its live shape: runtime.aten_step.View."""

    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Caches(Protocol):
    """KV caches that lie otherwise than operators mean them: backends.cpu.caches.Caches."""

    def read(self, name: str, like: Tensor) -> Tensor: ...
    def write(self, name: str, cache: Tensor) -> None: ...


class Table(Protocol):
    """What is asked of a step table: runtime.table.StepTable."""

    program: Program

    @property
    def bytes(self) -> int: ...
    def close(self) -> None: ...
    def sizes(self, dims: Mapping[str, int]) -> Mapping[str, int]: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def run_step(self, index: int, dims: Mapping[str, int]) -> None: ...
    def views(self, index: int, dims: Mapping[str, int]) -> Sequence[View]: ...


@dataclass(frozen=True)
class Bound:
    """The units behind one program's steps, in the same order."""

    graph: Graph
    units: Sequence[Unit]
    context: Context


@dataclass
class ReferenceTable:
    """Runs in place of a step table: the kernels of a unit where `by_kernel(unit)` says so, else its reference operators.

    An ATen step is an operator already, and runs as the step it is. Units are counted in their order, as `bound` has them.

    Where `watch` is a unit, its kernels run and `differences` gets (worst error of the kernel's results against the reference
    on the same inputs, relative to each row's largest value) each time.
    """

    table: Table
    bound: Bound
    by_kernel: Callable[[int], bool]
    caches: Caches | None = None           # where they lie otherwise than operators mean them
    watch: int | None = None
    differences: list[float] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Of the table itself, for the cache's budget."""
        return self.table.bytes

    @property
    def program(self) -> Program:
        return self.table.program

    @cached_property
    def _launches(self) -> list[tuple[Launch, ...]]:
        """Of each unit, its steps as they were lowered and chosen."""
        chosen = self.program.chosen()
        pairs = zip(self.bound.units, self._firsts, strict=True)
        return [launches_of(unit, self.bound.context, chosen.get(first)) for unit, first in pairs]

    @cached_property
    def _firsts(self) -> list[int]:
        """Of each unit, its first step."""
        return [i for i, step in enumerate(self.program.steps) if not step.part]

    def close(self) -> None:
        """Give the table back."""
        self.table.close()

    def run(self, dims: Mapping[str, int]) -> None:
        """Every unit's steps once. dims: live sizes by name."""
        dims = self.table.sizes(dims)
        self.table.begin()
        with torch.no_grad():
            for index in range(len(self.bound.units)):
                if index == self.watch:
                    self._compare(index, dims)
                elif self.by_kernel(index) or self.bound.units[index].backend == "aten":
                    self._kernels(index, dims)
                else:
                    self._reference(index, dims)
        self.table.end()

    def steps_of(self, unit: int) -> range:
        """The steps of the program that are one unit's: its launches."""
        return range(self._firsts[unit], self._firsts[unit] + len(self._launches[unit]))

    def _kernels(self, index: int, dims: Mapping[str, int]) -> None:
        for step in self.steps_of(index): self.table.run_step(step, dims)

    def _reference(self, index: int, dims: Mapping[str, int]) -> None:
        arguments = self._arguments(index, dims)
        for out, value in self._results(index, arguments, dims):
            out.copy_(value)
        if self.caches and any(_writes(node) for node in self.bound.units[index].nodes):
            for arg, cache in arguments:
                if name := self._cache(arg): self.caches.write(name, cache)

    def _compare(self, index: int, dims: Mapping[str, int]) -> None:
        """Run the kernel, and the reference on copies of what it read; caches and results are compared."""
        given = self._arguments(index, dims)
        copies = [(arg, tensor.clone()) for arg, tensor in given]
        wanted = self._results(index, copies, dims)
        self._kernels(index, dims)
        error = 0.0
        found = self._arguments(index, dims)
        for (arg, now), (_, then) in zip(found, copies, strict=True):
            if self._cache(arg): error = max(error, row_error(now, then))
        outs = [tensor for arg, tensor in found if isinstance(arg, Out)]
        error = max([error, *(row_error(out, value) for out, (_, value) in zip(outs, wanted, strict=True))])
        self.differences.append(error)

    def _arguments(self, index: int, dims: Mapping[str, int]) -> list[tuple[Arg, Tensor]]:
        """What the step's kernel is given, beside what it is in the graph. Weights lie packed there: those come from the graph."""
        pairs = [pair for i, launch in enumerate(self._launches[index], self._firsts[index])
                 for pair in zip(launch.args, self.table.views(i, dims), strict=True)]
        return [(arg, self._tensor(arg, view)) for arg, view in pairs
                if not isinstance(arg, (Scratch, Weight)) and not self._is_weight(arg)]

    def _tensor(self, arg: Arg, view: View) -> Tensor:
        """The memory itself, or a copy of a cache that lies otherwise than operators mean it."""
        name = self._cache(arg)
        if not self.caches or not name: return tensor(view)
        return self.caches.read(name, torch.empty(view.shape, dtype=_TORCH[view.dtype], device="meta"))

    def _cache(self, arg: Arg) -> str:
        """The name of the KV buffer that an argument is, if it is one."""
        name = source_of(arg)[0].name if isinstance(arg, fx.Node) else ""
        return name if name in self.bound.graph.kv else ""

    def _is_weight(self, arg: Arg) -> bool:
        return isinstance(arg, fx.Node) and source_of(arg)[0].name in self.bound.graph.weights

    def _results(self, index: int, arguments: Sequence[tuple[Arg, Tensor]], dims: Mapping[str, int]) -> list[tuple[Tensor, Tensor]]:
        """(where a result goes, what it is) for each result of the step; caches are written on the way."""
        unit = self.bound.units[index]
        known = {source_of(arg): tensor for arg, tensor in arguments if isinstance(arg, fx.Node)}
        run = _Evaluation(self.bound, known, dims)
        if not unit.results:
            for node in unit.nodes: run.node(node)         # for its effect: kv_write
        found = [(tensor, run.value(unit.results[arg.index])) for arg, tensor in arguments if isinstance(arg, Out)]
        return [(out, value.reshape(out.shape).to(out.dtype, copy=True)) for out, value in found]


@dataclass
class _Evaluation:
    """Values of one unit's nodes, computed from what the step was given."""

    bound: Bound
    known: dict[Value, Tensor]
    dims: Mapping[str, int]
    done: dict[fx.Node, Any] = field(default_factory=dict)

    def value(self, value: Value) -> Tensor:
        node, index = value
        found = self.node(node)
        return found[index] if isinstance(found, (tuple, list)) else found

    def node(self, node: fx.Node) -> Any:
        """Given, a weight, a size, or computed from its own arguments."""
        if node in self.done: return self.done[node]
        if (node, 0) in self.known and not isinstance(node.meta["val"], (tuple, list)):
            found: Any = self.known[node, 0].reshape(self._shape(node))
        elif is_alias(node) and isinstance(node.meta["val"], Tensor) and source_of(node) in self.known:
            found = self.known[source_of(node)].reshape(self._shape(node))
        elif node.name in self.bound.graph.weights:
            found = self.bound.graph.weights[node.name]
        elif not isinstance(node.meta["val"], (Tensor, tuple, list, type(None))):
            found = self._size(node.meta["val"])
        else:
            args, kwargs = self._filled(node.args), self._filled(node.kwargs)
            found = node.target(*args, **kwargs)           # type: ignore[operator]
        self.done[node] = found
        return found

    def _filled(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node): return self.node(arg)
        if isinstance(arg, SymInt): return self._size(arg)
        if isinstance(arg, (tuple, list)): return type(arg)(map(self._filled, arg))
        return {key: self._filled(value) for key, value in arg.items()} if isinstance(arg, dict) else arg

    def _shape(self, node: fx.Node) -> list[int]:
        return [self._size(size) for size in node.meta["val"].shape]

    def _size(self, size: Any) -> int:
        named = self.bound.context.name(size)
        if isinstance(named, int): return named
        base, _, plus = named.partition("+")
        return self.dims[base] + int(plus or 0)


def install(
    executor: Any, bounds: Mapping[str, Bound], by_kernel: Callable[[int], bool], caches: Caches | None = None,
) -> dict[str, ReferenceTable]:
    """Let a runtime's executor run reference tables. bounds: by program name. caches: where they lie otherwise than operators mean them.
    Returns the tables, by the same names, as they are made."""
    made, plain = dict[str, ReferenceTable](), executor.table

    def table(name: str) -> ReferenceTable:
        made[name] = ReferenceTable(plain(name), bounds[name], by_kernel, caches)
        return made[name]

    executor.table = table
    return made


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def tensor(view: View) -> Tensor:
    """A buffer's live elements, as a tensor over the same memory."""
    count = 1
    for extent in view.shape: count *= extent
    dtype = _TORCH[view.dtype]
    if count == 0: return torch.empty(view.shape, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(view.address)
    return torch.frombuffer(memory, dtype=dtype).reshape(view.shape)
