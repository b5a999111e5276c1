"""Why a step or a phase is not what was predicted: the field's usual causes, each told by what was measured."""
from collections.abc import Mapping
from typing import Any

LOW, HIGH, SHARE = 0.67, 1.5, 0.02
"""A step kind is far off outside these ratios of measured to predicted time, where it also takes this share of its phase."""

SHORT_S = 5e-6                  # below this, waiting for the slowest thread is most of a step
GAP, KV_BOUND, RATE = 0.05, 0.4, 0.8


def far_off(row: Mapping[str, Any], phase_s: float) -> bool:
    """Is this row's measured time far from the predicted one, and does it matter?"""
    return not LOW <= row["ratio"] <= HIGH and row["measured_s"] > SHARE * phase_s


def cause(row: Mapping[str, Any], read_gb_s: float) -> str:
    """The likely cause for one kernel's row of explain's report."""
    each = row["measured_s"] / row["calls"]
    if row["kind"] == "aten": return "a call of torch, which has no kernel here: `infc compile --strict` names it"
    if row["ratio"] < LOW: return "faster than predicted: its data were still in a cache, or the kept peaks were taken on a busy machine"
    if row["op"].startswith("infc.dequantize"): return "weights are dequantized: no low-bit kernel for this format here"
    if each < SHORT_S: return "imbalance: so short a step mostly waits for its slowest thread"
    if row["kind"] == "attention" and row["bound"] == "memory": return "KV-bound: scattered blocks of the cache come from memory"
    if row["kind"] == "gather": return "rows of a packed table lie scattered: more is read than is used"
    if row["bound"] == "memory" and row["activations"] > row["weights"] + row["kv"]:
        return f"its rows were pushed out of the caches: they come at {row['activations'] / row['measured_s'] / 1e9:.1f} GB/s"
    if row["bound"] == "memory":
        rate = (row["weights"] + row["kv"]) / row["measured_s"] / 1e9
        return f"memory rate below the peak: it reads at {rate:.1f} of {read_gb_s:.1f} GB/s"
    return "arithmetic below the peak: few or uneven rows for each thread, or the clock is lower than it was"


def findings(phase: Mapping[str, Any]) -> list[str]:
    """What a whole phase's figures say; phase is an entry of explain's report with its measurement."""
    found = []
    measured = phase["measured"]
    gap = measured["gap_s"] / (measured["gap_s"] + measured["steps_s"])
    if gap > GAP: found.append(f"gaps between kernels: {100 * gap:.0f} % of the time no step runs (inputs, cache blocks, the caller)")
    attention = sum(k["measured_s"] for k in phase["kernels"] if k["kind"] == "attention") / measured["steps_s"]
    if attention > KV_BOUND:
        found.append(f"KV-bound: attention takes {100 * attention:.0f} % of the steps; KV int8 or fewer kv heads help, weights do not")
    if phase["chunks"] > 1:
        found.append(f"a bucket miss: {phase['tokens']} tokens run in {phase['chunks']} chunks, each reads every weight anew; "
                     "compile with a larger bucket")
    rate = (phase["weights"] + phase["kv"]) / measured["wall_s"] / 1e9
    if phase["bound"] == "memory" and rate < RATE * measured["read_gb_s"]:
        found.append(f"memory rate below the peak: {rate:.1f} of {measured['read_gb_s']:.1f} GB/s")
    return found
