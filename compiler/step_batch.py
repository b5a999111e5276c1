"""Inputs of a step graph for any mix of sequences, with real block tables: what eager checks and golden cases feed it."""
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .ir import Graph
from .ops import BLOCK
from .ops.kv_quantized import stored


@dataclass
class Stream:
    """One sequence: its tokens, the cache blocks it holds, and how many tokens are done."""

    tokens: Tensor                     # i64 [length]
    blocks: list[int]
    done: int = 0


@dataclass
class Pool:
    """Cache blocks handed out in a shuffled order; those that nobody holds are poisoned with NaN, as is block 0."""

    count: int
    seed: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        order = torch.randperm(self.count - 1, generator=torch.Generator().manual_seed(self.seed)) + 1
        self.free = order.tolist()

    def stream(self, tokens: Tensor) -> Stream:
        """A sequence with blocks for all its tokens."""
        need = -(-len(tokens) // BLOCK)
        blocks, self.free = self.free[:need], self.free[need:]
        return Stream(tokens, blocks)

    def caches(self, graph: Graph, dtype: torch.dtype | None = None) -> list[Tensor]:
        """One poisoned tensor per KV placeholder: reading what was not written shows. Codes i8 have no NaN, their scales do.

        dtype: of the wide caches, in place of their own.
        """
        caches = []
        for fake in (graph.placeholders[name].meta["val"] for name in graph.kv):
            kind, fill = fake.dtype if dtype is None or fake.dtype.itemsize == 1 else dtype, torch.nan if fake.is_floating_point() else -1
            caches.append(torch.full((self.count, *map(int, fake.shape[1:])), fill, dtype=torch.float32).to(kind))
        return caches


def step_inputs(work: Sequence[tuple[Stream, int]], padding: int = 0, empty: int = 0) -> dict[str, Tensor]:
    """The next `count` tokens of each stream, then padding tokens of no sequence and empty sequences; advances the streams."""
    ids, positions, slots, starts, context = [], [], [], [0], []
    for stream, count in work:
        place = range(stream.done, stream.done + count)
        ids += stream.tokens[stream.done : stream.done + count].tolist()
        positions += place
        slots += [stream.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in place]
        stream.done += count
        starts.append(len(ids))
        context.append(stream.done)
    widest = max(len(stream.blocks) for stream, _ in work)
    table = [stream.blocks + [0] * (widest - len(stream.blocks)) for stream, _ in work] + [[0] * widest] * empty
    columns: dict[str, list] = {
        "input_ids": ids + [0] * padding, "positions": positions + [0] * padding, "slots": slots + [-1] * padding,
        "query_start": starts + starts[-1:] * empty, "context_len": context + [0] * empty, "block_table": table,
    }
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in columns.items()}


@dataclass(frozen=True)
class Mix:
    """One sample step: (tokens done, tokens now) per sequence, then padding tokens and empty sequences."""

    work: tuple[tuple[int, int], ...]
    padding: int = 1
    empty: int = 1


FEW = (Mix(((31, 3), (40, 1), (0, 5), (12, 1), (0, 1)), padding=2), Mix(((7, 1),), padding=0, empty=0))
"""A chunk over a block's end, decodes and prefills side by side, with padding; and one token of one sequence, with none."""

MORE = (
    Mix(((0, 5),)), Mix(((0, 37),), padding=0), Mix(((3, 1), (40, 1), (0, 4)), padding=0), Mix(((31, 3), (0, 1)), empty=3),
    Mix(((63, 1), (32, 1), (64, 2)), padding=5, empty=2), Mix(((0, 1), (0, 1), (1, 1), (31, 1), (30, 1))), Mix(((32, 33),), empty=0),
)  # fmt: skip


@dataclass(frozen=True)
class StepSamples:
    """Calls return one sample per mix: the graph's inputs, then its caches, filled with what earlier steps might have left.

    `samples()` are few, `samples.thorough()` all.
    """

    names: tuple[str, ...]
    cache_shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    vocab: int
    longest: int                       # positions the model has
    formats: tuple[str, ...] = ()      # of each cache's codes, "none" where it is wide; () where all are

    def for_inputs(self, names: Sequence[str]) -> "StepSamples":
        """The same mixes for a graph with these inputs."""
        return replace(self, names=tuple(names))

    def __call__(self, seed: int = 0) -> list[tuple[Tensor, ...]]:
        return [self._one(mix, seed + i) for i, mix in enumerate(FEW)]

    def thorough(self) -> list[tuple[Tensor, ...]]:
        """Every kind of sample."""
        return [self._one(mix, i) for i, mix in enumerate(FEW + MORE)]

    def prompts(self) -> list[tuple[Tensor, ...]]:
        """Whole prompts, every row sampled: what the model itself computes, where a mean over rows is to mean something.

        In the other samples caches hold noise, and one rounding more or less decides what attention makes of it.
        """
        return [self._one(Mix(((0, 37), (0, 9)), padding=0, empty=0), 0, every=True)]

    def _one(self, mix: Mix, seed: int, every: bool = False) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        pool, work = Pool(8, seed), []
        for done, count in mix.work:
            count = min(count, self.longest)
            done = min(done, self.longest - count)
            stream = pool.stream(torch.randint(self.vocab, (done + count,), generator=generator))
            stream.done = done
            work.append((stream, count))
        given: dict[str, Any] = step_inputs(work, mix.padding, mix.empty)
        rows = torch.arange(len(given["input_ids"]), dtype=torch.int32) if every else given["query_start"][1 : len(work) + 1] - 1
        given |= sampling(len(rows), generator) | {"sample_rows": rows}
        caches = [torch.randn((8, *shape), generator=generator).to(dtype) for shape, dtype in self.cache_shapes]
        for cache in caches: cache[[0, *pool.free]] = torch.nan
        return (*(given[name] for name in self.names), *self.held(caches))

    def held(self, caches: Sequence[Tensor]) -> list[Tensor]:
        """Wide caches as the graph holds them: codes and their scales where it is quantized."""
        formats = self.formats or ("none",) * len(caches)
        pairs = zip(caches, formats, strict=True)
        return [part for cache, format in pairs for part in ((cache,) if format == "none" else stored(cache, format))]


def sampling(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sampling inputs for `rows` rows: greedy, top-p, top-k and plain in turn, the telling ones first: few mixes have four rows."""
    kinds = [(0.0, 0, 1.0), (1.3, 0, 0.8), (0.7, 5, 1.0), (1.0, 0, 1.0)]
    chosen = [kinds[i % len(kinds)] for i in range(rows)]
    return {
        "temperature": torch.tensor([t for t, _, _ in chosen]), "top_k": torch.tensor([k for _, k, _ in chosen], dtype=torch.int32),
        "top_p": torch.tensor([p for _, _, p in chosen]), "uniform": torch.rand(rows, generator=generator),
    }
