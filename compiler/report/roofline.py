"""The roofline plot and the speeds of a few phases, from the artifact's cost formulas and a machine's peaks."""
from collections.abc import Mapping, Sequence
from typing import Any

from ..costs.cost import Costs, Phase, decode, phase_seconds, prefill, roofline_points
from ..costs.peaks import Peaks
from .families import family

Measured = Mapping[str, Mapping[str, float]]
"""Phase name -> kernel hash -> seconds of one call. Not its name: the last layer's kernels share theirs with the others'."""


def phases(costs: Costs) -> list[Phase]:
    """What is plotted: decode of 1 and of as many sequences as fit up to 8, and a prefill of up to 256 tokens in one step, each at
    most as long as the model allows."""
    room, most = costs["max_positions"], list(costs["buckets"].values())
    largest, sequences = max(b["T"] for b in most), max(min(b["T"], b["N"], b["R"]) for b in most)
    context = min(448, room - 1)
    batches = dict.fromkeys((1, min(8, sequences)))
    return [*(decode(batch, context) for batch in batches), prefill(min(256, room, largest), 0, largest)]


def roofline(costs: Costs, peaks: Peaks, plotted: Sequence[Phase], measured: Measured | None = None) -> dict[str, Any]:
    """{"memories": [[name, bytes/s]], "peaks": [[name, flops/s]], "phases": [{"name", "words", "measured", "seconds", "points"}]}.

    A point is `roofline_points`' entry with "family", "rate" (flops/s of one call, measured where it was, else predicted) and "share"
    of the phase's time. "seconds" is the sum over its steps.
    """
    known = measured or {}
    points = [p | {"measured_s": known.get(p["phase"], {}).get(p["kernel"])} for p in roofline_points(costs, peaks, plotted)]
    return {
        "machine": f"{peaks.cpu}, {peaks.threads} threads", "measured": bool(known),
        "memories": [["memory", peaks.read_gb_s * 1e9], ["caches", peaks.cache_gb_s * 1e9]],
        "peaks": [[f"{dtype} products", rate * 1e9] for dtype, rate in peaks.product_gflop_s.items()],
        "phases": [_phase(phase, [p for p in points if p["phase"] == phase.name]) for phase in plotted],
    }


def _phase(phase: Phase, points: list[dict[str, Any]]) -> dict[str, Any]:
    took = [point["predicted_s"] if point["measured_s"] is None else point["measured_s"] for point in points]
    total = sum(point["calls"] * seconds for point, seconds in zip(points, took, strict=True))
    shown = [
        point | {"family": family(point["op"]), "rate": point["flops"] / seconds if seconds else 0.0,
                 "share": point["calls"] * seconds / total if total else 0.0}
        for point, seconds in zip(points, took, strict=True)
    ]
    measured = any(point["measured_s"] is not None for point in points)
    return {"name": phase.name, "words": _words(phase), "measured": measured, "seconds": total, "points": shown}


def speeds(costs: Costs, peaks: Peaks, plotted: Sequence[Phase]) -> list[dict[str, Any]]:
    """[{"name", "words", "kind", "tokens", "seconds"}]: each phase as the cost model predicts it."""
    return [{"name": phase.name, "words": _words(phase), "kind": phase.kind, "tokens": phase.tokens,
             "seconds": phase_seconds(costs, phase, peaks)} for phase in plotted]


def _words(phase: Phase) -> str:
    """For a legend: "decode at context 448, batch 8", "prefill of 256 tokens"."""
    return f"decode at {phase.words}" if phase.kind == "decode" else f"prefill of {phase.tokens} tokens"
