"""Measure a phase on a loaded model: nanoseconds of every step, the wall time, and what the machine could read meanwhile."""
import statistics
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from ...runtime.batch import Work
from ...runtime.environment import cpu_share
from .cost import Phase

if TYPE_CHECKING:
    from ...runtime.session import Model

ROUNDS = {"decode": 9, "prefill": 5}


def measure(model: "Model", phase: Phase) -> dict[str, Any]:
    """{"steps": per load, medians in seconds of each step with its barrier; "wall_s"; "gap_s"; "read_gb_s"; "cpu_share"}.

    cpu_share: of the steps' time, that in which our threads had their CPUs (they spin, so it is 1 on a machine of one's own).
    wall_s: a whole phase through the runtime, inputs and table included. gap_s: of a profiled one, the time in which no step runs.
    Rounds of both and of a pure read of all weights alternate, since on shared machines the read rate moves by itself. Raises
    RuntimeFault where the phase does not fit the model.
    """
    steps: list[list[list[float]]] = [[] for _ in phase.loads]
    walls, gaps, reads, shares = list[float](), list[float](), list[float](), list[float]()
    first = phase.loads[0]
    sequences = [model.sequence() for _ in first.new]
    base = _base(model, phase)
    try:
        for i, sequence in enumerate(sequences):
            if base[i]: model.step([sequence], [_tokens(model, base[i], i)], logits="none")
        for round_ in range(-1, ROUNDS[phase.kind]):          # round -1 only warms up
            read = model.executor.read_weights()
            profiled, begin = [], perf_counter()
            for load in phase.loads:
                profiled.append(model.profile_batch(sequences, [_tokens(model, n, 7) for n in load.new], min(load.rows, 1)))
            gap = perf_counter() - begin - sum(ns for times in profiled for _, ns in times) * 1e-9
            _rewind(sequences, base)
            begin, used = perf_counter(), process_time()
            for load in phase.loads:
                model.run([Work(s, _tokens(model, n, 7), min(load.rows, 1)) for s, n in zip(sequences, load.new, strict=True)])
            wall, used = perf_counter() - begin, process_time() - used
            _rewind(sequences, base)
            read = (read + model.executor.read_weights()) / 2
            if round_ < 0: continue
            for kept, times in zip(steps, profiled, strict=True): kept.append([ns * 1e-9 for _, ns in times])
            walls.append(wall)
            gaps.append(gap)
            shares.append(cpu_share(used, wall, model.executor.threads))
            reads.append(model.memory()["weights"] / read)
    finally:
        for sequence in sequences: sequence.close()
    return {"steps": [[statistics.median(s) for s in zip(*kept, strict=True)] for kept in steps],
            "wall_s": statistics.median(walls), "gap_s": statistics.median(gaps), "read_gb_s": statistics.median(reads),
            "cpu_share": statistics.median(shares)}


def _base(model: "Model", phase: Phase) -> tuple[int, ...]:
    """Tokens in each cache before the rounds. A decode starts one further, where that fits: 31 of 32 steps find their block there, and
    going back to the end of a block would make every round take a new one."""
    load = phase.loads[0]
    one = int(phase.kind == "decode" and max(load.before) + 2 <= model.limits.positions)
    return tuple(b + one for b in load.before)


def _rewind(sequences: Any, lengths: tuple[int, ...]) -> None:
    for sequence, length in zip(sequences, lengths, strict=True): sequence.truncate(length)


def _tokens(model: "Model", count: int, seed: int) -> list[int]:
    """Ids, the same every time: what they say does not change what a step costs."""
    vocab = model.manifest.model.vocab
    return [(7919 * i + 104729 * seed + 1) % vocab for i in range(count)]
