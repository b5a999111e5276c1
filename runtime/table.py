"""The step table: a Program's steps as addresses, checked against what was allocated, ready for one call."""
import ctypes
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING

from .errors import RuntimeFault
from .library import Library
from .program import Buffer, Program, Step

if TYPE_CHECKING:
    from .aten_step import View

ATEN = "aten::"
"""How the symbol of a step begins that no kernel was made for: it calls torch, and is counted."""


class _Step(ctypes.Structure):
    _fields_ = [("fn", ctypes.c_void_p), ("buf", ctypes.c_void_p)]


class StepTable:
    """One bucket, ready to run. The steps between two ATen steps, usually all of them, are one call of the library."""

    def __init__(self, program: Program, symbols: Mapping[str, str], library: Library, address: Callable[[Buffer], int]) -> None:
        """symbols: of each kernel hash. address: where a buffer lies. Raises RuntimeFault where the program does not fit."""
        self.program = program
        self._library = library
        self._addresses = [address(b) for b in program.buffers]
        self._arguments = (ctypes.c_void_p * max(1, sum(len(s.args) for s in program.steps)))()
        self._steps = (_Step * max(1, len(program.steps)))()
        self._runs: list[tuple[int, int, str]] = []        # (first step, steps, ATen symbol or "")
        functions: dict[str, int] = {}
        at = 0
        for i, step in enumerate(program.steps):
            symbol = symbols.get(step.kernel, "")
            if symbol.startswith(ATEN):
                self._runs.append((i, 1, symbol))
                continue
            if step.kernel not in functions:
                functions[step.kernel] = self._function(symbol, step)
            self._steps[i].fn = functions[step.kernel]
            self._steps[i].buf = ctypes.addressof(self._arguments) + at * ctypes.sizeof(ctypes.c_void_p)
            for j in step.args:
                self._arguments[at] = self._addresses[j]
                at += 1
            if self._runs and not self._runs[-1][2]:
                self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + 1, "")
            else:
                self._runs.append((i, 1, ""))

    @property
    def bytes(self) -> int:
        """Memory of the table itself."""
        return ctypes.sizeof(self._steps) + ctypes.sizeof(self._arguments)

    def sizes(self, dims: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes kernels see: the live ones."""
        return dims

    def begin(self) -> None:
        """Nothing: inputs and outputs lie where kernels find them. For whoever runs steps one by one."""

    end = begin

    def close(self) -> None:
        """Nothing: its memory goes with it."""

    def run(self, dims: Mapping[str, int]) -> None:
        """Run every step once. dims: live sizes by name."""
        live = self._live(dims)
        for first, count, symbol in self._runs:
            if symbol:
                self._call_aten(first, symbol, dims)
            else:
                self._library.run(ctypes.addressof(self._steps) + first * ctypes.sizeof(_Step), count, live, None)

    def run_step(self, index: int, dims: Mapping[str, int]) -> None:
        """Run one step alone, for whoever looks for the one that is wrong."""
        symbol = next(symbol for first, count, symbol in self._runs if first <= index < first + count)
        if symbol:
            self._call_aten(index, symbol, dims)
        else:
            self._library.run(ctypes.addressof(self._steps) + index * ctypes.sizeof(_Step), 1, self._live(dims), None)

    def views(self, index: int, dims: Mapping[str, int]) -> "list[View]":
        """The buffers one step reads and writes, at their live shapes, in its kernel's order."""
        return [live_view(self.program.buffers[j], self._addresses[j], dims) for j in self.program.steps[index].args]

    def profile(self, dims: Mapping[str, int]) -> list[int]:
        """Run every step once; nanoseconds of each, the barrier after it included."""
        live, times = self._live(dims), list[int]()
        for first, count, symbol in self._runs:
            if symbol:
                start = perf_counter_ns()
                self._call_aten(first, symbol, dims)
                times.append(perf_counter_ns() - start)
            else:
                stamps = (ctypes.c_uint64 * (count + 1))()
                self._library.run(ctypes.addressof(self._steps) + first * ctypes.sizeof(_Step), count, live, stamps)
                times += [stamps[i + 1] - stamps[i] for i in range(count)]
        return times

    def _live(self, dims: Mapping[str, int]) -> "ctypes.Array[ctypes.c_int64]":
        return (ctypes.c_int64 * len(self.program.dims))(*[dims[name] for name in self.program.dims])

    def _call_aten(self, index: int, symbol: str, dims: Mapping[str, int]) -> None:
        from . import aten_step  # imports torch when it runs

        aten_step.call(symbol, self.views(index, dims), dims)

    def _function(self, symbol: str, step: Step) -> int:
        found = self._library.symbol(symbol) if symbol else None
        if not found:
            raise self._misfit(f"{step.op} needs the kernel {step.kernel or '(none)'}, which its code does not have")
        return found

    def _misfit(self, what: str) -> RuntimeFault:
        return RuntimeFault(f"{self._library.where}: {self.program.name}: {what}; compile it again")


def live_view(b: Buffer, address: int, dims: Mapping[str, int]) -> "View":
    """A buffer at its live shape."""
    from .aten_step import View, size

    return View(address, b.dtype, tuple(n if isinstance(n, int) else size(n, dims) for n in b.shape))
