"""The last resort: a step that calls one ATen operator by name at run time. Always counted, and an error under --strict."""
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, where
from ..compiler.placement import Claims, Placement, Unit
from .launch import Context, Launch, Out
from .loops import DTYPES

DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format"})     # a program's buffers are on its device, row-major


@dataclass(frozen=True)
class AtenLaunch(Launch):
    """A launch with no code of its own: `symbol` says it all (its grammar: runtime/aten_step.py), `body` repeats it."""

    @property
    def symbol(self) -> str:
        return self.body


@dataclass(frozen=True)
class Aten:
    """The backend that takes what no other did, one operator at a time."""

    name: str = "aten"

    def claim(self, graph: Graph, free: Sequence[fx.Node], context: Context) -> Claims:
        found = Claims()
        for node in free:
            reason = refuse(node, context)
            if reason is not None: found.refused[node] = reason
            else:
                values = node.meta["val"]
                results = tuple((node, i) for i in range(len(values) if isinstance(values, (tuple, list)) else 1))
                found.units.append(Unit(f"aten.{_name(node)}", self.name, (node,), results, lambda c, n=node: lower(n, c)))
        return found


def refuse(node: fx.Node, context: Context) -> str | None:
    """None when the node is an ATen operator that a step can call, else the reason."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return f"{node.target} is no ATen operator"
    if node.target._schema.is_mutable: return f"{node.target} writes its arguments"
    if torch.Tag.nondeterministic_seeded in node.target.tags: return f"{node.target} is random"
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    if not values or not all(isinstance(v, torch.Tensor) and v.dtype in DTYPES for v in values):
        return f"{node.target} returns something other than tensors of the dtypes a buffer has"
    try:
        lower(node, context)
    except ValueError as error:
        return str(error)
    return None


def lower(node: fx.Node, context: Context) -> AtenLaunch:
    """The step of a node: its tensor inputs in order of first use, then its results."""
    inputs: dict[fx.Node, int] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if isinstance(value.meta["val"], torch.Tensor): return {"in": inputs.setdefault(value, len(inputs))}
            return encode(value.meta["val"])
        if isinstance(value, torch.SymInt):
            name = context.name(value)
            return name if isinstance(name, int) else {"dim": name}
        if isinstance(value, (tuple, list)): return [encode(v) for v in value]
        if isinstance(value, torch.dtype): return {"dtype": DTYPES[value]}
        if isinstance(value, float) and not math.isfinite(value): return {"float": repr(value)}
        if value is None or isinstance(value, (bool, int, float, str)): return value
        raise ValueError(f"{node.target}: the argument {value} is not data")

    arguments = [encode(a) for a in node.args]
    keywords = {k: encode(v) for k, v in sorted(node.kwargs.items()) if k not in DROPPED and v is not None}
    text = json.dumps([*arguments, *([{"kwargs": keywords}] if keywords else [])], separators=(",", ":"), allow_nan=False)
    count = len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else 1
    return AtenLaunch(f"aten_{_name(node)}", f"aten::{_name(node)} {text}", (*inputs, *map(Out, range(count))), ())


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")


@dataclass(frozen=True)
class Coverage:
    """How much of a program runs on kernels of its own."""

    steps: int
    aten_steps: int
    operators: dict[str, int] = field(default_factory=dict)              # "aten.topk.default" -> steps
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)     # operator -> backend -> why it said no, first node's
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)     # operator -> nodes, module paths, source lines


def coverage(placement: Placement) -> Coverage:
    """Counts and explains the ATen steps of a placement."""
    fallbacks = [u for u in placement.units if u.backend == "aten"]
    reasons: dict[str, dict[str, str]] = {}
    places: dict[str, dict[str, None]] = {}
    for unit in fallbacks:
        reasons.setdefault(unit.op, dict(placement.refused.get(unit.nodes[0].name, {})))
        places.setdefault(unit.op, {})[where(unit.nodes[0])] = None
    counts = Counter(u.op for u in fallbacks)
    return Coverage(len(placement.units), len(fallbacks), dict(counts), reasons, {op: tuple(p) for op, p in places.items()})


def check_strict(found: Coverage) -> None:
    """Raises CheckFailed when a step falls back to ATen; the line names each operator, where it is and why."""
    if not found.aten_steps: return
    told = [f"{count} x {op} ({', '.join(found.places[op][:3])}): "
            + (", ".join(f"{backend}: {reason}" for backend, reason in found.reasons[op].items()) or "no backend was asked")
            for op, count in found.operators.items()]
    raise CheckFailed(f"--strict: {found.aten_steps} of {found.steps} steps call ATen operators, which have no kernel: {'; '.join(told)}")
