"""How fast an artifact's steps are on a card: the time of one replay on the device, and what the host adds to a step."""
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from gpu_models import MODELS
from infc.runtime.batch import Work
from infc.runtime.bench import step_bytes
from infc.runtime.blocks import blocks_for
from infc.runtime.cpu import kv_bytes_per_token
from infc.runtime.device import Device, Recorded
from infc.runtime.golden import replay
from infc.runtime.session import Model, load
from infc.runtime.stepper import OpenSequence
from infc.runtime.tune import tune

ROUNDS = 21
"""Replays timed of each step."""

PATTERN = 32 << 20
"""Random numbers, repeated all over the KV pool: zeros take less power, and so less time."""

Tell = Callable[[dict[str, Any]], None]


def rates(request: Mapping[str, Any], begin: Callable[[str], None], tell: Tell) -> None:
    """Tell what this card's memory and tensor cores do: bytes/s of its own copy, flop/s of an 8192 x 8192 x 8192 product of bf16."""
    import torch
    from infc.runtime.cuda import CudaDevice

    begin("rates")
    size = 8192
    device = CudaDevice()
    copy = device.copy_rate()
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    samples = []
    for _ in range(3): a @ b
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    tell({"copy_bytes_s": copy, "matmul_flops_s": 2 * size**3 / statistics.median(samples), "multiprocessors": device.multiprocessors})


def measure(request: Mapping[str, Any], begin: Callable[[str], None], tell: Tell) -> None:
    """Tell a row of each step. request: name, path, model, layers, quant, batches, contexts, prefill, dry, beside (compiles running)."""
    begin(request["name"])
    device = _idle(request["arch"]) if request["dry"] else _card()
    made: list[Recorded] = []
    record = device.record

    def watched(work: Sequence[Any]) -> Recorded:
        made.append(record(work))
        return made[-1]

    device.record = watched                                               # type: ignore[method-assign]   # a table keeps its own
    batches, contexts = request["batches"], request["contexts"]
    positions = -(-max(*contexts, request["prefill"]) // 32) * 32
    same = {name: request[name] for name in ("model", "layers", "quant", "beside")} | {"engine": "infc"}
    with load(request["path"], device=device, kv_tokens=max(batches) * positions) as model:
        if not request["dry"]:
            report = replay(model)
            wrong = {} if report.passed else {"error": f"golden logits differ by {report.error:.3g}, the bound is {report.bound:.3g}"}
            tell(same | {"what": "golden", "share": report.error / report.bound, "load_s": model.timing.load_s} | wrong)
        sequences = [model.sequence() for _ in range(max(batches))]
        for sequence in sequences: model.pool.grow(sequence, blocks_for(positions))
        _fill(model, device)
        for batch, context in ((b, c) for c in contexts for b in batches):
            begin(f"{request['name']} decode {batch} at {context}")
            works = [(sequence, [5], context - 1) for sequence in sequences[:batch]]
            moved = step_bytes(model.artifact) + batch * context * kv_bytes_per_token(model.artifact)
            tell(same | {"what": "decode", "batch": batch, "context": context, "bytes": moved} | _timed(model, device, made, works))
        tokens = request["prefill"]
        begin(f"{request['name']} prefill {tokens}")
        vocab = model.manifest.model.vocab
        works = [(sequences[0], [i * 7919 % vocab for i in range(tokens)], 0)]
        flops = MODELS[request["model"]].prefill_flops(request["layers"], tokens)
        tell(same | {"what": "prefill", "batch": 1, "context": tokens, "flops": flops} | _timed(model, device, made, works))


def tuned(request: Mapping[str, Any], begin: Callable[[str], None], tell: Tell) -> None:
    """Tell what `infc tune` gains on an artifact: microseconds of the calls it measures, a step of each bucket. request: as `measure`'s."""
    dry, name = request["dry"], f"{request['name']} tune"
    begin(name)
    found = tune(request["path"], request["path"] + ".tuned.infc", device=_idle(request["arch"]) if dry else _card(), brief=dry,
                 force=True, note=lambda line: begin(f"{name}: {line}"))
    wrong = {} if dry or found.written else {"error": f"tuned golden logits differ by {found.golden.error:.3g}"}
    tell({key: request[key] for key in ("model", "layers", "quant", "beside")} | {"engine": "infc", "what": "tune", "name": name} | {
        "choices": found.info.choices, "changed": found.info.changed, "before_us": found.before_us, "after_us": found.after_us,
        "calls": msgspec.to_builtins(found.calls)} | wrong)


def _timed(model: Model, device: Device, made: list[Recorded], given: Sequence[tuple[OpenSequence, list[int], int]]) -> dict[str, Any]:
    """Milliseconds of a step on the device, and microseconds more that it takes its caller. given: (sequence, new tokens, those before)."""
    def run() -> float:
        for sequence, _, length in given: sequence.length = length        # its blocks stay, and what is in them
        start = perf_counter()
        model.run([Work(sequence, tokens, 1) for sequence, tokens, _ in given])
        return perf_counter() - start

    tokens = sum(len(tokens) for _, tokens, _ in given)
    fit = [b for b in model.manifest.buckets if b.bucket["T"] >= tokens and b.bucket["N"] >= len(given)]
    bucket = min(fit, key=lambda b: b.bucket["T"])
    run()                                                                 # its inputs are there now, and the recording's memory is warm
    before = len(made)
    table = model.executor.table(bucket.name)
    try:
        if len(made) != before + 1: raise ValueError(f"{bucket.name} is {len(made) - before} recordings: it has ATen steps")
        samples = [us / 1e3 for us in device.timed(made[-1], ROUNDS)]
    finally:
        table.close()
    calls = [run() * 1e3 for _ in range(ROUNDS)]
    ms = statistics.median(samples)
    return {"ms": ms, "samples": samples, "call_ms": statistics.median(calls), "host_us": 1e3 * (statistics.median(calls) - ms)}


def _fill(model: Model, device: Device) -> None:
    """Random bf16 all over the KV pool."""
    numbers = np.random.default_rng(0).standard_normal(PATTERN // 2, np.float32)
    pattern = memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16)).cast("B")
    for address, size in model.executor.kv.values():
        whole = size * model.executor.kv_blocks
        for at in range(0, whole, PATTERN): device.upload(address + at, pattern[:min(PATTERN, whole - at)])


def _card() -> Device:
    from infc.runtime.cuda import CudaDevice

    return CudaDevice()


def _idle(arch: str) -> Device:
    """A card's memory, and nothing that computes: the way through what is above, without a card."""
    from infc.backends.host_device import HostDevice

    class Idle(HostDevice):
        def launch(self, launch: Any) -> None:
            """Nothing."""

    return Idle(arch)
