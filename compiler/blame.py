"""Which of a pass's rewrites broke the graph? Run it again with fewer of them: the first count that fails names the site."""
from collections.abc import Callable
from typing import Any

from torch import fx

from .errors import CheckFailed
from .ir import Graph, node_text, where
from .rewrite import AnyPass, Report

Breaks = Callable[[Graph], None]
"""Raises CheckFailed for a changed graph that is broken."""


def guilty_rewrite(one: AnyPass, before: Graph, after: Graph, fired: int, options: dict[str, Any], breaks: Breaks) -> str | None:
    """`rewrite 3 of 7, %rope_1 in model.layers.1 [llama.py:60]`, in about log2(fired) runs of the pass and its check.

    `after` is the broken graph. None where no single rewrite is to blame: the pass does all of them at once, or nothing
    that it changed can be named.
    """
    good, bad = (0, before), (fired, after)                            # rewrites, and the graph after them
    while bad[0] - good[0] > 1:
        budget = (good[0] + bad[0]) // 2
        twin, notes = before.copy(), Report(one.name, options=options, budget=budget)
        try:
            one.apply(twin, notes)
            breaks(twin)
            good = (budget, twin)
        except CheckFailed:
            bad = (budget, twin)
        if notes.fired > budget:
            return None
    site = _changed(good[1], bad[1], one.name)
    return f"rewrite {bad[0]} of {fired}, {where(site)}" if site else None


def _changed(before: Graph, after: Graph, stamp: str) -> fx.Node | None:
    """The first node of `after` that `before` has not, or not so; one that the pass made, if there is any."""
    old = _lines(before)
    found = [node for node, line in zip(after.nodes, _lines(after).values(), strict=True) if old.get(node.name) != line]
    found = [node for node in found if node.op == "call_function"] or [node for node in found if node.op != "output"]
    return next((node for node in found if stamp in (node.meta.get("passes") or ())), found[0] if found else None)


def _lines(graph: Graph) -> dict[str, str]:
    names = {node: node.name for node in graph.nodes}
    return {node.name: node_text(node, graph, names) for node in graph.nodes}
