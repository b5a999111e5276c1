"""The graph that a bucket's program is built from.

Products of codes that are of bf16 with many rows (bf16_rows, see ops.linear_quantized) round what they read. Where a bucket's steps
always have so many tokens, the operator that makes it rounds it: the same values, in half the bytes, which products read where they lie.
"""
import torch

from .casts import Casts
from .divergence import WIDE
from .ir import Graph, argument, fake_propagate, size_text, verify
from .ops.linear_quantized import PRODUCTS
from .rewrite import complete, set_arguments


def of_bucket(graph: Graph, least: int) -> Graph:
    """The graph for steps of `least` tokens or more: it gives what `graph` gives for those. The same object where nothing differs."""
    def always(node: torch.fx.Node) -> bool:
        if node.target not in PRODUCTS or not 0 < argument(node, "bf16_rows") <= least: return False
        x = node.args[0].meta["val"]                                   # type: ignore[union-attr]
        return x.dtype == WIDE and [size_text(size, graph.symbols) for size in x.shape[:-1]] == ["T"]

    if not any(map(always, graph.nodes)): return graph
    made = graph.copy()
    old, casts = set(made.nodes), Casts(made, torch.bfloat16)
    for node in [node for node in made.nodes if always(node)]:
        set_arguments(node, x=casts.of(node.args[0], node), out_dtype=argument(node, "out_dtype") or WIDE, bf16_rows=1)
    casts.absorb()
    complete(made, "bucket", old)
    fake_propagate(made, accept_changes=True)
    verify(made)
    return made
