"""Scales by gradient, all at once: they move until the model's next-token distributions are as near the wide model's as they get.

Codes stay. Every scale is multiplied by 1 + p, and p follows the gradient of the KL from the wide model's distributions, one window of
the calibration text a step, by Adam with a rate that falls as a cosine. After the second phase of EfficientQAT (Chen et al., 2024), which
trains step sizes alone; its labels are the text's tokens, ours the wide model's distributions, which say more for each token read.
The eager operators are differentiable as they stand; rows of 8-bit codes pass gradients as if they were not rounded.
"""
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import CheckFailed, UserError
from ..ir import Graph
from ..ops import codes
from ..ops.registry import operator_of
from ..quality.evaluate import StepEvaluator
from .matrices import PRODUCTS
from .rounding import F16_MAX, F16_TINY, WORST, Quantized, bounded, round_to_nearest, row_errors
from .scheme import Scheme
from .sequential import as_read
from .statistics import Window

RATE = 1e-3
"""Of Adam: what a step changes a scale by, as a share of it."""

WARM = 4
"""Steps in which the rate rises to RATE, while Adam learns how large gradients are."""


def tuned(
    graph: Graph, known: Mapping[fx.Node, Quantized], moving: Collection[fx.Node], windows: Sequence[Window],
) -> dict[fx.Node, Quantized]:
    """`moving`, some of the weights whose codes are `known`, with their scales tuned; one step for each window, in order.

    A row whose weights would be too far from the wide ones (rounding.WORST) keeps its scales. UserError for a graph without logits;
    CheckFailed where a KL is not finite.
    """
    if "logits" not in graph.outputs:
        raise UserError("--quant-method tuned compares next-token distributions, and this model gives none: choose gptq")
    walk = StepEvaluator(graph)
    rounds = {str(node.target): found.scheme for node, found in known.items()}
    fixed = {str(node.target): found.dequantized() for node, found in known.items() if node not in moving}
    shares = {node: torch.zeros(known[node].scale.shape, requires_grad=True) for node in moving}
    adam = torch.optim.Adam(shares.values(), lr=RATE, betas=(0.9, 0.99))
    for step, window in enumerate(windows):
        ids: Any = window
        for part in adam.param_groups: part["lr"] = RATE * min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / len(windows))) / 2
        truth = walk.logits(ids).log_softmax(-1)
        weights = fixed | {str(node.target): _weight(known[node], share) for node, share in shares.items()}
        ours = walk.logits(ids, weights, call=lambda node, args, kwargs: _call(node, args, kwargs, rounds)).log_softmax(-1)
        loss = (truth.exp() * (truth - ours)).sum(-1).mean()
        if not bool(loss.isfinite()): raise CheckFailed(f"tuning scales: the KL on window {step} of the calibration text is {float(loss)}")
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {node: _near(graph.weights[str(node.target)].float(), known[node], share.detach(), str(node.target))
            for node, share in shares.items()}


def _weight(found: Quantized, share: Tensor) -> Tensor:
    """f32 [N, K], differentiable by share [N, G]."""
    s = found.scheme
    return codes.weight(found.codes, found.scale.float() * (1 + share), found.offset, s.bits, s.group, found.k, torch.float32)


def _near(w: Tensor, found: Quantized, share: Tensor, name: str) -> Quantized:
    """With its scales moved, in the rows where that is allowed."""
    moved = replace(found, scale=(found.scale.float() * (1 + share)).clamp(F16_TINY, F16_MAX).half())
    return bounded(w, moved, found, row_errors(w, moved) <= WORST * row_errors(w, round_to_nearest(w, found.scheme, name)))


def _call(node: fx.Node, args: tuple, kwargs: dict, schemes: Mapping[str, Scheme]) -> Any:
    """One node by its reference, which has a gradient where an operator's call has none."""
    weight: Any = node.args[1] if node.target in PRODUCTS else None
    scheme = None if weight is None else schemes.get(str(weight.target))
    known = operator_of(node)
    with torch.enable_grad():
        if scheme is not None and scheme.act_bits == 8:
            args = (args[0] + (as_read(args[0].detach(), scheme) - args[0].detach()), *args[1:])
        return (known.reference if known else node.target)(*args, **kwargs)            # type: ignore[operator]
