"""GPTQ (Frantar et al., 2023), then a descent over codes and scales: what rounding does to one column, the others make up for.

Groups go by the size of their inputs, largest first, and so do the columns of each. A group's range is chosen at its turn, for its
columns as those before it left them, by what an error in each will cost after all others have made up for it. Then sweeps: each
group's scale is solved for its codes, and each code chosen again beside all the others.
Output error on text not seen, in thousandths of the output, geometric mean of eight matrices of SmolLM2 in w4, gram of 8,192 tokens:
1.23 with ranges chosen beforehand and columns by their size alone, 0.96 as above, 0.88 after the sweeps (0.93 where they leave scales
alone), 2.8 of the best ranges for these inputs. Gram of 4,096 tokens: 0.92 after the sweeps.

Ours, because the libraries that offer it (llm-compressor, GPTQModel) quantize the linear modules of a Hugging Face model in place,
and a weight here is a matrix of a graph, perhaps several projections in one.
"""
import torch
from torch import Tensor

from ..ops.codes import pack_codes
from .rounding import F16_MAX, F16_TINY, Quantized, best_range, bounded, check_finite, nearest, round_to_nearest
from .scheme import Scheme

DAMPING = 0.05
"""Added to the diagonal of xᵀx, as a share of its mean. Error as above, gram of 8,192 tokens: 0.88, and 0.91 with 0.1; 0.01 is worse on
text not seen in seven of the eight matrices."""

BLOCK = 32
"""Columns whose errors reach the rest of the matrix in one product."""

SWEEPS = 3
"""Error as above: 0.884 after three, 0.879 after four; one alone leaves 1 to 5 % more."""


def gptq(w: Tensor, scheme: Scheme, name: str, gram: Tensor) -> Quantized:
    """Codes for w f32 [N, K] with a small mean of (x (codes - w)ᵀ)². gram f32 [K, K]: mean xᵀx of its inputs.

    No row's output error on these inputs is above that of rounding to nearest, nor is it further from w than WORST allows. UserError
    where a value of w is not finite.
    """
    check_finite(w, name)
    codes = _Codes(w, scheme, name, damped(gram))
    codes.compensate()
    for _ in range(SWEEPS): codes.sweep()
    found, plain = codes.quantized(), round_to_nearest(w, scheme, name)
    return bounded(w, found, plain, output_errors(w, found, gram) <= output_errors(w, plain, gram))


def output_errors(w: Tensor, found: Quantized, gram: Tensor) -> Tensor:
    """Of each row: f32 [N], mean of (x (codes - w)ᵀ)²."""
    off = found.dequantized() - w
    return ((off @ gram) * off).sum(1)


def damped(gram: Tensor) -> Tensor:
    """gram with DAMPING on its diagonal: positive definite, whatever the inputs were."""
    share = DAMPING * float(gram.diagonal().mean()) or 1.0                           # 1: no input was ever other than 0
    return gram + share * torch.eye(len(gram))


class _Codes:
    """Codes in the making. Columns are in the order that they are chosen in; tensors are [K, N], a column of the weight to a row."""

    def __init__(self, w: Tensor, scheme: Scheme, name: str, gram: Tensor):
        k = w.shape[1]
        self.scheme, self.name = scheme, name
        group = torch.arange(k) // (scheme.group or k)
        size = gram.diagonal()
        mean = torch.zeros(int(group[-1]) + 1).scatter_reduce(0, group, size, "mean", include_self=False)
        by_size = size.argsort(descending=True, stable=True)
        self.order = by_size[_rank(mean)[group[by_size]].argsort(stable=True)]
        self.gram = gram[self.order][:, self.order]
        self.w = w.T[self.order].contiguous()
        self.codes = torch.zeros_like(self.w)
        self.scale = torch.ones(len(mean), len(w))
        self.offset = None if scheme.symmetric else torch.zeros(len(mean), len(w))
        ends = torch.unique_consecutive(group[self.order], return_counts=True)
        stops = ends[1].cumsum(0).tolist()
        self.groups = [(int(g), stop - int(n), stop) for g, n, stop in zip(*ends, stops, strict=True)]

    def _range(self, group: int) -> tuple[Tensor, Tensor | None]:
        return self.scale[group], None if self.offset is None else self.offset[group]

    def _value(self, codes: Tensor, group: int) -> Tensor:
        """What codes [..., N] of a group mean."""
        scale, offset = self._range(group)
        return (codes - 2 ** (self.scheme.bits - 1)) * scale if offset is None else codes * scale + offset

    def compensate(self) -> None:
        """GPTQ: each column to its nearest code, those to come made up for it."""
        factor, left = _factor(self.gram), self.w.clone()
        for group, first, last in self.groups:
            scale, offset = best_range(left[first:last].T, self.scheme, self.name, factor.diagonal()[first:last] ** -2)
            self.scale[group] = scale.float()
            if self.offset is not None and offset is not None: self.offset[group] = offset.float()
            for start, stop in _blocks(first, last):
                block, errors = left[start:stop], torch.empty(stop - start, left.shape[1])
                for i in range(stop - start):
                    self.codes[start + i] = codes = nearest(block[i], *self._range(group), self.scheme).float()
                    errors[i] = (block[i] - self._value(codes, group)) / factor[start + i, start + i]
                    block[i + 1 :].addr_(factor[start + i, start + i + 1 : stop], errors[i], alpha=-1)
                left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)

    def sweep(self) -> None:
        """Each group's scale, then each of its codes, to where the output error is least with all others as they are."""
        off = torch.cat([self.w[first:last] - self._value(self.codes[first:last], group) for group, first, last in self.groups])
        slope = self.gram @ off
        for group, first, last in self.groups:
            self._solve(group, first, last, slope)
            before = off[first:last].clone()
            off[first:last] = self.w[first:last] - self._value(self.codes[first:last], group)
            slope.addmm_(self.gram[:, first:last], off[first:last] - before)
            for start, stop in _blocks(first, last):
                before, own, block = off[start:stop].clone(), self.gram[start:stop, start:stop], slope[start:stop].clone()
                for i in range(stop - start):
                    best = self.w[start + i] - off[start + i] + block[i] / own[i, i]
                    self.codes[start + i] = codes = nearest(best, *self._range(group), self.scheme).float()
                    now = self.w[start + i] - self._value(codes, group)
                    block.addr_(own[i], now - off[start + i])
                    off[start + i] = now
                slope.addmm_(self.gram[:, start:stop], off[start:stop] - before)

    def _solve(self, group: int, first: int, last: int, slope: Tensor) -> None:
        """The scale (and offset) with the least output error for a group's codes; what it is where f16 has none."""
        codes = self.codes[first:last] - (2 ** (self.scheme.bits - 1) if self.offset is None else 0)
        own, its = self.gram[first:last, first:last], slope[first:last]
        weighed = own @ codes
        a, up = (codes * weighed).sum(0), (codes * its).sum(0)
        if self.offset is None:
            scale, offset = self.scale[group] + up / a, None
            sound = a > 0
        else:
            b, c, right = weighed.sum(0), own.sum(), its.sum(0)
            determinant = a * c - b * b
            scale = self.scale[group] + (c * up - b * right) / determinant
            offset = (self.offset[group] + (a * right - b * up) / determinant).half().float()
            sound = (determinant > 1e-4 * a * c) & (offset.abs() <= F16_MAX)
        scale = scale.half().float()
        sound &= (scale >= F16_TINY) & (scale <= F16_MAX)
        self.scale[group] = torch.where(sound, scale, self.scale[group])
        if self.offset is not None and offset is not None: self.offset[group] = torch.where(sound, offset, self.offset[group])

    def quantized(self) -> Quantized:
        codes = torch.empty(self.codes.shape, dtype=torch.uint8)
        codes[self.order] = self.codes.to(torch.uint8)
        offset = None if self.offset is None else self.offset.T.half().contiguous()
        return Quantized(pack_codes(codes.T.contiguous(), self.scheme.bits), self.scale.T.half().contiguous(), offset, self.scheme,
                         len(codes))


def _rank(size: Tensor) -> Tensor:
    """Each value's place, largest first."""
    return size.argsort(descending=True, stable=True).argsort()


def _blocks(first: int, last: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, last)) for start in range(first, last, BLOCK)]


def _factor(gram: Tensor) -> Tensor:
    """U f32, upper, with UᵀU = gram⁻¹: row i says what an error in column i asks of those after it."""
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram.double())), upper=True).float()
