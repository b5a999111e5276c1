"""bf16 where the bytes are: weights, what products read, and the KV cache; fp32 where sums live: the residual stream.

A weight is stored once, in bf16, also where embedding and head share it. What feeds a product is rounded by the operator
that makes it (its out_dtype) where nobody needs it wide, else by a cast; products give fp32 again.
APPROXIMATE: next-token distributions may not be further (KL) from the fp32 graph's than those of eager bf16 PyTorch.
"""
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..compiler.divergence import NARROW, WIDE, converted, divergences, input_dtypes
from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, argument, fake_mode, fake_propagate
from ..compiler.layout import MOVES
from ..compiler.ops import aten, infc
from ..compiler.rewrite import APPROXIMATE, Measured, Pass, Report, emit

PRODUCTS = {infc.linear.default, infc.linear_swiglu.default}
CACHE_OPS = {infc.kv_write.default, infc.rope_kv_write.default, infc.paged_attention.default}
SELECTS = MOVES - {aten.cat.default, aten.stack.default, operator.getitem} | {aten.index_select.default}
"""Of one value; rounding before or after them is the same."""


def run(graph: Graph, report: Report) -> int:
    """Counts the weights and the attentions (with their caches) that became narrow."""
    if report.options.get("dtype", "bf16") != "bf16":
        return 0
    fired, casts = 0, {}
    for weight in _weights(graph, report):
        if not report.may_fire(): break
        _narrow_weight(graph, weight, casts)
        fired += 1
    for node in [n for n in graph.nodes if n.target is infc.paged_attention.default and n.args[1].meta["val"].dtype == WIDE]:
        caches = node.args[1:3]
        other = next((u for c in caches for u in c.users if u.target not in CACHE_OPS), None)
        if other is not None:
            report.refuse(node, f"its cache is also used by %{other.name}")
            continue
        if not report.may_fire(): break
        for cache in caches: _retype(graph, cache)
        _set(node, q=_cast(graph, node.args[0], casts, node), out_dtype=WIDE)
        fired += 1
    for node in [n for n in graph.nodes if n.target is infc.paged_attention_quantized.default and n.args[0].meta["val"].dtype == WIDE]:
        if not report.may_fire(): break
        _set(node, q=_cast(graph, node.args[0], casts, node), out_dtype=WIDE)           # its caches are narrower than this already
        fired += 1
    if fired:
        for cast in casts.values(): _absorb(cast)
        if graph.sample_inputs is not None: graph.sample_inputs = SamplesAs(graph.sample_inputs, input_dtypes(graph))
        fake_propagate(graph, accept_changes=True)
    return fired


def _weights(graph: Graph, report: Report) -> list[fx.Node]:
    """Weights that products and lookups alone read; the others, if some product reads them, are refused."""
    found = []
    for node in graph.module.graph.find_nodes(op="placeholder"):
        weight = graph.weight(node)
        if weight is None or weight.dtype != WIDE: continue
        reads = [(u, (u.target in PRODUCTS and u.args[1] is node and node not in (u.args[0], *u.args[2:]))
                  or (u.target is aten.embedding.default and u.args[0] is node)) for u in node.users]
        other = next((user for user, known in reads if not known), None)
        if reads and other is None:
            found.append(node)
        elif any(known for _, known in reads):
            report.refuse(node, f"also used by {'the output' if other.op == 'output' else f'%{other.name}'}")  # type: ignore[union-attr]
    return found


def _reads_as_matrix(user: fx.Node, weight: fx.Node) -> bool:
    if user.target in PRODUCTS:
        return user.args.index(weight) == 1 and user.args.count(weight) == 1
    return user.target is aten.embedding.default and user.args[0] is weight


def _narrow_weight(graph: Graph, weight: fx.Node, casts: dict[fx.Node, fx.Node]) -> None:
    graph.weights[str(weight.target)] = graph.weights[str(weight.target)].to(NARROW)
    _retype(graph, weight)
    for user in list(weight.users):
        if user.target in PRODUCTS:
            _set(user, x=_cast(graph, user.args[0], casts, user), out_dtype=argument(user, "out_dtype") or WIDE)
        else:                                               # the residual stream starts here, and stays wide
            users = list(user.users)
            user.meta["val"] = user.meta["val"].to(NARROW)
            wide = emit(graph, aten._to_copy.default, (user,), {"dtype": WIDE}, like=user.next)
            wide.meta["origin"] = list(user.meta.get("origin") or ())
            for reader in users: reader.replace_input_with(user, wide)


def _retype(graph: Graph, placeholder: fx.Node) -> None:
    with fake_mode(graph):
        placeholder.meta["val"] = placeholder.meta["val"].to(NARROW)


def _cast(graph: Graph, x: Any, casts: dict[fx.Node, fx.Node], like: fx.Node) -> fx.Node:
    """x in bf16, one cast for all who want it."""
    if x.meta["val"].dtype == NARROW:
        return x
    if x not in casts:
        casts[x] = emit(graph, aten._to_copy.default, (x,), {"dtype": NARROW}, like=like)
    elif like < casts[x]:
        like.prepend(casts[x])
    return casts[x]


def _set(node: fx.Node, **given: Any) -> None:
    """Give arguments by their schema names, positional where they were."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, value in given.items():
        place = names.index(name)
        if place < len(node.args): node.update_arg(place, value)
        else: node.update_kwarg(name, value)


def _absorb(cast: fx.Node) -> None:
    """Let the operator that makes the value round it, if the cast is its only reader (views and row selections between)."""
    x: Any = cast.args[0]
    node, reader = x, cast
    while list(node.users) == [reader] and node.target in SELECTS:
        node, reader = node.args[0], node
    if list(node.users) == [reader] and node.target is operator.getitem and node.args[1] == 0:
        first = node.args[0]
        if first.target is infc.add_rms_norm.default and sum(u.args[1] == 0 for u in first.users) == 1: node, reader = first, None
    known = isinstance(node.target, OpOverload) and any(a.name == "out_dtype" for a in node.target._schema.arguments)
    if not known or (reader is not None and list(node.users) != [reader]):
        return
    _set(node, out_dtype=NARROW)
    cast.replace_all_uses_with(x)
    cast.graph.erase_node(cast)


@dataclass(frozen=True)
class SamplesAs:
    """Another graph's samples, each tensor in the dtype it has here: caches became bf16."""

    samples: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.samples(*args, **kwargs)
        return [converted(s, self.dtypes) for s in found] if isinstance(found, list) else converted(found, self.dtypes)

    def thorough(self) -> list[tuple[Tensor, ...]]:
        """All of them, for strict checks."""
        return [converted(s, self.dtypes) for s in getattr(self.samples, "thorough", self.samples)()]


# ------------------------------------------------------------------------------------------------------------ the bound

def check(before: Graph, after: Graph) -> Measured:
    """Mean KL(fp32 || ours); CheckFailed where eager bf16 PyTorch is closer."""
    ours, eager = divergences(before, after)
    if not ours <= eager:
        raise CheckFailed(f"KL to fp32 is {ours:.3g}, of eager bf16 it is {eager:.3g}")
    return Measured(ours, eager, "nats, mean KL(fp32 || ours) of next-token distributions: what eager bf16 PyTorch has")


PASS = Pass("narrow_dtype", run, APPROXIMATE, check=check)
