"""Fuse act(gate) * up into one operator, and with its product into infc::linear_swiglu: 2F columns never reach memory.

gate and up are found by what they are, the two halves of one value; columns in another order are put right in the weight.
"""
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.ir import Graph, drop_dead_nodes, target_name
from ..compiler.layout import Layout, NotMoves, cannot_reorder, column_order, drop_weights, reorder_columns, sources, stray_reader
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit

LINEARS = {aten.linear.default, infc.linear.default}
OTHER_ACTIVATIONS = {aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.hardswish.default, aten.mish.default,
                     aten.leaky_relu.default, aten.elu.default, aten.softplus.default}  # fmt: skip


@dataclass(frozen=True)
class Gated:
    """`node` is act(gate) * up; `active` is act(gate)."""

    node: fx.Node
    active: fx.Node
    up: fx.Node
    act: str

    @property
    def gate(self) -> fx.Node:
        return self.active.args[0]                          # type: ignore[return-value]


def run(graph: Graph, report: Report) -> int:
    layout, fired = Layout(graph), 0
    for node in graph.nodes:
        if act := _other_gate(node):
            report.refuse(node, f"its gate goes through {act}: infc::swiglu has silu and gelu")
    for gated in [found for node in graph.nodes if (found := _gated(node))]:
        found = _whole(layout, gated)
        if found is None:
            apart = gated.gate.target in LINEARS and gated.up.target in LINEARS
            report.refuse(gated.node, "gate and up are two products that merge_projections did not merge" if apart
                          else "gate and up are not all columns of one value")
            continue
        whole, order = found
        reason = _objection(graph, gated, whole, order)
        if reason:
            report.refuse(gated.node, reason)
            continue
        if not report.may_fire():
            break
        _fuse(graph, gated, whole, order, report)
        fired += 1
    return fired


def _gated(node: fx.Node) -> Gated | None:
    if node.target is aten.mul.Tensor and all(isinstance(n, fx.Node) for n in node.args):
        for active, up in (node.args, node.args[::-1]):
            act = _activation(active)
            if act and up is not active.args[0]:            # type: ignore[union-attr]   # x * act(x) is no gate
                return Gated(node, active, up, act)         # type: ignore[arg-type]
    return None


def _activation(node: Any) -> str | None:
    if node.target is aten.silu.default:
        return "silu"
    return {"none": "gelu", "tanh": "gelu_tanh"}[arguments(node)[1]] if node.target is aten.gelu.default else None


def _other_gate(node: fx.Node) -> str | None:
    """The activation of act(gate) * up, both from products with a weight, where it is one that no operator has."""
    if node.target is not aten.mul.Tensor or not all(isinstance(n, fx.Node) for n in node.args):
        return None
    for active, up in (node.args, node.args[::-1]):
        if active.target in OTHER_ACTIVATIONS and all(sources(n)[-1].target in LINEARS for n in (active.args[0], up)):  # type: ignore
            return target_name(active.target)               # type: ignore[union-attr]
    return None


def _whole(layout: Layout, gated: Gated) -> tuple[fx.Node, Tensor] | None:
    """(the nearest value whose columns are gate and up, the columns that are gate and then those that are up)."""
    above = set(sources(gated.up))
    for node in sources(gated.gate):
        if node in above and isinstance(node.meta["val"], Tensor):
            order = _column_order(layout, gated, node)
            if order is not None:
                return node, order
    return None


def _column_order(layout: Layout, gated: Gated, whole: fx.Node) -> Tensor | None:
    """None where gate and up are not all columns of `whole`, each once."""
    numbers = layout.numbered(whole)
    try:
        parts = [layout.run(n, {whole: numbers}) for n in (gated.gate, gated.up)]
    except NotMoves:
        return None
    if not parts[0].shape == parts[1].shape == (*numbers.shape[:-1], parts[0].shape[-1]):
        return None
    return column_order(numbers.flatten(0, -2), torch.cat(parts, -1).flatten(0, -2))


def _objection(graph: Graph, gated: Gated, whole: fx.Node, order: Tensor) -> str | None:
    if _is_sorted(order):
        return None
    reason, stray = cannot_reorder(graph, whole), stray_reader(whole, {gated.node, gated.active})
    if reason is None and stray is not None:
        reason = f"it is also used by %{stray.name}"
    return f"the columns of %{whole.name} do not lie as gate, up, and cannot be moved: {reason}" if reason else None


def _is_sorted(order: Tensor) -> bool:
    return torch.equal(order, torch.arange(len(order)))


def _fuse(graph: Graph, gated: Gated, whole: fx.Node, order: Tensor, report: Report) -> None:
    product = whole if _is_sorted(order) else reorder_columns(graph, whole, order)
    reason = _stays_apart(product, whole, gated)
    if reason is None:
        new = emit(graph, infc.linear_swiglu.default, (*product.args[:2], gated.act), like=gated.node)
    else:
        report.refuse(gated.node, f"infc::swiglu alone: {reason}")
        new = emit(graph, infc.swiglu.default, (product, gated.act), like=gated.node)
    gated.node.replace_all_uses_with(new)
    weights = [n for n in whole.all_input_nodes if graph.weight(n) is not None]
    drop_dead_nodes(graph)
    drop_weights(graph, weights)


def _stays_apart(product: fx.Node, whole: fx.Node, gated: Gated) -> str | None:
    """Why the product cannot be part of the operator."""
    if product.target not in LINEARS:
        return f"%{product.name} is no product with a weight"
    if any(a is not None for a in arguments(product)[2:]):
        return f"%{product.name} has a bias or a residual"
    stray = stray_reader(whole, {gated.node, gated.active}) or next((u for u in gated.active.users if u is not gated.node), None)
    if stray is not None:
        return f"%{product.name} is also " + ("returned" if stray.op == "output" else f"used by %{stray.name}")
    return None


PASS = Pass("fuse_swiglu", run, EXACT, requires=("canonicalize",))
