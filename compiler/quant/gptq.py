"""GPTQ (Frantar et al., 2023): columns are rounded one after the other, and those still to come make up for the error of each.

Scales are chosen beforehand, for the errors that inputs make heavy; columns go by the size of their inputs, largest first
("act-order" with static groups). Against scales chosen group by group on the way and columns as they stand, the output error on
calibration text is -37 to +6 % (five matrices of SmolLM2 in w4, w4:g128 and w4:g128:asym; lower in 13 of the 15).

Ours, because the libraries that offer it (llm-compressor, GPTQModel) quantize the linear modules of a Hugging Face model in place,
and a weight here is a matrix of a graph, perhaps several projections in one.
"""
import torch
from torch import Tensor

from ..ops.codes import pack_codes
from .rounding import Quantized, bounded, least_squares, nearest, round_to_nearest
from .scheme import Scheme

DAMPING = 0.01
"""Added to the diagonal of xᵀx, as a share of its mean: the authors' value."""

BLOCK = 128
"""Columns whose errors reach the rest of the matrix in one product."""


def gptq(w: Tensor, scheme: Scheme, name: str, gram: Tensor) -> Quantized:
    """Codes for w f32 [N, K] with a small mean of (x (codes - w)ᵀ)². gram f32 [K, K]: mean xᵀx of its inputs.

    No row's output error on these inputs is above that of rounding to nearest, nor is it further from w than WORST allows.
    """
    plain = round_to_nearest(w, scheme, name)
    start = least_squares(w, scheme, name, gram.diagonal())
    order = gram.diagonal().argsort(descending=True)
    codes = _compensated(w.T[order].contiguous(), start, order, _factor(gram[order][:, order]))
    found = Quantized(pack_codes(codes.T.contiguous(), scheme.bits), start.scale, start.offset, scheme, w.shape[1])
    return bounded(w, found, plain, output_errors(w, found, gram) <= output_errors(w, plain, gram))


def output_errors(w: Tensor, found: Quantized, gram: Tensor) -> Tensor:
    """Of each row: f32 [N], mean of (x (codes - w)ᵀ)²."""
    off = found.dequantized() - w
    return ((off @ gram) * off).sum(1)


def _factor(gram: Tensor) -> Tensor:
    """U f32, upper, with UᵀU = (gram, damped)⁻¹: row i says what an error in column i asks of those after it.

    Nothing fails here: damping is a share of the trace, and no eigenvalue is above the trace.
    """
    wide = gram.double()
    damping = DAMPING * float(wide.diagonal().mean()) or 1.0                         # 1: no input was ever other than 0
    wide = wide + damping * torch.eye(len(wide), dtype=torch.float64)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(wide)), upper=True).float()


def _compensated(left: Tensor, scales: Quantized, order: Tensor, factor: Tensor) -> Tensor:
    """u8 codes [K, N], in the weight's own order of columns; `left` [K, N] is the weight in `order`, and is written to."""
    k, codes = len(left), torch.empty(left.shape, dtype=torch.uint8)
    scale = scales.scale.T.float().contiguous()
    offset = None if scales.offset is None else scales.offset.T.float().contiguous()
    middle = 2 ** (scales.scheme.bits - 1)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = torch.empty(stop - start, left.shape[1])
        for i in range(start, stop):
            column = int(order[i])
            group = column // (scales.scheme.group or k)
            its = None if offset is None else offset[group]
            codes[column] = code = nearest(left[i], scale[group], its, scales.scheme)
            value = (code.float() - middle) * scale[group] if its is None else code.float() * scale[group] + its
            errors[i - start] = (left[i] - value) / factor[i, i]
            left[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[i - start], alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes
