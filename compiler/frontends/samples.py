"""Sample inputs: small, seeded, real token ids; what captured graphs and passes are checked on."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = ((2, 9), (1, 1), (3, 2))
"""(batch, length) a decoder is checked at: several tokens first, for passes are checked on the first alone by default and at
one token every mask and every rotation looks right; then one token, and more rows than tokens."""


@dataclass(frozen=True)
class DecoderSamples:
    """Calls return (input_ids [B, S], position_ids [B, S]), both i64, positions counting from 0.

    `samples(batch, length, seed)` is one sample; `samples()` a list of them, one per entry of SHAPES.
    """

    vocab_size: int
    max_positions: int

    def __call__(self, batch: int | None = None, length: int | None = None, seed: int = 0) -> object:
        if batch is None or length is None:
            return [self.at(b, min(s, self.max_positions), seed + i) for i, (b, s) in enumerate(SHAPES)]
        return self.at(batch, length, seed)

    def at(self, batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.vocab_size, (batch, length), generator=generator)
        return ids, torch.arange(length).repeat(batch, 1)


@dataclass(frozen=True)
class TensorSamples:
    """Samples like the example inputs of any module, with its dynamic dims at other sizes, batch 1 among them.

    Float inputs are normal; integer ones are drawn from the range seen in the example, so indices stay in bounds.
    """

    examples: tuple[Tensor, ...]
    dynamic: Mapping[int, Mapping[int, str]]
    """input index -> axis -> dim name"""

    def __call__(self, seed: int = 0) -> list[tuple[Tensor, ...]]:
        names = sorted({name for axes in self.dynamic.values() for name in axes.values()})
        choices: Sequence[Sequence[int]] = [(1,) * len(names), *([[2 + (i + j) % 5 for j in range(len(names))] for i in (0, 3)])]
        return [self.at(dict(zip(names, sizes, strict=True)), seed + i) for i, sizes in enumerate(choices)]

    def at(self, sizes: Mapping[str, int], seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(self._draw(i, x, sizes, generator) for i, x in enumerate(self.examples))

    def _draw(self, index: int, example: Tensor, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        axes = self.dynamic.get(index, {})
        shape = [sizes[axes[d]] if d in axes else n for d, n in enumerate(example.shape)]
        if example.is_floating_point():
            return torch.randn(shape, generator=generator).to(example.dtype)
        if example.dtype == torch.bool or not example.numel():
            return torch.randint(2, shape, generator=generator).to(example.dtype)
        low, high = int(example.min()), int(example.max())
        return torch.randint(low, high + 1, shape, generator=generator).to(example.dtype)
