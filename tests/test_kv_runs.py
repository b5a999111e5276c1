"""Runs of KV blocks on the CPU: every byte is of one block, and where a sequence's blocks lie changes no bit of its answers."""
import itertools
from collections.abc import Sequence
from pathlib import Path

import infc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from infc.backends import reference
from infc.backends.cpu.caches import Caches
from infc.compiler import driver
from infc.runtime.batch import Work
from infc.runtime.kv_runs import RUN, KvRuns
from infc.runtime.manifest import BLOCK, KvBuffer
from infc.runtime.session import Model
from infc.runtime.stepper import OpenSequence

BUFFERS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([4, 64, 100])), min_size=1, max_size=4)


@given(BUFFERS, st.integers(1, 3 * RUN), st.data())
def test_every_byte_is_of_one_block(buffers: list[tuple[int, int]], blocks: int, data: st.DataObject) -> None:
    runs = KvRuns([KvBuffer(str(i), "f32", heads * part, heads) for i, (heads, part) in enumerate(buffers)], blocks)
    cuts = sorted(data.draw(st.sets(st.integers(1, blocks), max_size=4)) | {0, blocks})
    owner = bytearray(runs.bytes)
    for first, stop in itertools.pairwise(cuts):
        ranges = list(runs.ranges(first, stop - first))
        assert sum(size for _, size in ranges) == (stop - first) * sum(heads * part for heads, part in buffers)
        for offset, size in ranges:
            assert offset + size <= len(owner) and not any(owner[offset : offset + size]), "two blocks share a byte"
            owner[offset : offset + size] = b"\1" * size


def logits(loaded: Model, sequence: OpenSequence, tokens: Sequence[int], chunk: int = 16) -> list[bytes]:
    """The bits of each step's last row."""
    found = []
    for at in range(0, len(tokens), chunk):
        loaded.run([Work(sequence, tokens[at : at + chunk], 1)])
        found.append(loaded.executor.logits(1).tobytes())
    return found


@pytest.mark.parametrize("kv", ["none", "int8"])
def test_a_sequence_in_other_runs_answers_the_same(tmp_path: Path, kv: str) -> None:
    options = driver.Options(kv_quant=kv, buckets=(1, 16), max_sequences=4, reuse=False, unverified=kv != "none")
    artifact = driver.compile("tiny", tmp_path / "a", options=options).artifact
    long, short = [(7 * i) % 90 + 1 for i in range(10 * BLOCK + 5)], [(5 * i) % 80 + 3 for i in range(11 * BLOCK - 3)]
    expected = {}
    for name, tokens in (("low", short), ("across", long)):
        with infc.load(artifact, threads=2, kv_tokens=3 * RUN * BLOCK) as loaded, loaded.sequence() as alone:
            expected[name] = logits(loaded, alone, tokens) + logits(loaded, alone, [9])
    with infc.load(artifact, threads=2, kv_tokens=3 * RUN * BLOCK) as loaded, loaded.sequence() as low, loaded.sequence() as across:
        found = {"low": logits(loaded, low, short), "across": logits(loaded, across, long)}
        for name, sequence in (("low", low), ("across", across)): found[name] += logits(loaded, sequence, [9])
        assert across.blocks[0] < RUN <= across.blocks[-1], "it lies in two runs"
    assert found == expected and len(set(expected["across"])) > 10


@pytest.mark.parametrize("kv", ["none", "int8"])
def test_reference_operators_read_the_caches_that_kernels_wrote(tmp_path: Path, kv: str) -> None:
    """Every other unit on reference operators, over caches in two runs: what a kernel wrote an operator reads, and the other way round."""
    bounds = driver.Bounds()
    options = driver.Options(dtype="fp32", kv_quant=kv, buckets=(1, 16), max_sequences=4, reuse=False, unverified=kv != "none")

    def keep(_: Path, found: driver.Bounds) -> dict[str, object]:
        bounds.update(found)
        return {"replayed": False}

    hooks = driver.Hooks(lambda graph: driver._run_passes(graph, options, lambda event: None), keep)
    artifact = driver.compile("tiny", tmp_path / "a", options=options, hooks=hooks).artifact
    answers = []
    for odd in (None, 0, 1):                             # kernels alone; then every second unit, and the others
        with infc.load(artifact, threads=2, kv_tokens=3 * RUN * BLOCK) as loaded, loaded.sequence() as low, loaded.sequence() as across:
            if odd is not None:
                loaded.cache.clear()
                reference.install(loaded.executor, bounds, lambda unit, odd=odd: unit % 2 == odd, Caches(loaded.executor))
            logits(loaded, low, [5] * (RUN - 1) * BLOCK)
            logits(loaded, across, [(7 * i) % 90 + 1 for i in range(2 * BLOCK + 5)])
            assert across.blocks[0] < RUN <= across.blocks[-1], "it lies in two runs"
            answers.append(np.array(loaded.executor.logits(1)))
    kernels, *mixed = answers
    for found in mixed: assert np.abs(found - kernels).max() <= (1e-3 if kv == "none" else 0.05) * np.abs(kernels).max()
