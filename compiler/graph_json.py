"""A graph as plain data: what dumps, reports and `infc diff` read without torch."""
from typing import Any

from torch import fx

from .ir import Graph, argument_text, target_name, type_text


def graph_json(graph: Graph) -> dict[str, Any]:
    """{"dialect", "inputs", "outputs", "kv", "nodes"}, nodes in order.

    A node: name, kind ("weight", "input", "kv", "call", "return"), target ("infc.rms_norm"; "" but for calls), args (as in the
    text form), inputs (names of the nodes it uses), type ("f32[T,576]"), origin (module paths), line (source), passes (that
    made or changed it).
    """
    names = {node: node.name for node in graph.nodes}
    return {"dialect": graph.dialect, "inputs": graph.inputs, "outputs": graph.outputs, "kv": graph.kv,
            "nodes": [_node(node, graph, names) for node in graph.nodes]}


def _node(node: fx.Node, graph: Graph, names: dict[fx.Node, str]) -> dict[str, Any]:
    meta = node.meta
    call = node.op == "call_function"
    return {
        "name": node.name, "kind": _kind(node, graph), "target": target_name(node.target) if call else "",
        "args": argument_text(node, names) if node.op != "placeholder" else "",
        "inputs": [used.name for used in node.all_input_nodes],
        "type": "" if node.op == "output" else type_text(meta.get("val"), graph.symbols),
        "origin": list(meta.get("origin") or ()), "line": meta.get("line") or "", "passes": list(meta.get("passes") or ()),
    }


def _kind(node: fx.Node, graph: Graph) -> str:
    if node.op != "placeholder":
        return "return" if node.op == "output" else "call"
    name = str(node.target)
    return "weight" if name in graph.weights else "kv" if name in graph.kv else "input"
