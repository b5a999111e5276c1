"""Triton kernels by operator. Each says which calls it refuses, and makes launches of the others; it launches nothing itself.

Triton decides when it is imported whether kernels are compiled or interpreted (TRITON_INTERPRET=1), for the whole process. Lowering
works either way; code is built in processes of its own (build.py), and only a process that was started for it interprets (interpret.py).
"""
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import kernels as package


@dataclass(frozen=True)
class Work:
    """What one program of a launch does, padding included: what ranking.py needs beside the compiler's report.

    Bytes: `cold` come from memory (weights, keys), `warm` were just written or are read by many (rows of x, parts of a split), `stores`
    are written; `ahead`, of the loads, are on their way while it computes. flops: of its products. rounds: of its loop.
    """

    cold: int = 0
    warm: int = 0
    stores: int = 0
    ahead: int = 0
    flops: int = 0
    rounds: int = 1


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a grid of programs over tensors and numbers; constants are compiled in.

    args follow the kernel's own arguments that are not constants: tensors, ints (i32, or i64 past 2**31), floats (fp32), and None, which
    is compiled in.
    spills_ok: its registers may spill to memory; of any other kernel the build refuses that. work: where a call has several cuts.
    """

    function: Any                        # what @triton.jit made
    grid: tuple[int, ...]
    args: tuple[Tensor | int | float | None, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    spills_ok: bool = False
    work: Work | None = None


Cut = TypeVar("Cut")


@dataclass
class Emit:
    """Collects the launches of one call, and the scratch tensors they share. pick: of the cuts a kernel offers, the one to lower."""

    pick: int = 0
    offered: tuple[str, ...] = ()
    launches: list[Launch] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)

    def __call__(self, function: Any, *, grid: tuple[int, ...], args: Sequence[Tensor | int | float | None], warps: int = 4,
                 stages: int = 3, spills_ok: bool = False, work: Work | None = None, **constants: Any) -> None:
        """One more launch. A grid with a 0 in it launches nothing. What stands beside the rule's cut may never spill."""
        if all(grid): self.launches.append(Launch(function, grid, tuple(args), constants, warps, stages, spills_ok and not self.pick, work))

    def choice(self, cuts: Sequence[Cut]) -> Cut:
        """The cut to lower, of several ways to cut the work of a call: the rule's first, then what may be faster. A call offers once."""
        if self.offered: raise ValueError("a call offers its cuts once")
        unique = tuple(dict.fromkeys(cuts))
        self.offered = tuple(map(str, unique))
        return unique[self.pick]

    def empty(self, *shape: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Scratch that lives during this call: partial sums of a split."""
        self.scratch.append(like.new_empty(shape, dtype=dtype))
        return self.scratch[-1]


@dataclass(frozen=True)
class Kernel:
    """The kernels of one operator. `refuse` and `lower` take the operator's arguments by name, tensors with concrete sizes."""

    op: str                              # "infc::rms_norm"
    call: torch._ops.OpOverload          # what it means
    refuse: Callable[..., str | None]
    lower: Callable[..., None]           # lower(emit, *results, **arguments)


_table: dict[str, Kernel] = {}


def kernel(op: Any, *, refuse: Callable[..., str | None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register `lower(emit, *results, **arguments)` for an operator; results are tensors to write, in the operator's order."""
    def register(lower: Callable[..., None]) -> Callable[..., None]:
        call = getattr(op, "_opoverload", op)
        name = str(call.name())
        if name in _table: raise ValueError(f"{name} has two kernels")
        _table[name] = Kernel(name, call, refuse, lower)
        return lower

    return register


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel, by operator name."""
    for module in pkgutil.iter_modules(package.__path__): importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_table)
