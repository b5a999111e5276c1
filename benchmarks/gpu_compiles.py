"""What the GPU check compiles, in the background from its first second on, and how many at a time."""
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gpu_run import BATCHES, PREFILL, Run
from gpu_worker import Died, Worker

BYTES_PER_PARAMETER = 18
"""Memory at the peak of a compile: 16 measured on two layers of Llama-3.2-1B, in fp32 and bf16 with its golden outputs in fp64."""


@dataclass(frozen=True)
class Job:
    """One compile. layers: of a key of gpu_models.MODELS, 0 where `model` is a name that infc knows."""

    name: str
    part: str
    model: str
    layers: int = 0
    quant: str = "none"
    kv: str = "none"
    parameters: int = 0


def jobs(parts: Sequence[str], dry: bool, fp8: bool) -> list[Job]:
    """In the order they are wanted: programs first, then the speed of wide weights, then of codes. fp8: the card has e4m3."""
    from gpu_models import MODELS

    found: list[Job] = []
    floats = ("fp8", "fp8a8") if fp8 else ()
    if "B" in parts:
        found.append(Job("tiny", "B", "tiny"))
        if not dry:
            found += [Job(f"tiny KV {kv}", "B", "tiny", kv=kv) for kv in ("int8", *(["fp8"] if fp8 else []))]
            found += [Job(f"tiny {quant}", "B", "tiny", quant=quant) for quant in ("w8a32", "w4a32", *floats)]
            found.append(Job("smollm2's shape", "B", "random:smollm2", parameters=135_000_000))
    if "C" in parts:
        for model, quant in (("tiny", "none"),) if dry else (("Llama-3.1-8B", "none"), ("Llama-3.2-1B", "none"), ("Qwen2.5-7B", "none"),
                                                             ("Llama-3.1-8B", "w8a32"), ("Llama-3.1-8B", "w4a32"),
                                                             *(("Llama-3.1-8B", quant) for quant in floats)):
            sizes = MODELS[model]
            found += [Job(f"{model} {layers} layers{'' if quant == 'none' else ' ' + quant}", "C", model, layers, quant,
                          parameters=sizes.parameters(layers)) for layers in sizes.tried]
    return found


class Compiles:
    """Compiles in the background, as many at a time as memory and cores allow."""

    def __init__(self, run: Run, todo: Sequence[Job]) -> None:
        cores = run.cores
        self.run, self.running = run, 0
        self.free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 7 // 10
        self.threads = max(1, cores // 3)
        self.changed = threading.Condition()
        self.stopped = False
        self.workers: set[Worker] = set()
        self.pool = ThreadPoolExecutor(max(1, min(4, cores // 3)))
        self.results: dict[Job, Future[dict[str, Any]]] = {job: self.pool.submit(self._one, job) for job in todo}

    def _one(self, job: Job) -> dict[str, Any]:
        size = min(self.free, BYTES_PER_PARAMETER * job.parameters + (2 << 30))
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.free >= size or not self.running)
            if self.stopped: raise Died("its time is up", job.name)
            self.free, self.running = self.free - size, self.running + 1
            worker = Worker("compile", self.run.scratch, {"OMP_NUM_THREADS": str(self.threads)})
            self.workers.add(worker)
        try:
            brief = job.part == "C" or self.run.dry
            path = str(self.run.scratch / f"{job.name.replace(' ', '-')}.infc")
            request = {"name": job.name, "model": job.model, "layers": job.layers, "quant": job.quant, "kv": job.kv,
                       "target": self.run.target, "path": path, "brief": brief, "times": 3,
                       "check": "off" if brief else "fast", "host": self.run.dry and job.part == "B",
                       "buckets": [1, 8] if self.run.dry else [*BATCHES, PREFILL] if job.part == "C" else []}
            rows = list(worker.ask(request, self.run.end))
            return rows[-1]
        finally:
            worker.close()
            with self.changed:
                self.workers.discard(worker)
                self.free, self.running = self.free + size, self.running - 1
                self.changed.notify_all()

    def close(self) -> None:
        """End those that run, and begin no other."""
        with self.changed:
            self.stopped = True
            for worker in self.workers:
                worker.hangs = True                                       # it would not end by itself for minutes
                worker.close()
            self.changed.notify_all()
        self.pool.shutdown(wait=True, cancel_futures=True)
