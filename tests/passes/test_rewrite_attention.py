"""rewrite_attention: every spelling x every mask, masks told by value, head expansion but never tiling (FIELD R01, R02, R04, R07, R10)."""
import math
from collections.abc import Callable

import pytest
import torch
from golden import filecheck, trace
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import Graph, text, verify
from infc.compiler.masks import LARGEST
from infc.compiler.ops import infc
from infc.compiler.ops.registry import arguments
from infc.compiler.rewrite import Report
from infc.passes.canonicalize import PASS as CANONICALIZE
from infc.passes.rewrite_attention import NOTE_EMPTY_ROWS, NOTE_PACKED, PASS
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

HEADS, KV, HEAD, SCALE = 6, 2, 8, 0.25
DYNAMIC = ({0: "B", 2: "S"},) * 3


def sample(batch: int, length: int, keys: int | None = None, kv: int = KV, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((batch, HEADS, length, HEAD), *((batch, kv, keys or length, HEAD),) * 2)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def rewritten(fn: Callable[..., Tensor], *inputs: Tensor, dynamic=DYNAMIC, canonical: bool = True,
              others: list | None = None) -> tuple[Graph, Report, Graph]:
    """(graph after the pass, its report, graph before); the contract is checked on `inputs` and `others`."""
    graph = trace(fn, *inputs, dynamic=dynamic)
    if canonical: CANONICALIZE.apply(graph)
    before, report = graph.copy(), Report(PASS.name)
    PASS.apply(graph, report)
    verify(graph)
    check_exact(Reference(before, [inputs, *(others or [])]), before, graph)
    return graph, report, before


def the_attention(graph: Graph) -> dict:
    (node,) = [n for n in graph.nodes if n.target is infc.attention.default]
    return arguments(node)


# ------------------------------------------------------------------------------------------------- spellings of the heads

def by_expand(t: Tensor, g: int) -> Tensor:
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, g, s, d).reshape(b, h * g, s, d)


def by_clone_view(t: Tensor, g: int) -> Tensor:
    b, h, s, d = t.shape
    return t.unsqueeze(2).expand(b, h, g, s, d).clone().view(b, -1, s, d)


def by_index(t: Tensor, g: int) -> Tensor:
    return t.index_select(1, torch.arange(t.shape[1] * g) // g)


def by_stack(t: Tensor, g: int) -> Tensor:
    return torch.ops.aten.repeat_interleave.self_int(t, g, 1)


def before_the_transpose(t: Tensor, g: int) -> Tensor:
    return t.transpose(1, 2).repeat_interleave(g, 2).transpose(1, 2)


EXPANSIONS = {"expand": by_expand, "clone": by_clone_view, "repeat_interleave": lambda t, g: t.repeat_interleave(g, 1), "index": by_index,
              "aten": by_stack, "transposed": before_the_transpose}


# ---------------------------------------------------------------------------------------------------- spellings of the mask

def grid(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None, :]


def causal(length: int) -> Tensor:
    i, j = grid(length)
    return j <= i


def tril(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def window(length: int) -> Tensor:
    i, j = grid(length)
    return (j <= i) & (i - j < 4)


def open_to_all(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


MASKS = {"causal": (causal, "causal", 0), "tril": (tril, "causal", 0), "window": (window, "causal", 4), "none": (open_to_all, "none", 0)}


def additive(seen: Tensor, fill: float) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, fill)


def softmax_matmul(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, how: str) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    if how == "add -inf": scores = scores * SCALE + additive(seen, -math.inf)
    if how == "add min": scores = scores / (1 / SCALE) + additive(seen, torch.finfo(torch.float32).min)
    if how == "where": scores = torch.where(seen, scores * SCALE, -math.inf)
    if how == "where tensor": scores = torch.where(seen, scores * SCALE, torch.full((), torch.finfo(scores.dtype).min))
    if how == "where hidden": scores = torch.where(~seen, -math.inf, scores * SCALE)
    if how == "fill": scores = (scores * SCALE).masked_fill(~seen, -math.inf)
    if how == "fill min": scores = (scores * SCALE).masked_fill(~seen, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def early(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    root = math.sqrt(SCALE)
    return torch.softmax(((q * root) @ (k * root).mT).masked_fill(~seen, -math.inf), -1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = 5.0 * torch.tanh(q @ k.transpose(2, 3) * SCALE / 5.0)
    return torch.softmax(scores + additive(seen, -math.inf), -1) @ v


SPELLINGS = {
    "sdpa bool": lambda q, k, v, seen: sdpa(q, k, v, attn_mask=seen, scale=SCALE),
    "sdpa 4d": lambda q, k, v, seen: sdpa(q, k, v, attn_mask=seen[None, None].expand(q.shape[0], 1, -1, -1), scale=SCALE),
    "sdpa -inf": lambda q, k, v, seen: sdpa(q, k, v, attn_mask=additive(seen, -math.inf), scale=SCALE),
    "sdpa min": lambda q, k, v, seen: sdpa(q, k, v, attn_mask=additive(seen, torch.finfo(q.dtype).min), scale=SCALE),
    **{f"softmax {how}": (lambda q, k, v, seen, how=how: softmax_matmul(q, k, v, seen, how))
       for how in ("add -inf", "add min", "where", "where tensor", "where hidden", "fill", "fill min")},
    "scaled early": early, "soft-cap": capped,
}


# every spelling and every mask in `make test`, every pair in `make test-slow`
PAIRS = [pytest.param(spelling, mask, marks=() if mask == "causal" or (i + j) % 4 == 2 else pytest.mark.slow)
         for i, spelling in enumerate(SPELLINGS) for j, mask in enumerate(MASKS)]


@pytest.mark.parametrize(("spelling", "mask"), PAIRS)
def test_every_spelling_of_every_mask(spelling, mask):
    build, kind, width = MASKS[mask]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SPELLINGS[spelling](q, by_expand(k, 3), by_expand(v, 3), build(q.shape[2]))

    graph, report, _ = rewritten(model, *sample(2, 7), others=[sample(3, 11), sample(1, 1), sample(1, 3)])
    found = the_attention(graph)
    assert (found["mask"], found["window"], found["bias"]) == (kind, width, None), report.refused
    assert math.isclose(found["scale"], SCALE) and found["softcap"] == (5.0 if spelling == "soft-cap" else 0.0)
    assert found["k"].meta["val"].shape[1] == KV and found["k"].target == "y" and found["v"].target == "z"
    assert "notes" not in graph.meta
    if spelling == "sdpa bool" and mask == "window":
        filecheck(graph, r"""
        CHECK:      [[Q:%\w+]]: f32[B,6,S,8] = input
        CHECK-NEXT: [[K:%\w+]]: f32[B,2,S,8] = input
        CHECK-NEXT: [[V:%\w+]]: f32[B,2,S,8] = input
        CHECK-NEXT: [[Y:%\w+]]: f32[B,6,S,8] = infc.attention([[Q]], [[K]], [[V]], None, 0.25, 'causal', 4, 0.0)
        CHECK-NEXT: return [[Y]]
        """)


@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("canonical", [True, False])
def test_every_head_expansion_is_undone(expansion, canonical):
    grow = EXPANSIONS[expansion]
    graph, _, _ = rewritten(lambda q, k, v: sdpa(q, grow(k, 3), grow(v, 3)), *sample(2, 7), canonical=canonical, others=[sample(3, 5)])
    assert the_attention(graph)["k"].meta["val"].shape[1] == KV


def test_grouped_sdpa_and_a_broadcast_head():
    one = lambda q: sdpa(q, q[:, :KV], q[:, KV:2 * KV], is_causal=True, enable_gqa=True)    # noqa: E731
    graph, _, _ = rewritten(one, sample(2, 7)[0], dynamic=DYNAMIC[:1])
    assert (the_attention(graph)["k"].meta["val"].shape[1], the_attention(graph)["mask"]) == (KV, "causal")
    for fn in (lambda q, k, v: sdpa(q, k.expand(-1, HEADS, -1, -1), v.expand(-1, HEADS, -1, -1)), sdpa):
        graph, _, _ = rewritten(fn, *sample(2, 7, kv=1))
        assert the_attention(graph)["k"].meta["val"].shape[1] == 1
    graph, _, _ = rewritten(sdpa, *sample(2, 7, kv=HEADS))
    assert the_attention(graph)["k"].meta["val"].shape[1] == HEADS


@pytest.mark.parametrize("tile", [lambda t: t.repeat(1, 3, 1, 1), lambda t: t.tile(1, 3, 1, 1), lambda t: torch.cat([t, t, t], 1)])
def test_r04_tiled_heads_stay_tiled(tile):
    graph, _, _ = rewritten(lambda q, k, v: sdpa(q, tile(k), tile(v)), *sample(2, 7))
    assert the_attention(graph)["k"].meta["val"].shape[1] == HEADS


def test_heads_expanded_unlike_stay():
    graph, _, _ = rewritten(lambda q, k, v: sdpa(q, by_expand(k, 3), v.repeat(1, 3, 1, 1)), *sample(2, 7))
    assert the_attention(graph)["k"].meta["val"].shape[1] == HEADS


def test_many_heads():
    q, k, v = (torch.randn(2, h, 5, 4) for h in (48, 2, 2))
    graph, _, _ = rewritten(lambda q, k, v: sdpa(q, by_expand(k, 24), by_expand(v, 24)), q, k, v)
    assert the_attention(graph)["k"].target == "y"


# ------------------------------------------------------------------------------------------------------------- alignment

TWO = ({0: "B", 2: "S"}, {0: "B", 2: "L"}, {0: "B", 2: "L"})


def rectangle(diagonal: str) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        return sdpa(q, k, v, attn_mask=j <= (i + k.shape[2] - q.shape[2] if diagonal == "bottom-right" else i))

    return fn


@pytest.mark.parametrize(("diagonal", "mask"), [("bottom-right", "causal"), ("top-left", "causal_top_left")])
def test_r02_a_rectangle_keeps_its_alignment(diagonal, mask):
    others = [sample(1, 1, 5, HEADS), sample(1, 5, 2, HEADS), sample(1, 4, 4, HEADS)]
    graph, _, _ = rewritten(rectangle(diagonal), *sample(2, 3, 5, HEADS), dynamic=TWO, others=others)
    assert (the_attention(graph)["mask"], the_attention(graph)["bias"]) == (mask, None)


def test_r02_is_causal_is_top_left_unless_square():
    fn = lambda q, k, v: sdpa(q, k, v, is_causal=True)                     # noqa: E731
    graph, _, _ = rewritten(fn, *sample(2, 2, 5, HEADS), dynamic=TWO)
    assert the_attention(graph)["mask"] == "causal_top_left"
    graph, _, _ = rewritten(lambda q: fn(q, q, q), sample(2, 5)[0], dynamic=DYNAMIC[:1])
    assert the_attention(graph)["mask"] == "causal"


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (1, 5)])
def test_r02_fixed_sizes(queries, keys):
    graph, _, _ = rewritten(rectangle("bottom-right"), *sample(2, queries, keys, HEADS), dynamic=())
    assert the_attention(graph)["mask"] == ("none" if queries == 1 else "causal")      # one query sees all keys: both names fit


# --------------------------------------------------------------------------------------------------- kept as what they are

def test_a_soft_bias_stays_a_bias():
    def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = grid(q.shape[2])
        return sdpa(q, k, v, attn_mask=additive(j <= i, -math.inf) - 0.5 * (i - j))

    graph, _, _ = rewritten(alibi, *sample(2, 5, kv=HEADS))
    found = the_attention(graph)
    assert found["mask"] == "none" and found["bias"].meta["val"].dtype == torch.float32


def test_masks_of_no_known_kind_stay_a_bias():
    blocks = lambda n: grid(n)[0] // 4 == grid(n)[1] // 4                  # noqa: E731  chunked: looks open below 4
    reach = lambda n: (grid(n)[0] - grid(n)[1]).abs() < 3                  # noqa: E731  a window both ways
    for build in (blocks, reach):
        graph, _, _ = rewritten(lambda q, k, v, build=build: sdpa(q, k, v, attn_mask=build(q.shape[2])), *sample(2, 5, kv=HEADS))
        assert the_attention(graph)["bias"].meta["val"].dtype == torch.bool


def test_a_window_is_not_causal_at_short_lengths_only():
    """At length 3 a window of 4 looks causal: probes go beyond every constant. One too large to probe is not guessed at."""
    wide = lambda n, w: (grid(n)[1] <= grid(n)[0]) & (grid(n)[0] - grid(n)[1] < w)     # noqa: E731
    graph, _, _ = rewritten(lambda q, k, v: sdpa(q, k, v, attn_mask=wide(q.shape[2], 1000)), *sample(2, 3, kv=HEADS))
    assert (the_attention(graph)["mask"], the_attention(graph)["window"]) == ("causal", 1000)
    graph, _, _ = rewritten(lambda q, k, v: sdpa(q, k, v, attn_mask=wide(q.shape[2], LARGEST + 1)), *sample(2, 3, kv=HEADS))
    assert the_attention(graph)["mask"] == "none" and the_attention(graph)["bias"] is not None


def test_two_masks_meet():
    def fn(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.mT * SCALE).masked_fill(~window(q.shape[2]), -math.inf) + additive(causal(q.shape[2]), -math.inf)
        return torch.softmax(torch.where(seen[:, None, None], scores, -math.inf), -1) @ v

    q, k, v = sample(2, 5, kv=HEADS)
    seen = torch.ones(2, 5, dtype=torch.bool)
    seen[1, 3:] = False
    graph, _, _ = rewritten(fn, q, k, v, seen, dynamic=(*DYNAMIC, {0: "B", 1: "S"}))
    found = the_attention(graph)
    assert (found["mask"], found["window"], found["bias"].meta["val"].dtype) == ("causal", 4, torch.bool)


# ------------------------------------------------------------------------------------------------------ fully masked rows

def padded(how: str) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        if how == "sdpa": return sdpa(q, k, v, attn_mask=seen, scale=SCALE)
        return softmax_matmul(q, k, v, seen, how)

    return fn


@pytest.mark.parametrize("how", ["sdpa", "fill", "fill min", "add min"])
def test_r01_what_a_fully_masked_row_gives(how):
    """SDPA: 0, stays 0. -inf: NaN becomes 0, and the graph's notes say so. finfo.min: the mean of v, and stays it."""
    q, k, v = sample(2, 6, kv=HEADS)
    seen = causal(6)[None, None].repeat(2, 1, 1, 1)
    graph = trace(padded(how), q, k, v, seen, dynamic=(*DYNAMIC, {0: "B", 2: "S", 3: "S"}))
    CANONICALIZE.apply(graph)
    before = graph.copy()
    assert PASS.apply(graph) == 1
    check_exact(Reference(before, [(q, k, v, seen)]), before, graph)
    seen[:, :, 4:] = False
    (old,), (new,) = before.run(q, k, v, seen), graph.run(q, k, v, seen)
    torch.testing.assert_close(new[:, :, :4], old[:, :, :4])
    expected = v.mean(2, keepdim=True).expand(-1, -1, 2, -1) if "min" in how else torch.zeros(2, HEADS, 2, HEAD)
    torch.testing.assert_close(new[:, :, 4:], expected)
    assert bool(old[:, :, 4:].isnan().all()) == (how == "fill")
    assert (NOTE_EMPTY_ROWS in graph.meta.get("notes", [])) == (how != "sdpa")


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_r08_a_narrow_product_is_scaled_in_fp32(late, masked):
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * (1 / math.sqrt(128)) if late else (q * (1 / math.sqrt(128))) @ k.mT
        if masked: scores = scores.masked_fill(~causal(q.shape[2]), -math.inf)
        return torch.softmax(scores, -1) @ v

    q = torch.full((1, 1, 2, 128), 40.0, dtype=torch.float16)
    graph = trace(fn, q, q, q)
    CANONICALIZE.apply(graph)
    before = graph.copy()
    assert PASS.apply(graph) == 1
    assert torch.equal(graph.run(q, q, q)[0], q) and bool(before.run(q, q, q)[0].isnan().any()) == late


def test_an_upcast_softmax_in_bf16():
    fn = lambda q, k, v: softmax_matmul(q, by_expand(k, 3), by_expand(v, 3), causal(q.shape[2]), "fill")    # noqa: E731
    graph, _, _ = rewritten(fn, *sample(2, 7, dtype=torch.bfloat16))
    assert the_attention(graph)["mask"] == "causal"


# --------------------------------------------------------------------------------------------------------------- refusals

def refusal(fn: Callable[..., object], *inputs: Tensor) -> str:
    graph = trace(fn, *inputs)
    CANONICALIZE.apply(graph)
    before, report = text(graph), Report(PASS.name)
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    return "; ".join(report.refused.values())


def test_refusals_say_why():
    q, k, v = sample(2, 5, kv=HEADS)
    hidden = ~causal(5)

    def shared(q, k, v):
        probs = torch.softmax(q @ k.mT, -1)
        return probs @ v, probs

    def scores_too(q, k, v):
        scores = q @ k.mT * 0.5
        return torch.softmax(scores, -1) @ v, scores

    def cap_last(q, k, v):
        return torch.softmax(5.0 * torch.tanh((q @ k.mT).masked_fill(hidden, -math.inf) / 5.0), -1) @ v

    def scale_last(q, k, v):
        return torch.softmax(((q @ k.mT) + additive(~hidden, -3.0)) * 0.5, -1) @ v

    assert "are also returned" in refusal(shared, q, k, v)
    assert "the scores %mul are also returned" in refusal(scores_too, q, k, v)
    assert "masks before the soft-cap" in refusal(cap_last, q, k, v)
    assert "masks before the scale" in refusal(scale_last, q, k, v)
    assert "q, k, v have 3, 3, 3 dims" in refusal(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, q[0], k[0], v[0])
    assert refusal(lambda q, k, v: torch.softmax(q, -1) + k + v, q, k, v) == ""           # no attention: nothing to say
    assert refusal(lambda x: torch.softmax(x.relu(), -1) @ x.mT, q) == ""


def test_dropout_that_is_on_is_refused():
    q, k, v = sample(2, 5, kv=HEADS)
    graph = trace(lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), q, k, v)
    report = Report(PASS.name)
    assert PASS.apply(graph, report) == 0
    assert "dropout of 0.1 is live" in "".join(report.refused.values())


def test_uneven_heads_are_refused_with_both_numbers():
    report = Report(PASS.name)
    graph = trace(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *sample(2, 5))
    node = next(n for n in graph.nodes if "scaled_dot" in str(n.target))
    for name in ("y", "z"): graph.placeholders[name].meta["val"] = torch.empty(2, 4, 5, HEAD)     # 6 / 4, which torch would not trace
    assert PASS.apply(graph, report) == 0 and node.target is torch.ops.aten.scaled_dot_product_attention.default
    assert "6 query heads do not share 4 kv heads evenly" in "".join(report.refused.values())


# ----------------------------------------------------------------------------------------------------------------- budget

def test_each_mask_is_probed_once_for_all_layers(monkeypatch):
    import infc.passes.rewrite_attention as module

    probed = []
    real = module.recognise
    monkeypatch.setattr(module, "recognise", lambda *a, **k: (probed.append(a[1]), real(*a, **k))[1])

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = causal(q.shape[2])
        for _ in range(4): q = sdpa(q, k, v, attn_mask=seen)
        return q

    graph = trace(layers, *sample(2, 5, kv=HEADS), dynamic=DYNAMIC)
    assert PASS.apply(graph) == 4 and len(probed) == 1
    assert not any("arange" in str(n.target) for n in graph.nodes)                        # the mask is gone


def test_the_budget_is_kept():
    graph = trace(lambda q, k, v: sdpa(sdpa(q, k, v), k, v), *sample(2, 5, kv=HEADS))
    assert PASS.apply(graph, Report(PASS.name, budget=1)) == 1
    assert sum(n.target is infc.attention.default for n in graph.nodes) == 1


# ------------------------------------------------------------------------------------------------------ position ids, packed

def test_a_packed_sequence_test_is_all_true_on_contiguous_positions():
    """As Hugging Face writes it since 5.0: a token sees its own segment, segments starting where positions jump."""
    def fn(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        jump = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
        segment = jump.cumsum(-1)
        i, j = grid(q.shape[2])
        seen = (j <= i) & (segment[:, None, :, None] == segment[:, None, None, :])
        return sdpa(q, k, v, attn_mask=seen)

    q, k, v = sample(2, 5, kv=HEADS)
    positions = torch.arange(5).repeat(2, 1)
    graph = trace(fn, q, k, v, positions, dynamic=(*DYNAMIC, {0: "B", 1: "S"}), names=("q", "k", "v", "position_ids"))
    before = graph.copy()
    assert PASS.apply(graph) == 1
    assert the_attention(graph)["mask"] == "causal" and graph.meta["notes"] == [NOTE_PACKED]
    check_exact(Reference(before, [(q, k, v, positions + 3)]), before, graph)


def test_masks_that_read_tokens_or_weights_stay():
    q, k, v = sample(2, 5, kv=HEADS)
    table = torch.ones(5, 5, dtype=torch.bool).tril()
    graph = trace(lambda q, k, v: sdpa(q, k, v, attn_mask=table), q, k, v)
    PASS.apply(graph)
    assert the_attention(graph)["bias"] is not None

    def pads(q: Tensor, k: Tensor, v: Tensor, input_ids: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=causal(5) & (input_ids != 0)[:, None, None])

    ids = torch.tensor([[3, 1, 2, 0, 0], [1, 2, 3, 4, 5]])
    graph = trace(pads, q, k, v, ids, names=("q", "k", "v", "input_ids"))
    PASS.apply(graph)
    assert the_attention(graph)["bias"] is not None
