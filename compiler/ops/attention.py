"""infc::attention: grouped-query attention with its mask named, the one form every spelling is rewritten to."""
import torch
from torch import Tensor

from .registry import Cost, compute_dtype, nbytes, operator, out_bytes

MASKS = ("none", "causal", "causal_top_left")


def cost(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0, mask: str = "none",
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Cost:
    per_key = 2 * q.shape[-1] + 2 * v.shape[-1] + 5                            # two products; scale, mask, softmax
    flops = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * per_key        # masked keys counted: an upper bound
    written = out_bytes((*q.shape[:-1], v.shape[-1]), q.dtype)
    return Cost(flops=flops, bytes=nbytes(q) + nbytes(k) + nbytes(v) + nbytes(bias) + nbytes(sinks) + written)


def heads_per_group(q_heads: int, kv_heads: int) -> int:
    """Hq // Hkv. ValueError naming both when they do not divide."""
    if kv_heads < 1 or q_heads % kv_heads: raise ValueError(f"{q_heads} query heads do not share {kv_heads} kv heads evenly")
    return q_heads // kv_heads


def visible(mask: str, window: int, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """bool [S, L]: may query i see key j. causal aligns bottom-right (the last query sees the last key)."""
    if mask not in MASKS: raise ValueError(f"mask {mask!r} is none of {', '.join(MASKS)}")
    shift = 0 if mask == "causal_top_left" else keys - queries
    position = torch.arange(queries, device=device)[:, None] + shift
    key = torch.arange(keys, device=device)[None, :]
    seen = key <= position if mask != "none" else torch.ones(queries, keys, dtype=torch.bool, device=device)
    return seen & (position - key < window) if window > 0 else seen


def check_sinks(sinks: Tensor | None, q_heads: int) -> None:
    """ValueError unless there is one sink a query head, or none at all."""
    if sinks is not None and tuple(sinks.shape) != (q_heads,): raise ValueError(f"sinks are {list(sinks.shape)} for {q_heads} query heads")


def weigh(scores: Tensor, seen: Tensor, softcap: float, bias: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """Scaled scores [...,Hq,S,L] -> probabilities: soft-cap, then bias and mask, then softmax; a row that sees nothing gives zeros.

    sinks [Hq]: each joins the sum of its head's rows as one more score, neither scaled nor capped, that no value belongs to.
    """
    if softcap: scores = softcap * torch.tanh(scores / softcap)
    if bias is not None and bias.dtype == torch.bool: seen = seen & bias
    elif bias is not None: scores = scores + bias.to(scores.dtype)
    # Added, not filled: as in PyTorch's SDPA a NaN under the mask stays visible instead of being hidden.
    scores = scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill(~seen, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    if sinks is None: return torch.softmax(scores, -1).masked_fill(nothing, 0.0)
    sunk = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(sunk, -1)[..., :-1].masked_fill(nothing, 0.0)


@operator("infc::attention", cost=cost)
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0, mask: str = "none",
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:
    """softmax(softcap(q kᵀ scale) + bias, masked) v.  q [B,Hq,S,D], k [B,Hkv,L,D], v [B,Hkv,L,Dv] -> [B,Hq,S,Dv].

    Query head h reads kv head h // (Hq // Hkv). mask: "none"; "causal": key j is seen by query i iff j <= i + (L - S);
    "causal_top_left": iff j <= i. window W > 0: besides, i + (L - S) - j < W (top-left: i - j < W), so a row sees at
    most W keys. bias broadcasts to [B,Hq,S,L]; bool (True = seen) or float (added after the soft-cap). A row that sees
    no key gives 0. sinks [Hq]: exp(sinks[h]) is added to the sums of head h's softmax, as of a key whose value is 0 (gpt-oss).
    Sums in fp32 (fp64 for fp64), result in q.dtype.
    """
    check_sinks(sinks, q.shape[1])
    wide = compute_dtype(q.dtype)
    group = heads_per_group(q.shape[1], k.shape[1])
    keys, values = (t.to(wide).repeat_interleave(group, 1) for t in (k, v))
    scores = q.to(wide) @ keys.transpose(-1, -2) * scale
    seen = visible(mask, window, q.shape[2], k.shape[2], q.device)
    return (weigh(scores, seen, softcap, bias, sinks) @ values).to(q.dtype).contiguous()


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0, mask: str = "none",
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:
    heads_per_group(q.shape[1], k.shape[1])
    check_sinks(sinks, q.shape[1])
    if mask not in MASKS: raise ValueError(f"mask {mask!r} is none of {', '.join(MASKS)}")
    return q.new_empty((*q.shape[:-1], v.shape[-1]))
