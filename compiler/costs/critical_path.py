"""The longest chain of steps that must wait for each other, and what it says: how much a machine that ran steps side by side could gain."""
from collections.abc import Sequence
from typing import Any

import networkx

from ...runtime.program import Program


def edges(program: Program) -> set[tuple[int, int]]:
    """(earlier, later) steps, by the values in their buffers. Sharing a place in the arena is no dependence: it is the packer's choice.

    A step writes an arena or output buffer where it is first named, and where it is named twice by one step (in place). KV buffers
    are used in order: a step's own keys are written before they are read.
    """
    found: set[tuple[int, int]] = set()
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, step in enumerate(program.steps):
        for b in dict.fromkeys(step.args):
            kind = program.buffers[b].kind
            if kind in ("weight", "input"): continue
            writes = kind == "kv" or b not in writer or step.args.count(b) > 1
            if b in writer: found.add((writer[b], i))
            if writes:
                found.update((r, i) for r in readers.pop(b, []))
                writer[b] = i
            else:
                readers.setdefault(b, []).append(i)
    return {(a, b) for a, b in found if a != b}


def critical_path(program: Program, seconds: Sequence[float]) -> dict[str, Any]:
    """{"seconds", "steps", "all_seconds", "all_steps", "share"}: the longest path by predicted times beside the sum of all steps.

    seconds: of each call; where one takes several launches, its first stands for them all.

    The CPU runs steps one after the other, each on all threads, so the sum is what a step costs; the path is what it would cost
    if independent steps ran side by side, each as fast as it is now.
    """
    each = iter(seconds)
    seconds = [0.0 if step.part else next(each) for step in program.steps]
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(program.steps)))
    graph.add_edges_from(edges(program))
    best: dict[int, tuple[float, int]] = {}                  # step -> seconds of the longest path that ends with it, the step before
    for i in networkx.topological_sort(graph):
        before = max(((best[p][0], p) for p in graph.predecessors(i)), default=(0.0, -1))
        best[i] = (before[0] + seconds[i], before[1])
    at = max(best, key=lambda i: best[i][0], default=-1)
    path = []
    while at >= 0:
        path.append(at)
        at = best[at][1]
    whole, long = sum(seconds), sum(seconds[i] for i in path)
    return {"seconds": long, "steps": path[::-1], "all_seconds": whole, "all_steps": len(seconds), "share": long / whole if whole else 1.0}
