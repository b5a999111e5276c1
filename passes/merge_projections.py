"""Merge the projections of one x: q, k, v of an attention become one product, gate and up of a gated MLP another.

x is read once and the weights in one sweep; columns lie in the order q, k, v and gate, up.
"""
import operator
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, TypeGuard

import torch
from torch import fx

from ..compiler.ir import Graph
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit

ATTENTIONS = {aten.scaled_dot_product_attention.default, infc.attention.default}
LINEARS = {aten.linear.default, infc.linear.default}
PRODUCTS = LINEARS | {aten.mm.default, aten.addmm.default, aten.matmul.default, aten.bmm.default}
ACTIVATIONS = {aten.silu.default, aten.gelu.default}


def run(graph: Graph, report: Report) -> int:
    fired, seen = 0, set()
    for kind, found in [*_groups(graph)]:
        members = _of_one_x(found)
        if len(members) < 2 and (reason := _apart(found)):
            report.refuse(members[0], reason)
        if len(members) < 2 or members[0] in seen:
            continue
        seen.update(members)
        reason = _objection(graph, members)
        if reason:
            report.refuse(members[0], reason)
        elif report.may_fire():
            _merge(graph, kind, members)
            fired += 1
        else:
            break
    return fired


def _groups(graph: Graph) -> Iterator[tuple[str, list[fx.Node | None]]]:
    """(name, the projections in the order of their columns; None for a value that does not come from one), mergeable or not."""
    for node in graph.nodes:
        if node.target in ATTENTIONS:
            yield "qkv", [_projection(value) for value in node.args[:3]]
        elif node.target is aten.mul.Tensor:
            for gated, up in (node.args, node.args[::-1]):
                gate = gated.args[0] if isinstance(gated, fx.Node) and gated.target in ACTIVATIONS else None
                if _is_linear(gate) and _is_linear(up):
                    yield "gate_up", [gate, up]
                    break


def _apart(found: Sequence[fx.Node | None]) -> str | None:
    """Why these are not merged though they are several; None where one product makes them all, or none."""
    linears = list(dict.fromkeys(n for n in found if n is not None))
    if len(linears) > 1:
        return f"{', '.join(f'%{n.name}' for n in linears)} read different values"
    other = [name for name, projection in zip("qkv", found, strict=False) if projection is None]
    return f"{' and '.join(other)} of the same attention do not come from one product with a weight" if linears and other else None


def _is_linear(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target in LINEARS and not any(arguments(node)[3:])


def _of_one_x(found: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The projections that read what most of them read; each once."""
    linears = list(dict.fromkeys(n for n in found if n is not None))
    xs = [n.args[0] for n in linears]
    return [n for n in linears if n.args[0] is max(xs, key=xs.count)]


def _projection(value: fx.Node) -> fx.Node | None:
    """The one linear a value is computed from, through whatever is no product (rotation, norm, views)."""
    seen, stack, found = {value}, [value], []
    while stack:
        node = stack.pop()
        if node.target in PRODUCTS:
            found.append(node)
            continue
        inputs = node.all_input_nodes
        if node.target is operator.getitem and inputs[0].target is infc.rope.default:
            inputs = [arguments(inputs[0])[arguments(node)[1]]]    # q' comes from q alone, k' from k alone
        stack += [n for n in inputs if n not in seen]
        seen.update(inputs)
    return found[0] if len(found) == 1 and _is_linear(found[0]) else None


def _objection(graph: Graph, members: list[fx.Node]) -> str | None:
    weights, biases = ([arguments(n)[i] for n in members] for i in (1, 2))
    for node, weight in zip(members, weights, strict=True):
        if graph.weight(weight) is None:
            return f"%{weight.name} of %{node.name} is computed, not a weight"
        other = next((user for user in weight.users if user is not node), None)
        if other is not None:
            return f"weight {weight.name} is shared with %{other.name}: merging would store it twice"
    dtypes = {str(w.meta["val"].dtype) for w in weights}
    if len(dtypes) > 1:
        return f"weights have different dtypes: {', '.join(sorted(dtypes))}"
    bare = [n.name for n, bias in zip(members, biases, strict=True) if bias is None]
    if bare and len(bare) < len(members):
        return f"%{bare[0]} has no bias, the others have one"
    computed = next((b for b in biases if b is not None and graph.weight(b) is None), None)
    return f"bias %{computed.name} is computed, not a weight" if computed else None


def _merge(graph: Graph, kind: str, members: list[fx.Node]) -> None:
    first = min(members)
    operands: list[Any] = [first.args[0], _concatenated(graph, kind, [arguments(n)[1] for n in members])]
    if arguments(first)[2] is not None:
        operands.append(_concatenated(graph, kind, [arguments(n)[2] for n in members]))
    merged = emit(graph, first.target, operands, like=first)  # type: ignore[arg-type]
    merged.meta["origin"] = list(dict.fromkeys(path for n in members for path in n.meta.get("origin") or ()))
    start = 0
    for node in members:
        stop = start + node.meta["val"].shape[-1]
        part = emit(graph, aten.slice.Tensor, (merged, node.meta["val"].dim() - 1, start, stop), like=first)
        part.meta["origin"] = list(node.meta.get("origin") or ())
        node.replace_all_uses_with(part)
        start = stop
    old = {n for node in members for n in node.all_input_nodes}
    for node in members:
        graph.module.graph.erase_node(node)
    for weight in old:
        if graph.weight(weight) is not None and not weight.users:
            graph.drop_weight(weight)


def _concatenated(graph: Graph, kind: str, weights: list[fx.Node]) -> fx.Node:
    """The weights one below the other; q_proj_weight, k_proj_weight, v_proj_weight make qkv_proj_weight."""
    names = [w.name for w in weights]
    start = _common(names)
    end = _common([name[len(start):][::-1] for name in names])[::-1]
    return graph.add_weight(start + kind + end, torch.cat([graph.weights[str(w.target)] for w in weights]), before=min(weights))


def _common(names: list[str]) -> str:
    """The longest start that all names share."""
    letters = [*takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))]
    return "".join(column[0] for column in letters)


PASS = Pass("merge_projections", run, EXACT, requires=("canonicalize",))
