"""rewrite_attention and sinks: both spellings of a learned logit in each softmax's sum, and what only looks like one."""
import math
from collections.abc import Callable

import pytest
import torch
from golden import filecheck, trace
from infc.compiler.contracts import Broken, Reference, check_exact
from infc.compiler.ir import Graph, text, verify
from infc.compiler.ops import infc
from infc.compiler.ops.registry import arguments
from infc.compiler.rewrite import Report
from infc.passes import load
from infc.passes.rewrite_attention import NOTE_EMPTY_ROWS, PASS
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

HEADS, KV, HEAD, SCALE = 6, 2, 8, 0.25
DYNAMIC = ({0: "B", 2: "S"},) * 3
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -0.3])


def sample(batch: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, heads, length, HEAD, generator=generator).to(dtype) for heads in (HEADS, KV, KV))


class Attention(torch.nn.Module):
    """fn(q, k, v, sinks) with k and v repeated to all heads; the sinks are a weight."""

    def __init__(self, fn: Callable[..., object], sinks: Tensor = SINKS):
        super().__init__()
        self.fn, self.sinks = fn, torch.nn.Parameter(sinks.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> object:
        return self.fn(q, *(t.repeat_interleave(HEADS // KV, 1) for t in (k, v)), self.sinks)


def captured(fn: Callable[..., object], sinks: Tensor = SINKS, dtype: torch.dtype = torch.float32) -> Graph:
    graph = trace(Attention(fn, sinks).eval(), *sample(2, 7, dtype), dynamic=DYNAMIC)
    for name in ("canonicalize", "fold_constants", "merge_common"): load(name).apply(graph)
    return graph


def rewritten(fn: Callable[..., object], sinks: Tensor = SINKS, dtype: torch.dtype = torch.float32) -> tuple[Graph, Graph, Report]:
    """(after the pass, before it, its report); the contract is checked at several sizes."""
    graph, report = captured(fn, sinks, dtype), Report(PASS.name)
    before = graph.copy()
    PASS.apply(graph, report)
    verify(graph)
    check_exact(Reference(before, [sample(*size, dtype) for size in ((2, 7), (1, 1), (3, 11))]), before, graph)
    return graph, before, report


def the_attention(graph: Graph) -> dict:
    (node,) = [n for n in graph.nodes if n.target is infc.attention.default]
    return arguments(node)


def seen(length: int, window: int = 0) -> Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return (j <= i) & (i - j < window) if window else j <= i


def masked(q: Tensor, k: Tensor, window: int = 0, fill: float = -math.inf) -> Tensor:
    return q @ k.mT * SCALE + torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).masked_fill(~seen(q.shape[2], window), fill)


def joined(scores: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat((scores, sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)), -1)


# ------------------------------------------------------------------------------------------------------------ spellings

def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    logits = joined(masked(q, k, fill=torch.finfo(q.dtype).min), sinks)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return torch.softmax(logits, -1, dtype=logits.dtype)[..., :-1] @ v


def flint(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q.float(), k.float(), window=4)
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), -1), -1)[..., :-1].to(v.dtype) @ v


def paged_eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The cast before the cut."""
    logits = joined(masked(q, k), sinks)
    logits = logits - logits.amax(-1, keepdim=True)
    return torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype)[..., :-1] @ v


def capped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The sink is not capped."""
    scores = 5.0 * torch.tanh(q @ k.mT * SCALE / 5.0)
    return torch.softmax(joined(scores.masked_fill(~seen(q.shape[2]), -math.inf), sinks), -1)[..., :-1] @ v


def granite(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k, window=4)
    share = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v * share.unsqueeze(-1).to(v.dtype)


def granite_kept_dim(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    share = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - sinks[None, :, None, None])
    return share * (torch.softmax(scores - scores.max(-1, keepdim=True).values, -1) @ v)


def with_sdpa(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    share = torch.sigmoid(torch.logsumexp(masked(q, k, window=4), -1) - sinks[:, None])
    return sdpa(q, k, v, attn_mask=seen(q.shape[2], 4), scale=SCALE) * share[..., None]


def with_causal_sdpa(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    share = torch.sigmoid(torch.logsumexp((q @ k.mT * SCALE).masked_fill(~seen(q.shape[2]), -math.inf), -1) - sinks[:, None])
    return sdpa(q, k, v, is_causal=True, scale=SCALE) * share[..., None]


SPELLINGS = {gpt_oss: ("causal", 0, 0.0), flint: ("causal", 4, 0.0), paged_eager: ("causal", 0, 0.0), capped: ("causal", 0, 5.0),
             granite: ("causal", 4, 0.0), granite_kept_dim: ("causal", 0, 0.0), with_sdpa: ("causal", 4, 0.0),
             with_causal_sdpa: ("causal", 0, 0.0)}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling(spelling: Callable[..., Tensor]) -> None:
    graph, _, report = rewritten(spelling)
    found = the_attention(graph)
    assert (found["mask"], found["window"], found["softcap"]) == SPELLINGS[spelling] and found["bias"] is None, report.refused
    assert math.isclose(found["scale"], SCALE) and found["k"].meta["val"].shape[1] == KV and found["sinks"].meta["val"].shape == (HEADS,)
    left = {str(n.target) for n in graph.nodes if n.op == "call_function"}
    assert left <= {"infc.attention.default", "aten.reshape.default"}, left


def test_the_graph_of_gpt_oss() -> None:
    filecheck(rewritten(gpt_oss)[0], r"""
    CHECK:      [[SINKS:%\w+]]: f32[1,6,1,1] = weight
    CHECK:      [[ROW:%\w+]]: f32[6] = aten.reshape([[SINKS]], [-1])
    CHECK-NEXT: {{%\w+}}: f32[B,6,S,8] = infc.attention(%x, %y, %z, None, 0.25, 'causal', 0, 0.0, sinks=[[ROW]])
    CHECK-NOT:  cat
    """)


@pytest.mark.parametrize("spelling", [gpt_oss, granite], ids=lambda f: f.__name__)
def test_in_bf16(spelling: Callable[..., Tensor]) -> None:
    graph, _, _ = rewritten(spelling, SINKS.bfloat16(), torch.bfloat16)
    assert the_attention(graph)["sinks"].meta["val"].dtype == torch.bfloat16


def test_the_shift_by_the_largest_alone() -> None:
    """As MiMo's layers without sinks have it."""
    def shifted(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = masked(q, k)
        return torch.softmax(scores - scores.max(-1, keepdim=True).values, -1) @ v

    found = the_attention(rewritten(shifted)[0])
    assert (found["mask"], found["sinks"]) == ("causal", None)


def test_what_a_row_that_sees_nothing_gives() -> None:
    """With a column 0 before and after, and nothing to note; as softmax times a factor NaN before, 0 after, and a note."""
    hidden = torch.zeros(7, 7, dtype=torch.bool)
    hidden[3] = True

    def column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch.softmax(joined((q @ k.mT).masked_fill(hidden, -math.inf), sinks), -1)[..., :-1] @ v

    def factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ v * torch.sigmoid(torch.logsumexp(scores, -1) - sinks[:, None]).unsqueeze(-1)

    for fn in (column, factor):
        graph = trace(Attention(fn).eval(), *sample(2, 7))
        load("canonicalize").apply(graph)
        before = graph.copy()
        assert PASS.apply(graph) == 1 and the_attention(graph)["sinks"] is not None
        (old,), (new,) = before.run(*sample(2, 7)), graph.run(*sample(2, 7))
        assert bool((new[:, :, 3] == 0).all()) and bool(old[:, :, 3].isnan().all()) == (fn is factor)
        assert (NOTE_EMPTY_ROWS in graph.meta.get("notes", [])) == (fn is factor)


def test_the_contract_sees_the_sinks() -> None:
    """Left out, exchanged between heads, or scaled: another function."""
    graph, before, _ = rewritten(gpt_oss)
    (node,) = [n for n in graph.nodes if n.target is infc.attention.default]
    reference = Reference(before, [sample(2, 7)])
    name = next(iter(graph.weights))
    for wrong in (graph.weights[name].flip(1), graph.weights[name] * SCALE):
        changed = graph.copy()
        changed.weights[name] = wrong
        with pytest.raises(Broken, match="another function"): check_exact(reference, before, changed)
    node.kwargs = {}
    with pytest.raises(Broken, match="another function"): check_exact(reference, before, graph)


# ----------------------------------------------------------------------------------------------------------- look-alikes

def column(how: str) -> Callable[..., object]:
    """gpt_oss with one thing changed."""
    def fn(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> object:
        scores, b, s = masked(q, k), q.shape[0], q.shape[2]
        if how == "one for all heads": return torch.softmax(torch.cat((scores, sinks[:1].expand(b, HEADS, s, 1)), -1), -1)[..., :-1] @ v
        if how == "one for each token": sinks = q.mean(-1, keepdim=True)                      # Inkling: a projection of the token
        elif how == "two a head": sinks = sinks.reshape(1, -1, 1, 1).expand(b, -1, s, 2)
        elif how == "heads in the place of channels": sinks = q[..., :1] * sinks[None, :, None, None]
        else: sinks = sinks.reshape(1, -1, 1, 1).expand(b, -1, s, 1)
        if how == "in front": return torch.softmax(torch.cat((sinks, scores), -1), -1)[..., :-1] @ v
        logits = torch.cat((scores, sinks), -1)
        if how == "mask after it": logits = logits.masked_fill(logits > 1e3, -math.inf)
        if how == "scaled with it": logits = logits * 0.5
        if how == "another axis": return torch.softmax(logits, -2)[..., :-1] @ v
        if how == "less its mean": logits = (logits - logits.mean(-1, keepdim=True)).square()
        weights = torch.softmax(logits, -1)
        if how == "other columns": return weights[..., 1:] @ v
        if how == "two a head": return weights[..., :-2] @ v
        if how == "nothing cut": return weights @ torch.cat((v, v[:, :, :1]), 2)
        if how == "cut twice": return weights[..., :-1][..., :-1] @ v[:, :, 1:]
        if how == "its weight returned": return weights[..., :-1] @ v, weights[..., -1]
        return weights[..., :-1] @ v

    return fn


COLUMNS = ("one for all heads", "one for each token", "two a head", "heads in the place of channels", "in front", "mask after it",
           "scaled with it", "another axis", "less its mean", "other columns", "nothing cut", "cut twice",
           "its weight returned")


@pytest.mark.parametrize("how", COLUMNS)
def test_what_only_looks_like_a_column_of_sinks_stays(how: str) -> None:
    graph, report = captured(column(how)), Report(PASS.name)
    before = text(graph)
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    if how not in ("another axis", "less its mean"): assert report.refused, "it is told nowhere"


def test_the_column_that_was_changed_is_one() -> None:
    assert the_attention(rewritten(column("as it is"))[0])["sinks"] is not None


def factor(how: str) -> Callable[..., object]:
    """granite with one thing changed."""
    def fn(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> object:
        scores = masked(q, k)
        by = sinks[:, None]
        if how == "one for each token": by = q.mean(-1)
        summed = masked(q, k, window=3) if how == "of other scores" else scores
        if how == "of shifted scores": summed = scores - scores.max(-1, keepdim=True).values
        total = torch.logsumexp(summed, -2 if how == "another axis" else -1)
        share = torch.sigmoid(by - total if how == "the other way round" else total - by)
        if how == "another function": share = torch.tanh(total - by)
        if how == "times a half": share = torch.sigmoid((total - by) * 0.5)
        y = torch.softmax(scores, -1) @ v
        if how == "added": return y + share[..., None]
        if how == "of the result too": return y * share[..., None], y
        if how == "returned": return y * share[..., None], share
        return y * share[..., None]

    return fn


FACTORS = ("one for each token", "another axis", "the other way round", "another function", "times a half", "added", "of shifted scores",
           "of other scores", "of the result too", "returned")


@pytest.mark.parametrize("how", FACTORS)
def test_what_only_looks_like_a_factor_of_sinks_stays(how: str) -> None:
    graph, report = captured(factor(how)), Report(PASS.name)
    before = text(graph)
    assert PASS.apply(graph, report) == 0 and text(graph) == before and report.refused


def test_the_factor_that_was_changed_is_one() -> None:
    assert the_attention(rewritten(factor("as it is"))[0])["sinks"] is not None


@pytest.mark.parametrize("how", ["scale", "mask", "keys", "queries", "soft-cap"])
def test_an_sdpa_times_the_factor_of_other_scores_keeps_it(how: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = (v if how == "queries" else q) @ (v if how == "keys" else k).mT * (0.5 if how == "scale" else SCALE)
        if how == "soft-cap": scores = 5.0 * torch.tanh(scores / 5.0)
        scores = scores.masked_fill(~seen(q.shape[2], 3 if how == "mask" else 0), -math.inf)
        share = torch.sigmoid(torch.logsumexp(scores, -1) - sinks[:, None])
        return sdpa(q, k, v, attn_mask=seen(q.shape[2]), scale=SCALE) * share[..., None]

    graph, _, _ = rewritten(fn)
    assert the_attention(graph)["sinks"] is None and any("sigmoid" in str(n.target) for n in graph.nodes)
