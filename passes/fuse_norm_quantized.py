"""A norm whose result products read as 8-bit codes alone writes the codes: no launch rounds them, and the wide row never exists.

For targets whose kernels round rows in a launch of its own (option `norm_codes`); a CPU's products round them in their own scratch.
"""
import operator
from typing import Any

from torch import fx

from ..compiler.ir import Graph
from ..compiler.ops import add_rms_norm_quantized, infc, layer_norm_quantized, rms_norm_quantized
from ..compiler.ops.codes import E4M3
from ..compiler.ops.linear_quantized import PRODUCTS
from ..compiler.ops.registry import arguments
from ..compiler.rewrite import EXACT, Pass, Report, emit

NORMS = {infc.rms_norm.default: rms_norm_quantized, infc.layer_norm.default: layer_norm_quantized,
         infc.add_rms_norm.default: add_rms_norm_quantized}


def run(graph: Graph, report: Report) -> int:
    fired = 0
    if not report.options.get("norm_codes"): return fired
    for norm in [node for node in graph.nodes if node.target in NORMS]:
        results = _results(norm)
        kinds = {reader: _kind(reader, y) for y in results[0] for reader in y.users}
        if not any(kinds.values()): continue
        if reason := _objection(kinds):
            report.refuse(norm, reason)
            continue
        if not report.may_fire(): break
        _fuse(graph, norm, results, kinds)
        fired += 1
    return fired


def _results(norm: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that are the norm's result, and those that are the sum it normalised, where it gives that too."""
    if norm.target is not infc.add_rms_norm.default: return [norm], []
    users = [user for user in norm.users if user.target is operator.getitem]
    return [user for user in users if user.args[1] == 0], [user for user in users if user.args[1] == 1]


def _kind(reader: fx.Node, y: fx.Node) -> tuple[int, bool] | None:
    """(group, e4m3) of the 8-bit codes that a reader makes of y; None where it reads y wide."""
    if reader.target not in PRODUCTS: return None
    given = arguments(reader)
    if given["x"] is not y or given["act_bits"] != 8 or any(v is y for name, v in given.items() if name != "x"): return None
    return given["act_group"], given["codes"].meta["val"].dtype == E4M3


def _objection(kinds: dict[fx.Node, tuple[int, bool] | None]) -> str | None:
    wide = next((reader for reader, kind in kinds.items() if kind is None), None)
    if wide is not None: return f"its result is also {'returned' if wide.op == 'output' else f'read by %{wide.name}'}, wide"
    (first, kind), *others = kinds.items()
    other = next((reader for reader, its in others if its != kind), None)
    return f"%{first.name} and %{other.name} round its result to different codes" if other is not None else None


def _fuse(graph: Graph, norm: fx.Node, results: tuple[list[fx.Node], list[fx.Node]], kinds: dict[fx.Node, Any]) -> None:
    given = arguments(norm)
    out_dtype = given.pop("out_dtype")
    made = emit(graph, NORMS[norm.target], (*given.values(), *next(iter(kinds.values())), out_dtype), like=norm)     # type: ignore[index]
    codes, scale = (emit(graph, operator.getitem, (made, at), like=norm) for at in (0, 1))
    wide = results[0][0].meta["val"].dtype
    for reader in kinds:
        read = arguments(reader)
        read |= {"x": codes, "x_scale": scale, "out_dtype": read["out_dtype"] or wide}
        product = emit(graph, reader.target, tuple(read.values()), like=reader)                                      # type: ignore[arg-type]
        reader.replace_all_uses_with(product)
        graph.module.graph.erase_node(reader)
    for h in results[1]: h.replace_all_uses_with(emit(graph, operator.getitem, (made, 2), like=h))
    for node in dict.fromkeys((*results[0], *results[1], norm)): graph.module.graph.erase_node(node)


PASS = Pass("fuse_norm_quantized", run, EXACT, requires=("fuse_quantized_linear",))
