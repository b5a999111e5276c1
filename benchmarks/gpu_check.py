"""Kernels, whole programs and speed on an NVIDIA GPU, in ten minutes at most: one table, one JSON.

    python benchmarks/gpu_check.py [--parts A,B,C] [--seconds 540] [--output FILE] [--dry-run]

A  conformance: every kernel of the registry, built for this card's architecture and launched on it, against its operator in fp64.
B  programs: artifacts compiled here, golden prompts through every bucket with poisoned memory, and 200 replays that must not differ.
C  speed: random weights of real sizes beside transformers' own modules, eager and by torch.compile (max-autotune, CUDA graphs, static
   cache). A model that is too large to compile in minutes is compiled with 2 and with 6 layers: their difference is what a layer costs,
   what is left is the head's, and the whole model's step is extrapolated from both, and marked so. One model is tuned (`infc tune`).

Compiles run in processes of their own from the first second on. So does all that touches the card: a lost context, a crash or a kernel
that never ends costs the case it is in. What a part's time does not hold is left out and listed. Exit code 1 where A, B or a golden
prompt of C fails, 2 where there is no GPU to check.
"""
import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from gpu_worker import Died, Worker

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gpu.json"

SECONDS = 540
BUDGET = {"A": 130, "B": 90, "C": 320}
"""Seconds of each part; what one does not need the next ones have."""

BYTES_PER_PARAMETER = 18
"""Memory at the peak of a compile: 16 measured on two layers of Llama-3.2-1B, in fp32 and bf16 with its golden outputs in fp64."""

CRASHES = 12
"""Workers that part A starts at most, one behind the other."""

TUNED, DRY_MODEL = "Llama-3.2-1B", "tiny"
"""What `infc tune` is tried on: the model that is compiled whole."""

REPLAYS = 200
BATCHES, CONTEXTS, PREFILL = (1, 8, 64), (512, 8192), 2048

NEEDED = {"jinja2": "jinja2", "msgspec": "msgspec", "networkx": "networkx", "numpy": "numpy", "yaml": "pyyaml", "rich": "rich",
          "safetensors": "safetensors", "tokenizers": "tokenizers", "torch": "torch", "typer": "typer", "triton": "triton",
          "transformers": "transformers", "cuda.bindings": "cuda-bindings", "infc": "infc"}
"""Modules, and the packages they come in."""


# ---- what is compiled

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

    def __init__(self, run: "Run", todo: Sequence[Job]) -> None:
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


# ---- a run

@dataclass
class Run:
    """What is known of the card and the time, and what was found."""

    scratch: Path
    output: Path | None
    dry: bool
    parts: Sequence[str]
    target: str
    arch: str                                        # that code is built for
    seconds: float
    report: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    cores: int = os.cpu_count() or 2

    @property
    def end(self) -> float:
        return self.began + self.seconds

    def until(self, part: str) -> float:
        """When a part must be done: its own time and what those before it left."""
        whole = sum(BUDGET[p] for p in self.parts)
        return self.began + self.seconds * sum(BUDGET[p] for p in self.parts[:self.parts.index(part) + 1]) / whole

    def add(self, part: str, row: dict[str, Any]) -> None:
        """A row of a part; kept at once, for what comes next may end us."""
        self.report["parts"][part]["rows"].append(row)
        self.save()

    def leave_out(self, part: str, what: str) -> None:
        self.report["parts"][part]["left_out"].append(what)

    def save(self) -> None:
        """Write what was found so far."""
        from gpu_table import failures

        if self.output is None: return
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        self.report["passed"] = not failures(self.report)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(self.report, indent=1) + "\n")
        partial.replace(self.output)


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


# ---- beginning

def missing(dry: bool) -> list[str]:
    """Packages that are not here."""
    def there(module: str) -> bool:
        try:
            return util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return [package for module, package in NEEDED.items() if not (dry and module == "cuda.bindings") and not there(module)]


def card_target(arch: str, memory: int) -> str | None:
    """The target of the table that a card is: of its own architecture first, then the nearest memory. arch: "sm_90"."""
    from infc.compiler.targets import TARGETS

    capability = f"{arch[3:-1]}.{arch[-1]}"
    fit = [(target, target.gpu) for target in TARGETS.values() if target.gpu and capability in target.gpu.arch.runs_on]
    best = min(fit, key=lambda pair: (pair[1].arch.capability != capability, abs(pair[1].memory_bytes - memory)), default=None)
    return best[0].name if best else None


def environment() -> dict[str, Any]:
    """The machine, the versions that took part, and the card's clocks as nvidia-smi shows them."""
    from infc.runtime.environment import environment as of_host

    found = of_host()
    for package in ("torch", "triton", "transformers", "cuda-bindings"):
        with contextlib.suppress(metadata.PackageNotFoundError): found["versions"][package] = metadata.version(package)
    if tool := shutil.which("nvidia-smi"):
        asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
        answer = subprocess.run([tool, f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, check=False)
        found["nvidia_smi"] = dict(zip(asked.split(","), answer.stdout.strip().split("\n")[0].split(", "), strict=False))
        found["driver"] = f"driver {found['nvidia_smi'].get('driver_version', '?')}"
    return found


def card() -> dict[str, Any]:
    """This machine's first GPU. Raises infc.runtime.errors.RuntimeFault where there is none."""
    from infc.runtime.cuda import CudaDevice

    device = CudaDevice()
    try:
        return {"name": device.name, "arch": device.arch, "memory": device.total_memory, "multiprocessors": device.multiprocessors,
                "cuda": device.driver_version}
    finally:
        device.close()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; a mistake ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="A,B,C", help="which of A, B and C, with commas between them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of them together (default {SECONDS})")
    parser.add_argument("--output", type=Path, help=f"where the JSON goes (default {RESULT.relative_to(HERE.parent)}; none of a dry run)")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: small cases in Triton's interpreter, programs on the CPU")
    options = parser.parse_args(arguments)
    options.parts = sorted({part.strip().upper() for part in options.parts.split(",")})
    if unknown := set(options.parts) - BUDGET.keys(): parser.error(f"--parts {min(unknown) or 'nothing'}: A, B and C are known")
    if not 10 <= options.seconds <= 3600: parser.error(f"--seconds {options.seconds:g}: 10 to 3600 are known")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if lacks := missing(options.dry_run):
        print(f"gpu-check: missing here: {', '.join(lacks)}; pip install them, or where nothing can be downloaded unpack their wheels into "
              "a folder on PYTHONPATH (infc itself: pip install --no-deps --no-build-isolation -e .)", file=sys.stderr)
        return 2
    from gpu_table import failures, show, whole_models
    from infc.runtime.errors import RuntimeFault

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))               # through every finally: no worker is left behind
    try:
        found = {"name": "no card (dry run)", "arch": "sm_90", "memory": 80 * 10**9} if options.dry_run else card()
    except RuntimeFault as fault:
        print(f"gpu-check: {fault} (--dry-run goes the same way without one)", file=sys.stderr)
        return 2
    target = card_target(found["arch"], found["memory"])
    if target is None:
        print(f"gpu-check: infc builds no code for {found['name']} ({found['arch']}); `infc targets` lists what it knows", file=sys.stderr)
        return 2
    from infc.compiler.targets import TARGETS

    report = {"format": 1, "date": time.strftime("%Y-%m-%d"), "card": found, "target": target, "environment": environment(), "rates": {},
              "parts": {part: {"done": False, "seconds": 0.0, "rows": [], "left_out": []} for part in options.parts}}
    with tempfile.TemporaryDirectory(prefix="infc-gpu-check-") as scratch:
        run = Run(Path(scratch), options.output or (None if options.dry_run else RESULT), options.dry_run, options.parts, target,
                  TARGETS[target].isa, options.seconds, report)
        compiles = Compiles(run, jobs(options.parts, options.dry_run, run.arch != "sm_80"))
        try:
            for part in options.parts: _one_part(run, part, compiles)
        finally:
            compiles.close()
            run.save()
    if "C" in options.parts: report["whole_models"] = whole_models(report["parts"]["C"]["rows"])
    run.save()
    show(report)
    print(f"{run.output or 'dry run'}: {report['seconds'] if run.output else round(time.monotonic() - run.began, 1)} s")
    return 1 if failures(report) else 0


def _one_part(run: Run, part: str, compiles: Compiles) -> None:
    content, start = run.report["parts"][part], time.monotonic()
    print(f"gpu-check: part {part}, until {run.until(part) - run.began:.0f} s", file=sys.stderr)
    try:
        if part == "A": part_a(run)
        else: {"B": part_b, "C": part_c}[part](run, compiles)
    except Exception as error:                                            # noqa: BLE001   # a harness: what a part dies of is in the JSON,
        run.add(part, {"name": f"part {part}", "op": "", "error": f"{type(error).__name__}: {error}"})      # and the others go on
    content |= {"done": True, "seconds": round(time.monotonic() - start, 1)}
    run.report["parts"][part] = content
    run.save()


if __name__ == "__main__":
    sys.exit(main())
