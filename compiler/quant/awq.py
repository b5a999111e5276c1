"""Factors that move difficulty between a product's inputs and its weight: x wᵀ = (x / s)(w s)ᵀ, s f32 [K].

A column whose inputs are large has more of the weight's precision after w s (AWQ, Lin et al., 2023), and less of a say in the scales
of the inputs after x / s (SmoothQuant, Xiao et al., 2023).

Factors are powers of two, so that moving them loses not a bit. Against factors as they come, the output error on calibration text
is -13 to +23 % (five matrices of SmolLM2 in w4, w4:g128 and w4:g128:asym, ranges chosen after it; lower in 10 of the 15).
"""
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..ops.codes import rounded_rows
from .rounding import Quantized
from .scheme import Scheme
from .statistics import Inputs

EXPONENTS = tuple(step / 10 for step in range(1, 10))
LIMIT = 8
"""Factors stay within 2**-LIMIT .. 2**LIMIT."""

WEIGHT_ROWS = 128
"""Rows of a weight that a search looks at, evenly out of all."""

Factors = Callable[[Inputs, Tensor], Iterator[Tensor]]
"""(inputs, largest |w| of each column [K]) -> factors to try."""

Choice = Callable[[Tensor, Scheme, str, Inputs], Quantized]
"""How codes are chosen, given what the weight is multiplied with."""


def activation_aware(inputs: Inputs, largest: Tensor) -> Iterator[Tensor]:
    """AWQ: mean|x| ** a."""
    for a in EXPONENTS: yield _power_of_two(a * inputs.mean.log2(), inputs.mean > 0)


def outliers_moved(inputs: Inputs, largest: Tensor) -> Iterator[Tensor]:
    """SmoothQuant: max|x| ** a / max|w| ** (1 - a)."""
    for a in EXPONENTS: yield _power_of_two(a * inputs.largest.log2() - (1 - a) * largest.log2(), (inputs.largest > 0) & (largest > 0))


def _power_of_two(exponent: Tensor, known: Tensor) -> Tensor:
    """2 ** exponent, rounded, 1 for the median column; 1 where nothing is known of a column."""
    if not bool(known.any()): return torch.ones_like(exponent)
    return torch.where(known, (exponent - exponent[known].median()).round().clamp(-LIMIT, LIMIT).exp2(), 1.0)


def search(weights: Sequence[tuple[str, Tensor, Scheme]], inputs: Inputs, factors: Factors, choose: Choice) -> Tensor | None:
    """The factors with the least squared error of all products of `inputs` with `weights`; None where 1 for all is as good.

    weights: (name, f32 [N, K], scheme). Inputs are rounded as the scheme says.
    """
    some = [(name, w[torch.linspace(0, len(w) - 1, min(len(w), WEIGHT_ROWS)).long()], scheme) for name, w, scheme in weights]

    def error(s: Tensor) -> float:
        given, total = inputs.divided(s), 0.0
        for name, w, scheme in some:
            codes = choose(w * s, scheme, name, given)
            rows = rounded_rows(given.rows, scheme.act_bits, scheme.row_group, scheme.e4m3)
            total += float((rows @ codes.dequantized().T - inputs.rows @ w.T).square().sum())
        return total

    best, chosen = error(torch.ones_like(inputs.mean)), None
    tried = {tuple(torch.ones_like(inputs.mean).tolist())}
    for s in factors(inputs, torch.stack([w.abs().amax(0) for _, w, _ in weights]).amax(0)):
        if (key := tuple(s.tolist())) in tried: continue
        tried.add(key)
        if (found := error(s)) < best: best, chosen = found, s
    return chosen
