"""The three parts of the GPU check: kernels, programs, speed; what dies costs the case it is in, and what time does not hold is listed."""
import shutil
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gpu_compiles import Compiles, Job
from gpu_run import BATCHES, CONTEXTS, PREFILL, Run
from gpu_worker import Died, Worker

CRASHES = 12
"""Workers that part A starts at most, one behind the other."""

TUNED, DRY_MODEL = "Llama-3.2-1B", "tiny"
"""What `infc tune` is tried on: the model that is compiled whole."""

REPLAYS = 200


def part_a(run: Run) -> None:
    """Conformance. A worker that dies takes its case with it: another goes on behind it."""
    done: list[str] = []
    until, env = run.until("A"), {"TRITON_INTERPRET": "1"} if run.dry else {}
    for _ in range(CRASHES):
        worker = Worker("conformance", run.scratch, env)
        request = {"arch": run.arch, "dry": run.dry, "done": done, "seconds": until - time.monotonic() - 3, "workers": run.cores}
        try:
            for row in worker.ask(request, until):
                if "left_out" in row: run.leave_out("A", row["left_out"])
                else:
                    run.add("A", row)
                    done.append(row["name"])
            return
        except Died as died:
            if time.monotonic() >= until - 1:
                run.leave_out("A", f"{died.begun or 'conformance'} and what follows it")
                return
            if died.begun not in done: run.add("A", {"name": died.begun or "start", "op": died.begun.split(" ")[0], "error": died.reason})
            if not died.begun: return                                     # it did not even start
            done.append(died.begun)
        finally:
            worker.close()
    run.leave_out("A", f"what follows crash {CRASHES}")


def part_b(run: Run, compiles: Compiles) -> None:
    """Whole programs, each in a process of its own."""
    for job, result in [(job, result) for job, result in compiles.results.items() if job.part == "B"]:
        until = run.until("B")
        try:
            made = result.result(timeout=max(0.01, until - time.monotonic()))
        except TimeoutError:
            run.leave_out("B", f"{job.name}: not compiled in time")
            continue
        except Died as died:
            run.add("B", {"name": job.name, "error": f"compile: {died.reason}"})
            continue
        row = {"name": job.name, "compile": made}
        if run.dry: run.add("B", row | made["verify"])
        else:
            worker = Worker("program", run.scratch)
            try:
                for found in worker.ask({"name": job.name, "path": made["path"], "times": REPLAYS}, until): run.add("B", row | found)
            except Died as died:
                run.add("B", row | {"error": died.reason})
            finally:
                worker.close()
        shutil.rmtree(made["path"], ignore_errors=True)


@dataclass(frozen=True)
class Ask:
    """What the peers' process is asked to measure in one go."""

    model: str
    layers: int
    engine: str
    steps: tuple[tuple[str, int, int], ...]

    @property
    def name(self) -> str:
        what = ", ".join(f"{what} {batch} at {context}" for what, batch, context in self.steps) if len(self.steps) == 1 else "all steps"
        return f"{self.model} {self.layers} layers, {self.engine}, {what}"


def asks(models: Sequence[str]) -> list[Ask]:
    """Most telling first: time runs out before torch.compile has tuned all of them."""
    from gpu_models import MODELS

    steps = [("decode", b, c) for c in CONTEXTS for b in BATCHES]
    compiled = [("decode", 1, 512), ("prefill", 1, PREFILL), ("decode", 1, 8192), ("decode", 8, 512), ("decode", 64, 512),
                ("decode", 8, 8192), ("decode", 64, 8192)]
    found: list[Ask] = []
    for step in compiled:
        for model in models:
            found += [Ask(model, layers, "compile", (step,)) for layers in MODELS[model].tried]
            if step == compiled[0]:
                found += [Ask(model, layers, "eager", (*steps, ("prefill", 1, PREFILL))) for layers in MODELS[model].tried]
    return found


def part_c(run: Run, compiles: Compiles) -> None:
    """Speed: an artifact is measured as soon as it is compiled, and the peers while none is ready."""
    from gpu_models import MODELS

    until = run.until("C")
    if not run.dry: run.report["rates"] = next(iter(_asked(run, "C", "rates", {}, until)), {})
    waiting = {job: result for job, result in compiles.results.items() if job.part == "C"}
    todo = [Ask("tiny", 1, engine, (("decode", 2, 40), ("prefill", 1, 32))) for engine in ("eager", "compile")] if run.dry else asks(
        [model for model in MODELS if model != "tiny"])
    peers: Worker | None = None
    spent = {"eager": [8.0], "compile": [30.0]}
    while (waiting or todo) and time.monotonic() < until - 2:
        ready = next((job for job, result in waiting.items() if result.done()), None)
        if ready:
            _measure(run, ready, waiting.pop(ready), sum(not result.done() for result in waiting.values()), until)
            continue
        if not todo:
            time.sleep(0.2)
            continue
        ask, start = todo.pop(0), time.monotonic()
        if start + statistics.median(spent[ask.engine]) > until:
            run.leave_out("C", ask.name)
            continue
        if peers is None or peers.process.poll() is not None:
            peers = Worker("peers", run.scratch, {"TORCHINDUCTOR_CACHE_DIR": str(run.scratch / "inductor")})
        try:
            request = {"model": ask.model, "layers": ask.layers, "engine": ask.engine, "steps": ask.steps, "dry": run.dry}
            for row in peers.ask(request, until): run.add("C", row)
        except Died as died:
            if time.monotonic() >= until - 1: run.leave_out("C", ask.name)
            else: run.add("C", {"model": ask.model, "engine": ask.engine, "what": "peer", "name": ask.name, "peer_error": died.reason})
        spent[ask.engine].append(time.monotonic() - start)
    if peers: peers.close()
    for name in (*(job.name for job in waiting), *(ask.name for ask in todo)): run.leave_out("C", name)


def _measure(run: Run, job: Job, result: "Future[dict[str, Any]]", beside: int, until: float) -> None:
    """One artifact's speed."""
    row: dict[str, Any] = {"model": job.model, "layers": job.layers, "quant": job.quant, "engine": "infc"}
    try:
        made = result.result()
    except Died as died:
        return run.add("C", row | {"what": "compile", "name": job.name, "error": died.reason})
    run.add("C", row | {"what": "compile", **{name: made[name] for name in ("seconds", "phases", "peak_bytes", "aten_steps")}})
    request = {"name": job.name, "path": made["path"], "model": job.model, "layers": job.layers, "quant": job.quant, "arch": run.arch,
               "batches": [1, 2] if run.dry else BATCHES, "contexts": [40] if run.dry else CONTEXTS, "prefill": 8 if run.dry else PREFILL,
               "dry": run.dry, "beside": beside}
    for _ in _asked(run, "C", "speed", request, until): pass
    if job.quant == "none" and job.model == (DRY_MODEL if run.dry else TUNED):
        for _ in _asked(run, "C", "tune", request, until): pass
    return shutil.rmtree(made["path"], ignore_errors=True)


def _asked(run: Run, part: str, kind: str, request: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """A worker's rows, kept; what it died of is one too."""
    worker, found = Worker(kind, run.scratch), []
    try:
        for row in worker.ask(request, until):
            found.append(row)
            if kind != "rates": run.add(part, row)
    except Died as died:
        what = {name: request[name] for name in ("model", "layers", "quant") if name in request}
        if time.monotonic() >= until - 1: run.leave_out(part, died.begun or kind)
        else: run.add(part, what | {"engine": "infc", "what": kind, "name": died.begun or kind, "error": died.reason})
    finally:
        worker.close()
    return found
