"""Hold the KV cache as codes: 8 bits a value and one scale a token and kv head, in the layers that the plan names.

What DESIGN spells as quantize before the cache and dequantize behind it is one operator on each side here, since a cache is
memory that is written and read in place: infc::kv_write_quantized and infc::rope_kv_write_quantized mean quantize_rows, then the
write; infc::paged_attention_quantized means dequantize_rows, then attention.
APPROXIMATE: every value that is written lies within half a step of its format of what it was; and next-token distributions
are no further (KL) from the wide graph's than NOISE times those of eager bf16 PyTorch.
"""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.divergence import divergences
from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, evaluate, fake_mode
from ..compiler.judge import samples
from ..compiler.ops import infc
from ..compiler.ops.codes import TINY
from ..compiler.ops.kv_quantized import FORMATS, read
from ..compiler.ops.registry import arguments
from ..compiler.quant.kv import KvPlan
from ..compiler.rewrite import APPROXIMATE, Measured, Pass, Report, emit
from ..compiler.step_batch import StepSamples

WRITES = {infc.kv_write.default: infc.kv_write_quantized.default, infc.rope_kv_write.default: infc.rope_kv_write_quantized.default}
WIDE = {quantized: wide for wide, quantized in WRITES.items()}

NOISE = {"int8": 4.0, "fp8": 64.0}
"""Format -> how many times the KL of eager bf16 is allowed. KL goes with the square of the noise: int8 may add twice what all of
bf16's rounding does, e4m3, whose steps are eight times as wide as int8's at a row's largest value, eight times."""

HALF = {"int8": 0.5 + 2.0**-12, "fp8": 2.0**-4 + 2.0**-12}
"""Format -> largest error of a value: int8 in steps of its scale, e4m3 as a share of the value itself (at least of the smallest
normal, 2**-6 of its scale). Beside half a step, the fp32 rounding of code and scale."""


def run(graph: Graph, report: Report) -> int:
    """Counts the layers whose cache became codes."""
    plan: KvPlan | None = report.options.get("kv")
    writes = [node for node in graph.nodes if node.target in WRITES or node.target in WIDE]
    if plan is None or not writes:
        return 0
    formats: dict[str, str] = dict.fromkeys(graph.kv, "none")
    for write, format in zip(writes, plan.formats(len(writes)), strict=True):
        if format == "none" or write.target in WIDE: continue
        caches = [arguments(write)[name] for name in ("k_cache", "v_cache")]
        reason = _objection(caches, write)
        if reason:
            report.refuse(write, reason)
            continue
        if not report.may_fire(): break
        formats |= dict.fromkeys((str(cache.target) for cache in caches), format)
        _quantize(graph, write, caches, format)
    fired = sum(format != "none" for format in formats.values()) // 2
    if fired and isinstance(graph.sample_inputs, StepSamples):
        graph.sample_inputs = replace(graph.sample_inputs, formats=tuple(formats.values()))
    return fired


def _objection(caches: list[fx.Node], write: fx.Node) -> str | None:
    """Why these caches cannot become codes."""
    for cache in caches:
        other = next((u for u in cache.users if u is not write and u.target is not infc.paged_attention.default), None)
        if other is not None: return f"%{cache.name} is also used by {'the output' if other.op == 'output' else f'%{other.name}'}"
        if not cache.meta["val"].is_floating_point(): return f"%{cache.name} is {cache.meta['val'].dtype}, not wide"
    readers = [{u for u in cache.users if u is not write} for cache in caches]
    return None if readers[0] == readers[1] else f"%{caches[0].name} and %{caches[1].name} are not read together"


def _quantize(graph: Graph, write: fx.Node, caches: list[fx.Node], format: str) -> None:
    held = [part for cache in caches for part in (cache, _scales(graph, cache))]
    with fake_mode(graph):
        for cache in caches: cache.meta["val"] = cache.meta["val"].to(FORMATS[format])
    for node in [write, *(u for u in caches[0].users if u is not write)]:
        at = _names(node).index("k_cache")
        args = [*node.args[:at], *held, *node.args[at + 2:]]
        target = infc.paged_attention_quantized.default
        if node is write:
            target = WRITES[node.target]                                                # type: ignore[index]
            args.insert(_names(target).index("format"), format)
        node.replace_all_uses_with(emit(graph, target, args, dict(node.kwargs), like=node))
        graph.module.graph.erase_node(node)


def _names(call: Any) -> list[str]:
    """Of the arguments of an operator, or of the one that a node calls."""
    target: Any = call.target if isinstance(call, fx.Node) else call
    return [argument.name for argument in target._schema.arguments]


def _scales(graph: Graph, cache: fx.Node) -> fx.Node:
    """A new placeholder right behind the cache, k_scale_3 behind k_cache_3: [P,Hkv,block,1]."""
    name = str(cache.target).replace("_cache_", "_scale_")
    with graph.module.graph.inserting_after(cache):
        node = graph.module.graph.placeholder(name)
    with fake_mode(graph):
        val = cache.meta["val"]
        node.meta |= {"val": val.new_empty((*val.shape[:3], 1), dtype=torch.float32), "origin": [], "line": "", "passes": []}
    graph.kv.insert(graph.kv.index(str(cache.target)) + 1, name)
    return node


# ------------------------------------------------------------------------------------------------------------ the bound

def check(before: Graph, after: Graph) -> Measured:
    """Mean KL(wide || ours); CheckFailed where it is over the bound, or where a value that is written is over half a step off."""
    was, now = before.sample_inputs, after.sample_inputs
    if not isinstance(was, StepSamples) or not isinstance(now, StepSamples):
        raise CheckFailed("without samples of steps there is nothing to measure on")
    _check_wiring(after)
    for sample in samples(after, "fast"): _check_writes(after, sample)
    count, noise = len(before.inputs), max(NOISE[format] for format in now.formats if format != "none")
    ours, eager = divergences(before, after, lambda sample: (*sample[:count], *now.held(sample[count:])))
    bound = noise * eager
    if not ours <= bound:
        raise CheckFailed(f"KL to the graph with wide caches is {ours:.3g}, and {bound:.3g} is allowed "
                          f"({noise:g} times that of eager bf16)")
    return Measured(ours, bound, "nats, mean KL(wide caches || ours) of next-token distributions")


def _check_wiring(graph: Graph) -> None:
    """What attention reads is what one write fills, each cache with its own scales."""
    for write in [node for node in graph.nodes if node.target in WIDE]:
        at = _names(write).index("k_cache")
        held: Any = write.args[at : at + 4]
        other = next((u for part in held for u in part.users if u is not write and tuple(u.args[1:5]) != held), None)
        if other is not None:
            raise CheckFailed(f"%{other.name} reads caches or scales other than those that %{write.name} writes together")


def _check_writes(graph: Graph, sample: Sequence[Tensor]) -> None:
    """Every write beside the wide one of the same values."""
    def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        result = node.target(*args, **kwargs)                                           # type: ignore[operator]
        if node.target in WIDE: _compare(node, args, kwargs)
        return result

    evaluate(graph, [t.clone() for t in sample], graph.weights, call)


def _compare(node: fx.Node, args: tuple, kwargs: dict) -> None:
    names = _names(node)
    at, behind = names.index("k_cache"), names.index("format")
    codes, scales, format = args[at : at + 4 : 2], args[at + 1 : at + 4 : 2], args[behind]
    wide = [torch.full(c.shape, torch.nan, dtype=torch.float32) for c in codes]
    WIDE[node.target](*args[:at], *wide, *args[at + 4 : behind], **kwargs)                # type: ignore[index]
    for what, meant, c, scale in zip("kv", wide, codes, scales, strict=True):
        there = ~meant.isnan()
        unit = scale if format == "int8" else torch.maximum(meant.abs(), scale * 2.0**-6)
        off = (read(c, scale, torch.float32) - meant).abs() / torch.clamp(unit, min=32 * TINY)
        worst = float(off[there].max()) if bool(there.any()) else 0.0
        if not worst <= HALF[format]:
            raise CheckFailed(f"%{node.name} ({', '.join(node.meta.get('origin') or ())}): a value of {what} is held {worst:.3g} "
                              f"{'steps' if format == 'int8' else 'of itself'} off, and {HALF[format]:.3g} is allowed")


PASS = Pass("quantize_kv", run, APPROXIMATE, requires=("page_kv_cache",), check=check)
