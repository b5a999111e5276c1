"""Which heads a tensor's expansion repeats: the expansion is run on numbered data and compared with repeat_interleave."""
from typing import Any, cast

import torch
from torch import Tensor, fx

from .ir import same_size
from .probe import Unknown, evaluate, shape_of, symbols_of

aten = torch.ops.aten

# Move whole elements about; anything else computes and ends the walk.
MOVES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default, aten.contiguous.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.transpose.int, aten.permute.default,
    aten.repeat_interleave.self_int, aten.repeat.default, aten.tile.default, aten.index_select.default, aten.index.Tensor,
    aten.flatten.using_ints, aten.unflatten.int, aten.select.int, aten.alias.default,
}  # fmt: skip


def unexpanded(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """(base, transposed): `node` [B,Hq,S,D] is base [B,Hkv,S,D] with each head repeated Hq/Hkv times in place, Hkv < Hq.

    transposed: base lies as [B,S,Hkv,D]. The smallest Hkv wins, then the base nearest to `node`. None when there is no
    such base: nothing is expanded, or the heads are tiled (h0 h1 h0 h1), which is another function.
    """
    heads = node.meta["val"].shape[1]
    best: tuple[int, fx.Node, bool] | None = None
    current = node
    while isinstance(heads, int) and current.op == "call_function" and current.target in MOVES:
        current = cast(fx.Node, current.args[0])
        for transposed in (False, True):
            few = _heads(node.meta["val"], current.meta["val"], transposed)
            if few and heads % few == 0 and few < (best[0] if best else heads) and _repeats(node, current, heads // few, transposed):
                best = few, current, transposed
    return best[1:] if best else None


def _heads(full: Tensor, base: Any, transposed: bool) -> int | None:
    """The head count of a base candidate, when its other dims are those of the full tensor."""
    if not isinstance(base, Tensor) or base.dim() != 4: return None
    batch, heads, length, head = (base.shape[i] for i in ((0, 2, 1, 3) if transposed else (0, 1, 2, 3)))
    fits = all(same_size(a, b) for a, b in ((batch, full.shape[0]), (length, full.shape[2]), (head, full.shape[3])))
    return heads if fits and isinstance(heads, int) else None


def _repeats(node: fx.Node, base: fx.Node, group: int, transposed: bool) -> bool:
    symbols = sorted(symbols_of(node.meta["val"], base.meta["val"]), key=str)
    for shift in (2, 3):
        sizes = {symbol: shift + 2 * i for i, symbol in enumerate(symbols)}
        shape = shape_of(base.meta["val"], sizes)
        numbered = torch.arange(torch.Size(shape).numel()).reshape(shape)
        plain = numbered.transpose(1, 2) if transposed else numbered
        try:
            if not torch.equal(evaluate(node, sizes, {base: numbered}), plain.repeat_interleave(group, 1)): return False
        except Unknown:                                        # an index computed from something else, say
            return False
    return True
