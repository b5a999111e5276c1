"""Runs an operator's Triton kernels on CPU tensors through Triton's interpreter: slow, exact in its indexing, needs no GPU."""
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...compiler.errors import UserError
from .registry import Emit, kernels


def picks(op: str, **arguments: Any) -> range:
    """Which cuts a call offers."""
    return range(max(1, len(_lowered(op, Emit(), arguments)[0].offered)))


def run(op: str, pick: int = 0, **arguments: Any) -> Any:
    """The results of one call in one of its cuts, each of whose elements was poisoned before.

    ValueError with the reason where the kernel refuses it.
    """
    check_interpreting()
    emit, results = _lowered(op, Emit(pick), arguments)
    for scratch in emit.scratch: poison(scratch)
    with np.errstate(all="ignore"):                          # inf and nan mean no harm
        for launch in emit.launches: launch.function[launch.grid](*launch.args, **launch.constants)
    return results[0] if len(results) == 1 else tuple(results)


def _lowered(op: str, emit: Emit, arguments: dict[str, Any]) -> tuple[Emit, list[Tensor]]:
    found = kernels()[op]
    if reason := found.refuse(**arguments): raise ValueError(f"{op}: {reason}")
    shapes = found.call(**{name: _meta(value) for name, value in arguments.items()})
    results = [] if shapes is None else [poisoned(s) for s in (shapes if isinstance(shapes, tuple | list) else [shapes])]
    found.lower(emit, *results, **arguments)
    return emit, results


def _meta(value: Any) -> Any:
    if isinstance(value, list): return [_meta(v) for v in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def interprets() -> bool:
    """Does this process interpret kernels?"""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def check_interpreting() -> None:
    """UserError unless this process interprets kernels."""
    if not interprets():
        raise UserError("Triton compiles kernels in this process: start it with TRITON_INTERPRET=1 to have them interpreted")
    _mend_indices()


@cache
def _mend_indices() -> None:
    """Triton 3.6 makes an index of an array of one number by int(), which NumPy refuses from 2.4 on; 3.7 drops the axis first."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."): return
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def poisoned(like: Tensor) -> Tensor:
    """A CPU tensor of this shape that holds nothing sensible."""
    return poison(torch.empty(tuple(like.shape), dtype=like.dtype))


def poison(tensor: Tensor) -> Tensor:
    """Fill with NaN, or the least number of a whole type: what is read without having been written shows."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min if tensor.dtype != torch.bool else True)
