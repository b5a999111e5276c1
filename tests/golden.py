"""Helpers of golden tests: trace a function into a Graph, check its text, and hold a pass to its contract."""
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import torch
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import Graph, fake_propagate, text, verify
from infc.compiler.rewrite import AnyPass
from torch import Tensor, fx, nn
from torch.export import Dim, export

Dynamic = Sequence[dict[int, str] | None]


class _Call(nn.Module):
    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: Any) -> Any:
        return self.fn(*inputs)


def trace(fn: Callable[..., Any], *inputs: Tensor, dynamic: Dynamic = (), names: Sequence[str] = ()) -> Graph:
    """The captured Graph of a function or module. `dynamic` names dims per input: `({0: "B", 1: "S"}, None)`.

    Parameters, buffers and closed-over tensors become weights. Inputs are called `names` (x, y, z, ... by default).
    """
    module = fn if isinstance(fn, nn.Module) else _Call(fn)
    inputs = tuple(t.clone() for t in inputs)                     # export takes one tensor given twice for one input
    dims = tuple(dict.fromkeys(spec, Dim.DYNAMIC) if spec else None for spec in dynamic)
    dims += (None,) * (len(inputs) - len(dims))
    spec: Any = dims if isinstance(fn, nn.Module) else (dims,)
    program = export(module, inputs, dynamic_shapes=spec if any(dims) else None, strict=False).run_decompositions({})
    module_of = program.graph_module
    tensors = {**program.state_dict, **program.constants}
    sig = program.graph_signature
    owners = {**sig.inputs_to_parameters, **sig.inputs_to_buffers, **sig.inputs_to_lifted_tensor_constants}
    graph = Graph(module_of, outputs=[f"out{i}" for i in range(len(sig.user_outputs))])
    unique: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        node.meta = {"val": node.meta.get("val"), "origin": [], "line": "", "passes": []}
        if node.op == "output":
            node.args = (tuple(node.args[0]),)
        elif node.op == "placeholder" and node.name in owners:
            tensor = tensors[owners[node.name]].detach()
            first = unique.setdefault(tensor.untyped_storage().data_ptr(), node)
            if first is node:
                graph.weights[node.name] = tensor
            else:
                node.replace_all_uses_with(first)
                module_of.graph.erase_node(node)
        elif node.op == "placeholder":
            index = len(graph.inputs)
            name = names[index] if names else "xyzuvw"[index] if len(inputs) <= 6 else f"x{index}"
            node._rename(name)
            node.target = name
            graph.inputs.append(name)
            for dim, public in (dynamic[index] or {}).items() if index < len(dynamic) else ():
                graph.symbols.setdefault(str(node.meta["val"].shape[dim].node.expr), public)
    fake_propagate(graph)
    graph = graph.copy()                                          # export renames nodes behind fx's back: register the names
    verify(graph)
    made = samples(graph, inputs)
    graph.sample_inputs = lambda: made
    return graph


def samples(graph: Graph, example: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Inputs at several sizes of each dynamic dim (the example's own, 3, 1, 0), with large, tiny and non-finite values.

    A sample the graph as traced rejects (a `view(0, -1)`) is left out.
    """
    made = [tuple(example)]
    for kind, size in [("plain", 3), ("plain", 1), ("plain", 0), ("large", 2), ("tiny", 2), ("nonfinite", 4)]:
        generator = torch.Generator().manual_seed(size + len(kind))
        nodes = [graph.placeholders[name] for name in graph.inputs]
        made.append(tuple(_like(t, n.meta["val"], kind, size, generator) for t, n in zip(example, nodes, strict=True)))
    return [sample for sample in made if sample is made[0] or _runs(graph, sample)]


def _runs(graph: Graph, sample: Sequence[Tensor]) -> bool:
    try:
        graph.run(*sample)
    except (RuntimeError, IndexError):
        return False
    return True


def _like(example: Tensor, val: Tensor, kind: str, size: int, generator: torch.Generator) -> Tensor:
    shape = [s if isinstance(s, int) else size for s in val.shape]
    if example.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not example.is_floating_point():
        low, high = (int(example.min()), int(example.max()) + 1) if example.numel() else (0, 2)
        return torch.randint(low, high, shape, generator=generator, dtype=example.dtype)
    x = torch.randn(shape, generator=generator) * {"large": 1e4, "tiny": 1e-6}.get(kind, 1.0)
    if kind == "nonfinite" and x.numel() > 2:
        x.view(-1)[0], x.view(-1)[-1] = float("inf"), float("nan")
    return x.to(example.dtype)


def assert_contract(one: AnyPass, fn: Callable[..., Any], *inputs: Tensor, dynamic: Dynamic = (), fires: int | None = None) -> Graph:
    """The pass fires on `fn` (`fires` times if given) and keeps its contract on `samples`; returns the changed graph."""
    before = trace(fn, *inputs, dynamic=dynamic)
    after = before.copy()
    fired = one.apply(after)
    assert fired > 0 if fires is None else fired == fires, f"{one.name} fired {fired} times on\n{text(before)}"
    verify(after)
    fake_propagate(after)
    if one.check is not None:
        one.check(before, after)
    else:
        check_exact(Reference(before, before.sample_inputs()), before, after)
    return after


def filecheck(graph: Graph, checks: str) -> None:
    """The text of `graph` satisfies the CHECK lines (LLVM FileCheck's language)."""
    options = Options("golden")
    parser = Parser(options, StringIO(checks), *pattern_for_opts(options))
    matcher = Matcher(options, FInput("graph", text(graph)), parser)
    assert matcher.run() == 0, f"\n{checks}\ndoes not hold for\n{text(graph)}"
