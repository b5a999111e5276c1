"""infc::sample: logits to tokens, each row with its own temperature, top-k, top-p and its own uniform number."""
import math

import torch
from torch import Tensor

from .registry import Cost, nbytes, operator

GREEDY_BELOW = 1e-30
"""A temperature below this is 0: its reciprocal must be finite in fp32, which it is not below 2.9e-39, and a draw that cold is the
likeliest token anyway. The same number as in backends/cpu/kernels/sample.h."""


def cost(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Cost:
    rows = nbytes(temperature) + nbytes(top_k) + nbytes(top_p) + nbytes(uniform)
    return Cost(flops=5 * logits.numel(), bytes=nbytes(logits) + rows + 4 * logits.shape[0])


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """One row. fp64 inside, so that the judge's cumulative sums have no rounding worth speaking of."""
    known = torch.where(logits.isnan(), -math.inf, logits)
    likeliest = int((known == known.max()).nonzero()[0])                       # the lowest index wins a tie
    if not temperature >= GREEDY_BELOW: return likeliest
    wide = known.double()
    probs, order = torch.softmax((wide - wide.max()) / temperature, -1).sort(descending=True, stable=True)
    if 0 < top_k < len(probs): probs = probs[:top_k]
    mass = probs.cumsum(0)
    if not 0 < mass[-1] < math.inf: return likeliest                           # of infinite logits, NaN
    kept = int((mass < top_p * mass[-1]).sum()) + 1 if top_p < 1 else len(probs)
    chosen = int((mass[:kept] <= uniform * mass[kept - 1]).sum())
    return int(order[min(chosen, kept - 1)])


@operator("infc::sample", cost=cost)
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token per row.  logits [R,V]; temperature, top_p, uniform f32[R]; top_k i32[R] -> i32[R].

    A temperature below GREEDY_BELOW is argmax, the lowest index winning a tie. NaN counts as -inf: token 0 where nothing is
    more; a row whose mass is not finite (its largest logit is not) is argmax too. Else p = softmax(logits / temperature),
    sorted descending (ties by index), cut to the top_k largest (0: off), then to the smallest prefix with at least top_p of
    the mass that is left (1: off; one token at least); the token is the inverse CDF of that prefix at uniform in [0, 1).
    """
    rows = zip(logits, temperature.tolist(), top_k.tolist(), top_p.tolist(), uniform.tolist(), strict=True)
    return torch.tensor([draw(*row) for row in rows], dtype=torch.int32, device=logits.device)


@sample.register_fake
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)
