"""Fold constants: what depends on weights alone is computed now and stored as a weight."""
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.contracts import lifted_call
from ..compiler.ir import Graph, impure, random
from ..compiler.rewrite import EXACT, Pass, Report

GROWTH = 1 << 20
"""Bytes one folded value may add beyond the weights it sets free: no expanded mask, no second copy of a tied embedding."""


def run(graph: Graph, report: Report) -> int:
    """Fold each constant value that something not constant reads; a value that would grow the model is left and named."""
    constant = _constants(graph)
    frontier = [n for n in graph.nodes if n in constant and n.op == "call_function" and any(u not in constant for u in n.users)]
    count = 0
    for node in frontier:
        cone = _cone(node)
        if all(n.op == "call_function" for n in cone) and len(cone) == 1:
            continue                                       # a bare `zeros([])` is as good as a weight
        reason = _objection(graph, node, cone)
        if reason is not None:
            report.refuse(node, reason)
        elif not report.may_fire():
            break
        else:
            _fold(graph, node, cone)
            count += 1
    return count


def _constants(graph: Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            constant = node.target in graph.weights
        else:
            constant = node.op == "call_function" and not impure(node) and all(n in found for n in node.all_input_nodes)
        if constant:
            found.add(node)
    return found


def _cone(node: fx.Node) -> list[fx.Node]:
    """Everything the node is computed from, itself included, in order."""
    cone, todo = {node}, [node]
    while todo:
        for used in todo.pop().all_input_nodes:
            if used not in cone:
                cone.add(used)
                todo.append(used)
    return sorted(cone)


def _objection(graph: Graph, node: fx.Node, cone: list[fx.Node]) -> str | None:
    val = node.meta["val"]
    if not isinstance(val, Tensor):
        return "is not one tensor"
    if any(random(n) for n in cone):
        return "is random"
    inside = set(cone)
    freed = sum(w.nbytes for n in cone if (w := graph.weight(n)) is not None and all(u in inside for u in n.users))
    if val.nbytes > freed + GROWTH:
        kept = [f"%{n.name}" for n in cone if n.op == "placeholder" and any(u not in inside for u in n.users)]
        why = f": {', '.join(kept)} would be stored twice" if kept else ""
        return f"{val.nbytes:,} bytes would replace {freed:,}{why}"
    return None


def _fold(graph: Graph, node: fx.Node, cone: list[fx.Node]) -> None:
    value, exact = _evaluate(graph, cone, lifted=False), _evaluate(graph, cone, lifted=True)
    source = next((n.name for n in cone if n.op == "placeholder"), "constant")
    weight = graph.add_weight(f"{source}_{node.name}", value.contiguous())
    weight.meta["origin"], weight.meta["line"] = list(node.meta.get("origin") or ()), node.meta.get("line") or ""
    if value.is_floating_point() and not torch.equal(value.to(torch.float64), exact):
        graph.exact[str(weight.target)] = exact.contiguous()
    node.replace_all_uses_with(weight)
    for dead in reversed(cone):
        if not dead.users:
            if dead.op == "placeholder":
                graph.drop_weight(dead)
            else:
                graph.module.graph.erase_node(dead)


def _evaluate(graph: Graph, cone: list[fx.Node], *, lifted: bool) -> Tensor:
    env: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in cone:
            if node.op == "placeholder":
                tensor = graph.weights[str(node.target)]
                exact = graph.exact.get(str(node.target), tensor)
                env[node] = exact.to(torch.float64) if lifted and tensor.is_floating_point() else tensor
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = lifted_call(node, args, kwargs) if lifted else node.target(*args, **kwargs)  # type: ignore
    return env[cone[-1]]


PASS = Pass("fold_constants", run, EXACT)
