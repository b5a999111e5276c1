"""How far one model's next-token distributions are from another's, and how well each foretells a text.

Over n scored tokens, y_t the token that came, p_t the reference's distribution before it and q_t ours, in fp64:

    ppl            exp(-1/n sum_t ln q_t(y_t)), reference_ppl the same of p
    kl             1/n sum_t KL_t, KL_t = sum_v p_t(v) (ln p_t(v) - ln q_t(v)), in nats
    kl_p99         the smallest KL_t that at least 99 of 100 tokens do not pass
    top1           the share of tokens whose likeliest v is the same in p_t and q_t
"""
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ..errors import CheckFailed

ROWS = 64
"""Rows widened to fp64 at once: 25 MB a copy at a vocabulary of 49,152."""


@dataclass(frozen=True)
class Figures:
    """What a comparison found; without a reference the last four are None."""

    tokens: int
    ppl: float
    reference_ppl: float | None = None
    kl: float | None = None
    kl_p99: float | None = None
    top1: float | None = None

    def json(self) -> dict[str, float | int | None]:
        """Plain data."""
        return asdict(self)


@dataclass
class Comparison:
    """Takes logits window by window and keeps four numbers a token."""

    loss: list[Tensor] = field(default_factory=list)
    reference_loss: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    agreed: int = 0

    def add(self, ours: Tensor, targets: Sequence[int], reference: Tensor | None = None) -> None:
        """ours, reference [n, V]: logits before each of the n targets. CheckFailed where they hold NaN or +inf, or -inf for a target."""
        n = len(targets)
        if ours.shape[0] != n or (reference is not None and reference.shape != ours.shape):
            shapes = tuple(ours.shape), None if reference is None else tuple(reference.shape)
            raise ValueError(f"logits of {shapes[0]}, a reference of {shapes[1]} and {n} targets do not fit")
        every = torch.tensor([*targets])
        for start in range(0, n, ROWS):
            part = slice(start, start + ROWS)
            q = _log_probabilities(ours[part], "the compiled model")
            self.loss.append(_loss(q, every[part], "the compiled model"))
            if reference is None: continue
            p = _log_probabilities(reference[part], "the captured model")
            self.reference_loss.append(_loss(p, every[part], "the captured model"))
            self.divergence.append(divergence(p, q))
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def figures(self) -> Figures:
        """Of all tokens so far."""
        loss = torch.cat(self.loss)
        if not self.divergence: return Figures(len(loss), _perplexity(loss))
        apart = torch.cat(self.divergence)
        return Figures(len(loss), _perplexity(loss), _perplexity(torch.cat(self.reference_loss)), float(apart.mean()),
                       percentile(apart, 0.99), self.agreed / len(loss))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of each row, both given as log-probabilities [n, V]; what has no probability in p adds nothing."""
    return torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(-1)


def percentile(values: Tensor, share: float) -> float:
    """The smallest value that at least `share` of all do not pass."""
    return float(values.sort().values[max(0, math.ceil(share * len(values)) - 1)])


def _perplexity(loss: Tensor) -> float:
    return float(loss.mean().exp())


def _log_probabilities(logits: Tensor, who: str) -> Tensor:
    wide = logits.double()
    largest = wide.amax(-1)                                # NaN where a row holds one
    bad = (~largest.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise CheckFailed(f"{who} gives logits that are no distribution: the largest of a row is {float(largest[row])}")
    return wide.log_softmax(-1)


def _loss(log_probabilities: Tensor, targets: Tensor, who: str) -> Tensor:
    loss = -log_probabilities.gather(-1, targets[:, None])[:, 0]
    if bool(loss.isinf().any()):
        raise CheckFailed(f"{who} gives a token of the text no probability at all")
    return loss
