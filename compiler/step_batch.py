"""Inputs of a step graph for any mix of sequences, with real block tables: what eager checks and golden cases feed it."""
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .ir import Graph
from .ops import BLOCK


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
        """One poisoned tensor per KV placeholder: reading what was not written shows."""
        fakes = [graph.placeholders[name].meta["val"] for name in graph.kv]
        return [torch.full((self.count, *map(int, fake.shape[1:])), torch.nan, dtype=dtype or fake.dtype) for fake in fakes]


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


MIXES: tuple[tuple[tuple[int, int], ...], ...] = (((0, 5),), ((3, 1), (40, 1), (0, 4)), ((31, 3), (0, 1)))
"""Sample steps as (tokens done, tokens now) per sequence: a prefill; decodes beside a prefill; a chunk over a block's end."""


@dataclass(frozen=True)
class StepSamples:
    """Calls return one sample per mix: the graph's inputs, then its caches, filled with what earlier steps might have left."""

    names: tuple[str, ...]
    cache_shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    vocab: int
    longest: int                       # positions the model has

    def for_inputs(self, names: Sequence[str]) -> "StepSamples":
        """The same mixes for a graph with these inputs."""
        return replace(self, names=tuple(names))

    def __call__(self, seed: int = 0) -> list[tuple[Tensor, ...]]:
        return [self._one(mix, seed + i) for i, mix in enumerate(MIXES)]

    def _one(self, mix: Sequence[tuple[int, int]], seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        pool, work = Pool(8, seed), []
        for done, count in mix:
            done = min(done, self.longest - count)
            stream = pool.stream(torch.randint(self.vocab, (done + count,), generator=generator))
            stream.done = done
            work.append((stream, count))
        given: dict[str, Any] = step_inputs(work, padding=1, empty=1) | sampling(len(work), generator)
        given["sample_rows"] = given["query_start"][1 : len(work) + 1] - 1
        caches = [torch.randn((8, *shape), generator=generator).to(dtype) for shape, dtype in self.cache_shapes]
        for cache in caches: cache[pool.free] = torch.nan
        return (*(given[name] for name in self.names), *caches)


def sampling(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sampling inputs for `rows` rows: greedy, plain, top-k and top-p in turn."""
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8)]
    chosen = [kinds[i % len(kinds)] for i in range(rows)]
    return {
        "temperature": torch.tensor([t for t, _, _ in chosen]), "top_k": torch.tensor([k for _, k, _ in chosen], dtype=torch.int32),
        "top_p": torch.tensor([p for _, _, p in chosen]), "uniform": torch.rand(rows, generator=generator),
    }
