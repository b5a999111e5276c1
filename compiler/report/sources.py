"""Which captured nodes did a node of the final graph come from? By module path, and by source line where several share one."""
from collections.abc import Sequence
from typing import Any

Node = dict[str, Any]                                 # see graph_json


def sources(captured: Sequence[Node], final: Sequence[Node]) -> list[list[int]]:
    """Per node of `final` the indices of the captured nodes it stands for; empty for inputs, caches and results.

    A captured node belongs to final nodes whose module path is the longest that holds its own. Of several at that path: those that
    still run its operator; else the fused ones with its source line, else all fused ones; else all.
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for index, node in enumerate(final):
        for path in node["origin"] if node["kind"] in ("call", "weight") else ():
            owners.setdefault((node["kind"], path), []).append(index)
    found: list[list[int]] = [[] for _ in final]
    for index, node in enumerate(captured):
        for owner in _owners(node, owners, final):
            found[owner].append(index)
    return found


def _owners(node: Node, owners: dict[tuple[str, str], list[int]], final: Sequence[Node]) -> list[int]:
    for origin in node["origin"] if node["kind"] in ("call", "weight") else ():
        path = origin
        while path:
            at_path = owners.get((node["kind"], path))
            if at_path:
                return _narrowed(node, at_path, final)
            path = path.rpartition(".")[0]
    return []


def _narrowed(node: Node, at_path: list[int], final: Sequence[Node]) -> list[int]:
    fused = [i for i in at_path if not final[i]["target"].startswith("aten.")]
    return ([i for i in at_path if final[i]["target"] == node["target"]] or [i for i in fused if final[i]["line"] == node["line"]]
            or fused or at_path)
