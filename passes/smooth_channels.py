"""Move factors between a weight's columns and whatever makes their inputs: x wᵀ = (x / s)(w s)ᵀ.

The factors are powers of two, so that not a bit of the result changes; which they are is the quantization method's choice
(compiler.quant.awq), made on its calibration text: for 4-bit weights, or for outliers among 8-bit activations.
x must be of products alone, and made by an operator that takes 1 / s into a weight of its own: a norm, or the up half of a gated MLP.
"""
import operator
from typing import Any

from torch import Tensor, fx

from ..compiler.ir import Graph, target_name
from ..compiler.ops import infc
from ..compiler.quant import awq
from ..compiler.quant.blocks import kept
from ..compiler.quant.matrices import PRODUCTS, matrices
from ..compiler.quant.plan import Plan
from ..compiler.quant.scheme import Scheme
from ..compiler.rewrite import EXACT, Pass, Report, arguments

NORMS = {infc.rms_norm.default: (1,), infc.add_rms_norm.default: (2,), infc.layer_norm.default: (1, 2)}
"""Operator -> which arguments its first result is a multiple of, column by column."""

Maker = list[tuple[fx.Node, slice]]
"""Weights, and which of their rows become 1 / s of what they were."""


def run(graph: Graph, report: Report) -> int:
    plan: Plan | None = report.options.get("quantization")
    if plan is None or plan.factors is None:
        return 0
    schemes = plan.schemes(graph, [weight for weight, reason in matrices(graph).items() if not reason])
    sites: dict[fx.Node, Maker] = {}
    every: Any = dict.fromkeys(node.args[0] for node in graph.nodes if node.target in PRODUCTS and node.args[1] in schemes)
    for x in every:
        reason = _objection(graph, x, schemes)
        maker = reason or _maker(graph, x)
        if isinstance(maker, str): report.refuse(x, maker)
        else: sites[x] = maker
    readers: dict[fx.Node, Any] = {x: list(dict.fromkeys(user.args[1] for user in x.users)) for x in sites}
    inputs = plan.inputs(graph, [weight for weights in readers.values() for weight in weights]) if sites else {}
    fired = 0
    for x, maker in sites.items():
        weights = [(str(w.target), graph.weights[str(w.target)].float(), schemes[w]) for w in readers[x]]
        s = awq.search(weights, inputs[weights[0][0]], plan.factors, plan.quantize)
        if s is None:
            report.refuse(x, "no factors lower the error on the calibration text")
            continue
        if not report.may_fire(): break
        _move(graph, s, maker, readers[x])
        fired += 1
    return fired


def _objection(graph: Graph, x: fx.Node, schemes: dict[fx.Node, Scheme]) -> str | None:
    """Why the weights that x is multiplied with cannot take the factors."""
    for user in x.users:
        if user.target not in PRODUCTS or user.args.count(x) > 1: return f"%{x.name} is also used by %{user.name}"
        weight: Any = user.args[1]
        if weight not in schemes: return f"%{user.name} has a weight that stays wide"
        other = next((reader for reader in weight.users if reader.args[0] is not x), None)
        if other is not None: return f"weight {weight.name} is also read by %{other.name}"
        if kept(graph, weight, schemes[weight]) is not None: return f"weight {weight.name} keeps the codes of its file"
    return None


def _maker(graph: Graph, x: fx.Node) -> Maker | str:
    """The weights that 1 / s goes into; or why there are none."""
    node: Any = x
    if x.target is operator.getitem:
        if x.args[1] != 0: return f"%{x.name} is a sum, not a norm's result"
        node = x.args[0]
    if node.target in NORMS:
        found = [(weight, slice(None)) for weight in map(arguments(node).__getitem__, NORMS[node.target]) if weight is not None]
    elif node.target is infc.linear_swiglu.default:
        rows = node.args[1].meta["val"].shape[0]
        found = [(node.args[1], slice(rows // 2, rows))]
    elif node.target is infc.paged_attention.default:
        return "it is a mean of cached values, and a cache holds them unscaled"
    else:
        return f"{target_name(node.target)} has no weight that its columns are multiples of"
    for weight, _ in found:
        if graph.weight(weight) is None: return f"%{weight.name} of %{node.name} is computed, not a weight"
        if len(weight.users) > 1: return f"%{weight.name} of %{node.name} is shared"
    return found


def _move(graph: Graph, s: Tensor, maker: Maker, weights: list[fx.Node]) -> None:
    for weight, rows in maker:
        factor = s if len(weight.meta["val"].shape) == 1 else s[:, None]
        _scaled(graph, weight, rows, 1 / factor)
    for weight in weights: _scaled(graph, weight, slice(None), s)


def _scaled(graph: Graph, weight: fx.Node, rows: slice, by: Tensor) -> None:
    """A new tensor: copies of the graph share the old one."""
    name = str(weight.target)
    for values in (graph.weights, graph.exact):
        if name not in values: continue
        values[name] = values[name].clone()
        values[name][rows] *= by.to(values[name].dtype)
    weight.meta["passes"] = [*weight.meta.get("passes", ()), "smooth_channels"]


PASS = Pass("smooth_channels", run, EXACT, requires=("canonicalize",))
