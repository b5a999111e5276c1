"""Golden cases: what the captured model says in fp64, and how far a program of the optimized graph may be from it.

A quantized model is another one: its cases are what its own graph says in fp64, and how far that is from the captured model is
the quality gate's question.

The bound is measured, not chosen: twice the worst error of the optimized graph itself, run operator by operator in eager
PyTorch in its own dtypes, plus one ulp of the largest logit. A kernel may round in another order; it may not be a
different function. Where products are other ones with many rows, a prompt's own rows do not decide which: its error is the larger
of both ways.

A bound that follows the graph's own error would follow a wrong graph too. So that error has a bound of its own: twice what the
captured graph has in eager PyTorch, plus one ulp; with weights in 16 bits that is with every operator's result rounded to them. These
prompts are longer than the samples that passes are judged on, and no pass was judged on them.

Answers and bounds follow from the two graphs, the prompts and our sources: what an earlier compile computed of the very same is
taken.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import kept
from .bucket_graph import of_bucket
from .contracts import run_fp64, run_plain, run_rounded
from .divergence import LARGEST, NARROW, narrow
from .errors import CheckFailed
from .ir import Graph, argument
from .ops import BLOCK, infc
from .ops.linear_quantized import PRODUCTS
from .rewrite import set_arguments
from .step_batch import Pool, step_inputs

ROWS = 8
"""Positions of each case that are compared, the last ones: they depend on all the others."""

SHORT = (1, 9, 37, 140)
"""Lengths besides the one that reaches the largest bucket: one token, less and more than one block of the KV pool, and more than
the four blocks that the CPU kernel takes at once, so that partial sums of attention are put together."""

CODED = PRODUCTS | {infc.embedding_quantized.default, infc.dequantize.default}

COMPUTABLE = 0.01
"""Largest error of eager fp32, as a share of the largest logit, at which a model still has an answer."""


@dataclass(frozen=True)
class Case:
    """A prompt, the positions that are compared, and the captured model's logits there (fp64 arithmetic, stored f32)."""

    tokens: list[int]
    rows: list[int]
    logits: torch.Tensor                              # f32 [rows, vocab]


@dataclass(frozen=True)
class Golden:
    """Cases and the largest absolute difference a replay may show. graph_error: the optimized graph's own.

    kept_from: when an earlier compile computed them; empty where it was now.
    """

    cases: list[Case]
    bound: float
    graph_error: float
    kept_from: str = ""


class _Answers(kept.Entry, frozen=True):
    """Golden cases as they are kept. cases: tokens, rows, and the logits as f32 bytes, row by row."""

    cases: list[tuple[list[int], list[int], bytes]]
    bound: float
    graph_error: float


def lengths(buckets: Sequence[int], max_positions: int, many: int = 0) -> list[int]:
    """Prompt lengths that reach every bucket: the longest is a little more than the second largest bucket, and than `many`, from where on
    some products work otherwise."""
    ordered = sorted(set(buckets))
    longest = max((ordered[-2] if len(ordered) > 1 else 0) + 12, max(SHORT), many + 12 if 0 < many <= ordered[-1] else 0)
    return sorted({min(length, max_positions) for length in (*SHORT, longest)})


def golden(captured: Graph, graph: Graph, buckets: Sequence[int], cache: kept.Kept | None = None) -> Golden:
    """Cases in fp64 from the captured graph (from the step graph, where it is quantized); the bound from the latter in eager PyTorch.

    cache: what earlier compiles computed.
    """
    assert captured.sample_inputs is not None
    prompts = [captured.sample_inputs(1, length, seed)
               for seed, length in enumerate(lengths(buckets, int(captured.meta["max_positions"]), _many(graph)))]
    if cache is None: return _computed(captured, graph, prompts)
    key = kept.key("golden", kept.content(captured), kept.content(graph), kept.content_of(prompts))
    if found := cache.take(key, _Answers, "golden answers"):
        cases = [Case(tokens, rows, torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(len(rows), -1))
                 for tokens, rows, raw in found.cases]
        return Golden(cases, found.bound, found.graph_error, found.made)
    made = _computed(captured, graph, prompts)
    cases = [(case.tokens, case.rows, case.logits.contiguous().numpy().tobytes()) for case in made.cases]
    cache.keep(key, _Answers(cases=cases, bound=made.bound, graph_error=made.graph_error), "golden answers")
    return made


def _computed(captured: Graph, graph: Graph, prompts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Golden:
    """The cases of these prompts, token ids and positions [1, S]."""
    cases: list[Case] = []
    worst, largest, allowed, dtype, ways = 0.0, 0.0, 0.0, narrow(graph), _ways(graph)
    for ids, positions in prompts:
        length = ids.shape[1]
        rows = list(range(max(0, length - ROWS), length))
        logits = graph.outputs.index("logits")
        if quantized(graph):
            step = step_sample(graph, ids[0], rows)
            truth, eager = run_fp64(graph, step)[logits], _eager(graph, step, logits, dtype or torch.bfloat16)
        else:
            plain = run_plain(captured, (ids, positions))[0][0, rows]
            truth = run_fp64(captured, (ids, positions))[0][0, rows]
            eager = _eager(captured, (ids, positions), 0, dtype)[0, rows] if dtype else plain
            _check_computable(truth, plain, "the model as captured, in eager fp32,")
            step = step_sample(graph, ids[0], rows)
        own = torch.stack([run_plain(way, step)[logits] for way in ways])
        if not bool(own.isfinite().all()):
            raise CheckFailed("the optimized graph gives logits that are not finite, where fp64 gives finite ones"
                              + (f": fp16 ends at {LARGEST:.0f}, use --dtype bf16" if dtype == torch.float16 else ""))
        worst = max(worst, float((own.double() - truth).abs().max()))
        largest = max(largest, float(truth.abs().max()))
        allowed = max(allowed, float((eager.double() - truth).abs().max()))
        cases.append(Case(ids[0].tolist(), rows, truth.float()))
    ulp = torch.finfo(torch.float32).eps * largest
    allowed = 2 * allowed + ulp
    if not worst <= allowed:
        asked = dtype or (torch.bfloat16 if quantized(graph) else None)
        yardstick = next((name for name, kind in NARROW.items() if kind == asked), "fp32")
        raise CheckFailed(f"the optimized graph is not the model: its logits are {worst:.3g} off those of fp64, and {allowed:.3g} is "
                          f"allowed after eager PyTorch in {yardstick}: use --check strict, or infc bisect")
    return Golden(cases, 2 * worst + ulp, worst)


def _many(graph: Graph) -> int:
    """Rows from which products of codes are of bf16; 0 where none ever is."""
    return max((argument(node, "bf16_rows") for node in graph.nodes if node.target in PRODUCTS), default=0)


def _ways(graph: Graph) -> list[Graph]:
    """The graph; where products are other ones with many rows, what it is with few and with many: a prompt's rows may come in chunks, and
    beside those of other sequences."""
    if not _many(graph): return [graph]
    few, many = graph.copy(), of_bucket(graph, _many(graph)).copy()
    for way, rows in ((few, 0), (many, 1)):
        for node in way.nodes:
            if node.target in PRODUCTS and argument(node, "bf16_rows"): set_arguments(node, bf16_rows=rows)
    return [few, many]


def quantized(graph: Graph) -> bool:
    """Does it hold weights or its KV cache as codes?"""
    return any(node.target in CODED or node.target is infc.paged_attention_quantized.default for node in graph.nodes)


def _eager(graph: Graph, sample: tuple[torch.Tensor, ...], index: int, dtype: torch.dtype) -> torch.Tensor:
    """An output of the graph in eager PyTorch with 16 bits; bf16 where fp16 overflows there: our sums stay wide."""
    found = run_rounded(graph, sample, dtype)[index]
    return found if bool(found.isfinite().all()) else run_rounded(graph, sample, torch.bfloat16)[index]


def _check_computable(truth: torch.Tensor, own: torch.Tensor, who: str) -> None:
    """A bound that follows the graph's own error means nothing where that error is as large as the logits themselves."""
    error, largest = float((own.double() - truth).abs().max()), float(truth.abs().max())
    if not error <= COMPUTABLE * largest:
        raise CheckFailed(f"{who} is {error:.3g} off its fp64 logits, the largest of which is {largest:.3g}: it overflows or loses "
                          "all precision, so there is no answer to verify a program against")


def step_sample(graph: Graph, ids: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The step graph's inputs for one whole prompt in one step, `rows` sampled greedily. ids i64 [T]."""
    count = len(rows)
    pool = Pool(2 - (-len(ids) // BLOCK))              # the prompt's blocks, and poisoned ones
    given = step_inputs([(pool.stream(ids), len(ids))]) | {
        "sample_rows": torch.tensor(rows, dtype=torch.int32), "temperature": torch.zeros(count),
        "top_k": torch.zeros(count, dtype=torch.int32), "top_p": torch.ones(count), "uniform": torch.zeros(count),
    }
    return (*(given[name] for name in graph.inputs), *pool.caches(graph))
