"""The graph before and after, packed for the page: a table of strings, and nodes that point into it."""
from collections.abc import Mapping, Sequence
from typing import Any

from .families import FAMILIES, family
from .sources import sources
from .tree import module_tree

GONE = len(FAMILIES)
"""The family of a captured node that nothing in the final graph comes from: a mask that was recognised, a cast that was dropped."""

FIELDS = ("name", "kind", "target", "args", "type", "line")


def graphs(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"strings", "fields", "captured", "final", "sources"} of report.json's "graphs"; None for an artifact without them."""
    if not found:
        return None
    captured, final = found["captured"]["nodes"], found["final"]["nodes"]
    came_from = sources(captured, final)
    after = [family(node["target"]) for node in final]
    owners: list[list[int]] = [[] for _ in captured]
    for index, nodes in enumerate(came_from):
        for source in nodes:
            owners[source].append(after[index])
    before = [_colour(family(f"infc.{node['target']}"), owned) for node, owned in zip(captured, owners, strict=True)]
    strings = _Strings()
    return {
        "captured": _graph(captured, before, strings), "final": _graph(final, after, strings), "sources": came_from,
        "fields": FIELDS, "strings": strings.all,
    }


def _colour(own: int, owners: Sequence[int]) -> int:
    """The family of one captured node among those that it went into: the one its own name speaks of, else the first fused one."""
    if own in owners:
        return own
    return next((found for found in owners if found != FAMILIES.index("aten")), owners[0] if owners else GONE)


class _Strings:
    """Every string once: layers repeat their types, lines and operators."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))

    @property
    def all(self) -> list[str]:
        return list(self.index)


def _graph(nodes: Sequence[dict[str, Any]], families: Sequence[int], strings: _Strings) -> dict[str, Any]:
    """Per node: FIELDS as indices of strings, then inputs (indices of nodes), origins, passes (of strings), family."""
    place = {node["name"]: index for index, node in enumerate(nodes)}
    packed = [
        [*(strings(node[name]) for name in FIELDS), [place[name] for name in node["inputs"]],
         [strings(path) for path in node["origin"]], [strings(name) for name in node["passes"]], families[index]]
        for index, node in enumerate(nodes)
    ]
    return {"nodes": packed, "tree": module_tree(nodes, families), "calls": sum(node["kind"] == "call" for node in nodes)}
