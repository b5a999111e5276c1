"""Capture a PyTorch module as one Graph: exported with dynamic sizes, weights lifted to inputs, compared with the module.

Every frontend ends here. The graph is functional, holds no submodule and no attribute, and computes what the module
computes at sizes other than those it was exported with: that is checked, not assumed.
"""
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from ..errors import CheckFailed, UserError
from ..ir import Graph, drop_dead_nodes, verify
from . import composites
from .samples import TensorSamples
from .specialized import explain

aten = torch.ops.aten

Dynamic = Mapping[str, Mapping[int, str]]
"""input name -> axis -> dim name, e.g. {"input_ids": {0: "B", 1: "S"}}"""

EXPORT_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, LookupError, AssertionError, NameError)

METADATA_ASSERTS = {aten._assert_tensor_metadata.default}         # what they assert, the values' own dtypes say


def capture_module(module: nn.Module, inputs: Sequence[Tensor], dynamic: Dynamic | None = None, *,
                   outputs: Sequence[str] | None = None, meta: Mapping[str, Any] | None = None,
                   samples: Callable[..., Any] | None = None, prefix: str = "") -> Graph:
    """The module as a Graph in the captured dialect.

    `inputs` are examples: each dynamic axis at least 2, and no two dims equal (a size of 0 or 1, or equal sizes, would be
    baked in). `prefix` is cut off module paths and weight names (a wrapper's attribute).
    Raises UserError for a module that cannot be captured as it is (training mode, data-dependent control flow, a dynamic
    size the code fixes), CheckFailed when graph and module disagree.
    """
    dynamic = dynamic or {}
    inputs = tuple(inputs)
    names = input_names(module, len(inputs))
    _check_request(module, names, inputs, dynamic)
    program = _export(module, names, inputs, dynamic)
    graph = _lift(program, _functional(program), names, outputs, prefix)
    graph.symbols = _symbols(graph, dynamic)
    graph.meta = dict(meta or {})
    by_index = {i: dynamic[name] for i, name in enumerate(names) if name in dynamic}
    graph.sample_inputs = samples or TensorSamples(inputs, by_index)
    _check_deterministic(graph)
    verify(graph, "captured")
    compare(graph, module)
    return graph


def input_names(module: nn.Module, count: int) -> list[str]:
    """Names of the module's first `count` positional parameters."""
    named: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            named += [f"{parameter.name}_{i}" for i in range(count - len(named))]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            named.append(parameter.name)
    if len(named) < count:
        raise UserError(f"{type(module).__name__}.forward takes {len(named)} inputs, {count} were given")
    return named[:count]


# ---------------------------------------------------------------------------------------------------------------- checks

def _check_request(module: nn.Module, names: list[str], inputs: tuple[Tensor, ...], dynamic: Dynamic) -> None:
    training = [(name, type(child).__name__) for name, child in module.named_modules() if child.training]
    if training:
        name, kind = next(((n, k) for n, k in training if "Dropout" in k or "BatchNorm" in k), training[0])
        raise UserError(f"{name or 'the module'} ({kind}) is in training mode: call .eval() on the model before compiling it")
    unknown = set(dynamic) - set(names)
    if unknown:
        raise UserError(f"dynamic names {sorted(unknown)}, the inputs are {names}")
    sizes: dict[str, int] = {}
    for name, x in zip(names, inputs, strict=True):
        for axis, dim in dynamic.get(name, {}).items():
            if not -x.dim() <= axis < x.dim():
                raise UserError(f"dynamic axis {axis} of {name}: it has {x.dim()} axes")
            if sizes.setdefault(dim, x.shape[axis]) != x.shape[axis]:
                raise UserError(f"dim {dim} is {sizes[dim]} and {x.shape[axis]} in the example inputs")
    for dim, size in sizes.items():
        if size < 2:
            raise UserError(f"dim {dim} is {size} in the example inputs: give 2 or more, or that size would be baked in")
        twins = [other for other, n in sizes.items() if n == size and other != dim]
        if twins:
            raise UserError(f"dims {dim} and {twins[0]} are both {size} in the example inputs: give them different sizes")


def _check_deterministic(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = _arguments(node)
        if arguments.get("dropout_p") or (arguments.get("train") is True and arguments.get("p")):
            raise UserError(f"{_place(node)}: {node.target} drops values at random; pass 0 (or training=False) for inference")
        if "batch_norm" in node.target.name() and (arguments.get("training") or arguments.get("train")):
            raise UserError(f"{_place(node)}: {node.target} normalizes by the batch at hand (training=True)")
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if random and "attention" not in node.target.name() and "dropout" not in node.target.name():
            raise UserError(f"{_place(node)}: {node.target} draws random numbers; a compiled graph must not")


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = node.target._schema.arguments                        # type: ignore[union-attr]
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)}
    return given | dict(node.kwargs)


def compare(graph: Graph, module: nn.Module) -> None:
    """Run graph and module on the graph's samples; CheckFailed unless outputs agree to 1e-6 of their largest value."""
    samples = graph.sample_inputs() if graph.sample_inputs else []
    for sample in samples:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(graph.inputs, sample, strict=True))
        with torch.no_grad():
            expected = [x for x in pytree.tree_leaves(module(*sample)) if isinstance(x, Tensor)]
        try:
            found = graph.run(*sample)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CheckFailed(f"the captured graph fails where the module runs ({shapes}): {first_line(error)}") from error
        for name, a, b in zip(graph.outputs, found, expected, strict=True):
            reason = _difference(a, b)
            if reason:
                raise CheckFailed(f"the captured graph differs from the module in {name} ({shapes}): {reason}")


def _difference(found: Tensor, expected: Tensor) -> str | None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
    if torch.equal(found, expected) or not expected.numel():
        return None
    if not expected.is_floating_point():
        return f"{int((found != expected).sum())} of {expected.numel()} values differ"
    a, b = found.double(), expected.double()
    a, b = a.where(a.isfinite(), 0.0), b.where(b.isfinite(), 0.0)
    same_special = torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    error, scale = float((a - b).abs().max()), float(b.abs().max())
    return None if same_special and error <= 1e-6 * scale else f"largest error {error:.3g} where the largest value is {scale:.3g}"


# ---------------------------------------------------------------------------------------------------------------- export

def _export(module: nn.Module, names: list[str], inputs: tuple[Tensor, ...], dynamic: Dynamic) -> ExportedProgram:
    dims = {name: Dim(name) for axes in dynamic.values() for name in axes.values()}
    shapes = tuple({axis % x.dim(): dims[d] for axis, d in dynamic.get(name, {}).items()} for name, x in zip(names, inputs, strict=True))
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs, dynamic_shapes=_as_signature(module, names, shapes), strict=False)
    except GuardOnDataDependentSymNode as error:
        raise UserError(f"the module decides on the values of a tensor, which a graph cannot: {_user_line(error)}") from error
    except EXPORT_ERRORS as error:
        reason = explain(module, inputs, names, dynamic, str(error)) if "specialized" in str(error) else None
        raise UserError(reason or f"{type(module).__name__} cannot be captured: {first_line(error)} {_user_line(error)}") from error


def _as_signature(module: nn.Module, names: list[str], shapes: tuple[Any, ...]) -> Any:
    """Export wants *args grouped under their one name."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    fixed = [p for p in parameters if p.kind is not p.VAR_POSITIONAL][:len(names)]
    starred = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
    if starred is None or starred >= len(names):
        return dict(zip((p.name for p in fixed), shapes, strict=False))
    return (*shapes[:starred], tuple(shapes[starred:]))


def _user_line(error: BaseException) -> str:
    """Where in the model it happened, from the message or the traceback: "(model.py:13: if x.sum() > 0: ...)"."""
    written = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', str(error))
    if written:
        path, line, code = written[-1]
        return f"({Path(path).name}:{line} {code.strip()})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _of_torch(f.filename) and Path(f.filename) != Path(__file__)]
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line})" if frames else ""


def _of_torch(file: str) -> bool:
    return Path(file).is_relative_to(Path(torch.__file__).parent)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _functional(program: ExportedProgram) -> tuple[fx.Graph, ExportedProgram]:
    """The program's graph without mutation and aliasing composites, and the program whose signature describes it."""
    _check_mutations(program)
    graph = composites.lower(program.graph)
    if graph is None:
        program = program.run_decompositions({})
        _check_mutations(program)
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
    return graph, program


def _check_mutations(program: ExportedProgram) -> None:
    signature = program.graph_signature
    written = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    if written:
        raise UserError(f"the module writes to {', '.join(map(str, written.values()))} while it runs; a stateless forward is needed")


# ------------------------------------------------------------------------------------------------------------------ lift

def _lift(program: ExportedProgram, lowered: tuple[fx.Graph, ExportedProgram], names: list[str], outputs: Sequence[str] | None,
          prefix: str) -> Graph:
    """A Graph over the functional fx graph: weights first, one placeholder per storage, plain metadata."""
    source, program = lowered
    tensors = _weight_tensors(program)
    graph, env = fx.Graph(), {}
    weights: dict[str, Tensor] = {}
    by_storage: dict[Any, fx.Node] = {}
    used = {node.name for node in source.nodes if node.op == "placeholder" and node.users}
    user_inputs = [s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    for node in source.nodes:                                     # weights, in the order the module declares them
        if node.op == "placeholder" and node.name in tensors:
            path, tensor = tensors[node.name]
            twin = by_storage.get(_identity(tensor))
            if twin is None and (node.name in used or _shares(tensor, tensors, used)):
                name = _identifier(path.removeprefix(prefix), [*weights, *names])
                twin = by_storage[_identity(tensor)] = _placeholder(graph, name, node, [_module_of(path.removeprefix(prefix))])
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


def _weight_tensors(program: ExportedProgram) -> dict[str, tuple[str, Tensor]]:
    """Placeholder name -> (path in the module, real tensor) for parameters, buffers and constants."""
    found: dict[str, tuple[str, Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        path = str(spec.target)
        tensor = program.state_dict.get(path, program.constants.get(path))
        if not isinstance(tensor, Tensor):
            raise UserError(f"{path} is a {type(tensor).__name__}: only tensors can be lifted out of the module")
        found[spec.arg.name] = (path, tensor.detach())
    return found


def _identity(tensor: Tensor) -> Any:
    """Tied weights share this: storage, place in it, and how it is read."""
    if not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _shares(tensor: Tensor, tensors: Mapping[str, tuple[str, Tensor]], used: set[str]) -> bool:
    return any(_identity(other) == _identity(tensor) for name, (_, other) in tensors.items() if name in used)


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
    own = [f for f in frames if not _of_torch(f[0])] or frames
    if not own:
        return ""
    path, line, code = own[-1]
    return f"{Path(path).name}:{line} {code.strip()}"


def _place(node: fx.Node) -> str:
    origin = ", ".join(node.meta.get("origin") or ())
    return f"{origin or node.name} [{node.meta.get('line', '')}]"


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


def _symbols(graph: Graph, dynamic: Dynamic) -> dict[str, str]:
    """sympy symbol -> dim name, read off the inputs; every dynamic size must still be one."""
    symbols: dict[str, str] = {}
    placeholders = graph.placeholders
    for name, axes in dynamic.items():
        for axis, dim in axes.items():
            size = placeholders[name].meta["val"].shape[axis]
            if isinstance(size, int):
                raise UserError(f"axis {axis} of {name} ({dim}) became the constant {size} while exporting")
            symbols[str(size.node.expr)] = dim
    return symbols
