"""What a product with a quantized weight reads is rounded to codes, row by row as it comes: 16 bits (finer than bf16), 8, or e4m3.

One rounding for all who read the same value with the same codes. 16 bits are for targets that multiply integers alone; where a product
takes wide rows, they stay wide.
APPROXIMATE: next-token distributions may not be further (KL) from the wide graph's than those of eager bf16 PyTorch, where
codes have 16 bits; nor than 64 times that (8 times the noise) where they have 8, or 256 times (16 times the noise) where they are e4m3.
"""
import operator
from typing import Any

from torch import fx

from ..compiler.divergence import divergences
from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, where
from ..compiler.ops import infc
from ..compiler.quant.matrices import PRODUCTS
from ..compiler.quant.plan import Plan
from ..compiler.quant.scheme import Scheme
from ..compiler.rewrite import APPROXIMATE, Measured, Pass, Report, arguments, emit

NOISE = {16: 1.0, 8: 64.0}
"""Bits -> how many times the KL of eager bf16 is allowed. A step of 8 bits is 1/127 of the group's largest value, twice bf16's step
there; most values of a group are a fraction of it."""

NOISE_E4M3 = 256.0
"""The same of e4m3: 4 significant bits where bf16 has 8, so 2**4 times its noise on every value; KL grows with the square."""


def run(graph: Graph, report: Report) -> int:
    plan: Plan | None = report.options.get("quantization")
    if plan is None:
        return 0
    rounded: dict[tuple[fx.Node, int, int, bool], fx.Node] = {}
    wide = (0, 16) if report.options.get("wide_rows") else (0,)
    for node, scheme in _products(graph):
        if scheme.act_bits in wide: continue
        key = (node.args[0], scheme.act_bits, scheme.row_group, scheme.e4m3)
        if key not in rounded:
            if not report.may_fire(): break
            rounded[key] = _round(graph, node, *key)
        node.update_arg(0, rounded[key])
    return len(rounded)


def _products(graph: Graph) -> list[tuple[Any, Scheme]]:
    """Products of quantized weights, each with its weight's scheme."""
    found = []
    for node in graph.nodes:
        weight = node.args[1] if node.target in PRODUCTS else None
        if isinstance(weight, fx.Node) and weight.target is infc.dequantize.default and "scheme" in weight.meta:
            found.append((node, weight.meta["scheme"]))
    return found


def _round(graph: Graph, node: fx.Node, x: fx.Node, bits: int, group: int, e4m3: bool) -> fx.Node:
    codes_and_scale = emit(graph, infc.quantize_rows.default, (x, bits, group), {"e4m3": True} if e4m3 else {}, like=node)
    codes, scale = (emit(graph, operator.getitem, (codes_and_scale, i), like=node) for i in (0, 1))
    return emit(graph, infc.dequantize_rows.default, (codes, scale, group, x.meta["val"].dtype), like=node)


def check(before: Graph, after: Graph) -> Measured:
    """Mean KL(wide || rounded); CheckFailed where it is over the bound, or where rows are rounded otherwise than their scheme says."""
    noise = 1.0
    for node, scheme in _products(after):
        if node.args[0].target is not infc.dequantize_rows.default: continue      # left wide
        codes, _, group = arguments(node.args[0])[:3]
        made = arguments(codes.args[0])
        if (*made[1:4], group) != (scheme.act_bits, scheme.row_group, scheme.e4m3, scheme.row_group):
            raise CheckFailed(f"what {where(node)} reads is rounded to {made[1]} bits{' of e4m3' * made[3]} in groups of {made[2]}, and "
                              f"{scheme} asks for {scheme.act_bits}{' of e4m3' * scheme.e4m3} in groups of {scheme.row_group}")
        noise = max(noise, NOISE_E4M3 if scheme.e4m3 else NOISE[scheme.act_bits])
    ours, eager = divergences(before, after)
    bound = noise * eager
    if not ours <= bound:
        raise CheckFailed(f"KL to the wide graph is {ours:.3g}, and {bound:.3g} is allowed ({noise:g} times that of eager bf16)")
    return Measured(ours, bound, "nats, mean KL(wide || ours) of next-token distributions")


PASS = Pass("quantize_activations", run, APPROXIMATE, requires=("quantize_weights",), check=check)
