"""The operators of infc: each has a meaning (eager reference), a fake and a cost, found here by name."""
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import CustomOpDef


@dataclass(frozen=True)
class Cost:
    """What one call must at least do. Sizes may be symbolic, then so are these.

    What depends on data beside the sizes is a rate: attention over a paged cache costs `key_bytes` for each cached key that a
    sequence's tokens see at all, and `pair_flops` for each pair of a token and a key it sees. With a window W > 0 a token sees
    the last W keys.
    """

    flops: int | torch.SymInt
    bytes: int | torch.SymInt      # every operand read once, every result written once
    kv: int | torch.SymInt = 0     # of these bytes, those of the KV cache
    table: int | torch.SymInt = 0  # of these bytes, those of rows picked out of a table that is not read whole
    pair_flops: int | torch.SymInt = 0
    key_bytes: int | torch.SymInt = 0
    window: int = 0


@dataclass(frozen=True)
class Operator:
    """One infc:: operator. `call` is what an FX node targets."""

    name: str                      # "infc::rms_norm"
    call: torch._ops.OpOverload
    reference: Callable[..., Any]  # plain eager code, the judge of every kernel
    cost: Callable[..., Cost]


_OPERATORS: dict[str, Operator] = {}


def operator(name: str, cost: Callable[..., Cost], mutates: Iterable[str] = ()) -> Callable[[Callable], CustomOpDef]:
    """Register a reference as a torch.library operator; `cost` takes the same arguments as the reference."""

    def register(reference: Callable) -> CustomOpDef:
        definition = torch.library.custom_op(name, reference, mutates_args=tuple(mutates))
        _OPERATORS[name] = Operator(name, definition._opoverload, reference, cost)
        return definition

    return register


def nbytes(tensor: Tensor | None) -> int | torch.SymInt:
    """Bytes of a tensor; 0 for an absent one."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def out_bytes(shape: Iterable[int], dtype: torch.dtype) -> int | torch.SymInt:
    """Bytes of a contiguous result."""
    size = dtype.itemsize
    for dim in shape: size = size * dim
    return size


def by_name(name: str) -> Operator:
    """The operator called `name`, e.g. "infc::linear". KeyError when there is none."""
    return _OPERATORS[name]


def names() -> list[str]:
    """Every registered operator, sorted."""
    return sorted(_OPERATORS)


def operator_of(node: fx.Node) -> Operator | None:
    """The infc:: operator a node calls, or None."""
    target = node.target
    return _OPERATORS.get(target.name()) if isinstance(target, torch._ops.OpOverload) else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of an operator call by its schema name, defaults filled in: no reading by position."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload): raise TypeError(f"{node.format_node()} calls no operator")
    found: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args): found[argument.name] = node.args[position]
        elif argument.name in node.kwargs: found[argument.name] = node.kwargs[argument.name]
        else: found[argument.name] = argument.default_value
    return found


def cost_of(node: fx.Node) -> Cost:
    """Cost of an infc:: node, from the fake tensors of its arguments. KeyError for any other node."""
    found = operator_of(node)
    if found is None: raise KeyError(f"{node.target} is no infc:: operator")
    values = {name: fx.map_arg(value, lambda n: n.meta["val"]) for name, value in arguments(node).items()}
    return found.cost(**values)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are taken in: fp64 stays, everything narrower goes to fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
