"""Turn a decoder over [B, S] into a step over T tokens of any mix of sequences, its keys and values in a paged cache."""
from collections.abc import Callable

import torch
from torch import Tensor, fx

from ..compiler.contracts import LIFTED, SAME_FUNCTION, row_error, run_fp64, run_plain
from ..compiler.errors import CheckFailed, UserError
from ..compiler.ir import Graph, expression, same_size, where
from ..compiler.ops import BLOCK, aten, infc
from ..compiler.ops.registry import arguments
from ..compiler.rewrite import EXACT, Pass, Report, emit
from ..compiler.step_batch import Pool, StepSamples, Stream, step_inputs
from ..compiler.tokens import Refused, Tokens

SIGNATURE = ["input_ids", "position_ids"]
LEFT = {infc.attention.default, aten.scaled_dot_product_attention.default}


def run(graph: Graph, report: Report) -> int:
    """0 for a graph that is no decoder; UserError, naming the layer, for a decoder whose attention cannot be paged."""
    attentions = [node for node in graph.nodes if node.target in LEFT]
    if graph.inputs != SIGNATURE or not attentions:
        found = f"inputs {', '.join(graph.inputs)}" if graph.inputs != SIGNATURE else "no attention"
        report.refuse(graph.output, f"a decoder takes {', '.join(SIGNATURE)} and has attentions; this graph has {found}")
        return 0
    for node in attentions:
        reason = _objection(node)
        if reason: raise UserError(f"{where(node)}: this attention cannot read a paged KV cache: {reason}")
    if not report.may_fire(): return 0
    saved = graph.copy()
    try:
        _to_steps(graph)
    except Refused as reason:
        graph.restore(saved)
        raise UserError(f"this decoder cannot run as a step over tokens: {reason}") from reason
    report.fired = len(attentions)
    return len(attentions)


def _objection(node: fx.Node) -> str | None:
    if node.target is not infc.attention.default: return "it was not rewritten to infc::attention (see rewrite_attention)"
    given = arguments(node)
    if given["bias"] is not None: return f"it adds a bias, %{given['bias'].name}, that is no known mask"
    if given["mask"] != "causal": return f"its mask is {given['mask']!r}, not causal: later tokens would change earlier ones"
    q, k = given["q"].meta["val"], given["k"].meta["val"]
    return None if same_size(q.shape[2], k.shape[2]) else "queries and keys have different lengths: it is no self-attention"


def _to_steps(graph: Graph) -> None:
    ids, positions = (graph.placeholders[name] for name in SIGNATURE)
    batch, length = ids.meta["val"].shape
    if any(isinstance(s, int) for s in (batch, length)): raise Refused(f"batch {batch} and length {length} must be dynamic")
    state: dict[str, fx.Node] = {}
    tokens = Tokens(graph, batch, length, positions, {infc.attention.default: lambda t, n: _paged(t, n, state)})
    _inputs(tokens, positions, state)
    tokens.run()
    graph.inputs = ["input_ids", "positions", *(name for name in state if name not in graph.kv)]
    graph.symbols = {str(expression(s)): name for name, s in (("T", tokens.T), ("N", tokens.N), ("M", tokens.M), ("P", tokens.P))}
    caches = [graph.placeholders[name].meta["val"] for name in graph.kv]
    shapes = tuple((tuple(map(int, c.shape[1:])), c.dtype) for c in caches)
    graph.sample_inputs = StepSamples(tuple(graph.inputs), shapes, _vocabulary(graph), int(graph.meta.get("max_positions", 64)))


def _inputs(tokens: Tokens, positions: fx.Node, state: dict[str, fx.Node]) -> None:
    """slots, query_start, context_len and block_table after the two inputs that stay."""
    for node in tokens.graph.nodes:
        if node is not positions and node.name == "positions": node._rename("positions_value")
    positions.target = "positions"
    positions._rename("positions")
    tokens.graph.inputs = ["input_ids", "positions"]
    T, N, M = tokens.T, tokens.N, tokens.M
    after = positions
    for name, shape in (("slots", (T,)), ("query_start", (N + 1,)), ("context_len", (N,)), ("block_table", (N, M))):
        after = state[name] = _placeholder(tokens, name, tokens.fake(shape, torch.int32), after)


def _placeholder(tokens: Tokens, name: str, val: Tensor, after: fx.Node) -> fx.Node:
    with tokens.graph.module.graph.inserting_after(after):
        node = tokens.graph.module.graph.placeholder(name)
    node.meta |= {"val": val, "origin": [], "line": "", "passes": []}
    return node


def _paged(tokens: Tokens, node: fx.Node, state: dict[str, fx.Node]) -> fx.Node:
    """kv_write, then paged_attention, on caches of this layer's own."""
    given, graph = arguments(node), tokens.graph
    q, k, v = (tokens.now[given[name]] for name in "qkv")
    layer = len(graph.kv) // 2
    caches = []
    for name, value in ((f"k_cache_{layer}", k), (f"v_cache_{layer}", v)):
        val = value.meta["val"]
        after = state[graph.kv[-1]] if graph.kv else state["block_table"]
        fake = tokens.fake((tokens.P, val.shape[1], BLOCK, val.shape[2]), val.dtype)
        caches.append(_placeholder(tokens, name, fake, after))
        state[name] = caches[-1]
        graph.kv.append(name)
    emit(graph, infc.kv_write.default, (k, v, *caches, state["slots"]), like=node)
    table = (state["query_start"], state["context_len"], state["block_table"])
    options = (given["scale"], given["window"], given["softcap"])
    while not any(options[1:]) and len(options) > 1: options = options[:-1]
    sinks = {} if given["sinks"] is None else {"sinks": tokens.now[given["sinks"]]}
    wide = emit(graph, infc.paged_attention.default, (q, *caches, *table, *options), sinks, like=node)
    return tokens.shaped(wide, tokens.step_shape(tokens.captured[node]), like=node)


def _vocabulary(graph: Graph) -> int:
    """How many token ids the model takes."""
    ids = graph.placeholders["input_ids"]
    tables = [n.args[0].meta["val"].shape[0] for n in ids.users if n.target is aten.embedding.default]    # type: ignore[union-attr]
    return int(graph.meta.get("vocab_size") or min(tables, default=2))


# --------------------------------------------------------------------------------------------------------------- check

LENGTHS = (35, 7, 1)
"""Sequences of the check: over one block's end, short, and a single token."""


def check(before: Graph, after: Graph) -> float:
    """Steps over a mixed batch give, at every position, the logits that the captured graph gives: in fp64 and in their own dtype.

    One schedule holds it all: a whole prompt, the same prompt in chunks and then token by token over a block's end, others
    beside them, padding tokens, empty sequences, and NaN in every cache slot that was not written.
    """
    generator = torch.Generator().manual_seed(0)
    longest = int(after.meta.get("max_positions", max(LENGTHS)))
    prompts = [torch.randint(_vocabulary(after), (min(n, longest),), generator=generator) for n in LENGTHS]
    truth, own = [], []
    for prompt in prompts:
        sample = prompt[None], torch.arange(len(prompt))[None]
        truth.append(run_fp64(before, sample, LIFTED)[0][0])
        own.append(run_plain(before, sample)[0][0])
    exact, plain = (_replay(after, prompts, run) for run in (lambda s: run_fp64(after, s, LIFTED), lambda s: run_plain(after, s)))
    # the bound is the captured graph's worst row of all sequences: one token's error is a single draw of rounding noise
    bound = 2 * max(row_error(o, t) for o, t in zip(own, truth, strict=True)) + torch.finfo(own[0].dtype).eps
    worst = 0.0
    for name in exact:
        which = 0 if name == "whole" else int(name)
        error = row_error(exact[name], truth[which])
        worst = max(worst, error)
        if not error <= SAME_FUNCTION: raise CheckFailed(f"sequence {name}: steps give other logits than the captured graph: {error:.3g}")
        error = row_error(plain[name], truth[which])
        if not error <= bound: raise CheckFailed(f"sequence {name}: steps lose precision: {error:.3g}, bound {bound:.3g}")
    return worst


def _replay(graph: Graph, prompts: list[Tensor], step: Callable[[list[Tensor]], list[Tensor]]) -> dict[str, Tensor]:
    """Logits of each sequence from the schedule of `check`."""
    pool = Pool(16)
    streams = {"whole": pool.stream(prompts[0]), **{str(i): pool.stream(p) for i, p in enumerate(prompts)}}
    caches, rows = pool.caches(graph), {name: [] for name in streams}
    for plan in ({"whole": 99, "0": 16, "1": 5}, {"2": 1, "0": 16}, {"0": 1, "1": 1}, {"1": 1, "0": 1}, {"0": 99}):
        counts = {name: min(count, len(streams[name].tokens) - streams[name].done) for name, count in plan.items()}
        counts = {name: count for name, count in counts.items() if count}
        if not counts: continue
        work: list[tuple[Stream, int]] = [(streams[name], count) for name, count in counts.items()]
        given = step_inputs(work, padding=2, empty=1)
        results = step([*(given[name] for name in graph.inputs), *caches])
        caches, start = results[len(graph.outputs) :], 0
        for name, count in counts.items():
            rows[name].append(results[0][start : start + count])
            start += count
    return {name: torch.cat(parts) for name, parts in rows.items() if parts}


PASS = Pass("page_kv_cache", run, EXACT, requires=("rewrite_attention",), check=check)
