"""Fuse act(gate) * up into one operator, and with its product into infc::linear_swiglu: 2F columns never reach memory."""
from typing import Any

from torch import Tensor, fx

from ..compiler.ir import Graph, drop_dead_nodes
from ..compiler.layout import Layout, sources
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit

LINEARS = {aten.linear.default, infc.linear.default}


def run(graph: Graph, report: Report) -> int:
    layout, fired = Layout(graph), 0
    for node in list(graph.nodes):
        found = _gated(node)
        if not found:
            continue
        act, gate, up = found
        product, reason = _product(layout, gate, up)
        if product is None:
            if reason: report.refuse(node, reason)
        elif report.may_fire():
            _fuse(graph, node, act, product, report)
            fired += 1
        else:
            break
    if fired:
        drop_dead_nodes(graph)
    return fired


def _gated(node: fx.Node) -> tuple[str, fx.Node, fx.Node] | None:
    """(activation, gate, up) of act(gate) * up."""
    if node.target is aten.mul.Tensor and all(isinstance(n, fx.Node) for n in node.args):
        for active, up in (node.args, node.args[::-1]):
            act = _activation(active)
            if act and up is not active.args[0]:            # type: ignore[union-attr]   # x * act(x) is no gate
                return act, active.args[0], up              # type: ignore
    return None


def _activation(node: Any) -> str | None:
    if node.target is aten.silu.default:
        return "silu"
    if node.target is aten.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}[arguments(node)[1]]
    return None


def _product(layout: Layout, gate: fx.Node, up: fx.Node) -> tuple[fx.Node | None, str]:
    """The value whose two halves are gate and up; or None and why there is none ("" where nothing was to be expected)."""
    above = set(sources(up))
    whole = next((n for n in sources(gate) if n in above and isinstance(n.meta["val"], Tensor)), None)
    if whole is None:
        linears = [n for n in (gate, up) if n.target in LINEARS]
        return None, "gate and up are two products: merge_projections did not merge them" if len(linears) == 2 else ""
    numbers = layout.numbered(whole)
    if numbers.shape[-1] % 2:
        return None, f"gate and up are no halves of %{whole.name}: it has {numbers.shape[-1]} columns"
    first, second = numbers.chunk(2, -1)
    if layout.is_moved(gate, whole, first, numbers) and layout.is_moved(up, whole, second, numbers):
        return whole, ""
    if layout.is_moved(gate, whole, second, numbers) and layout.is_moved(up, whole, first, numbers):
        return None, f"the columns of %{whole.name} are up, gate, not gate, up"
    return None, f"gate and up are not the first and second half of %{whole.name}"


def _fuse(graph: Graph, node: fx.Node, act: str, product: fx.Node, report: Report) -> None:
    reason = _product_objection(graph, node, product)
    if reason is None:
        x, w = product.args[:2]
        new = emit(graph, infc.linear_swiglu.default, (x, w, act), like=node)
    else:
        report.refuse(product, f"infc::swiglu alone: {reason}")
        new = emit(graph, infc.swiglu.default, (product, act), like=node)
    node.replace_all_uses_with(new)


def _product_objection(graph: Graph, node: fx.Node, product: fx.Node) -> str | None:
    """Why the product cannot be part of it."""
    if product.target not in LINEARS:
        return f"%{product.name} is no linear"
    if any(a is not None for a in arguments(product)[2:]):
        return f"%{product.name} has a bias, a residual or a dtype of its own"
    seen, stack = {node}, [product]
    while stack:
        for user in stack.pop().users:
            if user.op == "output": return f"%{product.name} is also returned"
            if user not in seen:
                seen.add(user)
                if user.target in (aten.silu.default, aten.gelu.default) or product in sources(user): stack.append(user)
                else: return f"%{product.name} is also used by %{user.name}"
    return None


PASS = Pass("fuse_swiglu", run, EXACT)
