"""Measure, on the GPU that is here, the candidates of each call of an artifact, and store which are the fastest.

Calls that are alike are recorded together, layer behind layer: each finds weights of its own, as in a step, and before every replay the
L2 is filled with something else. Candidates take turns, so that a clock that falls slows them all. The tuned programs answer the golden
prompts before anything is written; a choice that makes an answer wrong is taken back.
"""
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from .artifact import Artifact, copy, read, refuse_place, verify_files
from .batch import Work
from .blocks import blocks_for
from .errors import RuntimeFault
from .golden import GoldenReport, replay
from .gpu import GpuExecutor
from .manifest import BLOCK, GPU, BucketInfo, TunedInfo
from .program import Choice, Program, steps_of
from .session import Model, load

if TYPE_CHECKING:
    from .device import Device

ROUNDS = 7
TIMES = 5
"""Replays of a recording in a round; their median counts."""

TOGETHER = 32
"""Calls recorded at most: layers whose weights pass through the L2 one behind the other."""

MARGIN = 0.02
"""By how much a candidate must be faster than the one it replaces: less than that is noise of clocks."""


class Timed(msgspec.Struct, frozen=True):
    """What was measured of calls that are alike: microseconds of one call by candidate, and the candidates before and after."""

    bucket: str
    op: str
    calls: int
    us: dict[str, float]
    before: str
    after: str
    why_not: str = ""                    # the fastest is not taken


class Tuned(msgspec.Struct, frozen=True):
    """What `tune` did. before_us, after_us: of a step of each bucket, all calls that were measured. golden: of what was (not) written."""

    artifact: str
    info: TunedInfo
    calls: tuple[Timed, ...]
    before_us: dict[str, float]
    after_us: dict[str, float]
    golden: GoldenReport
    written: bool


def tune(
    path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, force: bool = False, rounds: int = ROUNDS,
    device: "Device | None" = None, brief: bool = False, note: Callable[[str], object] = lambda line: None,
) -> Tuned:
    """Time the candidates of the artifact at `path` and write it with the fastest to `output`, with `force` in its own place.

    device: default, the first GPU; closed at the end. brief: as golden.replay. Nothing is written where the tuned programs do not answer
    as recorded. Raises RuntimeFault where there is no GPU, the artifact has no candidates, or `output` cannot be written.
    """
    source, target = Path(path), Path(path if output is None else output)
    if rounds < 5: raise RuntimeFault(f"rounds is {rounds}; medians want 5 or more")
    with read(source) as artifact:
        _check(artifact)
        buckets = artifact.manifest.buckets
    refuse_place(target, force)
    with load(source, device=device) as model:
        device = _gpu(model).device
        programs = [model.artifact.program(bucket.name) for bucket in buckets]
        choices = dict[str, list[Choice]]()
        cold = (device.allocate(2 * device.l2_bytes, "memory that empties the L2"), 2 * device.l2_bytes)
        for bucket, program in zip(buckets, programs, strict=True):
            note(f"{bucket.name}: {sum(len(c.candidates) > 1 for c in program.choices)} choices, {rounds} rounds, "
                 f"sequences of {sum(_lengths(model, bucket)[0])} tokens")
            choices[bucket.name] = [_with_times(choice, us) for choice, us in zip(
                program.choices, _measured(model, bucket, program, rounds, cold), strict=True)]
        note("replaying the golden prompts")
        tuned, wrong, golden = _verified(model, programs, choices, brief)
        calls = [_timed(program.name, old, new, (program.name, at) in wrong) for program, one in zip(programs, tuned, strict=True)
                 for at, (old, new) in enumerate(zip(program.choices, one.choices, strict=True)) if len(old.candidates) > 1]
        context = max(before for bucket in buckets for before, _ in _lengths(model, bucket))
        info = TunedInfo(device.name, device.driver_version, rounds, context, MARGIN, len(calls), sum(c.before != c.after for c in calls))
        found = Tuned(str(target), info, tuple(calls), _sums(calls, "before"), _sums(calls, "after"), golden, golden.passed)
        if golden.passed: _write(model.artifact, source, target, force, tuned, found)
        return found


def _check(artifact: Artifact) -> None:
    """RuntimeFault where there is nothing to measure."""
    if artifact.manifest.machine != GPU:
        raise RuntimeFault(f"{artifact.path}: is for a CPU, whose kernels have no candidates; compile it for a GPU (infc targets)")
    if not artifact.path.is_dir(): raise RuntimeFault(f"{artifact.path}: is no folder, and only a folder is tuned; unpack it first")
    if not any(len(c.candidates) > 1 for b in artifact.manifest.buckets for c in artifact.program(b.name).choices):
        raise RuntimeFault(f"{artifact.path}: has no candidates to measure; compile it again with this infc")


def _gpu(model: Model) -> GpuExecutor:
    assert isinstance(model.executor, GpuExecutor)
    return model.executor


# ---- measuring

def _measured(
    model: Model, bucket: BucketInfo, program: Program, rounds: int, cold: tuple[int, int],
) -> Iterator[list[float]]:
    """Of each choice, microseconds of a call by candidate."""
    executor = _gpu(model)
    with ExitStack() as opened:
        model.run_logits(_works(model, bucket, opened), False, bucket.name)     # inputs and all buffers are a step's now
        table = executor.table(bucket.name)
        opened.callback(table.close)
        for choice in program.choices:
            if len(choice.candidates) < 2:
                yield [0.0]
                continue
            calls = choice.calls[:TOGETHER]
            with ExitStack() as kept:
                recorded = []
                for candidate in choice.candidates:
                    recorded.append(table.record([step for call in calls for step in steps_of(candidate, call, program.steps[call.step])]))
                    kept.callback(recorded[-1].close)
                times: list[list[float]] = [[] for _ in recorded]
                for turn in range(rounds):
                    for at in sorted(range(len(recorded)), key=lambda at, turn=turn: (at + turn) % len(recorded)):
                        times[at].append(median(executor.device.timed(recorded[at], TIMES, cold)) / len(calls))
            yield [median(found) for found in times]


def _sequences(bucket: BucketInfo, most: int) -> int:
    """Of a step that fills a bucket: as many as tokens where it holds them, a token each; else as few as hold them, at `most` tokens."""
    return bucket.bucket["T"] if bucket.bucket["T"] <= bucket.bucket["N"] else -(-bucket.bucket["T"] // most)


def _lengths(model: Model, bucket: BucketInfo) -> list[tuple[int, int]]:
    """(tokens before the step, tokens of the step) of each sequence of one that fills a bucket: all of the model's positions, as the
    compiler ranks candidates; where the KV pool, so the card's memory, holds fewer, an equal share of it for each."""
    tokens, most = bucket.bucket["T"], model.limits.positions
    count = _sequences(bucket, most)
    length = min(most, model.pool.count // count * BLOCK)
    new = [tokens // count + (index < tokens % count) for index in range(count)]
    return [(max(0, length - one), one) for one in new]


def _works(model: Model, bucket: BucketInfo, opened: ExitStack) -> list[Work]:
    """A step that fills a bucket."""
    works = list[Work]()
    for index, (before, new) in enumerate(_lengths(model, bucket)):
        sequence = opened.enter_context(model.sequence())
        model.pool.grow(sequence, blocks_for(before + new))
        sequence.length = before
        works.append(Work(sequence, [(7 * index + 3) % model.manifest.model.vocab] * new, 1))
    return works


def _with_times(choice: Choice, us: Sequence[float]) -> Choice:
    """The choice with what was measured, and the fastest candidate where it is faster by the margin; a tie keeps the one before."""
    candidates = tuple(msgspec.structs.replace(c, measured_us=round(t, 4)) for c, t in zip(choice.candidates, us, strict=True))
    best = min(range(len(us)), key=us.__getitem__)
    if us[best] >= (1 - MARGIN) * us[choice.chosen]: best = choice.chosen
    return msgspec.structs.replace(choice, candidates=candidates, chosen=best)


# ---- verifying

def _verified(
    model: Model, programs: Sequence[Program], choices: Mapping[str, list[Choice]], brief: bool,
) -> tuple[list[Program], set[tuple[str, int]], GoldenReport]:
    """The programs as chosen, the (bucket, choice) taken back because they alone make an answer wrong, and the replay of what is left."""
    def tried(taken: Callable[[str, int], bool], *buckets: str) -> tuple[list[Program], GoldenReport]:
        made = [p.with_choices([new if taken(p.name, at) else msgspec.structs.replace(new, chosen=old.chosen)
                                for at, (old, new) in enumerate(zip(p.choices, choices[p.name], strict=True))]) for p in programs]
        _gpu(model).take({program.name: program for program in made})
        model.cache.clear()
        model.prepare()
        return made, replay(model, buckets, brief)

    found, report = tried(lambda bucket, at: True)
    changed = [(p.name, at) for p in programs for at, old in enumerate(p.choices) if choices[p.name][at].chosen != old.chosen]
    if report.passed or not changed: return found, set(), report
    wrong = {one for one in changed if not tried(lambda bucket, at, one=one: (bucket, at) == one, one[0])[1].passed}
    found, report = tried(lambda bucket, at: (bucket, at) not in wrong)
    return found, wrong, report


def _timed(bucket: str, old: Choice, new: Choice, wrong: bool) -> Timed:
    us = {candidate.name: candidate.measured_us for candidate in new.candidates}
    before, after = old.candidates[old.chosen].name, new.candidates[new.chosen].name
    fastest = min(us, key=us.__getitem__)
    why = "" if fastest == after else "its answers are wrong" if wrong else f"not faster by {MARGIN:.0%}"
    return Timed(bucket, new.op, len(new.calls), us, before, after, why)


def _sums(calls: Sequence[Timed], which: str) -> dict[str, float]:
    """Microseconds of all calls of each bucket's step, each as it was before, or is after."""
    found: dict[str, float] = {}
    for one in calls: found[one.bucket] = found.get(one.bucket, 0.0) + one.calls * one.us[getattr(one, which)]
    return {bucket: round(us, 3) for bucket, us in found.items()}


# ---- writing

def _write(artifact: Artifact, source: Path, target: Path, force: bool, programs: Sequence[Program], found: Tuned) -> None:
    from .writer import retune

    report = artifact.report()
    if report.get("costs"): report["costs"] = _recosted(report["costs"], programs, {k.hash: k.name for k in artifact.manifest.kernels})
    report["tuned"] = msgspec.to_builtins(found)

    def finish(folder: Path) -> None:
        retune(folder, programs, report, found.info)
        opened = verify_files(folder)
        for program in programs: opened.program(program.name)
        opened.close()

    copy(source, target, force, finish)


def _recosted(costs: Mapping[str, Any], programs: Sequence[Program], names: Mapping[str, str]) -> dict[str, Any]:
    """report.json's costs with the kernels that run now."""
    entries, steps, places = list[Any](), dict[str, list[int]](), dict[tuple[int, str], int]()
    for program in programs:
        heads = [step.kernel for step in program.steps if not step.part]
        steps[program.name] = []
        for old, kernel in zip(costs["steps"][program.name], heads, strict=True):
            if (old, kernel) not in places:
                places[old, kernel] = len(entries)
                entries.append({**costs["kernels"][old], "kernel": kernel, "name": names[kernel]})
            steps[program.name].append(places[old, kernel])
    return {**costs, "kernels": entries, "steps": steps}
