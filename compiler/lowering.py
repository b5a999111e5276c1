"""A graph as what an artifact holds of it: a program a bucket, kernels, and the manifest that describes them."""
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..backends.aten import check_strict, coverage
from ..backends.launch import Context
from ..backends.loops import cost as loop_cost
from ..backends.program import DTYPES as NAMES
from ..backends.program import Store, build
from ..backends.reference import Bound
from ..backends.regions import LoopUnit
from ..runtime.artifact import GOLDEN
from ..runtime.manifest import BLOCK, GoldenInfo, KvBuffer, Manifest, ModelInfo, PassInfo
from ..runtime.program import Program
from . import keys, targets
from .bucket_graph import of_bucket
from .errors import UserError
from .fits import machine_of
from .ir import Graph
from .options import Options
from .pipeline import PipelineReport
from .placement import Placement, Unit, place
from .replays import Bounds
from .verification import Golden


def backend_of(kind: str) -> Any:
    if kind == "cpu":
        from ..backends import cpu

        return cpu
    try:
        from ..backends.triton import backend
    except ModuleNotFoundError as error:
        raise UserError("compiling for a GPU needs Triton: pip install 'infc[gpu]'") from error
    return backend


def build_programs(
    graph: Graph, options: Options, backend: Any, isa: str, store: Store, maxima: Callable[[Unit, Context], tuple[int, int]],
) -> tuple[list[Program], Placement, Bounds]:
    assert options.buckets and options.max_sequences
    programs, placement, bounds, least = [], None, Bounds(), 1
    for tokens in sorted(set(options.buckets)):
        own, least = of_bucket(graph, least), tokens + 1
        rows = min(tokens, options.max_sequences)
        blocks = -(-int(graph.meta["max_positions"]) // BLOCK)
        context = Context(isa, {"T": tokens, "N": rows, "R": rows, "M": blocks}, graph.symbols)
        placement = place(own, backend.backends(), context)
        if options.strict: check_strict(coverage(placement))
        programs.append(build(own, placement.units, context, store, backend.pack, maxima))
        bounds[programs[-1].name] = Bound(own, placement.units, context)
    assert placement is not None
    return programs, placement, bounds


def chosen_cuts(
    programs: list[Program], store: Store, target: targets.Target, cubins: dict[str, bytes],
) -> tuple[list[Program], dict[str, bytes], dict[str, Any] | None]:
    """On a GPU each call in its likeliest cut, with the code that some candidate runs and what became of the others."""
    if target.gpu is None: return programs, cubins, None
    from ..backends.triton.shortlist import choose

    programs, told = choose(store, programs, target.gpu)
    return programs, {kernel.file: cubins[kernel.file] for kernel in store.kernels.values() if kernel.file}, told


def manifest_of(
    captured: Graph, graph: Graph, target: targets.Target, options: Options, report: PipelineReport, store: Store,
    version: str, toolchain: str, golden: Golden,
) -> Manifest:
    meta = captured.meta
    caches = graph.placeholders
    return Manifest(
        name=str(meta["name"]), version=version, target=options.target, machine=machine_of(target), isa=target.flags,
        dtype="fp32" if "narrow_dtype" in report.dropped else options.dtype, contract=report.weakest.label,
        model=ModelInfo(
            name=str(meta["name"]), vocab=int(meta["vocab_size"]), max_positions=int(meta["max_positions"]),
            eos_ids=tuple(meta.get("eos_token_ids") or ()), layers=int(meta.get("layers") or 0),
            chat_template=meta.get("chat_template") or "", special_tokens=dict(meta.get("special_tokens") or {}),
            parameters=sum(w.numel() for w in captured.weights.values()), license=meta.get("license") or "",
            source=":".join(str(v) for v in (meta.get("source") or {}).values())),
        passes=tuple(PassInfo(p.name, p.contract.label, p.fired, p.stated_bound) for p in report.passes if p.fired),
        created_with={"infc": keys.infc_version(), "torch": str(torch.__version__), "python": platform.python_version(),
                      "compiler": toolchain},
        kv=tuple(_kv_buffer(name, caches[name].meta["val"]) for name in graph.kv),
        kernels=tuple(store.kernels.values()), golden=GoldenInfo(GOLDEN, "max_abs", golden.bound))


def _kv_buffer(name: str, fake: torch.Tensor) -> KvBuffer:
    heads, block, head_dim = (int(size) for size in fake.shape[1:])
    return KvBuffer(name, NAMES[fake.dtype], heads * block * head_dim * fake.element_size(), heads)


def kv_bytes_per_token(graph: Graph) -> int:
    return sum(_kv_buffer(name, graph.placeholders[name].meta["val"]).block_bytes for name in graph.kv) // BLOCK


def summary_of(programs: list[Program], placement: Placement) -> dict[str, dict[str, int]]:
    return {program.name: {
        "steps": len(program.steps), "unique_kernels": len({step.kernel for step in program.steps}),
        "aten_steps": placement.count("aten"), "arena_bytes": program.arena_bytes,
        "flops": sum(step.flops for step in program.steps), "bytes": sum(step.bytes for step in program.steps),
    } for program in programs}


def coverage_of(placement: Placement) -> dict[str, Any]:
    units: dict[str, int] = {}
    for unit in placement.units:
        units[unit.backend] = units.get(unit.backend, 0) + 1
    return {"steps": units, "refused": {n: why for n, why in placement.refused.items() if "loops" in why and len(why) > 1}}


def region_cost(unit: Unit, dims: Mapping[str, int]) -> tuple[int, int] | None:
    """The loop IR's own count, which is exact where nodes are merged and views absorbed."""
    return loop_cost(unit.region, dims) if isinstance(unit, LoopUnit) else None
