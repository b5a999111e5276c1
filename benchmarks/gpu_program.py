"""A whole artifact on a card: golden prompts through every bucket, memory poisoned before, and hundreds of replays that must not differ."""
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from infc.runtime.batch import Work
from infc.runtime.golden import replay
from infc.runtime.session import Model, load

ROOM = 8192
"""Tokens of the KV pool: more than all golden prompts together, twice."""

TOGETHER = (1, 8)
"""Sequences of the decode steps that are repeated."""


def check(request: Mapping[str, Any], begin: Callable[[str], None], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell a row of an artifact. request: name, path, times."""
    from infc.runtime.cuda import CudaDevice

    begin(request["name"])
    with load(request["path"], device=CudaDevice(), kv_tokens=ROOM) as model:
        tell({"name": request["name"], **checked(model, request["times"])})


def checked(model: Model, times: int) -> dict[str, Any]:
    """Golden prompts and repeats of a loaded model, all that it may not read being NaN."""
    poison(model, whole=True)
    report = replay(model)
    differ = {count: repeated(model, count, times) for count in TOGETHER if count <= model.limits.sequences}
    wrong = [f"{n} of {times} replays of {count} sequences differ" for count, n in differ.items() if n]
    if not report.passed:
        wrong.append(f"golden logits differ by {report.error:.3g}, the bound is {report.bound:.3g}; {report.wrong_tokens} wrong tokens")
    return {"golden": msgspec.to_builtins(report), "share": report.error / report.bound, "buckets": len(report.errors), "replays": times,
            "load_s": model.timing.load_s, "memory": model.memory()} | ({"error": "; ".join(wrong)} if wrong else {})


def poison(model: Model, whole: bool = False) -> None:
    """Every bit of the arena, and of the whole KV pool: NaN in any float type."""
    executor = model.executor
    device, (_, _, arena, *_) = executor.device, executor.places          # type: ignore[union-attr]   # of a GPU
    device.fill(arena, 0xFF, executor.memory()["arena"])
    if whole:
        for address, size in executor.kv.values(): device.fill(address, 0xFF, size * executor.kv_blocks)


def repeated(model: Model, count: int, times: int) -> int:
    """How many of so many replays of one decode step, the arena poisoned before each, gave other tokens or other bits of logits."""
    vocab = model.manifest.model.vocab
    sequences = [model.sequence() for _ in range(count)]
    model.step(sequences, [[(7 * i + j) % vocab for j in range(5 + 11 * i)] for i in range(count)], logits="none")
    lengths, first, other = [s.length for s in sequences], None, 0
    for _ in range(times):
        for sequence, length in zip(sequences, lengths, strict=True): sequence.truncate(length)
        poison(model)
        tokens, logits = model.run_logits([Work(sequence, [3], 1) for sequence in sequences], True)
        found = tokens, logits.tobytes()
        first = first or found
        other += found != first
    for sequence in sequences: sequence.close()
    return other


def on_host(folder: Path, bounds: Any, times: int) -> dict[str, Any]:
    """The same in the CPU's memory, where reference operators stand for the kernels: a mistake in what is above shows without a card."""
    from infc.backends import reference
    from infc.backends.host_device import HostDevice

    arch = next(iter(bounds.values())).context.target
    with load(folder, device=HostDevice(arch), kv_tokens=ROOM) as model:
        model.cache.clear()                                               # recordings of kernels that cannot run here
        reference.install(model.executor, bounds, lambda step: False)
        return checked(model, times)
