"""Turn an exported graph into a Graph: weights become named inputs, one per storage; metadata becomes plain."""
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from ..errors import UserError
from ..ir import Graph, drop_dead_nodes
from .messages import of_torch

METADATA_ASSERTS = {torch.ops.aten._assert_tensor_metadata.default}          # what they assert, the values' own dtypes say


def lift(source: fx.Graph, program: ExportedProgram, names: list[str], outputs: Sequence[str] | None, prefix: str) -> Graph:
    """A Graph over the functional fx graph `source`, whose placeholders `program`'s signature describes."""
    tensors = _weight_tensors(program, prefix)
    graph, env = fx.Graph(), {}
    weights: dict[str, Tensor] = {}
    by_storage: dict[Any, fx.Node] = {}
    used = {node.name for node in source.nodes if node.op == "placeholder" and node.users}
    user_inputs = [s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    for node in source.nodes:                                     # weights, in the order the module declares them
        if node.op == "placeholder" and node.name in tensors:
            path, tensor = tensors[node.name]
            twin = by_storage.get(identity_of(tensor))
            if twin is None and (node.name in used or _shares(tensor, tensors, used)):
                name = _identifier(path.removeprefix(prefix), [*weights, *names])
                twin = by_storage[identity_of(tensor)] = _placeholder(graph, name, node, [_module_of(path.removeprefix(prefix))])
                weights[name] = tensor
            env[node] = twin
    placeholders = {node.name: node for node in source.nodes if node.op == "placeholder"}
    for name, exported in zip(names, user_inputs, strict=True):
        env[placeholders[exported]] = _placeholder(graph, name, placeholders[exported], [])
    for node in source.nodes:
        if node.op == "placeholder" or node.target in METADATA_ASSERTS:
            continue
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = _metadata(node, prefix)
    result = Graph(fx.GraphModule({}, graph), weights, list(names))
    result.outputs = _name_outputs(program, result, outputs)
    drop_dead_nodes(result)
    graph.lint()
    result.module.recompile()
    return result


def _weight_tensors(program: ExportedProgram, prefix: str) -> dict[str, tuple[str, Tensor]]:
    """Placeholder name -> (path in the module, real tensor) for parameters, buffers and constants."""
    found: dict[str, tuple[str, Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        path = str(spec.target)
        tensor = program.state_dict.get(path, program.constants.get(path))
        if not isinstance(tensor, Tensor):
            raise UserError(f"{path.removeprefix(prefix)} is a {type(tensor).__name__}: only tensors can be lifted out of the module")
        found[spec.arg.name] = (path, tensor.detach())
    return found


def identity_of(tensor: Tensor) -> Any:
    """Tied weights share this: storage, place in it, and how it is read."""
    if not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _shares(tensor: Tensor, tensors: Mapping[str, tuple[str, Tensor]], used: set[str]) -> bool:
    return any(identity_of(other) == identity_of(tensor) for name, (_, other) in tensors.items() if name in used)


def _identifier(path: str, taken: Sequence[str]) -> str:
    name = re.sub(r"\W", "_", path)
    name = name if name.isidentifier() else f"w_{name}"
    while name in taken:
        name += "_w"
    return name


def _module_of(path: str) -> str:
    return path.rpartition(".")[0]


def _placeholder(graph: fx.Graph, name: str, source: fx.Node, origin: list[str]) -> fx.Node:
    node = graph.placeholder(name)
    if node.name != name:                                         # fx renames builtins and keywords; keep ours
        node._rename(name)
    node.meta = {"val": source.meta["val"], "origin": [o for o in origin if o], "line": "", "passes": []}
    return node


def _metadata(node: fx.Node, prefix: str) -> dict[str, Any]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0].removeprefix(prefix.rstrip(".")).removeprefix(".") if stack else ""
    meta = {"origin": [path] if path else [], "line": _line(node.meta.get("stack_trace") or ""), "passes": []}
    return meta | ({"val": node.meta["val"]} if "val" in node.meta else {})


def _line(trace: str) -> str:
    """The innermost line of the model itself, not of torch.nn: "llama.py:104 q = self.q_proj(x)"."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n?([^\n]*)', trace)
    own = [f for f in frames if not of_torch(f[0])] or frames
    if not own:
        return ""
    path, line, code = own[-1]
    return f"{Path(path).name}:{line} {code.strip()}"


def _name_outputs(program: ExportedProgram, graph: Graph, wanted: Sequence[str] | None) -> list[str]:
    """Make the output a tuple of the tensors the module returned, and name them."""
    specs = program.graph_signature.output_specs
    results = graph.output.args[0]
    kept = []
    for spec, value in zip(specs, results, strict=True):           # type: ignore[arg-type]
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument):
            kept.append(value)
        elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
            raise UserError(f"the module returns {spec.arg}: only tensors can be outputs")
    if not kept:
        raise UserError("the module returns no tensor")
    graph.output.args = (tuple(kept),)
    names = list(wanted or ([f"output_{i}" for i in range(len(kept))] if len(kept) > 1 else ["output"]))
    if len(names) != len(kept):
        raise UserError(f"the module returns {len(kept)} tensors, {len(names)} names were given: {names}")
    return names


def place(node: fx.Node) -> str:
    """Module path and source line of a node, for messages."""
    origin = ", ".join(node.meta.get("origin") or ())
    return f"{origin or node.name} [{node.meta.get('line', '')}]"
