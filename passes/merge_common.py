"""Merge common subexpressions: the same operator on the same arguments is computed once."""
from typing import Any

from torch import fx

from ..compiler.ir import Graph, arguments, impure
from ..compiler.rewrite import EXACT, Pass, Report


def run(graph: Graph, report: Report) -> int:
    """Keep the first of equal nodes. Writes to a cache and live random draws are never equal to anything."""
    writes = _written(graph)
    known: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or impure(node) or writes & set(node.all_input_nodes):
            continue
        first = known.setdefault((node.target, _key(arguments(node))), node)
        if first is node:
            continue
        if not report.may_fire():
            break
        first.meta["origin"] = list(dict.fromkeys([*first.meta["origin"], *node.meta["origin"]]))
        node.replace_all_uses_with(first)
        graph.module.graph.erase_node(node)
        count += 1
    return count


def _written(graph: Graph) -> set[fx.Node]:
    """Nodes that an operator writes into: what is read from them depends on when."""
    return {a for n in graph.nodes if n.op == "call_function" and impure(n) for a in n.all_input_nodes
            if a.op == "placeholder" and a.target in graph.kv}


def _key(arg: Any) -> Any:
    if isinstance(arg, tuple | list):
        return tuple(map(_key, arg))
    if isinstance(arg, slice):
        return ("slice", _key(arg.start), _key(arg.stop), _key(arg.step))
    return arg if isinstance(arg, fx.Node) else (type(arg), repr(arg))      # 1, 1.0 and True differ; nan equals nan


PASS = Pass("merge_common", run, EXACT)
