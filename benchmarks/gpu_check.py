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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from gpu_compiles import Compiles, jobs
from gpu_parts import part_a, part_b, part_c
from gpu_run import BUDGET, Run

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gpu.json"

SECONDS = 540

NEEDED = {"jinja2": "jinja2", "msgspec": "msgspec", "networkx": "networkx", "numpy": "numpy", "yaml": "pyyaml", "rich": "rich",
          "safetensors": "safetensors", "tokenizers": "tokenizers", "torch": "torch", "typer": "typer", "triton": "triton",
          "transformers": "transformers", "cuda.bindings": "cuda-bindings", "infc": "infc"}
"""Modules, and the packages they come in."""


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
