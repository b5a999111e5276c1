"""Measure an artifact: fresh process, warm, and steady apart, each decode between two pure reads of the same weights.

Speed on a CPU is the machine's own read rate times the share of it that a step reaches. The first changes from minute to
minute on shared machines, so it is taken right before and after every sample, by the same threads, of the same bytes.
Every figure is a median of `rounds` samples, the samples are kept, and the kinds are interleaved.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import msgspec

from .artifact import Artifact
from .cpu import default_threads, kv_bytes_per_token
from .environment import busy, cpu_share, environment
from .errors import RuntimeFault
from .generate import Request, run_requests
from .options import Sampling
from .session import Model, load

SCHEMA = 1
SEED = 0


class Workload(msgspec.Struct, frozen=True):
    """What is run; two reports can be compared only where these agree."""

    batches: tuple[int, ...] = (1, 8)  # sequences decoded at once
    contexts: tuple[int, ...] = (128, 448)  # tokens of each prompt before the decode that is measured
    new_tokens: int = 64  # per sequence and sample
    prefill: tuple[int, ...] = (128, 256, 1024)  # prompt lengths
    cold_prompt: int = 16  # prompt of a fresh process
    rounds: int = 5
    threads: int = 0  # filled in by measure


class DecodeSample(msgspec.Struct, frozen=True):
    """One decode of a batch: times of its steps, and what the machine could read meanwhile."""

    context: int
    first_s: list[float]  # from the start to each sequence's first token
    each_s: list[float]  # from the start to each sequence's last token
    total_s: float
    steps_s: list[float]  # every step in which all sequences decode
    read_gb_s: float
    share_of_read: float
    cpu_share: float  # of the machine: environment.cpu_share


def measure(
    path: Path, work: Workload, *, threads: int | None = None, note: Callable[[str], object] | None = None, may_drop: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole report, plain data. `note` gets one line per stage. Raises RuntimeFault where the workload does not fit.

    may_drop: of "contexts" and "prefill", those whose lengths nobody asked for: what is longer than the model's positions is left out,
    said, and in the report under "left_out"; where none is left, the longest that fits is taken.
    """
    work = msgspec.structs.replace(work, threads=threads or default_threads())
    say = note or (lambda text: None)
    with load(path, threads=work.threads) as model:
        work, left_out = _fitting(work, may_drop, model.limits.positions)
        for name, lengths in left_out.items():
            say(f"{name} of {', '.join(map(str, lengths))} tokens left out: this model has {model.limits.positions} positions; "
                f"measured: {', '.join(map(str, getattr(work, name)))}")
        _check_fits(model, work)
    say(f"fresh processes: {work.rounds} of a {work.cold_prompt}-token prompt")
    cold = [_fresh_process(path, work) for _ in range(work.rounds)]
    with load(path, threads=work.threads) as model:
        warm = {"load_s": model.timing.load_s, "first_token_s": _prefill(model, work.cold_prompt)}
        decode: dict[int, list[DecodeSample]] = {batch: [] for batch in work.batches}
        prefill: dict[int, list[float]] = {length: [] for length in work.prefill}
        for round_ in range(-1, work.rounds):  # round -1 only warms up
            say("warming up" if round_ < 0 else f"round {round_ + 1} of {work.rounds}")
            samples = [(b, _decode(model, b, c, work.new_tokens)) for b in work.batches for c in work.contexts]
            rates = [(n, n / _prefill(model, n)) for n in work.prefill]
            if round_ < 0:
                continue
            for batch, sample in samples:
                decode[batch].append(sample)
            for length, rate in rates:
                prefill[length].append(rate)
        return _report(model, work, cold, warm, decode, prefill) | {"left_out": left_out}


def step_bytes(artifact: Artifact) -> int:
    """Weight bytes a decode step reads: every weight once, but of an embedding table only the rows it looks up."""
    program = artifact.program(min(artifact.manifest.buckets, key=lambda b: b.bucket["T"]).name)
    read_whole = {i for step in program.steps if "embedding" not in step.op for i in step.args}
    tensors = {b.tensor: b.bytes for i, b in enumerate(program.buffers) if b.kind == "weight" and i in read_whole}
    return sum(tensors.values())


def _prompt(model: Model, length: int, index: int = 0) -> list[int]:
    """Token ids, the same in every process: what they say does not change what a step costs."""
    return random.Random(SEED + index).choices(range(model.manifest.model.vocab), k=length)


def _prefill(model: Model, length: int) -> float:
    """Seconds from a prompt of that length to its first token."""
    begin = perf_counter()
    run_greedy(model, [_prompt(model, length)], 1)
    return perf_counter() - begin


def run_greedy(model: Model, prompts: Sequence[list[int]], new: int) -> list[tuple[int, int, float]]:
    """Greedy tokens without text, end tokens ignored: (number of the step, sequence, time) of each."""
    requests = [
        Request(i, ids, max_tokens=new, sampling=Sampling(), seed=None, eos=frozenset(), stop_ids=frozenset(), text=None, live=False)
        for i, ids in enumerate(prompts)
    ]
    return [(model.steps, request.index, perf_counter()) for request, _, _ in run_requests(model, requests)]


def _read_rate(model: Model) -> float:
    """GB/s of a pure read of all weights."""
    return model.memory()["weights"] / model.executor.read_weights()


def _decode(model: Model, batch: int, context: int, new: int) -> DecodeSample:
    """Prompts of `context` tokens, then `new` tokens for each."""
    prompts = [_prompt(model, context, index) for index in range(batch)]
    before = _read_rate(model)
    begin, used = perf_counter(), process_time()
    events = run_greedy(model, prompts, new)
    end, used = perf_counter(), process_time() - used
    rate = (before + _read_rate(model)) / 2
    steps = _full_steps(events, batch)
    moved = step_bytes(model.artifact) + batch * kv_bytes_per_token(model.artifact) * (context + new // 2)
    firsts, lasts = _times(events, min), _times(events, max)
    return DecodeSample(
        context=context,
        steps_s=steps,
        read_gb_s=rate,
        share_of_read=moved / statistics.median(steps) / 1e9 / rate,
        cpu_share=cpu_share(used, end - begin, model.executor.threads),
        first_s=[t - begin for t in firsts],
        each_s=[t - begin for t in lasts],
        total_s=end - begin,
    )


def _full_steps(events: Sequence[tuple[int, int, float]], batch: int) -> list[float]:
    """Seconds of each step in which every sequence decoded: it and the step before it gave `batch` tokens."""
    ends: dict[int, list[float]] = {}
    for step, _, when in events:
        ends.setdefault(step, []).append(when)
    return [max(ends[k]) - max(ends[k - 1]) for k in ends if len(ends[k]) == batch == len(ends.get(k - 1, ()))]


def _times(events: Sequence[tuple[int, int, float]], which: Callable[..., float]) -> list[float]:
    """The first (min) or last (max) time of each sequence."""
    by_sequence: dict[int, list[float]] = {}
    for _, sequence, when in events:
        by_sequence.setdefault(sequence, []).append(when)
    return [which(times) for times in by_sequence.values()]


def _fitting(work: Workload, may_drop: Sequence[str], positions: int) -> tuple[Workload, dict[str, list[int]]]:
    """The workload without lengths that are too long, and those; where none is left the longest that fits, as it is where none does."""
    room = {"contexts": positions - work.new_tokens, "prefill": positions}
    kept = {name: tuple(n for n in getattr(work, name) if n <= room[name]) or (room[name],) for name in may_drop if room[name] > 0}
    left_out = {name: [n for n in getattr(work, name) if n not in lengths] for name, lengths in kept.items()}
    left_out = {name: lengths for name, lengths in left_out.items() if lengths}
    return msgspec.structs.replace(work, **{name: kept[name] for name in left_out}), left_out


def _check_fits(model: Model, work: Workload) -> None:
    """Raise RuntimeFault, naming the option, where the artifact cannot run the workload."""
    if min((*work.batches, *work.contexts, *work.prefill, work.rounds), default=0) < 1 or not work.batches or not work.contexts:
        raise RuntimeFault("batches, contexts, prefill lengths and rounds must all be >= 1, and there must be a batch and a context")
    if work.new_tokens < 3:
        raise RuntimeFault(f"new tokens is {work.new_tokens}; a decode needs at least 3")
    limits = model.limits
    if max(work.batches) > limits.sequences:
        raise RuntimeFault(f"batch {max(work.batches)} is more than the {limits.sequences} sequences this artifact takes; give --batches")
    longest = max(*(c + work.new_tokens for c in work.contexts), *work.prefill)
    if longest > limits.positions:
        raise RuntimeFault(f"{longest} tokens are more than this model's {limits.positions}; give shorter --contexts or --prefill, or "
                           "fewer --new-tokens")


def _report(
    model: Model,
    work: Workload,
    cold: list[dict[str, float]],
    warm: dict[str, float],
    decode: dict[int, list[DecodeSample]],
    prefill: dict[int, list[float]],
) -> dict[str, Any]:
    manifest = model.manifest
    every = [sample for samples in decode.values() for sample in samples]
    share = statistics.median(s.cpu_share for s in every)
    return {
        "schema": SCHEMA,
        "artifact": {"name": manifest.name, "version": manifest.version, "target": manifest.target, "dtype": manifest.dtype},
        "model": manifest.model.name,
        "contract": manifest.contract,
        "workload": msgspec.to_builtins(work),
        "environment": environment(),
        "cpu_share": share,
        "findings": busy(share),
        "read_gb_s": statistics.median(s.read_gb_s for s in every),
        "step_bytes": step_bytes(model.artifact),
        "kv_bytes_per_token": kv_bytes_per_token(model.artifact),
        "decode": {str(batch): _decode_report(batch, samples, work) for batch, samples in decode.items()},
        "prefill": {str(length): statistics.median(rates) for length, rates in prefill.items()},
        "cold": {name: statistics.median(run[name] for run in cold) for name in cold[0]},
        "warm": warm,
        "memory": {"peak_bytes": int(cold[0]["peak_bytes"]), **model.memory()},
        "counters": model.counters,
        "samples": {
            "cold": cold,
            "decode": {str(batch): msgspec.to_builtins(samples) for batch, samples in decode.items()},
            "prefill": {str(length): rates for length, rates in prefill.items()},
        },
    }


def _decode_report(batch: int, samples: Sequence[DecodeSample], work: Workload) -> dict[str, Any]:
    """tok_s and ms are of the decode steps alone, over all contexts; throughput counts the prompts' time as well."""
    step = statistics.median(statistics.median(s.steps_s) for s in samples)
    return {
        "tok_s": batch / step,
        "ms": 1000 * step,
        "share_of_read": statistics.median(s.share_of_read for s in samples),
        "context": {str(c): _context_report(batch, [s for s in samples if s.context == c]) for c in work.contexts},
        "ttft_s": percentiles([t for s in samples for t in s.first_s]),
        "tpot_s": percentiles([t for s in samples for t in s.steps_s]),
        "end_to_end_s": percentiles([t for s in samples for t in s.each_s]),
        "throughput_tok_s": statistics.median(batch * work.new_tokens / s.total_s for s in samples),
    }


def _context_report(batch: int, samples: Sequence[DecodeSample]) -> dict[str, float]:
    step = statistics.median(statistics.median(s.steps_s) for s in samples)
    return {"tok_s": batch / step, "ms": 1000 * step, "share_of_read": statistics.median(s.share_of_read for s in samples)}


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """P50, P90 and P99 by the nearest rank: each is a sample that was seen."""
    ordered = sorted(samples)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 90, 99)}


# --- a fresh process ------------------------------------------------------------------------------------------------

_FIRST_TOKEN = """
from time import perf_counter
from {package}.session import load
with load({path!r}, threads={threads}, text=True) as model:
    for piece in model.stream({ids}, max_tokens=1, ignore_eos=True):
        at = perf_counter()
import json, resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"at": at, "load_s": model.timing.load_s, "first_token_s": model.timing.ttft_s, "peak_bytes": peak}}))
"""
"""What a service does and no more: imports of the measurement itself would be counted. `at` is on the system's clock
(CLOCK_MONOTONIC, one for all processes), so that the process's end is not."""


def _fresh_process(path: Path, work: Workload) -> dict[str, float]:
    """Start Python, load, answer with one token: seconds of each part, and the process's peak memory."""
    ids = [1 + i % 100 for i in range(work.cold_prompt)]
    code = _FIRST_TOKEN.format(package=__package__, path=str(path), threads=work.threads, ids=ids)
    begin = perf_counter()
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeFault(f"{path}: a fresh process failed: {last}")
    parts = json.loads(child.stdout)
    total = parts.pop("at") - begin
    return {"total_s": total, "start_and_import_s": total - parts["load_s"] - parts["first_token_s"], **parts}
