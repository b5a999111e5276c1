"""Every product with a weight becomes infc::linear, which adds bias and residual while it writes: a trip over the row less."""
from typing import Any

from torch import fx

from ..compiler.ir import Graph, same_type
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit


def run(graph: Graph, report: Report) -> int:
    fired = 0
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        x, w, bias = arguments(node)
        reason = _objection(graph, node, x, w)
        if reason:
            report.refuse(node, reason)
            continue
        if not report.may_fire():
            break
        add, residual = _residual(node, report)
        optional = (bias, residual) if residual else (bias,) if bias else ()
        new = emit(graph, infc.linear.default, (x, w, *optional), like=add or node)
        new.meta["origin"] = list(node.meta.get("origin") or ())
        (add or node).replace_all_uses_with(new)
        if add: graph.module.graph.erase_node(add)
        graph.module.graph.erase_node(node)
        fired += 1
    return fired


def _objection(graph: Graph, node: fx.Node, x: fx.Node, w: fx.Node) -> str | None:
    if graph.weight(w) is None:
        return f"%{w.name} is computed, not a weight"
    dtypes = {str(n.meta["val"].dtype) for n in (x, w, node)}
    return f"x, weight and result have different dtypes: {', '.join(sorted(dtypes))}" if len(dtypes) > 1 else None


def _residual(node: fx.Node, report: Report) -> tuple[fx.Node | None, fx.Node | None]:
    """(the sum, what is added) where the product is of no other use; a sum that cannot be absorbed is reported."""
    add = next((user for user in node.users if user.target is aten.add.Tensor), None)
    if add is None:
        return None, None
    a, b, scale = arguments(add)
    other = b if a is node else a
    reason = _no_residual(node, add, other, scale)
    if reason:
        report.refuse(add, f"not absorbed: {reason}")
        return None, None
    return add, other


def _no_residual(node: fx.Node, add: fx.Node, other: Any, scale: Any) -> str | None:
    if len(node.users) > 1:
        user = next(user for user in node.users if user is not add)
        return "the product is also " + ("returned" if user.op == "output" else f"used by %{user.name}")
    if not isinstance(other, fx.Node):
        return f"{other} is a number"
    if other is node or scale != 1:
        return "the product is added to itself" if other is node else f"the sum is scaled by {scale}"
    if not same_type(other.meta["val"], node.meta["val"]) or not same_type(add.meta["val"], node.meta["val"]):
        return f"%{other.name} has not the product's shape and dtype"
    return None


PASS = Pass("fuse_linear_epilogue", run, EXACT)
