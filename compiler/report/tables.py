"""The tables of buckets, of kernels, and of the cuts that were to be had of a GPU's."""
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.manifest import Manifest
from ...runtime.program import Program
from .families import family


def bucket_table(manifest: Manifest, programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Per bucket: its maxima, steps, kernels (unique), ATen steps, arena bytes; flops and bytes at its maxima."""
    infos = {info.name: info for info in manifest.buckets}
    return [
        {"name": p.name, **p.bucket, "steps": len(p.steps), "kernels": len({s.kernel for s in p.steps}), "aten": infos[p.name].aten_steps,
         "arena": p.arena_bytes, "flops": sum(s.flops for s in p.steps), "bytes": sum(s.bytes for s in p.steps)}
        for p in programs
    ]


def kernel_table(manifest: Manifest, program: Program) -> list[dict[str, Any]]:
    """Per kernel of one bucket: steps that run it, flops and bytes of them all at the bucket's maxima; most bytes first."""
    names = {kernel.hash: kernel for kernel in manifest.kernels}
    rows: dict[str, dict[str, Any]] = {}
    for step in program.steps:
        kernel = names.get(step.kernel)               # an ATen step has no code object
        row = rows.setdefault(step.kernel, {
            "hash": step.kernel[:6], "name": kernel.name if kernel else step.op, "op": step.op, "family": family(step.op),
            "steps": 0, "flops": 0, "bytes": 0})
        row["steps"] += 1
        row["flops"] += step.flops
        row["bytes"] += step.bytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def choice_table(manifest: Manifest, program: Program, dropped: Sequence[Mapping[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Of one bucket's choices, a row for each candidate that was kept, the one that runs marked, registers those of its hungriest launch;
    and those that were dropped, with the reason. dropped: of all buckets, as report.json has them. Empty where a kernel has one cut."""
    kernels = {kernel.hash: kernel for kernel in manifest.kernels}
    kept = [
        {"op": choice.op, "calls": len(choice.calls), "name": one.name, "runs": at == choice.chosen,
         "registers": max(kernels[step.kernel].registers or 0 for step in one.steps), "programs_per_sm": one.programs_per_sm,
         "waves": one.waves, "predicted_us": one.predicted_us, "measured_us": one.measured_us or None}
        for choice in program.choices for at, one in enumerate(choice.candidates)]
    return {"kept": kept, "dropped": [{name: one[name] for name in ("op", "candidate", "reason")}
                                      for one in dropped if one["bucket"] == program.name]}


def head(manifest: Manifest, report: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What the artifact is, in facts that need no running."""
    model, weights = manifest.model, manifest.weights
    return {
        "name": manifest.name, "version": manifest.version, "target": manifest.target, "isa": list(manifest.isa), "dtype": manifest.dtype,
        "contract": manifest.contract, "created_with": manifest.created_with, "schema": manifest.schema,
        "parameters": model.parameters, "layers": model.layers, "vocab": model.vocab, "positions": model.max_positions,
        "license": model.license, "source": model.source,
        "size": size, "weights": weights.data_bytes if weights else 0, "code": manifest.files[manifest.code].bytes if manifest.code else 0,
        "kv_block": sum(kv.block_bytes for kv in manifest.kv),
        "bound": manifest.golden.bound if manifest.golden else None, "metric": manifest.golden.metric if manifest.golden else "",
        "graph_error": report["graph_error"], "coverage": report["coverage"],
    }
