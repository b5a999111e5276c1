"""Capture a PyTorch module as one Graph: exported with dynamic sizes, weights lifted to inputs, compared with the module.

Every frontend ends here. The graph is functional, holds no submodule and no attribute, and computes what the module
computes at sizes other than those it was exported with: that is checked, not assumed.
"""
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..errors import CheckFailed, UserError, not_finite
from ..ir import Graph, verify
from . import composites
from .compare import compare
from .hushed import hushed
from .kept_graph import KeptGraph
from .lift import lift, place
from .messages import first_line, user_line
from .samples import TensorSamples
from .specialized import explain

Dynamic = Mapping[str, Mapping[int, str]]
"""input name -> axis -> dim name, e.g. {"input_ids": {0: "B", 1: "S"}}"""

EXPORT_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, LookupError, AssertionError, NameError)


def capture_module(module: nn.Module, inputs: Sequence[Tensor], dynamic: Dynamic | None = None, *,
                   outputs: Sequence[str] | None = None, meta: Mapping[str, Any] | None = None,
                   samples: Callable[..., Any] | None = None, prefix: str = "", known: KeptGraph | None = None) -> Graph:
    """The module as a Graph in the captured dialect.

    `inputs` are examples: each dynamic axis at least 2, and no two dims equal (a size of 0 or 1, or equal sizes, would be
    baked in). `prefix` is cut off module paths and weight names (a wrapper's attribute, and messages name what it holds). `known` is
    where the graph of this very module may be kept: it is read back then instead of traced, and checked like any other.
    Raises UserError for a module that cannot be captured as it is (training mode, weights that are not finite, data-dependent
    control flow, a dynamic size the code fixes), CheckFailed when graph and module disagree.
    """
    dynamic = dynamic or {}
    inputs = tuple(inputs)
    names = input_names(module, len(inputs))
    given: nn.Module = getattr(module, prefix.removesuffix("."), module) if prefix else module
    called = (meta or {}).get("name") or type(given).__name__
    _check_request(given, names, inputs, dynamic)
    _check_finite(given)
    sizes = {dim: x.shape[axis] for name, x in zip(names, inputs, strict=True) for axis, dim in dynamic.get(name, {}).items()}
    graph = found = known.take(module, sizes) if known else None
    if graph is None:
        program = _export(module, names, inputs, dynamic, called)
        graph = lift(*_functional(program, prefix), names, outputs, prefix)
        graph.symbols = _symbols(graph, dynamic)
    graph.meta = dict(meta or {})
    by_index = {i: dynamic[name] for i, name in enumerate(names) if name in dynamic}
    graph.sample_inputs = samples or TensorSamples(inputs, by_index)
    _check_deterministic(graph)
    verify(graph, "captured")
    try:
        compare(graph, module)
    except CheckFailed as error:
        if found is None: raise
        raise CheckFailed(f"{error.message}; an earlier compile kept this graph: --no-cache captures it again") from error
    if known and found is None: known.keep(graph, module)
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


def _check_finite(module: nn.Module) -> None:
    """No weight holds NaN or infinity: whatever reads it would be noise. Buffers may hold infinity, as masks do."""
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and weight.numel() and not all(end.isfinite() for end in weight.detach().aminmax()):
            raise UserError(f"weight {name}: {not_finite(weight)}; mend the checkpoint")


def _check_deterministic(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = _arguments(node)
        if arguments.get("dropout_p") or (arguments.get("train") is True and arguments.get("p")):
            raise UserError(f"{place(node)}: {node.target} drops values at random; pass 0 (or training=False) for inference")
        if "batch_norm" in node.target.name() and (arguments.get("training") or arguments.get("train")):
            raise UserError(f"{place(node)}: {node.target} normalizes by the batch at hand (training=True)")
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if random and "attention" not in node.target.name() and "dropout" not in node.target.name():
            raise UserError(f"{place(node)}: {node.target} draws random numbers; a compiled graph must not")


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = node.target._schema.arguments                        # type: ignore[union-attr]
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)}
    return given | dict(node.kwargs)


# ---------------------------------------------------------------------------------------------------------------- export

def _export(module: nn.Module, names: list[str], inputs: tuple[Tensor, ...], dynamic: Dynamic, called: str) -> ExportedProgram:
    dims = {name: Dim(name) for axes in dynamic.values() for name in axes.values()}
    shapes = tuple({axis % x.dim(): dims[d] for axis, d in dynamic.get(name, {}).items()} for name, x in zip(names, inputs, strict=True))
    try:
        with torch.no_grad(), hushed():
            return torch.export.export(module, inputs, dynamic_shapes=_as_signature(module, names, shapes), strict=False)
    except GuardOnDataDependentSymNode as error:
        raise UserError(f"the module decides on the values of a tensor, which a graph cannot: {user_line(error)}") from error
    except EXPORT_ERRORS as error:
        reason = explain(module, inputs, names, dynamic, str(error), called) if "specialized" in str(error) else None
        raise UserError(reason or f"{called} cannot be captured: {first_line(error)} {user_line(error)}") from error


def _as_signature(module: nn.Module, names: list[str], shapes: tuple[Any, ...]) -> Any:
    """Export wants *args grouped under their one name."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    fixed = [p for p in parameters if p.kind is not p.VAR_POSITIONAL][:len(names)]
    starred = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
    if starred is None or starred >= len(names):
        return dict(zip((p.name for p in fixed), shapes, strict=False))
    return (*shapes[:starred], tuple(shapes[starred:]))


def _functional(program: ExportedProgram, prefix: str) -> tuple[fx.Graph, ExportedProgram]:
    """The program's graph without mutation and aliasing composites, and the program whose signature describes it."""
    _check_mutations(program, prefix)
    graph = composites.lower(program.graph)
    if graph is None:
        program = program.run_decompositions({})
        _check_mutations(program, prefix)
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
    return graph, program


def _check_mutations(program: ExportedProgram, prefix: str) -> None:
    signature = program.graph_signature
    written = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}.values()
    if written:
        names = ", ".join(str(name).removeprefix(prefix) for name in written)
        raise UserError(f"the module writes to {names} while it runs; a stateless forward is needed")


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
