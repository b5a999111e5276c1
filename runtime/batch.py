"""One step's inputs: the tokens of any mix of sequences, flattened, as every program reads them."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
    tokens = rows = width = 0
    for sequence, ids, sampled, *_ in works:
        tokens, rows, width = tokens + len(ids), rows + sampled, max(width, blocks_for(sequence.length + len(ids)))
    return {"T": tokens, "N": len(works), "R": rows, "M": width}


def fill(inputs: Mapping[str, Any], works: Sequence[Work], width: int) -> None:
    """Write the inputs of a step, memoryviews of int32 or float32. Every sequence must own the blocks it needs. width: of the block
    table's rows.

    Item by item where there is one: Python's caches are cold after a step, and each call it does not make is a microsecond.
    """
    ids, positions, slots = inputs["input_ids"], inputs["positions"], inputs["slots"]
    starts, lengths, table, rows = inputs["query_start"], inputs["context_len"], inputs["block_table"], inputs["sample_rows"]
    temperature, top_k, top_p, uniform = inputs["temperature"], inputs["top_k"], inputs["top_p"], inputs["uniform"]
    starts[0] = at = row = 0
    for n, (sequence, tokens, sampled, sampling, number) in enumerate(works):
        begin, blocks = sequence.length, sequence.blocks
        end, stop = begin + len(tokens), at + len(tokens)
        if stop == at + 1:
            ids[at], positions[at], slots[at] = tokens[0], begin, blocks[begin // BLOCK] * BLOCK + begin % BLOCK
        else:
            ids[at:stop] = _ints(tokens)
            positions[at:stop] = _ints(range(begin, end))
            slots[at:stop] = _ints([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(begin, end)])
        used = blocks_for(end)                            # what is behind it is never read: context_len says where a sequence ends
        table[n * width : n * width + used] = _ints(blocks[:used])
        starts[n + 1], lengths[n], at = stop, end, stop
        for sample in range(stop - sampled, stop):
            rows[row], temperature[row], top_k[row], top_p[row] = sample, sampling.temperature, sampling.top_k, sampling.top_p
            uniform[row] = min(number, _BELOW_ONE)
            row += 1


def _ints(values: Iterable[int]) -> memoryview:
    return memoryview(array("i", values))


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
        inputs[name][start:stop] = _ints([value] * (stop - start))
    for name, value in (("temperature", 0.0), ("top_p", 1.0), ("uniform", 0.0)):
        inputs[name][live["R"] : r] = memoryview(array("f", [value]) * (r - live["R"]))
