"""`infc report`: read an artifact, run it if asked to, write the page. Wiring, like the driver."""
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..runtime.artifact import Artifact, read
from ..runtime.manifest import GPU
from .costs.cost import Costs, Phase, steps_of
from .costs.peaks import Peaks
from .errors import UserError
from .files import refuse_existing, write_whole
from .report import collect, page, phases


def write(path: Path, output: Path, *, measured: bool, force: bool, threads: int | None,
          note: Callable[[str], object] | None) -> dict[str, Any]:
    """Write the page of the artifact at `path` to `output`; what it holds, in numbers.

    Raises UserError where the page exists and `force` is not given, or where nothing can be measured; RuntimeFault for an artifact
    that is damaged, of another schema, or not for this machine.
    """
    refuse_existing(output, force, "page")
    tell = note or (lambda text: None)
    with read(path) as artifact:
        peaks = _peaks(artifact, threads, tell)
        found = _run(path, artifact.report(), threads, tell) if measured else None
        if peaks and found:
            from .costs.explain import at_rate

            peaks = at_rate(peaks, found["read_gb_s"], artifact.report()["costs"])
        data = collect(artifact, peaks, found)
    text = page(data)
    write_whole(output, text)
    graph = data["graph"] or {"captured": {"calls": 0}, "final": {"calls": 0}}
    return {"report": str(output), "bytes": len(text.encode()), "model": data["head"]["name"], "version": data["head"]["version"],
            "passes": len(data["pipeline"]["passes"]), "captured": graph["captured"]["calls"], "final": graph["final"]["calls"],
            "buckets": len(data["buckets"]), "speed": data["speed"], "measured": found}


def _peaks(artifact: Artifact, threads: int | None, tell: Callable[[str], object]) -> Peaks | None:
    """The peaks of this machine if the artifact runs on it; None, and a line that says why, where no speed can be predicted."""
    from ..runtime.library import default_threads
    from . import targets
    from .costs import machine
    from .costs.data_sheet import data_sheet

    costs = artifact.report().get("costs")
    if costs and artifact.manifest.machine == GPU:
        return data_sheet(targets.find(artifact.manifest.target))
    missing = set(artifact.manifest.isa) - targets.host_flags()
    if not costs or missing:
        tell(f"no speed is predicted: this CPU lacks {', '.join(sorted(missing))}" if missing else "no speed is predicted: no costs in it")
        return None
    try:
        return machine.machine_peaks(costs["isa"], threads or default_threads(), tell)
    except UserError as error:
        tell(f"no speed is predicted: {error.message}")
        return None


def _run(path: Path, report: dict[str, Any], threads: int | None, tell: Callable[[str], object]) -> dict[str, Any]:
    """What collect() calls measured, and "read_gb_s": the median read rate of memory meanwhile."""
    import msgspec

    from ..runtime.environment import busy
    from ..runtime.golden import replay
    from ..runtime.session import load
    from .costs.measure_phase import measure

    costs = report.get("costs")
    if not costs:
        raise UserError(f"{path}: holds no costs to put measured times beside; compile the model again")
    kernels, whole, reads, shares = dict[str, dict[str, float]](), dict[str, float](), list[float](), list[float]()
    with load(path, threads=threads) as model:
        tell("replaying the golden prompts")
        golden = msgspec.to_builtins(replay(model))
        for phase in phases(costs):
            tell(f"measuring {phase.name}")
            found = measure(model, phase)
            kernels[phase.name] = _by_kernel(costs, phase, found["steps"][-1])
            whole[phase.name] = found["wall_s"]
            reads.append(found["read_gb_s"])
            shares.append(found["cpu_share"])
    findings = busy(statistics.median(shares))
    for line in findings: tell(line)
    return {"golden": golden, "kernels": kernels, "phases": whole, "read_gb_s": statistics.median(reads), "findings": findings}


def _by_kernel(costs: Costs, phase: Phase, seconds: Sequence[float]) -> dict[str, float]:
    """Seconds of one call of each kernel, by its hash, in the last chunk of a phase: the mean over the steps that run it."""
    calls: dict[str, list[float]] = {}
    for kernel, took in zip(steps_of(costs, phase.loads[-1]), seconds, strict=True):
        calls.setdefault(kernel["kernel"], []).append(took)
    return {kernel: statistics.mean(took) for kernel, took in calls.items()}
