"""Weights become codes and scales, and an infc::dequantize stands where the weight stood.

Which scheme a weight gets is the recipe's word (options["quantization"]). A weight that several read, such as a tied head and
embedding, is quantized once.
APPROXIMATE: no weight may be further from what it was than twice what rounding to nearest in its scheme does. What that does
to the model's answers is the quality gate's question, not this pass's.
"""
import torch
from torch import Tensor, fx

from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph
from ..compiler.ops import aten, infc
from ..compiler.quant.plan import Plan
from ..compiler.quant.rounding import round_to_nearest
from ..compiler.quant.scheme import Scheme
from ..compiler.rewrite import APPROXIMATE, Measured, Pass, Report, arguments, emit

PRODUCTS = {infc.linear.default, infc.linear_swiglu.default}


def run(graph: Graph, report: Report) -> int:
    plan: Plan | None = report.options.get("quantization")
    if plan is None:
        return 0
    schemes = plan.schemes(graph, _weights(graph, report))
    statistics = plan.statistics(graph, [*schemes])
    fired = 0
    for weight, scheme in schemes.items():
        if not report.may_fire(): break
        _quantize(graph, weight, scheme, plan, statistics)
        fired += 1
    return fired


def _weights(graph: Graph, report: Report) -> list[fx.Node]:
    """fp32 matrices that products and lookups alone read; the others, if some product reads them, are refused."""
    found = []
    for node in graph.module.graph.find_nodes(op="placeholder"):
        weight = graph.weight(node)
        if weight is None or not weight.is_floating_point() or weight.dim() != 2: continue
        other = next((user for user in node.users if not reads_as_matrix(user, node)), None)
        if node.users and other is None:
            found.append(node)
        elif any(reads_as_matrix(user, node) for user in node.users):
            report.refuse(node, f"also used by {'the output' if other.op == 'output' else f'%{other.name}'}")  # type: ignore[union-attr]
    return found


def reads_as_matrix(user: fx.Node, weight: fx.Node) -> bool:
    """Is `weight` the matrix of this product, or the table of this lookup, and nothing else in it?"""
    if user.target in PRODUCTS:
        return user.args[1] is weight and user.args.count(weight) == 1
    return user.target is aten.embedding.default and user.args[0] is weight


def _quantize(graph: Graph, weight: fx.Node, scheme: Scheme, plan: Plan, statistics: dict) -> None:
    name = str(weight.target)
    found = plan.quantize(graph.weights[name], scheme, name, statistics.get(name))
    parts = {"codes": found.codes, "scale": found.scale, "offset": found.offset}
    nodes = [None if tensor is None else graph.add_weight(f"{name}_{part}", tensor, before=weight) for part, tensor in parts.items()]
    for node in nodes:
        if node is not None: node.meta["origin"] = list(weight.meta.get("origin") or ())
    first = next(node for node in graph.nodes if node.op != "placeholder")
    wide = emit(graph, infc.dequantize.default, (*nodes, scheme.bits, scheme.group, found.k, torch.float32), like=first)
    wide.meta |= {"origin": list(weight.meta.get("origin") or ()), "line": weight.meta.get("line") or "", "scheme": scheme}
    weight.replace_all_uses_with(wide)
    graph.drop_weight(weight)


def check(before: Graph, after: Graph) -> Measured:
    """The worst weight's error over that of rounding it to nearest; CheckFailed, naming the weight, where it is over two."""
    worst = 0.0
    for node in after.nodes:
        if node.target is not infc.dequantize.default: continue
        codes, scale, offset, bits, group, k = arguments(node)[:6]
        name = str(codes.target).removesuffix("_codes")
        if name not in before.weights: continue
        was: Tensor = before.weights[name].float()
        parts = [None if part is None else after.weights[str(part.target)] for part in (codes, scale, offset)]
        now = infc.dequantize.default(*parts, bits, group, k)
        plain = round_to_nearest(was, Scheme(bits, group, offset is None), name).dequantized()
        error, allowed = (float((w - was).norm()) for w in (now, plain))
        ratio = error / allowed if allowed else 1.0 if error == 0 else float("inf")
        if not ratio <= WORST:
            raise CheckFailed(f"{name} ({', '.join(node.meta.get('origin') or ())}) is {error:.3g} off its wide values (root of the sum of "
                              f"squares), {ratio:.3g} times what rounding to nearest gives, and {WORST:g} times is allowed")
        worst = max(worst, ratio)
    return Measured(worst, WORST, "times the error of rounding to nearest, of the worst weight")


WORST = 2.0
"""A better choice of codes for the products' results may be a worse one for the weights; a wrong scale is off by far more."""

PASS = Pass("quantize_weights", run, APPROXIMATE, requires=("canonicalize",), check=check)
