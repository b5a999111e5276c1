"""Weights become codes and scales, and an infc::dequantize stands where the weight stood.

Which scheme a weight gets is the recipe's word (options["quantization"]). A weight that several read, such as a tied head and
embedding, is quantized once.
APPROXIMATE: no row of a weight may be further from what it was than twice what rounding to nearest in its scheme does. What that
does to the model's answers is the quality gate's question, not this pass's.
"""
import torch
from torch import Tensor, fx

from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph
from ..compiler.ops import infc
from ..compiler.quant.matrices import matrices
from ..compiler.quant.pays import Pays
from ..compiler.quant.plan import Plan
from ..compiler.quant.rounding import WORST, Quantized, round_to_nearest, row_errors
from ..compiler.quant.scheme import Scheme, stored_as
from ..compiler.rewrite import APPROXIMATE, Measured, Pass, Report, arguments, emit


def run(graph: Graph, report: Report) -> int:
    plan: Plan | None = report.options.get("quantization")
    if plan is None:
        return 0
    found = matrices(graph)
    for weight, reason in found.items():
        if reason: report.refuse(weight, reason)
    schemes = plan.schemes(graph, [weight for weight, reason in found.items() if not reason])
    pays: Pays | None = report.options.get("pays")
    for weight, reason in (pays.objections(graph, schemes) if pays else {}).items():
        report.refuse(weight, reason)
        del schemes[weight]
    fired = 0
    for weight, codes in plan.codes(graph, schemes):
        if not report.may_fire(): break
        _replace(graph, weight, codes, schemes[weight])
        fired += 1
    return fired


def _replace(graph: Graph, weight: fx.Node, found: Quantized, scheme: Scheme) -> None:
    name = str(weight.target)
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
    """The worst row's error over that of rounding it to nearest; CheckFailed, naming the weight, where it is over WORST."""
    worst = 0.0
    for node in after.nodes:
        if node.target is not infc.dequantize.default: continue
        codes, scale, offset, bits, group, k = arguments(node)[:6]
        name = str(codes.target).removesuffix("_codes")
        if name not in before.weights: continue
        was: Tensor = before.weights[name].float()
        parts = [None if part is None else after.weights[str(part.target)] for part in (codes, scale, offset)]
        scheme = stored_as(parts[0], parts[1], parts[2], bits, group)                       # type: ignore[arg-type]
        error = row_errors(was, Quantized(parts[0], parts[1], parts[2], scheme, k))           # type: ignore[arg-type]
        allowed = row_errors(was, round_to_nearest(was, scheme, name))
        ratio = torch.where(error == 0, 0.0, error / allowed)
        row = int(ratio.nan_to_num(torch.inf).argmax())
        if not bool((error <= WORST * allowed).all()):
            raise CheckFailed(f"{name} ({', '.join(node.meta.get('origin') or ())}) is {float(error[row]):.3g} off its wide values in row "
                              f"{row} (root of the sum of squares), {float(ratio[row]):.3g} times what rounding to nearest gives, and "
                              f"{WORST:g} times is allowed")
        worst = max(worst, float(ratio[row]))
    return Measured(worst, WORST, "times the error of rounding to nearest, of the worst row of a weight")


PASS = Pass("quantize_weights", run, APPROXIMATE, requires=("canonicalize",), check=check)
