"""Golden cases replayed on what was written, before it gets its name: on this CPU, or a GPU's programs on what stands for it here."""
import time
from pathlib import Path
from typing import Any

import msgspec

from ..backends import reference
from ..backends.cpu.caches import Caches
from ..backends.host_device import HostDevice
from ..backends.reference import Bound
from ..runtime.artifact import REPORT, read, verify_files
from ..runtime.environment import cpu_share
from ..runtime.golden import GoldenReport, replay
from ..runtime.manifest import Manifest
from ..runtime.session import load
from . import debug, kept, targets
from .costs.step_times import step_times
from .errors import CheckFailed
from .kept import Kept
from .progress import Event, Listener

VERIFY_TOKENS = 4096
"""Room of the KV pool when a program is verified on reference operators: more than all golden cases together, twice."""

MEASURABLE_S = 0.005
"""Shorter reads of weights say nothing of who had the CPUs."""

Bounds = dict[str, Bound]
"""Program name -> the graph and the units behind its steps."""


class Replayed(kept.Entry, frozen=True):
    """What a replay on reference operators found that passed."""

    verified: dict[str, Any]


def replay_here(folder: Path, target: targets.Target, listen: Listener, bounds: Bounds | None = None) -> dict[str, Any]:
    """Load what was written and replay the golden cases through every bucket; on another machine, say so instead.

    bounds: given, reference operators run in place of every kernel (INFC_EAGER).
    """
    missing = targets.missing(target)
    if missing:
        return {"replayed": False, "reason": f"this CPU lacks {', '.join(missing)}: run `infc verify` on the target"}
    with load(folder, kv_tokens=None if bounds is None else VERIFY_TOKENS) as model:
        if bounds is not None:
            reference.install(model.executor, bounds, lambda unit: False, Caches(model.executor))
        report = replay(model)
        _refuse_other(report)
        size = model.memory()["weights"]
        begin, used = time.perf_counter(), time.process_time()
        times = sorted(model.executor.read_weights() for _ in range(5))
        used, wall = time.process_time() - used, time.perf_counter() - begin
        if debug.level() >= 2:
            listen(Event("note", "write", "\n".join(step_times(model, size / times[2]))))
        return {"replayed": True, "reference": bounds is not None, "read_gb_s": size / times[2],
                "cpu_share": cpu_share(used, wall, model.executor.threads) if wall > MEASURABLE_S else 1.0, **msgspec.to_builtins(report)}


def replay_on_host(folder: Path, target: targets.Target, bounds: Bounds, cache: Kept | None, listen: Listener) -> dict[str, Any]:
    """A GPU's programs in the CPU's memory, on reference operators: buffers, places, padding and the host's side of a step are as written.

    The kernels are not, but where this process interprets them (TRITON_INTERPRET=1): then they run, grids and all, for hours if the
    model is a real one. The tests judge each kernel against its operator, and so every kernel of a small model's programs. Without kernels
    the verdict follows from what was written, the graph and our sources: that of an earlier compile is taken, once every file is hashed.
    """
    with read(folder) as artifact: manifest = artifact.manifest
    device, runs_kernels = host_device(folder, target, bounds)
    if runs_kernels: cache = None
    key = replay_key(manifest, bounds) if cache else ""
    if cache and (found := cache.take(key, Replayed, "verdicts about programs")):
        verify_files(folder).close()
        measured = f"error {found.verified['error']:.3g}, bound {found.verified['bound']:.3g}"
        listen(Event("note", "write", f"the programs were verified at {found.made}, {measured}: files, graph and sources are the same "
                                      "(--no-cache verifies them again)"))
        return found.verified | {"kept_from": found.made}
    with load(folder, device=device, kv_tokens=VERIFY_TOKENS) as model:
        if not runs_kernels:
            model.cache.clear()                              # recordings of kernels that cannot run here
            reference.install(model.executor, bounds, lambda unit: False)
        report = replay(model, brief=True)
    _refuse_other(report)
    verified = {"replayed": True, "reference": not runs_kernels, "reason": "no kernel of a GPU runs on this machine", "by": device.name,
                **msgspec.to_builtins(report)}
    if cache: cache.keep(key, Replayed(verified=verified), "verdicts about programs")
    return verified | {"kept_from": ""}


def replay_key(manifest: Manifest, bounds: Bounds) -> str:
    """Of all that a replay on reference operators reads: every file by its hash, but for the report, and the graph behind the steps."""
    files = {name: info for name, info in manifest.files.items() if name != REPORT}
    graphs = {id(bound.graph): bound.graph for bound in bounds.values()}
    written = msgspec.json.encode(msgspec.structs.replace(manifest, files=files, digest=""))
    return kept.key("replay", written, *map(kept.content, graphs.values()))


def host_device(folder: Path, target: targets.Target, bounds: Bounds) -> tuple[HostDevice, bool]:
    """What stands for the GPU of an artifact here, and whether it runs kernels: where this process interprets them."""
    from ..backends.triton.device import interpreter, interprets

    if not interprets(): return HostDevice(target.isa), False
    with read(folder) as artifact:
        return interpreter(target.isa, [artifact.program(name) for name in bounds], bounds), True


def _refuse_other(report: GoldenReport) -> None:
    """CheckFailed where golden prompts are not answered as they must be."""
    if report.passed: return
    raise CheckFailed(f"the program is not the graph: golden logits differ by {report.error:.3g}, the bound is {report.bound:.3g} "
                      f"(per bucket: {', '.join(f'{k} {v:.3g}' for k, v in report.errors.items())}), "
                      f"{report.wrong_tokens} tokens are not what their logits and settings give; nothing was written")


def hash_only(folder: Path) -> dict[str, Any]:
    """A copy of an artifact that was verified when it was made."""
    verify_files(folder).close()
    return {"replayed": False, "reason": "it was verified when it was made, and every file is as it was then"}
