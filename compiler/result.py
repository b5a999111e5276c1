"""What a compile made, as its caller is told of it, with the time of a decode step predicted."""
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.artifact import read
from ..runtime.environment import busy
from ..runtime.library import default_threads
from ..runtime.manifest import GPU, Manifest
from . import targets
from .costs import cost, machine
from .costs.data_sheet import data_sheet
from .costs.explain import at_rate
from .progress import Clock


@dataclass
class Result:
    """What a compile made; every field is JSON-able but `artifact`, which is a path."""

    artifact: Path
    version: str
    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)    # where a pass changes what a model gives outside its contract's data
    program: dict[str, dict[str, int]] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] | None = None             # beside the captured model, on held-out data; None where nothing was quantized
    size_bytes: int = 0
    reused: bool = False

    def json(self) -> dict[str, Any]:
        """The stable form of `infc compile --json`."""
        return asdict(self) | {"artifact": str(self.artifact)}


def result_of(path: Path, clock: Clock, summary: dict[str, Any], verified: dict[str, Any], *, reused: bool) -> Result:
    clock.seconds["total"] = round(time.perf_counter() - clock.start, 3)
    with read(path) as artifact:
        manifest = artifact.manifest
        predicted = predict(summary["costs"], manifest, verified)
    return Result(
        artifact=path, version=manifest.version, seconds=clock.seconds, passes=summary["passes"], notes=summary["notes"],
        program=summary["program"], quality=summary.get("quality"), predicted=predicted,
        verify={"graph_error": summary["graph_error"], "golden_kept_from": summary["golden_kept_from"]} | verified,
        size_bytes=_size(path), reused=reused)


def predict(costs: dict[str, Any], manifest: Manifest, verified: dict[str, Any]) -> dict[str, Any]:
    """Decode of one sequence at the read rate measured while verifying; nothing where the target is another CPU.

    With the peaks of this machine, where `infc explain` has measured them, step by step; else by what it reads alone. A GPU's are
    those of its data sheet.
    """
    sheet = data_sheet(targets.find(manifest.target)) if manifest.machine == GPU else None
    if "read_gb_s" not in verified and sheet is None:
        return {}
    rate = sheet.read_gb_s if sheet else verified["read_gb_s"]
    context = min(256, manifest.model.max_positions - 1)     # a short model has no longer one to decode at
    phase = cost.decode(1, context)
    moved = [cost.moved(kernel, phase.loads[0]) for kernel in cost.steps_of(costs, phase.loads[0])]
    streamed = sum(m.weights + m.kv for m in moved)
    found: dict[str, Any] = {"context": context, "bytes": int(streamed), "flops": int(sum(m.flops for m in moved)),
                             "read_gb_s": rate, "findings": [] if sheet else busy(verified["cpu_share"])}
    peaks = sheet or machine.known_peaks(costs["isa"], default_threads())
    if peaks is None:
        seconds, binds = streamed / (rate * 1e9), {"memory": 1.0}
    else:
        if not sheet: peaks = at_rate(peaks, rate, costs)
        steps = cost.predict_load(costs, phase.loads[0], peaks)
        seconds = sum(step.seconds for step in steps)
        binds = {b: sum(s.seconds for s in steps if s.bound == b) / seconds for b in ("memory", "compute", "barrier")}
    return found | {"decode_ms": seconds * 1e3, "decode_tok_s": 1 / seconds, "bound": max(binds, key=binds.__getitem__),
                    "by": "the data sheet" if sheet else "reads alone" if peaks is None else "measured peaks", "shares": binds}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
