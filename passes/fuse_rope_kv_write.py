"""Split the merged projection, rotate q and k, and put k and v into the cache in one step: infc::rope_kv_write.

Which columns are q, k and v, and which token's angles rotate them, is read off by moving numbered elements along the graph.
"""
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..compiler.ir import Graph, drop_dead_nodes, target_name
from ..compiler.layout import Layout, NotMoves, cannot_reorder, column_order, drop_weights, reorder_columns, sources, stray_reader
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, emit


@dataclass(frozen=True)
class Site:
    """One attention's way from the projection to the cache. q', k' are results 0 and 1 of `rope`."""

    write: fx.Node                                          # infc.kv_write
    attention: fx.Node                                      # infc.paged_attention that reads the same cache
    rope: fx.Node
    qkv: fx.Node                                            # the merged product


class Declined(Exception):
    """The message says why a site is left as it is."""


def run(graph: Graph, report: Report) -> int:
    layout, fired = Layout(graph), 0
    for write in [n for n in graph.nodes if n.target is infc.kv_write.default]:
        try:
            site = _site(write)
            order = _column_order(graph, layout, site)
            _check_angles(layout, site)
            _check_users(site)
        except Declined as reason:
            report.refuse(write, str(reason))
            continue
        if not report.may_fire():
            break
        old = [n for n in site.qkv.all_input_nodes if graph.weight(n) is not None]
        _fuse(graph, layout, site, order)
        drop_dead_nodes(graph)
        drop_weights(graph, old)
        fired += 1
    return fired


def _site(write: fx.Node) -> Site:
    k, v, k_cache = write.args[:3]
    attention = next((u for u in k_cache.users if u.target is infc.paged_attention.default), None)  # type: ignore[union-attr]
    if attention is None:
        raise Declined(f"no attention reads %{k_cache}")
    rope = sources(k)[-1]                                   # type: ignore[arg-type]
    if rope.target is not infc.rope.default:
        raise Declined(f"k comes from {_named(rope)}, not from a rotation")
    if sources(attention.args[0])[-1] is not rope:          # type: ignore[arg-type]
        raise Declined(f"q comes from {_named(sources(attention.args[0])[-1])}, not from the rotation of k")  # type: ignore[arg-type]
    ends = {name: sources(node)[-1] for name, node in (("q", rope.args[0]), ("k", rope.args[1]), ("v", v))}  # type: ignore[arg-type]
    for name, end in ends.items():
        if end.target not in (aten.linear.default, infc.linear.default):
            goal = "cache" if name == "v" else "rotation"
            raise Declined(f"{name} passes through {_named(end)} between its projection and the {goal}")
    if len(set(ends.values())) > 1:
        raise Declined(f"q, k and v come from several products: {', '.join(f'%{n.name}' for n in dict.fromkeys(ends.values()))}")
    return Site(write, attention, rope, ends["q"])


def _named(node: fx.Node) -> str:
    return f"{target_name(node.target)} (%{node.name})" if node.op == "call_function" else f"%{node.name}"


def _heads(site: Site) -> tuple[int, int, int]:
    """(query heads, kv heads, head size)."""
    q, cache = site.attention.args[0].meta["val"], site.write.args[2].meta["val"]  # type: ignore[union-attr]
    return q.shape[1], cache.shape[1], q.shape[2]


def _moved(layout: Layout, site: Site) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbered product [T, columns] and what q, k (as rotated) and q', k', v (as used) hold of it, rotation left out."""
    numbers = layout.numbered(site.qkv)
    given = {site.qkv: numbers}
    try:
        q, k, v = (layout.run(n, given) for n in (*site.rope.args[:2], site.write.args[1]))  # type: ignore[arg-type]
        turned = {user: (q, k)[user.args[1]] for user in site.rope.users}  # type: ignore[index]
        used_q, used_k = (layout.run(n, turned) for n in (site.attention.args[0], site.write.args[0]))  # type: ignore[arg-type]
    except NotMoves as error:
        raise Declined(f"q, k or v passes through %{error} between projection and cache") from error
    return numbers.flatten(0, -2), {"q": q, "k": k, "v": v, "q'": used_q, "k'": used_k}


def _column_order(graph: Graph, layout: Layout, site: Site) -> Tensor | None:
    """None where the columns lie as q heads, k heads, v heads; else the order that makes them do so."""
    q_heads, kv_heads, head = _heads(site)
    numbers, moved = _moved(layout, site)
    found = torch.cat([moved[name].flatten(1) for name in ("q'", "k'", "v")], 1)
    order = column_order(numbers, found)
    if order is None:
        raise Declined(f"%{site.qkv.name} has other columns than {q_heads} q, {kv_heads} k and {kv_heads} v heads of {head}")
    for name in ("q", "k"):                                 # every row that is rotated is one head, channel by channel
        if not torch.equal(_rows(moved[name]), _rows(moved[f"{name}'"])):
            raise Declined(f"{name} is rotated along another axis than its channels")
    if torch.equal(order, torch.arange(len(order))):
        return None
    reason, stray = cannot_reorder(graph, site.qkv), stray_reader(site.qkv, {site.rope, site.write})
    if reason is None and stray is not None:
        reason = f"it is also used by %{stray.name}"
    if reason:
        raise Declined(f"the columns of %{site.qkv.name} do not lie as q, k, v, and cannot be moved: {reason}")
    return order


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows[rows[:, 0].argsort()]


def _check_angles(layout: Layout, site: Site) -> None:
    """cos and sin of token t rotate token t."""
    numbers, moved = _moved(layout, site)
    for angles in site.rope.args[2:4]:
        val = angles.meta["val"]                            # type: ignore[union-attr]
        shape = [layout.size(s) for s in val.shape[:-1]]
        if torch.Size(shape).numel() != numbers.shape[0]:
            raise Declined(f"%{angles} has {shape} rows for {numbers.shape[0]} tokens")
        token = torch.arange(numbers.shape[0]).reshape(shape)
        for name in ("q", "k"):
            own = (moved[name][..., 0] - 1) // numbers.shape[-1]
            if not torch.equal(token.expand_as(own), own):
                raise Declined(f"{name} of a token is rotated by another token's angles")


def _check_users(site: Site) -> None:
    """Nothing else may need the rotated q and k: they would be computed twice."""
    for user in site.rope.users:
        stray = stray_reader(user, {site.write, site.attention})
        if stray is not None:
            raise Declined(f"the rotated value is also {'returned' if stray.op == 'output' else f'used by %{stray.name}'}")


def _fuse(graph: Graph, layout: Layout, site: Site, order: Tensor | None) -> None:
    q_heads, kv_heads, _ = _heads(site)
    qkv = site.qkv if order is None else reorder_columns(graph, site.qkv, order)
    if qkv.meta["val"].dim() != 2:
        qkv = emit(graph, aten.reshape.default, (qkv, [-1, qkv.meta["val"].shape[-1]]), like=site.write)
    cos, sin = (_flat(graph, layout, angles) for angles in site.rope.args[2:4])  # type: ignore[arg-type]
    caches = site.write.args[2:5]
    q = emit(graph, infc.rope_kv_write.default, (qkv, cos, sin, *caches, q_heads, kv_heads, site.rope.args[4]), like=site.write)
    q.meta["origin"] = list(site.attention.meta.get("origin") or site.write.meta.get("origin") or ())
    site.attention.replace_input_with(site.attention.args[0], q)  # type: ignore[arg-type]
    graph.module.graph.erase_node(site.write)


def _flat(graph: Graph, layout: Layout, angles: fx.Node) -> fx.Node:
    """The angles as [T, R/2]: what they were before dims of 1 were put in, or a view shared by all layers."""
    val = angles.meta["val"]
    numbers = layout.numbered(angles)
    flat = numbers.reshape(-1, numbers.shape[-1])
    for node in sources(angles):
        if node.meta["val"].dim() == 2 and layout.is_moved(angles, node, numbers, flat):
            return node
    known = next((u for u in angles.users if u.target is aten.reshape.default and u.args[1] == [-1, val.shape[-1]]), None)
    if known is not None:
        return known
    after = angles.next
    return emit(graph, aten.reshape.default, (angles, [-1, val.shape[-1]]), like=after)


PASS = Pass("fuse_rope_kv_write", run, EXACT)
