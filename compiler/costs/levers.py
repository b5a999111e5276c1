"""Amdahl's bound of each lever: how much faster a phase could get at most, before anybody does the work."""
from collections.abc import Iterable
from typing import Any

from .cost import Change, Costs, Phase, bits_of, decode, phase_seconds
from .peaks import Peaks

WORTH = 1.05
"""A lever that cannot give this is not worth the work: machines and measurements differ by as much."""

GLUE = frozenset({"rows", "loop", "gather", "aten"})        # what is neither a product, nor attention, nor sampling


def bounds(costs: Costs, phases: Iterable[Phase], peaks: Peaks) -> list[dict[str, Any]]:
    """[{"lever", "phase", "ratio", "worth", "sentence"}]: every lever at every phase.

    Each is the predicted time with what the lever saves gone and nothing added: no dequantization, no scales, no fused kernel that
    is slower. Quantized weights are multiplied as fast as those there are (weight-only formats), so a product bound by arithmetic gains
    nothing. A KV cache in codes is read and multiplied as its own kernel does, where that was measured. A format that everything has
    already is left out.
    """
    weight, cache = (max((bits_of(k) for k in costs["kernels"] if k["kind"] == kind), default=0) for kind in ("product", "attention"))
    changes = [(f"weight int{bits}", Change(weight_bits=bits)) for bits in (8, 4) if bits < weight]
    changes += [("KV int8", Change(kv_bits=8))] if cache > 8 else []
    changes += [("fusion left", Change(free=GLUE)), ("graph replay", Change(barrier=0.0))]
    out = []
    for phase in phases:
        now = phase_seconds(costs, phase, peaks)
        out += [_bound(name, phase, now / phase_seconds(costs, phase, peaks, change)) for name, change in changes]
        if phase.kind == "decode" and (bigger := _larger(costs, phase)) is not None:
            rate = bigger.tokens / phase_seconds(costs, bigger, peaks)
            out.append(_bound(f"batch {bigger.tokens}", phase, rate / (phase.tokens / now), "tokens/s "))
    return out


def phases_for(costs: Costs) -> list[Phase]:
    """Where levers differ: one sequence and many, short and long context, as far as the model's positions go."""
    most = max(b["N"] for b in costs["buckets"].values())
    contexts = dict.fromkeys(min(c, costs["max_positions"] - 1) for c in (512, 8192))
    return [decode(batch, context) for context in contexts for batch in dict.fromkeys((1, most))]


def _larger(costs: Costs, phase: Phase) -> Phase | None:
    """The same decode with as many sequences as the buckets hold."""
    most = max(min(b["N"], b["T"]) for b in costs["buckets"].values())
    return decode(most, phase.loads[0].before[0]) if most > phase.tokens else None


def _bound(lever: str, phase: Phase, ratio: float, what: str = "") -> dict[str, Any]:
    worth = round(ratio, 2) >= WORTH                         # as it is shown
    return {"lever": lever, "phase": phase.name, "ratio": ratio, "worth": worth,
            "sentence": f"{lever} at {phase.words}: {what}at most {ratio:.2f}x{'' if worth else ', not worth it'}"}
