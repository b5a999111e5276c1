"""Triton's interpreter as a GPU: a whole program's launches, grids, buffers and padding, run on a CPU in a process that interprets."""
import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ...compiler.errors import CheckFailed
from ...runtime.device import Launch
from ...runtime.program import Program
from ..host_device import HostDevice
from ..launch import candidates_of
from ..reference import Bound
from . import registry
from .backend import GpuLaunch
from .interpret import check_interpreting, interprets


class InterpreterDevice(HostDevice):
    """Runs the kernels of a store, each at the addresses and sizes a program gives it: never those it was lowered with."""

    name = "Triton's interpreter"

    def __init__(self, arch: str, made: Mapping[str, registry.Launch]) -> None:
        """made: a launch of each kernel, by its hash. UserError unless this process interprets kernels."""
        check_interpreting()
        super().__init__(arch)
        self._made = made

    def launch(self, launch: Launch) -> None:
        """Run a grid of programs, one after the other."""
        made = self._made[launch.kernel.hash]
        given, args = list(launch.params), list[Any]()
        for value in made.args:
            if value is None: args.append(None)
            elif isinstance(value, torch.Tensor): args.append(self._tensor(int(given.pop(0)), value.dtype))
            else:
                scalar = given.pop(0)
                if type(scalar) is not type(value):
                    raise CheckFailed(f"kernel {launch.kernel.name} takes {value!r}, and is given {scalar!r}")
                args.append(scalar)
        if given: raise CheckFailed(f"kernel {launch.kernel.name} is given {len(given)} values too many")
        with np.errstate(all="ignore"): made.function[launch.grid](*args, **made.constants)

    def _tensor(self, address: int, dtype: torch.dtype) -> torch.Tensor:
        """What lies from an address to the end of its region."""
        count = self.room(address, 1) // dtype.itemsize
        return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def interpreter(arch: str, programs: Iterable[Program], bounds: Mapping[str, Bound]) -> InterpreterDevice:
    """The device for the programs of a compile. bounds: by program name."""
    made = dict[str, registry.Launch]()
    for program in programs:
        bound, ways = bounds[program.name], {call.step: choice for choice in program.choices for call in choice.calls}
        firsts = [at for at, step in enumerate(program.steps) if not step.part]
        for unit, first in zip(bound.units, firsts, strict=True):
            known = candidates_of(unit, bound.context)
            if first in ways: pairs = [(c.steps, known[c.name]) for c in ways[first].candidates]
            else: pairs = [(program.steps[first:first + len(steps)], steps) for steps in known.values()][:1]
            made.update({step.kernel: launch.made for steps, launches in pairs for step, launch in zip(steps, launches, strict=True)
                         if isinstance(launch, GpuLaunch) and launch.made})
    return InterpreterDevice(arch, made)


__all__ = ["InterpreterDevice", "interpreter", "interprets"]
