"""What a step must move and multiply, and how long that takes on a machine whose limits are known."""
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..runtime.program import Program
from .ops.registry import arguments, operator_of
from .placement import Unit


def concrete(fake: Any, maximum: Callable[[Any], int]) -> Any:
    """A meta tensor of the fake's dtype, its symbolic sizes replaced by `maximum(size)`. Tuples are mapped."""
    if isinstance(fake, (tuple, list)):
        return tuple(concrete(f, maximum) for f in fake)
    if not isinstance(fake, torch.Tensor):
        return fake
    return torch.empty([maximum(size) for size in fake.shape], dtype=fake.dtype, device="meta")


def unit_cost(unit: Unit, context: Any) -> tuple[int, int]:
    """flops and bytes of one step at the bucket's maxima: an infc operator's declared cost, else each input read once,
    each result written once, and one flop per element of every node."""
    if len(unit.nodes) == 1 and (operator := operator_of(unit.nodes[0])) is not None:
        given = {name: fx.map_arg(value, lambda n: concrete(n.meta["val"], context.maximum))
                 for name, value in arguments(unit.nodes[0]).items()}
        cost = operator.cost(**given)
        return int(cost.flops), int(cost.bytes)
    inside = set(unit.nodes)
    read = {arg for node in unit.nodes for arg in node.all_input_nodes if arg not in inside}
    moved = sum(_nbytes(concrete(node.meta["val"], context.maximum)) for node in [*read, *(n for n, _ in unit.results)])
    return sum(_numel(concrete(node.meta["val"], context.maximum)) for node in unit.nodes), moved


def _nbytes(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(_nbytes(v) for v in value)
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _numel(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(_numel(v) for v in value)
    return value.numel() if isinstance(value, torch.Tensor) else 0


def decode_bytes(program: Program, kv_bytes_per_token: int, context: int) -> int:
    """Bytes one decode step of one sequence must read: every weight once, and the KV of `context` tokens."""
    weights = {buffer.tensor: buffer.bytes for buffer in program.buffers if buffer.kind == "weight"}
    return sum(weights.values()) + kv_bytes_per_token * context
