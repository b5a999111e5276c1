"""One step's inputs: the tokens of any mix of sequences, flattened, as every program reads them."""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .blocks import Holder, blocks_for
from .manifest import BLOCK
from .options import Sampling


class SequenceState(Holder):
    """A sequence in the KV pool: how many tokens are written, and in which blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0


class Work(NamedTuple):
    """What one sequence does in a step: these tokens follow those it has; its last `rows` tokens are sampled."""

    sequence: SequenceState
    tokens: Sequence[int]
    rows: int
    sampling: Sampling = Sampling()
    uniform: float = 0.0  # in [0, 1), drawn by the sequence's own generator


_BELOW_ONE = 1 - 2**-24
"""The largest float32 below one: a uniform number must not round up to 1."""


def sizes(works: Sequence[Work]) -> dict[str, int]:
    """The live sizes T, N, R, M of a step."""
    return {
        "T": sum(len(work.tokens) for work in works), "N": len(works), "R": sum(work.rows for work in works),
        "M": max(blocks_for(work.sequence.length + len(work.tokens)) for work in works),
    }


def fill(inputs: Mapping[str, memoryview], works: Sequence[Work], width: int = 0) -> None:
    """Write the inputs of a step. Every sequence must own the blocks it needs.

    width: of the block table's rows, which are then written as far as they are used; 0: as wide as the longest.
    """
    ids, positions, slots = array("i"), array("i"), array("i")
    starts, lengths, rows = array("i", [0]), array("i"), array("i")
    temperature, top_k, top_p, uniform = array("f"), array("i"), array("f"), array("f")
    for sequence, tokens, sampled, sampling, number in works:
        begin, end, blocks = sequence.length, sequence.length + len(tokens), sequence.blocks
        ids.extend(tokens)
        positions.extend(range(begin, end))
        slots.extend([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(begin, end)])
        starts.append(len(ids))
        lengths.append(end)
        rows.extend(range(len(ids) - sampled, len(ids)))
        for _ in range(sampled):
            temperature.append(sampling.temperature)
            top_k.append(sampling.top_k)
            top_p.append(sampling.top_p)
            uniform.append(min(number, _BELOW_ONE))
    longest = max(blocks_for(length) for length in lengths)
    table = array("i")
    for row, (work, length) in enumerate(zip(works, lengths, strict=True)):
        used = blocks_for(length)
        if width:
            inputs["block_table"][row * width : row * width + used] = memoryview(array("i", work.sequence.blocks[:used]))
            continue
        table.extend(work.sequence.blocks[:used])
        table.extend([0] * (longest - used))  # never read: context_len says where a sequence ends
    for name, values in (
        ("input_ids", ids),
        ("positions", positions),
        ("slots", slots),
        ("query_start", starts),
        ("context_len", lengths),
        ("block_table", table),
        ("sample_rows", rows),
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("uniform", uniform),
    ):
        inputs[name][: len(values)] = memoryview(values)


def pad(inputs: Mapping[str, memoryview], live: Mapping[str, int], bucket: Mapping[str, int]) -> None:
    """Fill up a step whose program runs at its bucket's sizes: tokens without a slot, sequences without tokens, rows nobody asks for.

    Padded rows sample token 0 greedily: what is drawn is dropped.
    """
    t, n, r = (bucket[dim] for dim in ("T", "N", "R"))
    for name, start, stop, value in (
        ("input_ids", live["T"], t, 0), ("positions", live["T"], t, 0), ("slots", live["T"], t, -1),
        ("query_start", live["N"] + 1, n + 1, live["T"]), ("context_len", live["N"], n, 0), ("sample_rows", live["R"], r, 0),
        ("top_k", live["R"], r, 0),
    ):
        inputs[name][start:stop] = memoryview(array("i", [value]) * (stop - start))
    for name, value in (("temperature", 0.0), ("top_p", 1.0), ("uniform", 0.0)):
        inputs[name][live["R"] : r] = memoryview(array("f", [value]) * (r - live["R"]))
