"""`infc explain ARTIFACT`: where the time of a step goes, what binds it, what each lever could give; measured beside predicted."""
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...runtime.artifact import Artifact, read
from ...runtime.environment import busy
from ...runtime.isa import this_cpu
from ...runtime.library import default_threads
from ...runtime.manifest import GPU
from .. import targets
from ..errors import UserError
from . import cost, diagnose, levers
from .data_sheet import data_sheet
from .machine import machine_peaks, peaks_now
from .peaks import Peaks

WIDTH = 98
SAME_RATE = 0.2
"""Peaks taken at a read rate within this share of today's are taken as they are."""

SHOWN = 0.002
"""Kernels below this share of a phase are summed up in the table; --json has them all."""

MICROSECONDS = 1e-4
"""A phase that takes less is shown in those, of which its kernels take parts."""

ALONE = ("the longest chain of steps that wait for each other. Steps run one after the other, each on all threads: a phase takes their "
         "sum, the path is what steps side by side could reach")


def explain_artifact(
    path: Path, *, measured: bool = False, tokens: Sequence[int] | None = None, contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None, threads: int | None = None, note: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """The report, plain data. tokens: of prefills, each also after as many others where the model's positions allow it. contexts and
    batches: of decode steps, every pair. measured: run each phase and put its times beside the predicted ones, which then use the
    read rate of the same minutes. Needs no torch, but to measure this machine's peaks the first time; `note` gets a line then.

    Raises UserError where the artifact holds no costs, a phase fits no bucket, or the target is not this machine.
    """
    threads = threads or default_threads()
    with read(path) as artifact:
        costs = artifact.report().get("costs")
        if not costs: raise UserError(f"{path}: holds no costs, an older infc made it; compile the model again")
        phases = _phases(costs, tokens, contexts, batches)
        peaks = _peaks(path, artifact, costs, threads, note)
        report: dict[str, Any] = {
            "artifact": {"path": str(path), "name": artifact.manifest.name, "version": artifact.manifest.version,
                         "target": artifact.manifest.target, "dtype": artifact.manifest.dtype},
            "threads": threads, "peaks": asdict(peaks), "worth": levers.WORTH}
        if not measured:
            report["phases"] = [_phase(costs, artifact, phase, peaks) for phase in phases]
        else:
            report["phases"], peaks = _measured(path, costs, artifact, phases, peaks, threads, note)
            report["peaks"] = asdict(peaks)
            report["ratios"] = _ratios(report["phases"])
        report["levers"] = levers.bounds(costs, dict.fromkeys((*phases, *levers.phases_for(costs))), peaks)
    return report


def _phases(
    costs: cost.Costs, tokens: Sequence[int] | None, contexts: Sequence[int] | None, batches: Sequence[int] | None,
) -> list[cost.Phase]:
    """Prefills and decode steps. What is not asked for is 256 tokens, contexts of 128 and 448, batches of 1 and 8, as far as they fit."""
    most, room = costs["max_positions"], max(b["N"] for b in costs["buckets"].values())
    tokens = tokens or (min(256, most),)
    contexts = contexts or tuple(dict.fromkeys(min(c, most - 1) for c in (128, 448)))
    batches = batches or tuple(dict.fromkeys((1, min(8, room))))
    largest = max(b["T"] for b in costs["buckets"].values())
    if min((*tokens, *contexts, *batches), default=1) < 1: raise UserError("tokens, contexts and batches are whole numbers, 1 or more")
    if max(batches, default=1) > room:
        raise UserError(f"batch {max(batches)} is more than the {room} sequences this artifact takes in one step")
    longest = max((*tokens, *(c + 1 for c in contexts)), default=1)
    if longest > most: raise UserError(f"{longest} tokens of one sequence are more than this model's {most} positions")
    prefills = [cost.prefill(t, before, largest) for t in tokens for before in (0, t) if t + before <= most]
    return [cost.decode(b, c) for b in batches for c in contexts] + prefills


def _peaks(path: Path, artifact: Artifact, costs: cost.Costs, threads: int, note: Callable[[str], object]) -> Peaks:
    if artifact.manifest.machine == GPU:
        target = targets.find(artifact.manifest.target)
        note(f"times are the least that {target.name}'s data sheet allows; those of the card itself are measured where it is")
        return data_sheet(target)
    missing = sorted(set(artifact.manifest.isa) - set(this_cpu().flags))
    if missing: raise UserError(f"{path}: is for a CPU with {', '.join(missing)}; peaks are measured, so explain it on its target")
    return machine_peaks(costs["isa"], threads, note)


def _phase(
    costs: cost.Costs, artifact: Artifact, phase: cost.Phase, peaks: Peaks, found: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One phase: totals, one row per kernel, the critical path; with `found` (measure_phase.measure) the times beside it."""
    from .critical_path import critical_path  # networkx takes a while to import

    rows: dict[int, dict[str, Any]] = {}
    path_s = path_of = 0.0
    for number, load in enumerate(phase.loads):
        name = cost.program_of(costs, load)
        predictions = cost.predict_load(costs, load, peaks)
        for position, (index, prediction) in enumerate(zip(costs["steps"][name], predictions, strict=True)):
            row = rows.setdefault(index, _row(costs["kernels"][index]))
            m = cost.moved(costs["kernels"][index], load)
            for key in ("flops", "weights", "kv", "activations"): row[key] += getattr(m, key)
            row["calls"] += 1
            row["predicted_s"] += prediction.seconds
            row["by"][prediction.bound] += prediction.seconds
            if found: row["measured_s"] += found["steps"][number][position]
        path = critical_path(artifact.program(name), [p.seconds for p in predictions])
        path_s, path_of = path_s + path["seconds"], path_of + path["all_seconds"]
    kernels = sorted((_done(row, bool(found)) for row in rows.values()), key=lambda r: -r["predicted_s"])
    total = sum(r["predicted_s"] for r in kernels)
    by = {b: sum(r["by"][b] for r in kernels) for b in ("memory", "compute", "barrier")}
    out = {
        "name": phase.name, "kind": phase.kind, "tokens": phase.tokens, "chunks": len(phase.loads),
        "bucket": cost.program_of(costs, phase.loads[-1]), "steps": sum(r["calls"] for r in kernels),
        **{key: sum(r[key] for r in kernels) for key in ("flops", "weights", "kv", "activations")},
        "predicted_s": total, "tokens_s": phase.tokens / total, "bound": max(by, key=by.__getitem__),
        "bound_shares": {b: s / total for b, s in by.items()}, "kernels": kernels,
        "critical_path": {"seconds": path_s, "all_seconds": path_of, "share": path_s / path_of, "means": ALONE}, "measured": None}
    out["intensity"] = out["flops"] / (out["weights"] + out["kv"] + out["activations"])
    if found: _compare(out, found)
    return out


def _row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: kernel[k] for k in ("kernel", "name", "op", "kind", "dtype")}, "calls": 0, "flops": 0.0, "weights": 0.0, "kv": 0.0,
            "activations": 0.0, "predicted_s": 0.0, "measured_s": 0.0, "by": {"memory": 0.0, "compute": 0.0, "barrier": 0.0}}


def _done(row: dict[str, Any], measured: bool) -> dict[str, Any]:
    moved = row["weights"] + row["kv"] + row["activations"]
    row |= {"intensity": row["flops"] / moved if moved else 0.0, "bound": max(row["by"], key=row["by"].__getitem__)}
    if not measured: row["measured_s"] = None
    else: row["ratio"] = row["measured_s"] / row["predicted_s"]
    return row


def _compare(out: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Measured totals, what is far off and why."""
    steps = sum(sum(load) for load in found["steps"])
    out["measured"] = {"wall_s": found["wall_s"], "steps_s": steps, "gap_s": found["gap_s"], "read_gb_s": found["read_gb_s"],
                       "ratio": found["wall_s"] / out["predicted_s"], "tokens_s": out["tokens"] / found["wall_s"],
                       "cpu_share": found["cpu_share"]}
    if lines := busy(found["cpu_share"]):             # what is slow then says nothing about a kernel
        out["findings"] = lines
        return
    for row in out["kernels"]:
        if diagnose.far_off(row, steps): row["cause"] = diagnose.cause(row, found["read_gb_s"])
    out["findings"] = diagnose.findings(out)


def _measured(
    path: Path, costs: cost.Costs, artifact: Artifact, phases: Sequence[cost.Phase], peaks: Peaks, threads: int,
    note: Callable[[str], object],
) -> tuple[list[dict[str, Any]], Peaks]:
    """The phases, and the peaks they were predicted with."""
    from ...runtime.session import load
    from .measure_phase import measure

    out = []
    with load(path, threads=threads) as model:
        peaks = _of_this_minute(peaks, model, costs, threads, note)
        for phase in phases:
            note(f"measuring {phase.name}")
            found = measure(model, phase)
            out.append(_phase(costs, artifact, phase, at_rate(peaks, found["read_gb_s"], costs), found))
    return out, peaks


def _of_this_minute(peaks: Peaks, model: Any, costs: cost.Costs, threads: int, note: Callable[[str], object]) -> Peaks:
    """The peaks measured again where memory is now read at another rate: how far reads and arithmetic overlap goes with it.

    On shared machines the rate moves by itself. At 36 and at 61 GB/s, 0.07 and 0.3 of the shorter of the two was exposed.
    """
    if costs["weight_bytes"] <= peaks.llc_bytes: return peaks
    now = model.memory()["weights"] / statistics.median(model.executor.read_weights() for _ in range(5))
    if abs(now / peaks.read_gb_s - 1) <= SAME_RATE: return peaks
    note(f"memory is read at {now:.1f} GB/s now, the kept peaks were taken at {peaks.read_gb_s:.1f}: measuring peaks for this run")
    found = peaks_now(costs["isa"], threads)
    return found if found.quiet else peaks


def at_rate(peaks: Peaks, read_gb_s: float, costs: cost.Costs) -> Peaks:
    """The peaks at another read rate of memory; weights that fit the last cache say nothing about it.

    Scattered KV blocks are bound by the time of a first access, not by the rate: at 35 and at 62 GB/s of reads they came at 28.5 and 29.5.
    """
    if costs["weight_bytes"] <= peaks.llc_bytes: return peaks
    return replace(peaks, read_gb_s=read_gb_s, kv_read_gb_s={dtype: min(rate, read_gb_s) for dtype, rate in peaks.kv_read_gb_s.items()})


def _ratios(phases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median of measured over predicted time, over kernels and phases, of each kind of step."""
    found: dict[str, list[float]] = {}
    for phase in phases:
        for row in phase["kernels"]: found.setdefault(row["kind"], []).append(row["ratio"])
    return {kind: statistics.median(ratios) for kind, ratios in found.items()}


def show(report: Mapping[str, Any]) -> None:
    """The report as tables of about 100 columns."""
    from ..console import number, pairs, size, table

    p = report["peaks"]
    on_sheet = p["isa"] in targets.ARCHS                                   # a GPU that is not there
    pairs("machine, at most: no kernel was measured on it" if on_sheet else "machine, as its own kernels reach it" if p["quiet"]
          else "machine, busy with other work: its peaks are higher", {
        "gpu" if on_sheet else "cpu": f"{p['cpu']}, {p['isa']}" + ("" if on_sheet else f", {report['threads']} threads"),
        "reads": f"memory {p['read_gb_s']:.1f} GB/s, caches {p['cache_gb_s']:.1f}, KV blocks "
                 + ", ".join(f"{d} {r:.1f}" for d, r in p["kv_read_gb_s"].items()),
        "products": ", ".join(f"{d} {r:.0f} GFLOP/s" for d, r in p["product_gflop_s"].items()),
        "attention": ", ".join(f"{d} {r:.0f} GFLOP/s" for d, r in p["attention_gflop_s"].items()),
        **({} if on_sheet else {"barrier": f"{p['barrier_s'] * 1e6:.2f} us"})})
    for phase in report["phases"]:
        _show_phase(phase, number, size, table)
    print(textwrap.fill(f"critical path: {ALONE}", WIDTH) + "\n")
    _show_levers(report, table)
    if "ratios" in report:
        rows = [(kind, number(ratio, 2)) for kind, ratio in report["ratios"].items()]
        table("measured / predicted", ("kind of step", "median ratio"), rows, right=(1,))


def _show_levers(report: Mapping[str, Any], table: Callable[..., None]) -> None:
    """Every lever at every phase, and for each the sentence of where it gives most and least."""
    names = list(dict.fromkeys(b["lever"] for b in report["levers"]))
    phases = list(dict.fromkeys(b["phase"] for b in report["levers"]))
    ratios = {(b["phase"], b["lever"]): f"{b['ratio']:.2f}" for b in report["levers"]}
    table("how many times faster each lever could make a phase, at most", ("phase", *names),
          [(phase, *(ratios.get((phase, name), "") for name in names)) for phase in phases], right=tuple(range(1, len(names) + 1)))
    for name in names:
        found = sorted((b for b in report["levers"] if b["lever"] == name), key=lambda b: -b["ratio"])
        least = found[-1]["sentence"].partition(" at ")[2].replace("at most ", "") if len(found) > 1 else ""
        _say(f"{found[0]['sentence']}{'; at ' + least if least else ''}")
    print(f"  (nothing is added for what a lever needs; below {report['worth']:.2f}x it is not worth it)\n")


def _say(line: str) -> None:
    """A sentence under a table, within its width."""
    print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    "))


def _show_phase(
    phase: Mapping[str, Any], number: Callable[[float, int], str], size: Callable[[float], str], table: Callable[..., None],
) -> None:
    measured = phase["measured"]
    took = "measured_s" if measured else "predicted_s"
    unit, scale = ("us", 1e6) if phase["predicted_s"] < MICROSECONDS else ("ms", 1e3)
    most = [r for r in phase["kernels"] if r[took] >= SHOWN * sum(k[took] for k in phase["kernels"])]
    rows = [(r["name"], r["calls"], number(r["flops"] / 1e6, int(r["flops"] < 1e8)), size(r["weights"]),
             size(r["kv"]), number(r["intensity"], 1), r["bound"], number(r["predicted_s"] * scale, 3),
             *((number(r["measured_s"] * scale, 3), number(r["ratio"], 2)) if measured else ())) for r in most]
    heads = ("kernel", "calls", "Mflop", "weights", "KV", "flop/B", "bound", unit, *(("measured", "ratio") if measured else ()))
    title = (f"{phase['name']}: {number(phase['predicted_s'] * scale, 2)} {unit} predicted, {number(phase['tokens_s'], 0)} tokens/s, "
             f"bound by {phase['bound']}")
    if measured: title += f"; {number(measured['wall_s'] * scale, 2)} {unit} measured, {number(measured['ratio'], 2)} times that"
    table(title, heads, rows, right=(1, 2, 3, 4, 5, 7, 8, 9))
    path = phase["critical_path"]
    rest = sum(r[took] for r in phase["kernels"] if r not in most)
    print(f"  {len(phase['kernels']) - len(most)} more kernels: {number(rest * scale, 3)} {unit}; "
          f"critical path: {number(path['seconds'] * scale, 2)} of {number(path['all_seconds'] * scale, 2)} {unit}")
    for row in phase["kernels"]:
        if "cause" in row: _say(f"{row['name']}: {number(row['ratio'], 2)}x the prediction; {row['cause']}")
    for line in phase.get("findings", ()): _say(line)
    print()
