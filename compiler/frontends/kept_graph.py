"""A captured graph, kept: tracing 1700 nodes takes torch.export 8 s, reading them back 0.3 s (30 Llama layers, 2 cores, torch 2.13).

Kept are operators, arguments and where in the module each weight lies; weights and types are not. So what is read back is inferred anew,
must have the very text it had, and is compared with the module on sample inputs like any other capture.
"""
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .. import kept
from ..inference import Inference
from ..ir import DTYPE_NAMES, SIZE_FUNCTIONS, Graph, expression, fake_propagate, target_name, text
from ..tokens import new_dims
from .lift import identity_of

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FUNCTIONS = {target_name(function): function for function in (*SIZE_FUNCTIONS, operator.getitem)}
_WORDS = {str(word).removeprefix("torch."): word for word in (
    torch.strided, torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)}

WHAT = "captured graphs"


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One call, or the output."""

    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    origin: list[str]
    line: str


class _Input(msgspec.Struct, frozen=True):
    """A placeholder: path in the module for a weight, else dtype and sizes, dynamic ones by name."""

    name: str
    origin: list[str]
    path: str = ""
    dtype: str = ""
    shape: list[int | str] = []


class _Captured(kept.Entry, frozen=True):
    placeholders: list[_Input]
    lines: list[_Line]
    outputs: list[str]
    text: str


class _Other(Exception):
    """A graph that cannot be spelled as plain data, or is no longer what it was."""


@dataclass(frozen=True)
class KeptGraph:
    """The place of one model's captured graph. key: of the model's content and of what captures it. progress: hears when it is taken."""

    cache: kept.Kept
    key: str
    progress: Callable[[str], None]

    def take(self, module: nn.Module, hints: Mapping[str, int]) -> Graph | None:
        """The graph over the module's own weights; None where none is kept. hints: a size for each dynamic dim."""
        found = self.cache.take(self.key, _Captured, WHAT)
        if found is None: return None
        try:
            graph = _read(found, module, hints)
            self.progress(f"read back the graph captured at {found.made}")
            return graph
        except _Other as why:
            self.cache.note(f"the captured graph that is kept is of no use, capturing again: {why}")
            return None

    def keep(self, graph: Graph, module: nn.Module) -> None:
        """Keep a graph, if plain data can hold it."""
        try:
            entry = _written(graph, module)
        except _Other:
            return                                       # a constant that is nowhere in the module: captured anew each time
        self.cache.keep(self.key, entry, WHAT)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


# ---- writing

def _written(graph: Graph, module: nn.Module) -> _Captured:
    paths = {identity_of(tensor): path for path, tensor in reversed(_tensors(module).items())}
    placeholders = []
    for name, node in graph.placeholders.items():
        origin, weight = node.meta["origin"], graph.weights.get(name)
        if weight is None:
            val = node.meta["val"]
            shape: list[Any] = [size if isinstance(size, int) else graph.symbols.get(str(expression(size))) for size in val.shape]
            if None in shape: raise _Other
            placeholders.append(_Input(name, origin, dtype=DTYPE_NAMES[val.dtype], shape=shape))
        elif identity_of(weight) not in paths: raise _Other
        else: placeholders.append(_Input(name, origin, paths[identity_of(weight)]))
    lines = [_Line(node.name, _target(node), [_plain(a) for a in node.args], {k: _plain(v) for k, v in node.kwargs.items()},
                   node.meta.get("origin") or [], node.meta.get("line") or "") for node in graph.nodes if node.op != "placeholder"]
    return _Captured(placeholders=placeholders, lines=lines, outputs=graph.outputs, text=text(graph))


def _target(node: fx.Node) -> str:
    if node.op == "output": return "output"
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    if _FUNCTIONS.get(target_name(target)) is target: return target_name(target)
    raise _Other


def _plain(arg: Any) -> Any:
    if isinstance(arg, (bool, int, float, str)) or arg is None: return arg
    if isinstance(arg, list): return [_plain(a) for a in arg]
    if isinstance(arg, fx.Node): return {"node": arg.name}
    if isinstance(arg, tuple): return {"tuple": [_plain(a) for a in arg]}
    if isinstance(arg, slice): return {"slice": [_plain(a) for a in (arg.start, arg.stop, arg.step)]}
    if arg in DTYPE_NAMES: return {"dtype": DTYPE_NAMES[arg]}
    if isinstance(arg, torch.device): return {"device": str(arg)}
    word = str(arg).removeprefix("torch.")
    if word in _WORDS: return {"word": word}
    raise _Other


# ---- reading

def _read(found: _Captured, module: nn.Module, hints: Mapping[str, int]) -> Graph:
    tensors, mode, graph = _tensors(module), FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
    dims = dict(zip(hints, new_dims(mode, **hints), strict=True))
    nodes, weights, inputs = dict[str, fx.Node](), dict[str, Tensor](), list[str]()
    for given in found.placeholders:
        node = nodes[given.name] = _named(graph.placeholder(given.name), given.name)
        if given.path and given.path not in tensors: raise _Other(f"the module has no {given.path}")
        if given.path:
            weights[given.name] = tensors[given.path].detach()
            val = mode.from_tensor(weights[given.name], static_shapes=True)
        else:
            inputs.append(given.name)
            with mode: val = torch.empty([dims[s] if isinstance(s, str) else s for s in given.shape], dtype=_DTYPES[given.dtype])
        node.meta = {"val": val, "origin": given.origin, "line": "", "passes": []}
    for line in found.lines:
        args, kwargs = tuple(_value(a, nodes) for a in line.args), {k: _value(v, nodes) for k, v in line.kwargs.items()}
        node = graph.output(args[0]) if line.target == "output" else graph.create_node(
            "call_function", _function(line.target), args, kwargs, line.name)
        nodes[line.name] = _named(node, line.name)
        node.meta = {"origin": line.origin, "line": line.line, "passes": []}
    symbols = {str(expression(size)): name for name, size in dims.items()}
    result = Graph(_LazyGraphModule({}, graph), weights, inputs, found.outputs, symbols)
    fake_propagate(result, how=Inference())
    if text(result) != found.text: raise _Other("its types are inferred otherwise than they were")
    return result


def _named(node: fx.Node, name: str) -> fx.Node:
    if node.name != name: node._rename(name)
    return node


def _function(target: str) -> Any:
    if target in _FUNCTIONS: return _FUNCTIONS[target]
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def _value(arg: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(arg, list): return [_value(a, nodes) for a in arg]
    if not isinstance(arg, dict): return arg
    [(kind, held)] = arg.items()
    if kind == "node": return nodes[held]
    if kind == "dtype": return _DTYPES[held]
    if kind == "device": return torch.device(held)
    if kind == "word": return _WORDS[held]
    values: Sequence[Any] = [_value(a, nodes) for a in held]
    return slice(*values) if kind == "slice" else tuple(values)
