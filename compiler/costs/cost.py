"""What a step moves and multiplies at live sizes, and how long that takes on a machine whose peaks are known. Needs no torch.

The costs of an artifact are plain data, report.json["costs"]:

    {"kernels": [{"kernel", "name", "op", "kind", "dtype", "flops", "weights", "kv", "activations", "exact"}, ...],
     "steps": {program: [index into kernels, one per step]}, "buckets": {program: maxima}, "dtype", "kv_bytes_per_token",
     "weight_bytes", "max_positions"}

where flops and the three kinds of bytes are formulas over the live sizes of a step (compiler.phases). A kernel has "bf16_rows" where
from so many tokens on its codes are multiplied as bf16.
"""
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...runtime.program import ITEM_BYTES
from ..errors import UserError
from .peaks import Peaks
from .phases import BLOCK, Load, Phase, decode, prefill, value

__all__ = ["Change", "Costs", "Load", "Moved", "Peaks", "Phase", "Prediction", "bits_of", "decode", "kind_of", "moved", "phase_seconds",
           "predict", "predict_load", "prefill", "program_of", "roofline_points", "steps_of", "streams"]

Costs = Mapping[str, Any]
KINDS = ("weights", "kv", "activations")


@dataclass(frozen=True)
class Moved:
    """What one step does at a load: flops, bytes by kind."""

    flops: float
    weights: float
    kv: float
    activations: float

    @property
    def bytes(self) -> float:
        return self.weights + self.kv + self.activations

    @property
    def intensity(self) -> float:
        """flops per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step, what binds it ("memory", "compute", "barrier": its fixed part), and its parts."""

    seconds: float
    bound: str
    memory_s: float
    compute_s: float
    barrier_s: float


@dataclass(frozen=True)
class Change:
    """A machine or a model that is not there, for the bound of a lever."""

    weight_bits: float = math.inf   # of a product's or a table's value, at most
    kv_bits: float = math.inf       # of a cached value that attention reads, at most
    barrier: float = 1.0
    free: frozenset[str] = frozenset()      # kinds of step that vanish, each with its barrier


def kind_of(op: str) -> str:
    """What binds and measures a step alike: product, attention, gather, sample, aten, loop or rows (norms, rotations, casts)."""
    if op in ("infc.linear", "infc.linear_swiglu", "infc.linear_quantized", "infc.linear_swiglu_quantized"): return "product"
    if op in ("infc.paged_attention", "infc.paged_attention_quantized", "infc.attention"): return "attention"
    if op == "infc.sample": return "sample"
    if op in ("aten.embedding", "aten.index_select", "infc.embedding_quantized"): return "gather"
    if op.startswith("loop."): return "loop"
    return "rows" if op.startswith("infc.") or op == "aten._to_copy" else "aten"


def moved(kernel: Mapping[str, Any], load: Load) -> Moved:
    """Evaluate a kernel's formulas."""
    return Moved(*(value(kernel[name], load) for name in ("flops", *KINDS)))


def program_of(costs: Costs, load: Load) -> str:
    """The smallest bucket that holds a load, as the runtime chooses it. Raises UserError where none does."""
    order = sorted(costs["buckets"].items(), key=lambda item: (item[1]["T"], item[1]["N"]))
    for name, most in order:
        if all(load.dims[d] <= most[d] for d in ("T", "N", "R", "M")): return name
    raise UserError(f"{load.dims} fits no bucket of this artifact; the largest is {order[-1][1]}")


def steps_of(costs: Costs, load: Load) -> list[Mapping[str, Any]]:
    """The kernel of each step of the program that runs this load, in order."""
    return [costs["kernels"][i] for i in costs["steps"][program_of(costs, load)]]


def predict(kernel: Mapping[str, Any], load: Load, peaks: Peaks, *, streams: bool, change: Change = Change()) -> Prediction:
    """How long one step takes: the longer of its memory and its arithmetic time, the exposed part of the shorter, its start, a barrier.

    What is exposed is measured where both times are equal, and vanishes as one outweighs the other: exposed * shorter² / longer.
    streams: the weights and the cache of a whole step do not fit the last cache, so each step reads its own from memory.
    Activations were written by the step before and are read from the caches.
    """
    m = moved(kernel, load)
    barrier = peaks.barrier_s * change.barrier
    if kernel["kind"] in change.free: return Prediction(0.0, "barrier", 0.0, 0.0, 0.0)
    cold = streams and m.weights + m.kv > 0
    if kernel["kind"] == "product":
        memory, compute = _product(kernel, m, load, peaks, streams, change)
        start, exposed = peaks.start_s, peaks.exposed
    elif kernel["kind"] == "attention":
        memory, compute = _attention(kernel, m, load, peaks, streams, change)
        start, exposed = peaks.kv_start_s * len(load.new), 0.0   # its rate was measured with its own arithmetic in the way
    else:
        memory, compute = _rows(kernel, m, load, peaks, streams, change), 0.0
        start, exposed = peaks.start_s, 0.0
    fixed = barrier + (start if cold else 0.0) + (peaks.aten_call_s if kernel["kind"] == "aten" else 0.0)
    longer, shorter = max(memory, compute), min(memory, compute)
    seconds = longer + (exposed * shorter * shorter / longer if shorter else 0.0) + fixed
    bound = "barrier" if fixed > max(memory, compute) else "memory" if memory >= compute else "compute"
    return Prediction(seconds, bound, memory, compute, fixed)


def _product(kernel: Mapping[str, Any], m: Moved, load: Load, peaks: Peaks, streams: bool, change: Change) -> tuple[float, float]:
    """Seconds of reading the weights, and of multiplying: of many rows and codes, as bf16."""
    rate = peaks.read_gb_s if streams else peaks.weight_cache_gb_s
    dtype = "bf16" if 0 < kernel.get("bf16_rows", 0) <= load.dims["T"] else kernel["dtype"]
    return m.weights * _share(kernel, change.weight_bits) / 1e9 / rate, m.flops / 1e9 / _of(peaks.product_gflop_s, dtype)


def _attention(kernel: Mapping[str, Any], m: Moved, load: Load, peaks: Peaks, streams: bool, change: Change) -> tuple[float, float]:
    """Seconds of reading old keys and values from memory, and of the arithmetic and this step's own, which a step ago were written: all
    at the rates of a cache in that dtype, or in the codes that a change holds it in."""
    fresh = min(1.0, load.dims["T"] / max(1, load.keys())) if streams else 1.0
    kv = m.kv * _share(kernel, change.kv_bits)
    dtype = kernel["dtype"] if change.kv_bits >= bits_of(kernel) else f"i{change.kv_bits:.0f}"
    memory, cached = kv * (1 - fresh) / 1e9 / _of(peaks.kv_read_gb_s, dtype), kv * fresh / 1e9 / _of(peaks.key_cache_gb_s, dtype)
    return memory, m.flops / 1e9 / _of(peaks.attention_gflop_s, dtype) + cached


def _rows(kernel: Mapping[str, Any], m: Moved, load: Load, peaks: Peaks, streams: bool, change: Change) -> float:
    """Seconds of moving rows through the caches, weights from memory; new keys go to blocks that lie there, the first of each block."""
    tokens, sequences = load.dims["T"], load.dims["N"]
    rate = peaks.scan_gb_s if kernel["kind"] == "sample" else peaks.thread_cache_gb_s if tokens == 1 else peaks.cache_gb_s
    scattered = min(tokens, sequences + tokens // BLOCK) / tokens if streams else 0.0
    seconds = m.weights / 1e9 / (peaks.read_gb_s if streams else rate) + m.kv * scattered / 1e9 / peaks.kv_write_gb_s
    return seconds + (m.kv * (1 - scattered) + m.activations) / 1e9 / rate


def _of(rates: Mapping[str, float], dtype: str) -> float:
    """The rate of a dtype; one that was not measured is read and multiplied as bf16."""
    return rates.get(dtype, rates["bf16"])


def bits_of(kernel: Mapping[str, Any]) -> int:
    """Bits of a value that decides a kernel's bytes: of its weight, of attention's cache. 32 where that is neither float nor code."""
    dtype = kernel["dtype"]
    coded = re.match(r"(?:w|fp)(\d+)a", dtype)
    return int(coded[1]) if coded else 8 * ITEM_BYTES.get(dtype, 4)


def _share(kernel: Mapping[str, Any], bits: float) -> float:
    """What is left of a kernel's weights or keys with at most so many bits a value."""
    return min(1.0, bits / bits_of(kernel))


def streams(costs: Costs, load: Load, peaks: Peaks) -> bool:
    """Do the weights and the cached keys of one step exceed the last cache?"""
    kv = costs["kv_bytes_per_token"] * load.keys()
    return costs["weight_bytes"] + kv > peaks.llc_bytes


def predict_load(costs: Costs, load: Load, peaks: Peaks, change: Change = Change()) -> list[Prediction]:
    """One prediction per step of the program that runs the load."""
    cold = streams(costs, load, peaks)                       # as it is: a lever does not get a cache for nothing
    known: dict[int, Prediction] = {}
    out = []
    for index in costs["steps"][program_of(costs, load)]:
        if index not in known: known[index] = predict(costs["kernels"][index], load, peaks, streams=cold, change=change)
        out.append(known[index])
    return out


def phase_seconds(costs: Costs, phase: Phase, peaks: Peaks, change: Change = Change()) -> float:
    """Predicted seconds of a whole phase: steps run one after the other."""
    return sum(p.seconds for load in phase.loads for p in predict_load(costs, load, peaks, change))


def roofline_points(
    report_costs: Costs, peaks: Peaks, phases: Iterable[Phase], measured: Mapping[tuple[str, str], float] | None = None,
) -> list[dict[str, Any]]:
    """One point per kernel and phase, of one call of it: {kernel, name, op, kind, phase, calls, flops, bytes, weights, kv,
    activations, intensity, predicted_s, measured_s, bound}.

    measured: seconds of one call by (phase name, kernel hash), or by (phase name, kernel name) where two kernels of one name need not
    be told apart. Of a phase in several chunks the last one is shown.
    """
    points, known = [], measured or {}
    for phase in phases:
        load = phase.loads[-1]
        cold = streams(report_costs, load, peaks)
        indices = report_costs["steps"][program_of(report_costs, load)]
        for index in dict.fromkeys(indices):
            kernel = report_costs["kernels"][index]
            took = known.get((phase.name, kernel["kernel"]), known.get((phase.name, kernel["name"])))
            m, p = moved(kernel, load), predict(kernel, load, peaks, streams=cold)
            points.append({
                "kernel": kernel["kernel"], "name": kernel["name"], "op": kernel["op"], "kind": kernel["kind"], "phase": phase.name,
                "calls": indices.count(index), "flops": m.flops, "bytes": m.bytes, "weights": m.weights, "kv": m.kv,
                "activations": m.activations, "intensity": m.intensity, "predicted_s": p.seconds,
                "measured_s": took, "bound": p.bound})
    return points
