"""Infer what calls return, each distinct call once: a check of every node after every pass costs little more than one.

What a call returns depends on its operator, its numbers, and the dtype, sizes, strides and device of its tensors. Thirty equal
layers are one set of calls, and a pass that touched one node leaves the others as they were known.
"""
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .ir import expression, infer


class Inference:
    """Stands for `ir.infer` and remembers. Keys hold the FakeTensorMode: equal symbols of two modes are other sizes."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def __call__(self, node: fx.Node, mode: FakeTensorMode) -> Any:
        try:
            key = (node.target, mode, _described(node.args), tuple((k, _described(v)) for k, v in sorted(node.kwargs.items())))
        except _ValueMatters:
            return infer(node, mode)
        if key not in self.known:
            self.known[key] = infer(node, mode)
        return self.known[key]


class _ValueMatters(Exception):
    """A tensor whose contents are known while inferring: what a call makes of it may depend on them."""


def _described(arg: Any) -> Any:
    """A hashable stand-in for one argument: equal ones are inferred alike."""
    if isinstance(arg, fx.Node):
        return _described(arg.meta["val"])
    if isinstance(arg, Tensor):
        if getattr(arg, "constant", None) is not None:
            raise _ValueMatters
        sizes = (*arg.shape, *arg.stride(), arg.storage_offset())
        return (arg.dtype, str(arg.device), arg.layout, arg.dim(), *(expression(s) if isinstance(s, SymInt) else s for s in sizes))
    if isinstance(arg, tuple | list):
        return (list, *map(_described, arg))
    if isinstance(arg, slice):
        return (slice, *map(_described, (arg.start, arg.stop, arg.step)))
    if isinstance(arg, SymInt | SymFloat | SymBool):
        return (type(arg), expression(arg))
    return (type(arg), arg)                                            # True, 1 and 1.0 are equal, yet make other dtypes
