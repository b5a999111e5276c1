"""Rewrite every spelling of attention to infc::attention: kv heads unexpanded, the mask named by what it is, sinks an argument."""
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..compiler.heads import unexpanded
from ..compiler.ir import Graph, drop_dead_nodes, same_size, same_type
from ..compiler.masks import POSITIONS, MaskKind, constant, recognise
from ..compiler.ops import aten, attention
from ..compiler.probe import sources
from ..compiler.rewrite import EXACT, Pass, Report, arguments, emit
from ..compiler.sinks import column, gate, unshifted

SDPA = aten.scaled_dot_product_attention.default
SOFTMAX = (aten.softmax.int, aten._softmax.default)
CASTS = (aten._to_copy.default, aten.to.dtype, aten.type_as.default, aten.clone.default, aten.contiguous.default)
FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)

NOTE_EMPTY_ROWS = "rewrite_attention: a row whose keys are all masked gave NaN as softmax-matmul and gives 0 as infc::attention"
NOTE_PACKED = "rewrite_attention: masks are named for positions contiguous within a row; packed position_ids are another function"


NOT_KNOWN = "between two products, but not softmax(mask(soft-cap(scale * q kT))) v over the last axis in a spelling that is known"

NO_MASK = MaskKind("none")


class Declined(Exception):
    """This is attention, and it stays as it is; the message says why."""


@dataclass(frozen=True)
class Mask:
    """One mask on the scores: a bool condition (`hides`: True = unseen) or a float that is added."""

    node: fx.Node
    hides: bool = False
    unseen: float | None = None    # what unseen scores are set to; None: the node is added, or an SDPA bool mask


@dataclass
class Call:
    """One attention, whatever its spelling."""

    site: fx.Node                  # holds the result
    q: fx.Node
    k: fx.Node                     # [B,H,L,D], or [B,H,D,L] in a softmax-matmul
    v: fx.Node
    scale: float = 1.0
    softcap: float = 0.0
    kind: MaskKind = NO_MASK
    masks: list[Mask] = field(default_factory=list)
    sinks: fx.Node | None = None   # one number a head
    by_softmax: bool = False       # else an SDPA
    empty_nan: bool = False        # a row that sees nothing gives NaN
    path: list[fx.Node] = field(default_factory=list)    # what the rewrite makes dead: from the scores to the site


def run(graph: Graph, report: Report) -> int:
    count, kinds = 0, {}
    for node in list(graph.nodes):
        if node.target is not SDPA and node.target not in SOFTMAX: continue
        try:
            call = _from_sdpa(graph, node, kinds) if node.target is SDPA else _from_softmax(graph, node)
            if call is None:                             # a softmax of something else
                if _looks_like_attention(node): report.refuse(node, NOT_KNOWN)
                continue
            _refuse(call)
        except Declined as reason:
            report.refuse(node, str(reason))
            continue
        if not report.may_fire(): break
        _replace(graph, call, kinds)
        count += 1
    if count: drop_dead_nodes(graph)                     # the masks, built for every pair of tokens, are the largest tensors
    return count


# --------------------------------------------------------------------------------------------------------- spellings

def _from_sdpa(graph: Graph, node: fx.Node, kinds: dict) -> Call:
    q, k, v, mask, dropout, causal, scale, _ = arguments(node)
    if dropout: raise Declined(f"dropout of {dropout} is live")
    call = Call(node, q, k, v, 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else float(scale))
    if causal:                                           # top-left, the same as bottom-right only on a square
        square = same_size(q.meta["val"].shape[-2], k.meta["val"].shape[-2])
        call.kind = MaskKind("causal" if square else "causal_top_left")
    if mask is not None: call.masks.append(Mask(mask))
    if (found := gate(node)) and _same_scores(graph, call, found[1].scores, kinds): call.site, call.sinks = found[0], found[1].sinks
    return call


def _same_scores(graph: Graph, call: Call, scores: fx.Node, kinds: dict) -> bool:
    """Are these the scores that an SDPA weighs by: its q and k, its scale, its mask?"""
    other = Call(call.site, call.q, call.k, call.v)
    product = _peel(graph, scores, other)
    if product is None or other.softcap or not math.isclose(other.scale, call.scale): return False
    q, k = product.args[:2]
    if q is not call.q or _transposed(k) is not call.k: return False                # type: ignore[arg-type]
    sizes = call.q.meta["val"].shape[2], call.k.meta["val"].shape[2]
    seen, also = (_masks(graph, one, *sizes, kinds) for one in (call, other))
    return seen == also and not seen[1]


def _from_softmax(graph: Graph, node: fx.Node) -> Call | None:
    """softmax(mask(softcap(scale * q kᵀ))) v, read from the softmax outwards."""
    scores, dim = node.args[:2]
    site, path = _weighted_sum(node)
    if site is None or dim not in (-1, node.meta["val"].dim() - 1): return None
    scores, shift = unshifted(scores)
    call = Call(site, node, node, site.args[1], path=[*path, *shift], by_softmax=True, empty_nan=True)    # type: ignore[arg-type]
    cut = [inner for inner in path if inner.target is aten.slice.Tensor]
    if cut:
        sunk = column(scores, cut[0])
        if sunk is None or len(cut) > 1: return None
        call.empty_nan = False                           # its sink is all that such a row sees
    elif (found := gate(site)) and found[1].scores is scores:
        (call.site, sunk), call.path = found, [*call.path, site]
    else:
        sunk = None
    if sunk is not None:
        call.sinks, call.path, scores = sunk.sinks, [*call.path, *sunk.path], sunk.scores
    product = _peel(graph, scores, call)
    if product is None: return None
    call.q, call.k = product.args[:2]                                         # type: ignore[assignment]
    for inner in call.path:
        other = next((user for user in inner.users if user not in call.path and user is not call.site), None)
        if other is not None:
            what = "probabilities" if inner in path else "scores"
            raise Declined(f"the {what} %{inner.name} are also " + ("returned" if other.op == "output" else f"used by %{other.name}"))
    return call


def _looks_like_attention(softmax: fx.Node) -> bool:
    """A product goes in and its weights go into another one."""
    return softmax.target in SOFTMAX and _holds_product(softmax.args[0]) and _weighted_sum(softmax)[0] is not None


def _weighted_sum(softmax: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The product of the probabilities with v, past casts, copies and cuts, and what lies between."""
    node, path = softmax, []
    while True:
        path.append(node)
        product = next((u for u in node.users if u.target is aten.matmul.default and u.args[0] is node), None)
        if product is not None: return product, path
        following = next((u for u in node.users if u.target in (*CASTS, aten.slice.Tensor)
                          or (u.target is aten.dropout.default and not u.args[2])), None)
        if following is None: return None, path
        node = following


def _peel(graph: Graph, node: Any, call: Call) -> fx.Node | None:
    """Take mask, soft-cap and scale off the scores, noting them in `call`; the product q kᵀ, or None when there is none."""
    inner = ""                                           # what was peeled last: nothing may come before its place in the formula
    while isinstance(node, fx.Node) and node.op == "call_function":
        call.path.append(node)
        if node.target is aten.matmul.default: return node
        if node.target in CASTS:
            node = node.args[0]
        elif node.target in (*FILLS, *WHERES, aten.add.Tensor):
            if inner and _holds_product(node): raise Declined(f"%{node.name} masks before the {inner}")
            node = _unmasked(graph, node, call)
        elif (capped := _softcap(graph, node, call)) is not None:
            if inner: raise Declined(f"%{node.name} caps before the {inner}")
            node, inner = capped, "soft-cap"
        elif (scaled := _scaled(graph, node)) is not None:
            node, inner = scaled[0], inner or "scale"
            call.scale *= scaled[1]
        else:
            return None
    return None


def _unmasked(graph: Graph, node: fx.Node, call: Call) -> Any:
    """The scores below a mask, which goes to `call`; None when this masks nothing."""
    if node.target is aten.add.Tensor:
        a, b = node.args
        scores, mask = (a, b) if _holds_product(a) else (b, a)
        if not isinstance(mask, fx.Node) or not mask.meta["val"].is_floating_point() or node.kwargs.get("alpha", 1) != 1: return None
        call.masks.append(Mask(mask))
        return scores
    if node.target in FILLS:
        scores, condition, fill = node.args
        hides = True
    else:
        condition, scores, fill = node.args
        hides = not _holds_product(scores)
        if hides: scores, fill = fill, scores
    unseen = constant(graph, fill)
    if unseen is None or unseen > torch.finfo(node.meta["val"].dtype).min: return None
    call.masks.append(Mask(condition, hides, unseen))    # type: ignore[arg-type]
    return scores


def _holds_product(node: Any) -> bool:
    """Does the product of q and k lie below this node, rather than below the mask beside it?"""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is aten.matmul.default: return True
        if node.target in (aten.add.Tensor, *WHERES): return any(_holds_product(arg) for arg in node.args)
        if node.target is aten.cat.default: return any(_holds_product(arg) for arg in node.args[0])    # type: ignore[union-attr]
        if node.target not in (*CASTS, *FILLS, *PRODUCTS, aten.tanh.default, aten.sub.Tensor): return False
        node = node.args[0]
    return False


def _softcap(graph: Graph, node: fx.Node, call: Call) -> Any:
    """x of c * tanh(factor * x); c is noted as the soft-cap, c * factor as a scale. None when this is something else."""
    outer = _scaled(graph, node)
    if outer is None or outer[0].target is not aten.tanh.default: return None
    inner = _scaled(graph, outer[0].args[0]) or (outer[0].args[0], 1.0)
    call.path += [outer[0], *([outer[0].args[0]] if inner[0] is not outer[0].args[0] else [])]    # type: ignore[list-item]
    call.softcap = outer[1]
    call.scale *= inner[1] * outer[1]
    return inner[0]


def _scaled(graph: Graph, node: Any) -> tuple[fx.Node, float] | None:
    """(x, factor) of x * factor or x / divisor, by a constant and with x's own shape and dtype."""
    if not isinstance(node, fx.Node) or node.target not in PRODUCTS: return None
    times = node.target in (aten.mul.Tensor, aten.mul.Scalar)
    for x, other in (node.args[:2], *([node.args[1::-1]] if times else [])):
        if isinstance(x, fx.Node) and same_type(x.meta["val"], node.meta["val"]) and (factor := constant(graph, other)):
            return x, factor if times else 1 / factor
    return None


# ----------------------------------------------------------------------------------------------------------- refusals

def _refuse(call: Call) -> None:
    q, k, v = (n.meta["val"] for n in (call.q, call.k, call.v))
    if {q.dim(), k.dim(), v.dim()} != {4}: raise Declined(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dims, expected [B,H,S,D]")
    if len({q.dtype, k.dtype, v.dtype}) != 1: raise Declined(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    if not all(isinstance(t.shape[1], int) for t in (q, k, v)): raise Declined("the number of heads is not fixed")
    if k.shape[1] != v.shape[1]: raise Declined(f"k has {k.shape[1]} heads, v has {v.shape[1]}")
    if q.shape[1] % k.shape[1]: raise Declined(f"{q.shape[1]} query heads do not share {k.shape[1]} kv heads evenly")
    if not all(same_size(q.shape[0], t.shape[0]) for t in (k, v)): raise Declined("q, k and v differ in batch")


# -------------------------------------------------------------------------------------------------------- replacement

def _replace(graph: Graph, call: Call, kinds: dict) -> None:
    site = call.site
    if call.by_softmax: _untranspose_k(graph, call)
    call.q, factor = _scaled(graph, call.q) or (call.q, 1.0)
    k, v = _fewest_heads(graph, call)
    queries, keys = call.q.meta["val"].shape[2], k.meta["val"].shape[2]
    call.kind, kept = _masks(graph, call, queries, keys, kinds)
    if call.empty_nan and (kept or (not _full(queries, keys) and call.kind.mask != "none")): _note(graph, NOTE_EMPTY_ROWS)
    args = (call.q, k, v, _bias(graph, kept, site), call.scale * factor, call.kind.mask, call.kind.window, call.softcap)
    sinks = {} if call.sinks is None else {"sinks": _row(graph, call.sinks, site)}
    site.replace_all_uses_with(emit(graph, attention, args, sinks, like=site))


def _row(graph: Graph, sinks: fx.Node, site: fx.Node) -> fx.Node:
    """The sinks as [Hq]."""
    return sinks if sinks.meta["val"].dim() == 1 else emit(graph, aten.reshape.default, (sinks, [-1]), like=site)


def _full(queries: Any, keys: Any) -> bool:
    """Does a causal mask leave every query a key?"""
    return same_size(queries, keys) or (isinstance(queries, int) and isinstance(keys, int) and queries <= keys)


def _masks(graph: Graph, call: Call, queries: Any, keys: Any, kinds: dict) -> tuple[MaskKind, list[Mask]]:
    """All masks of a call as one that has a name, and those that have none."""
    kind, kept = call.kind, []
    for mask in call.masks:
        found = _kind(graph, mask, queries, keys, kinds)
        met = kind.meet(found) if isinstance(found, MaskKind) else None
        # finfo.min averages v over a row that sees nothing, a named mask gives 0: only where no row can be empty.
        sharp = mask.unseen == -math.inf or (mask.unseen is None and mask.node.meta["val"].dtype == torch.bool)
        if met is not None and (_full(queries, keys) or sharp or met.mask == "none"): kind = met
        else: kept.append(mask)
    return kind, kept


def _kind(graph: Graph, mask: Mask, queries: Any, keys: Any, kinds: dict) -> MaskKind | str:
    """recognise(), once per mask and not once per layer."""
    key = mask.node, mask.hides
    if key not in kinds:
        kinds[key] = recognise(graph, mask.node, queries, keys, hides=mask.hides)
        if isinstance(kinds[key], MaskKind) and any(n.op == "placeholder" and n.target in POSITIONS for n in sources(mask.node)):
            _note(graph, NOTE_PACKED)
    return kinds[key]


def _untranspose_k(graph: Graph, call: Call) -> None:
    """k [B,H,L,D] from the product's right side [B,H,D,L]; a constant factor on it joins the scale."""
    call.k, factor = _scaled(graph, call.k) or (call.k, 1.0)
    call.k = _transposed(call.k) or emit(graph, aten.transpose.int, (call.k, 2, 3), like=call.site)
    call.k, below = _scaled(graph, call.k) or (call.k, 1.0)
    call.scale *= factor * below


def _transposed(k: fx.Node) -> fx.Node | None:
    """x of xᵀ."""
    turned = k.target is aten.transpose.int and {d % 4 for d in k.args[1:]} == {2, 3}    # type: ignore[operator]
    turned = turned or (k.target is aten.permute.default and k.args[1] == [0, 1, 3, 2])
    return k.args[0] if turned else None                                              # type: ignore[return-value]


def _fewest_heads(graph: Graph, call: Call) -> tuple[fx.Node, fx.Node]:
    """k and v before their heads were repeated, where both were repeated alike."""
    found = [unexpanded(node) for node in (call.k, call.v)]
    if None in found: return call.k, call.v
    bases = [emit(graph, aten.transpose.int, (base, 1, 2), like=call.site) if turned else base for base, turned in found]    # type: ignore
    alike = bases[0].meta["val"].shape[1] == bases[1].meta["val"].shape[1]
    return (bases[0], bases[1]) if alike else (call.k, call.v)


def _bias(graph: Graph, masks: list[Mask], site: fx.Node) -> fx.Node | None:
    """Masks without a name as one bias, bool where all are bool and unseen means -inf, else added up as floats."""
    parts = []
    for mask in masks:
        part = emit(graph, aten.logical_not.default, (mask.node,), like=site) if mask.hides else mask.node
        if mask.unseen not in (None, -math.inf):         # keeps "all unseen" the average it was
            zero = emit(graph, aten.zeros.default, ([],), {"dtype": site.meta["val"].dtype}, like=site)
            part = emit(graph, aten.where.ScalarOther, (part, zero, mask.unseen), like=site)
        parts.append(part)
    while len(parts) > 1:
        a, b = sorted(parts[:2], key=lambda n: n.meta["val"].dtype != torch.bool)
        both = a.meta["val"].dtype == b.meta["val"].dtype == torch.bool
        if both: one = emit(graph, aten.logical_and.default, (a, b), like=site)
        elif a.meta["val"].dtype == torch.bool: one = emit(graph, aten.where.ScalarOther, (a, b, -math.inf), like=site)
        else: one = emit(graph, aten.add.Tensor, (a, b), like=site)
        parts[:2] = [one]
    return parts[0] if parts else None


def _note(graph: Graph, note: str) -> None:
    """Notes reach the report through the graph: what a reader must know though the contract holds."""
    known = graph.meta.get("notes", [])
    if note not in known: graph.meta["notes"] = [*known, note]


PASS = Pass("rewrite_attention", run, contract=EXACT, requires=("canonicalize",))
