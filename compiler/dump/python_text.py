"""A graph as the Python a person would write: one call a line, with its type, its module paths and the passes that made it."""
import builtins
import keyword
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..ir import Graph, type_text

_TAKEN = {"torch", "operator", "math", "aten", "infc", "w", "kv", "forward", "main", "Path", *keyword.kwlist, *dir(builtins)}
"""Names the file uses itself: a node called one of them gets an underscore."""


def function_text(graph: Graph) -> str:
    """`def forward(w, kv, input_ids, ...)`: w and kv have weights and KV caches as attributes, caches are written in place.

    Returns {output name: value}. Needs torch, math, operator, and `aten`, `infc` as torch.ops.aten and torch.ops.infc.
    """
    names = _names(graph)
    lines = [f"def forward({', '.join(['w', 'kv', *(names[graph.placeholders[name]] for name in graph.inputs)])}):"]
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {names[node]} = {_call(node, names)}  # {_comment(node, graph)}")
        elif node.op == "output":
            pairs = (f"{name!r}: {names[value]}" for name, value in zip(graph.outputs, node.args[0], strict=True))
            lines.append(f"    return {{{', '.join(pairs)}}}")
    return "\n".join(lines) + "\n"


def _names(graph: Graph) -> dict[fx.Node, str]:
    used: set[str] = set()
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.target in graph.weights:
            names[node] = f"w.{node.name}"
        elif node.op == "placeholder" and node.target in graph.kv:
            names[node] = f"kv.{node.name}"
        elif node.op != "output":
            name = node.name
            while name in _TAKEN or name in used: name += "_"
            names[node] = name
            used.add(name)
    return names


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.target is operator.getitem:
        return f"{_value(node.args[0], names)}[{_value(node.args[1], names)}]"
    given = [_value(a, names) for a in node.args] + [f"{k}={_value(v, names)}" for k, v in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(given)})"


def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    home = {"_operator": "operator", "math": "math"}.get(target.__module__, "torch")
    return f"{home}.{target.__name__}"


def _value(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument as Python source."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_value(v, names) for v in value)}]"
    if isinstance(value, slice):
        return f"slice({_value(value.start, names)}, {_value(value.stop, names)}, {_value(value.step, names)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else str(value)  # torch.float32, torch.strided


def _comment(node: fx.Node, graph: Graph) -> str:
    origin = ", ".join(node.meta.get("origin") or ()) or "no module"
    return f"{type_text(node.meta.get('val'), graph.symbols)} | {origin} | by {', '.join(node.meta.get('passes') or ()) or 'capture'}"
