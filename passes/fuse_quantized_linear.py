"""A product or a lookup of dequantized codes becomes one operator on the codes: the wide weight never exists."""
import operator
from typing import Any

from torch import fx

from ..compiler.ir import Graph, drop_dead_nodes
from ..compiler.ops import aten, infc
from ..compiler.ops.codes import E4M3
from ..compiler.quant.matrices import PRODUCTS
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit


def run(graph: Graph, report: Report) -> int:
    fired = 0
    for node in list(graph.nodes):
        weight = _weight(node)
        if weight is None: continue
        if not report.may_fire(): break
        fused = _product(graph, node, weight) if node.target in PRODUCTS else _lookup(graph, node, weight)
        node.replace_all_uses_with(fused)
        graph.module.graph.erase_node(node)
        fired += 1
    if fired: drop_dead_nodes(graph)
    return fired


def _weight(node: fx.Node) -> fx.Node | None:
    """The dequantized weight that a node reads as a matrix or a table."""
    if node.target in PRODUCTS: found = node.args[1]
    elif node.target is aten.embedding.default: found = node.args[0]
    else: return None
    return found if isinstance(found, fx.Node) and found.target is infc.dequantize.default else None


def _rows(x: Any, e4m3: bool) -> tuple[Any, int, int]:
    """(x as it was before it was rounded to codes of its weight's kind, bits, group); bits 0 where it was not."""
    if isinstance(x, fx.Node) and x.target is infc.dequantize_rows.default:
        codes, scale, group = arguments(x)[:3]
        made = codes.args[0] if codes.target is operator.getitem else None
        if made is not None and made.target is infc.quantize_rows.default and scale.target is operator.getitem and scale.args[0] is made:
            _, bits, _, floats = arguments(made)
            return (made.args[0], bits, group) if floats == e4m3 else (x, 0, 0)
    return x, 0, 0


def _product(graph: Graph, node: fx.Node, weight: fx.Node) -> fx.Node:
    codes, scale, offset, bits, group = arguments(weight)[:5]
    given = arguments(node)
    x, act_bits, act_group = _rows(given[0], codes.meta["val"].dtype == E4M3)
    how = (bits, group, act_bits, act_group)
    if node.target is infc.linear.default:
        bias, residual, out_dtype = given[2:5]
        return emit(graph, infc.linear_quantized.default, (x, codes, scale, offset, bias, residual, *how, out_dtype), like=node)
    act, out_dtype = given[2:4]
    return emit(graph, infc.linear_swiglu_quantized.default, (x, codes, scale, offset, act, *how, out_dtype), like=node)


def _lookup(graph: Graph, node: fx.Node, weight: fx.Node) -> fx.Node:
    codes, scale, offset, bits, group, k, out_dtype = arguments(weight)
    return emit(graph, infc.embedding_quantized.default, (codes, scale, offset, node.args[1], bits, group, k, out_dtype), like=node)


PASS = Pass("fuse_quantized_linear", run, EXACT, requires=("quantize_weights",))
