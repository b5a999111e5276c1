"""Sample inputs: small, seeded, real token ids; what captured graphs and passes are checked on.

`samples()` are few, yet each kind of input is among them: one token, one row, several rows, odd lengths, more tokens than a
KV block holds, rows that start at other positions, a padded row, a mask that hides a whole row. `samples.thorough()` are
those and more: extreme token ids and positions, large, tiny and non-finite values.
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """One sample of a decoder. `starts`: first position of each row in turn; below 0 counts from the model's last position."""

    batch: int
    length: int
    starts: tuple[int, ...] = (0,)
    padded: int = 0                    # tokens at the end of the last row that are one and the same
    token: int | None = None           # every token is this one; below 0 counts from the vocabulary's end


FEW = (Kind(2, 9, (0, 11), padded=3), Kind(1, 1, (5,)), Kind(1, 37, (2,)))
"""At one token every mask and every rotation looks right, in one row every batch; where all rows start at 0, a position that
is counted instead of read goes unseen; and below 33 tokens no window, no block and no chunk of that size ends."""

MORE = (
    Kind(3, 2), Kind(1, 1), Kind(5, 1, (0, 33, -1)), Kind(2, 33, (-33, 31)), Kind(1, 65), Kind(4, 7, (0, 3), padded=6),
    Kind(2, 5, token=0), Kind(2, 5, (1,), token=-1), Kind(1, 2, (-2,)),
)  # fmt: skip


@dataclass(frozen=True)
class DecoderSamples:
    """Calls return (input_ids [B, S], position_ids [B, S]), both i64, positions counting up within a row.

    `samples(batch, length, seed)` is one sample, its positions from 0; `samples()` a list of them, one per entry of FEW;
    `samples.thorough()` one per entry of FEW and MORE.
    """

    vocab_size: int
    max_positions: int

    def __call__(self, batch: int | None = None, length: int | None = None, seed: int = 0) -> object:
        if batch is None or length is None:
            return [self._of(kind, seed + i) for i, kind in enumerate(FEW)]
        return self.at(batch, length, seed)

    def thorough(self) -> list[tuple[Tensor, Tensor]]:
        """Every kind of sample."""
        return [self._of(kind, i) for i, kind in enumerate(FEW + MORE)]

    def at(self, batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.vocab_size, (batch, length), generator=generator)
        return ids, torch.arange(length).repeat(batch, 1)

    def _of(self, kind: Kind, seed: int) -> tuple[Tensor, Tensor]:
        ids, positions = self.at(kind.batch, min(kind.length, self.max_positions), seed)
        if kind.padded: ids[-1, -kind.padded:] = 0
        if kind.token is not None: ids[:] = kind.token % self.vocab_size
        room = self.max_positions - ids.shape[1]               # the last position a row may start at
        starts = [kind.starts[row % len(kind.starts)] for row in range(kind.batch)]
        first = [min(start, room) if start >= 0 else max(0, self.max_positions + start) for start in starts]
        return ids, positions + torch.tensor(first)[:, None]


@dataclass(frozen=True)
class TensorSamples:
    """Samples like the example inputs of any module, with its dynamic dims at other sizes, batch 1 among them.

    Float inputs are normal; integer ones are drawn from the range seen in the example, so indices stay in bounds. A bool
    input, or an integer one of zeros and ones alone, may be a mask: one sample hides whole rows of it, another pads them.
    """

    examples: tuple[Tensor, ...]
    dynamic: Mapping[int, Mapping[int, str]]
    """input index -> axis -> dim name"""

    def __call__(self, seed: int = 0) -> list[tuple[Tensor, ...]]:
        return [self.at(sizes, seed + i, mask) for i, (sizes, mask) in enumerate(zip(self._sizes(), MASKS, strict=True))]

    def thorough(self) -> list[tuple[Tensor, ...]]:
        """The few, then odd sizes at large, tiny, zero and non-finite values."""
        sizes = self._sizes()[1]
        return [*self(), *(tuple(_valued(x, value) for x in self.at(sizes, 10 + i)) for i, value in enumerate(VALUES))]

    def _sizes(self) -> list[dict[str, int]]:
        names = sorted({name for axes in self.dynamic.values() for name in axes.values()})
        choices: Sequence[Sequence[int]] = [(1,) * len(names), *([[2 + (i + j) % 5 for j in range(len(names))] for i in (0, 3)])]
        return [dict(zip(names, sizes, strict=True)) for sizes in choices]

    def at(self, sizes: Mapping[str, int], seed: int = 0, mask: str = "random") -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(self._draw(i, x, sizes, generator, mask) for i, x in enumerate(self.examples))

    def _draw(self, index: int, example: Tensor, sizes: Mapping[str, int], generator: torch.Generator, mask: str) -> Tensor:
        axes = self.dynamic.get(index, {})
        shape = [sizes[axes[d]] if d in axes else n for d, n in enumerate(example.shape)]
        if example.is_floating_point():
            return torch.randn(shape, generator=generator).to(example.dtype)
        low, high = (int(example.min()), int(example.max())) if example.numel() else (0, 1)
        if example.dtype == torch.bool or (low >= 0 and high == 1):
            return _mask(torch.randint(2, shape, generator=generator), mask).to(example.dtype)
        return torch.randint(low, high + 1, shape, generator=generator).to(example.dtype)


MASKS = ("random", "hidden", "padded")
"""How the mask-like inputs of the few samples look."""

VALUES = ("large", "tiny", "zero", "nonfinite")


def _mask(drawn: Tensor, kind: str) -> Tensor:
    """hidden: the first row is all 0; padded: 1, then 0 from somewhere on, in every row."""
    if drawn.dim() == 0 or not drawn.numel(): return drawn
    if kind == "hidden": drawn[(0,) * max(1, drawn.dim() - 1)] = 0
    if kind == "padded": drawn = drawn.sort(-1, descending=True).values
    return drawn


def _valued(x: Tensor, kind: str) -> Tensor:
    """The tensor at another magnitude; whole numbers and bools as they are."""
    if not x.is_floating_point() or not x.numel(): return x
    x = x * {"large": 1e4, "tiny": 1e-6, "zero": 0.0}.get(kind, 1.0)
    if kind == "nonfinite": x.view(-1)[0], x.view(-1)[-1] = torch.inf, torch.nan
    return x
