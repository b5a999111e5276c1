"""The figures `infc diff` compares: of an artifact (and what was measured or predicted of it), or of one dump stage."""
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...runtime.artifact import Artifact
from ...runtime.manifest import BLOCK, GPU, Manifest
from ...runtime.program import ITEM_BYTES, Kernel, Program, Step
from .. import targets
from ..costs.cost import decode, kind_of, moved, phase_seconds, prefill, steps_of
from ..costs.data_sheet import data_sheet
from ..costs.peaks import Peaks
from ..errors import UserError

Metrics = dict[str, float]
PeaksOf = Callable[[str], Peaks | None]

CONTEXT = 256
"""Tokens in the cache for the decode figures, and tokens of the prompt for the prefill ones; fewer where the model has fewer."""

METRICS: dict[str, tuple[str, str]] = {
    "decode_ms": ("ms", f"one decode step of one sequence: measured with --bench; else predicted at context {CONTEXT}"),
    "prefill_ms": ("ms", f"prefill of {CONTEXT} tokens, predicted"),
    "decode_bytes": ("B", f"bytes that decode step moves: weights, KV at context {CONTEXT}, activations"),
    "decode_flops": ("flop", "and its flops"),
    "prefill_bytes": ("B", f"bytes a prefill of {CONTEXT} tokens moves"),
    "prefill_flops": ("flop", "and its flops"),
    "memory": ("B", "reserved besides the KV cache: weights and the largest arena"),
    "weights": ("B", "packed weights; of a stage: its distinct tensors"),
    "arena": ("B", "the largest bucket's arena"),
    "arena.BUCKET": ("B", "one bucket's arena, as arena.step_T16"),
    "kv_per_token": ("B", "KV cache of one token, all layers"),
    "size": ("B", "all files of the artifact"),
    "buckets": ("", "buckets"),
    "kernels": ("", "unique kernels"),
    "steps": ("", "steps of the longest program"),
    "steps.BUCKET": ("", "steps of one bucket's program"),
    "flops.BUCKET": ("flop", "flops of one bucket's program at its maxima"),
    "bytes.BUCKET": ("B", "bytes of one bucket's program at its maxima"),
    "aten_steps": ("", "steps that call ATen: no kernel of ours took them"),
    "unfused": ("", "steps that are an ATen call, or a generated loop or lone cast inside a repeated layer"),
    "graph_error": ("", "largest error of the final graph's logits in eager PyTorch, absolute"),
    "golden_bound": ("", "largest error of golden logits that `infc verify` accepts, absolute"),
    "fired.PASS": ("", "how often a pass fired, all its runs"),
    "refused.PASS": ("", "how often it declined"),
    "compile_s": ("s", "seconds the compile took"),
    "nodes": ("", "calls in the graph (the final one of an artifact)"),
    "calls.OP": ("", "calls of one operator in it, as calls.infc.rms_norm"),
    "bench.FIGURE": ("", "any figure of `infc bench -o`, as bench.decode.8.tok_s; needs --bench"),
}
"""name -> (unit, meaning). A part in capitals stands for a name from the artifact."""


def unit_of(name: str) -> str:
    """The unit of a metric; "" for counts and for figures whose name says it."""
    if name in METRICS:
        return METRICS[name][0]
    family = next((f for f in METRICS if "." in f and name.startswith(f.partition(".")[0] + ".")), None)
    return METRICS[family][0] if family else ""


# ------------------------------------------------------------------------------------------------------------- artifacts

def of_artifact(artifact: Artifact, bench: Mapping[str, Any] | None = None, peaks: PeaksOf = lambda isa: None) -> Metrics:
    """Every metric that is known of an artifact.

    bench: what `infc bench -o` wrote about this very artifact; UserError when it is about another. peaks: of this machine for an
    instruction set, None where they were never measured; then no time is predicted. A GPU's are those of its data sheet.
    """
    manifest, report = artifact.manifest, artifact.report()
    programs = [artifact.program(bucket.name) for bucket in manifest.buckets]
    found = _sizes(manifest) | _programs(programs, manifest.kernels)
    for p in report.get("passes", ()):
        for kind, count in (("fired", p["fired"]), ("refused", len(p["refused"]))):
            found[f"{kind}.{p['name']}"] = found.get(f"{kind}.{p['name']}", 0) + count
    if "graph_error" in report: found["graph_error"] = report["graph_error"]
    if manifest.golden: found["golden_bound"] = manifest.golden.bound
    if "seconds" in report: found["compile_s"] = sum(report["seconds"].values())
    if final := report.get("graphs", {}).get("final"): found |= _calls(final)
    if costs := report.get("costs"):
        found |= _costs(costs, data_sheet(targets.find(manifest.target)) if manifest.machine == GPU else peaks(costs["isa"]))
    return found | (_measured(bench, manifest) if bench else {})


def _sizes(manifest: Manifest) -> Metrics:
    arena = max((bucket.arena_bytes for bucket in manifest.buckets), default=0)
    weights = manifest.weights.data_bytes if manifest.weights else 0
    return {"memory": weights + arena, "weights": weights, "arena": arena, "buckets": len(manifest.buckets),
            "kv_per_token": sum(kv.block_bytes for kv in manifest.kv) / BLOCK, "size": sum(f.bytes for f in manifest.files.values())}


def _programs(programs: Sequence[Program], kernels: Sequence[Kernel]) -> Metrics:
    by_hash = {kernel.hash: kernel for kernel in kernels}
    found: Metrics = {
        "kernels": len(kernels), "steps": max((len(p.steps) for p in programs), default=0),
        "aten_steps": max((sum(is_aten(by_hash[s.kernel]) for s in p.steps) for p in programs), default=0),
        "unfused": max((sum(is_unfused(s, by_hash[s.kernel]) for s in p.steps) for p in programs), default=0)}
    for program in programs:
        flops, moved_bytes = sum(s.flops for s in program.steps), sum(s.bytes for s in program.steps)
        found |= {f"arena.{program.name}": program.arena_bytes, f"steps.{program.name}": len(program.steps),
                  f"flops.{program.name}": flops, f"bytes.{program.name}": moved_bytes}
    return found


def is_aten(kernel: Kernel) -> bool:
    """True for a step no kernel of ours runs."""
    return kernel.symbol.startswith("aten::")


def is_unfused(step: Step, kernel: Kernel) -> bool:
    """True for an ATen call, and for a left-over of a repeated layer: a generated loop or a lone cast there.

    A module is a repeated layer when its path has a number (model.layers.7.mlp). Not counted: what runs once a step (the embedding's
    cast, cos and sin), for it would be fused into nothing thirty times; and looking up or picking rows, which is no arithmetic.
    """
    left_over = not step.op.startswith("infc.") and kind_of(step.op) != "gather"
    return is_aten(kernel) or (left_over and any(part.isdigit() for path in step.origin for part in path.split(".")))


def _calls(graph: Mapping[str, Any]) -> Metrics:
    calls = Counter(node["target"] for node in graph["nodes"] if node["kind"] == "call")
    return {"nodes": calls.total(), **{f"calls.{op}": count for op, count in calls.items()}}


def _costs(costs: Mapping[str, Any], peaks: Peaks | None) -> Metrics:
    most = min(CONTEXT, costs["max_positions"] - 1)
    largest = max(bucket["T"] for bucket in costs["buckets"].values())
    found: Metrics = {}
    for phase in (decode(1, most), prefill(most, 0, largest)):
        work = [moved(kernel, load) for load in phase.loads for kernel in steps_of(costs, load)]
        found |= {f"{phase.kind}_bytes": sum(m.bytes for m in work), f"{phase.kind}_flops": sum(m.flops for m in work)}
        if peaks is not None: found[f"{phase.kind}_ms"] = 1e3 * phase_seconds(costs, phase, peaks)
    return found


def _measured(bench: Mapping[str, Any], manifest: Manifest) -> Metrics:
    version = bench.get("artifact", {}).get("version")
    if version != manifest.version:
        raise UserError(f"the --bench file measured {bench.get('model')} of version {str(version)[:12]}, the artifact {manifest.name} is "
                        f"{manifest.version[:12]}: measure this one, with: infc bench {manifest.name}.infc -o FILE")
    decoded = bench["decode"][min(bench["decode"], key=int)]
    figures = {name: bench[name] for name in ("read_gb_s", "decode", "prefill", "cold", "warm", "memory")}
    return {"decode_ms": decoded["ms"], **{f"bench.{name}": number for name, number in _numbers(figures)}}


def _numbers(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, entry in value.items():
        if isinstance(entry, Mapping): yield from _numbers(entry, f"{prefix}{name}.")
        elif isinstance(entry, int | float): yield prefix + name, entry


# ---------------------------------------------------------------------------------------------------------------- stages

def of_stage(stage: Mapping[str, Any]) -> Metrics:
    """Every metric of a dump stage's JSON."""
    distinct = {w["sha256"]: w for w in stage["weights"].values()}
    weights = sum(_size(w["dtype"], w["shape"]) for w in distinct.values())
    return {"weights": weights, **_calls(stage)}


def _size(dtype: str, shape: Sequence[int]) -> int:
    size = ITEM_BYTES.get(dtype, 1)                                # f8: one byte
    for n in shape: size *= n
    return size
