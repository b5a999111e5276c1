"""quantize_kv: caches become codes and scales, within half a step and a stated divergence; what does not fit is refused."""
import pytest
import torch
from decoders import OneLayer, before, captured, llama
from golden import filecheck
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.ir import Graph, fake_propagate, text, verify
from infc.compiler.ops import aten
from infc.compiler.ops.codes import E4M3_MAX
from infc.compiler.ops.kv_quantized import FORMATS, read, stored
from infc.compiler.ops.registry import by_name, cost_of
from infc.compiler.quant.kv import KvPlan, parse_kv
from infc.compiler.rewrite import Report, emit
from infc.compiler.step_batch import Pool, step_inputs
from infc.passes import load, narrow_dtype, quantize_kv
from step_decoders import decoder
from torch import Tensor, nn

PASS = quantize_kv.PASS


def step(model: nn.Module | None = None) -> Graph:
    return before(captured(model or llama()), "quantize_kv")


def quantized(graph: Graph, kv: str, fires: int) -> Graph:
    """The graph after the pass, which kept its contract."""
    after, report = graph.copy(), Report(PASS.name, options={"kv": parse_kv(kv)})
    assert PASS.apply(after, report) == fires, report.refused
    verify(after)
    fake_propagate(after)
    assert quantize_kv.check(graph, after).error > 0
    return after


def test_caches_become_codes_with_scales_behind_them():
    graph = quantized(step(), "int8", 2)
    assert graph.kv == [f"{which}_{what}_{layer}" for layer in (0, 1) for which in "kv" for what in ("cache", "scale")]
    filecheck(graph, r"""
    CHECK:      %k_cache_0: i8[P,2,32,8] = kv
    CHECK-NEXT: %k_scale_0: f32[P,2,32,1] = kv
    CHECK-NEXT: %v_cache_0: i8[P,2,32,8] = kv
    CHECK-NEXT: %v_scale_0: f32[P,2,32,1] = kv
    CHECK-NEXT: %k_cache_1: i8[P,2,32,8] = kv
    CHECK:      [[Q:%\w+]]: f32[T,4,8] = infc.rope_kv_write_quantized({{.*}}, %k_cache_0, %k_scale_0, %v_cache_0, %v_scale_0, %slots,
    CHECK-SAME: 4, 2, False, 'int8')
    CHECK-NEXT: f32[T,32] = infc.paged_attention_quantized([[Q]], %k_cache_0, %k_scale_0, %v_cache_0, %v_scale_0, %query_start,
    CHECK-SAME: 0.35{{\d+}})
    CHECK-NOT:  infc.paged_attention(
    CHECK-NOT:  infc.rope_kv_write(
    """)
    again = text(graph)
    assert PASS.apply(graph, Report(PASS.name, options={"kv": KvPlan()})) == 0 and text(graph) == again


def test_the_first_and_last_layers_stay_wide():
    graph = quantized(step(llama(layers=4)), "int8:keep=1", 2)
    dtypes = [graph.placeholders[f"k_cache_{layer}"].meta["val"].dtype for layer in range(4)]
    assert dtypes == [torch.float32, torch.int8, torch.int8, torch.float32] and "k_scale_0" not in graph.kv


def test_r24_a_format_for_each_layer():
    graph = quantized(step(llama(layers=4)), "fp8,none,int8,none", 2)
    dtypes = [graph.placeholders[f"v_cache_{layer}"].meta["val"].dtype for layer in range(4)]
    assert dtypes == [torch.float8_e4m3fn, torch.float32, torch.int8, torch.float32]


def test_r24_formats_and_windows_that_differ_share_used_blocks():
    """Every byte 0xFF that no token wrote, then blocks full of another sequence: 30 tokens past the window, as in a pool of its own."""
    graph = quantized(decoder("rewrite_attention", "page_kv_cache", "sample_tokens", windows=(0, 8, 0, 8)), "fp8,none,int8,none", 2)
    texts = [torch.randint(graph.meta["vocab_size"], (39,), generator=torch.Generator().manual_seed(n)) for n in range(2)]

    def poisoned() -> list[Tensor]:
        caches = Pool(3).caches(graph)
        for cache in caches: cache.view(torch.uint8).fill_(0xFF)
        return caches

    def run(tokens: Tensor, caches: list[Tensor]) -> Tensor:
        stream, rows = Pool(3).stream(tokens), []
        for count in (9, *[1] * 30):
            given = step_inputs([(stream, count)], padding=1)
            given |= {"sample_rows": given["query_start"][1:] - 1, "temperature": torch.zeros(1), "top_p": torch.ones(1),
                      "top_k": torch.zeros(1, dtype=torch.int32), "uniform": torch.zeros(1)}
            rows.append(graph.run(*(given[name] for name in graph.inputs), *caches)[graph.outputs.index("logits")])
        return torch.cat(rows)

    used = poisoned()
    run(texts[0], used)
    first, second = run(texts[1], poisoned()), run(texts[1], used)
    assert first.shape == (31, graph.meta["vocab_size"]) and bool(first.isfinite().all()) and torch.equal(first, second)


def test_without_rotary_positions_and_with_windows():
    graph = quantized(decoder("rewrite_attention", "page_kv_cache", "sample_tokens", windows=(0, 5), learned_positions=128), "int8", 2)
    filecheck(graph, r"""
    CHECK:      infc.kv_write_quantized({{.*}}, %k_cache_0, %k_scale_0, %v_cache_0, %v_scale_0, %slots, 'int8')
    CHECK:      infc.paged_attention_quantized({{.*}}, %k_cache_1, %k_scale_1, %v_cache_1, %v_scale_1, {{.*}}, 0.35{{\d+}}, 5
    """)


def test_sinks_stay_with_their_attention_and_wide():
    passes = ("fold_constants", "rewrite_attention", "page_kv_cache", "sample_tokens")
    graph = quantized(decoder(*passes, windows=(0, 5), sinks=True), "int8", 2)
    was = graph.copy()
    assert narrow_dtype.PASS.apply(graph)
    assert narrow_dtype.check(was, graph).error > 0
    first, second = (n for n in graph.nodes if "paged_attention_quantized" in str(n.target))
    assert second.args[9] == 5 and first.kwargs["sinks"] is not second.kwargs["sinks"]
    for node in (first, second):
        held = node.kwargs["sinks"].meta["val"]
        assert (tuple(held.shape), held.dtype) == ((4,), torch.float32)


def test_narrow_dtype_leaves_codes_and_scales_alone():
    graph = quantized(step(llama(layers=3)), "int8:keep=1", 1)
    was = graph.copy()
    assert narrow_dtype.PASS.apply(graph) == 3 * 4 + 1 + 3                       # weights, the tied one, three attentions
    verify(graph)
    fake_propagate(graph)
    assert narrow_dtype.check(was, graph).error > 0
    filecheck(graph, r"""
    CHECK:      %k_cache_0: bf16[P,2,32,8] = kv
    CHECK:      %k_cache_1: i8[P,2,32,8] = kv
    CHECK-NEXT: %k_scale_1: f32[P,2,32,1] = kv
    CHECK:      %k_cache_2: bf16[P,2,32,8] = kv
    CHECK:      [[Q:%\w+]]: bf16[T,4,8] = infc.rope_kv_write_quantized({{.*}}, 'int8', out_dtype=bf16)
    CHECK-NEXT: bf16[T,32] = infc.paged_attention_quantized([[Q]], {{.*}}, out_dtype=bf16)
    """)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_steps_give_what_one_prompt_gives(kv):
    """Chunked, token by token, beside others, in blocks anywhere: each row is rounded by itself, so nothing but the order of sums moves."""
    graph = quantized(step(), kv, 2)
    index = graph.outputs.index("logits")
    prompts = [torch.randint(48, (n,), generator=torch.Generator().manual_seed(n)) for n in (41, 35)]

    def run(plan: list[dict[int, int]], seed: int) -> list[Tensor]:
        pool = Pool(8, seed)
        streams, caches, last = [pool.stream(p) for p in prompts], pool.caches(graph), {}
        for counts in plan:
            given = step_inputs([(streams[n], count) for n, count in counts.items()], padding=2, empty=1)
            rows = len(counts)
            given |= {"sample_rows": given["query_start"][1:rows + 1] - 1, "temperature": torch.zeros(rows), "top_p": torch.ones(rows),
                      "top_k": torch.zeros(rows, dtype=torch.int32), "uniform": torch.zeros(rows)}
            logits = graph.run(*(given[name] for name in graph.inputs), *caches)[index]
            last |= dict(zip(counts, logits, strict=True))
        return [last[n] for n in range(2)]

    whole = run([{0: 41}, {1: 35}], 0)
    for found in (run([{0: 41, 1: 35}], 1), run([{1: 30, 0: 7}, {0: 33}, {0: 1, 1: 1}, {1: 4}], 2)):
        for a, b in zip(found, whole, strict=True): torch.testing.assert_close(a, b, rtol=0, atol=2e-3 * float(b.abs().max()))


# --------------------------------------------------------------------------------------------------------------- refusals

def refuses(graph: Graph, reason: str, kv: str = "int8", layers: int = 0) -> None:
    written, report = text(graph), Report(PASS.name, options={"kv": parse_kv(kv)})
    assert PASS.apply(graph, report) == layers and (layers or text(graph) == written)
    assert any(reason in r for r in report.refused.values()), report.refused


def test_refuses_a_cache_that_others_read():
    graph = step(OneLayer())
    extra = emit(graph, aten.neg.default, (graph.placeholders["v_cache_0"],), like=graph.output)
    graph.output.args = ((*graph.output.args[0], extra),)
    graph.outputs.append("v")
    refuses(graph, "%v_cache_0 is also used by %neg")


def test_refuses_a_cache_that_is_narrow_already():
    graph = step(OneLayer())
    for name in ("k_cache_0", "v_cache_0"):
        graph.placeholders[name].meta["val"] = graph.placeholders[name].meta["val"].to(torch.int8)
    refuses(graph, "%k_cache_0 is torch.int8, not wide")


def test_does_nothing_unasked_or_without_a_cache():
    for graph, kv in ((step(), "none"), (captured(llama()), "int8")):
        written = text(graph)
        assert PASS.apply(graph, Report(PASS.name, options={"kv": parse_kv(kv)})) == 0 and text(graph) == written


@pytest.mark.parametrize(("kv", "reason"), [
    ("int8:keep=1", "keeps the first and last 1 layers wide, which are all 2 layers"),
    ("int8,none,int8", "names 3 layers, the model has 2 with a KV cache"),
    ("fp8,none,int8", "names 3 layers, the model has 4 with a KV cache"),
    ("int8:keep=2", "keeps the first and last 2 layers wide, which are all 4 layers"),
])
def test_r24_a_plan_that_does_not_fit_the_model(kv, reason):
    """Too many formats and too few."""
    graph = step(llama(layers=4) if "4" in reason else None)
    written = text(graph)
    with pytest.raises(UserError, match=reason): PASS.apply(graph, Report(PASS.name, options={"kv": parse_kv(kv)}))
    assert text(graph) == written


@pytest.mark.parametrize("kv", ["int4", "int8:keep", "int8:keep=-1", "int8:keep=2:3", "int8,int4", "", "INT8", "none:keep=1"])
def test_unknown_spellings(kv):
    with pytest.raises(UserError, match="unknown KV format"): parse_kv(kv)


def test_spellings_and_back():
    for kv in ("int8", "fp8:keep=2", "int8,none,fp8"): assert str(parse_kv(kv)) == kv
    assert parse_kv("none") is None and parse_kv("none,none") is None


# ------------------------------------------------------------------------------------------------------------- the check

def spoilt(node, graph: Graph, what: str) -> None:
    """One thing wrong with the layer that `node` writes."""
    args = list(node.args)
    at = [a.name for a in node.target._schema.arguments].index("k_scale")
    if what == "scales swapped": args[at], args[at + 2] = args[at + 2], args[at]
    if what == "another layer's scales": args[at] = graph.placeholders["k_scale_1"]
    node.args = tuple(args)


@pytest.mark.parametrize("what", ["scales swapped", "another layer's scales"])
def test_the_check_sees_wrong_wiring(what):
    was = step()
    graph = quantized(was, "int8", 2)
    write = next(n for n in graph.nodes if "kv_write" in n.name)
    spoilt(write, graph, what)
    with pytest.raises(CheckFailed, match="reads caches or scales other than those that"): quantize_kv.check(was, graph)


def test_the_check_sees_steps_that_are_too_coarse(monkeypatch):
    was = step()
    graph = quantized(was, "int8", 2)

    def coarse(x: Tensor, cache: Tensor, scales: Tensor, slots: Tensor, format: str) -> None:
        codes, scale = stored(x, format)
        for value, into in ((codes // 4 * 4, cache), (scale, scales)): kv_quantized.write(value, into, slots)

    from infc.compiler.ops import kv_quantized

    monkeypatch.setattr(kv_quantized, "_write", coarse)
    with pytest.raises(CheckFailed, match=r"rope_kv_write_quantized.*: a value of k is held .* steps off, and 0.5 is allowed"):
        quantize_kv.check(was, graph)


def test_every_prefix_of_its_rewrites_runs():
    was = step(llama(layers=3))
    for budget in range(4):
        graph = was.copy()
        assert PASS.apply(graph, Report(PASS.name, options={"kv": KvPlan()}, budget=budget)) == budget
        verify(graph)
        fake_propagate(graph)
        for sample in graph.sample_inputs(): graph.run(*map(torch.clone, sample))


# --------------------------------------------------------------------------------------------------------- the operators

ROWS = st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, format=st.sampled_from(sorted(FORMATS)))
def test_a_row_is_held_within_half_a_step(rows, format):
    x = torch.tensor(rows)
    codes, scale = stored(x, format)
    assert codes.dtype == FORMATS[format] and scale.shape == (len(rows), 1) and bool((scale >= 0).all() & scale.isfinite().all())
    off = (read(codes, scale, torch.float64) - x.double()).abs()
    unit = scale.double() if format == "int8" else torch.maximum(x.double().abs(), scale.double() * 2.0**-6)
    assert bool((off <= quantize_kv.HALF[format] * unit + 1e-30).all())


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_r19_zeros_are_exact_and_what_is_not_finite_is_not_hidden(format):
    x = torch.tensor([[0.0, 0, 0, 0], [0, 3, -3, 0], [torch.nan, 1, 2, 3], [torch.inf, 1, 2, 3], [1e-38, 0, 0, 0]])
    codes, scale = stored(x, format)
    meant = read(codes, scale, torch.float32)
    assert torch.equal(meant[0], x[0]) and torch.equal(meant[1], x[1]) and bool(meant[4].abs().max() <= 1e-38)
    assert bool(meant[2].isnan().all()) and not bool(meant[3].isfinite().any())
    assert float(codes[1].float().abs().max()) == (127 if format == "int8" else E4M3_MAX)


def test_costs_count_codes_and_scales():
    graph = quantized(step(), "int8", 2)
    attention, write = (next(n for n in graph.nodes if what in n.name) for what in ("paged_attention", "kv_write"))
    assert cost_of(attention).key_bytes == 2 * 2 * (8 + 4)                        # k and v, two heads, 8 codes and a scale
    assert cost_of(attention).pair_flops == 4 * (2 * 8 + 2 * 8 + 7)
    tokens = graph.placeholders["slots"].meta["val"].shape[0]
    assert cost_of(write).kv == tokens * 2 * 2 * (8 + 4)


def test_opcheck():
    slots = torch.tensor([3, -1, 40], dtype=torch.int32)
    caches = [part for _ in "kv" for part in (torch.zeros(2, 2, 32, 16, dtype=torch.int8), torch.zeros(2, 2, 32, 1))]
    x = torch.randn(3, 2, 16)
    angle = torch.randn(3, 8)
    table = (torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(by_name("infc::kv_write_quantized").call, (x, x, *caches, slots, "int8"), test_utils=tests)
    torch.library.opcheck(by_name("infc::rope_kv_write_quantized").call,
                          (torch.randn(3, 8 * 16), angle.cos(), angle.sin(), *caches, slots, 4, 2, False, "int8"), test_utils=tests)
    torch.library.opcheck(by_name("infc::paged_attention_quantized").call, (torch.randn(3, 4, 16), *caches, *table, 0.25), test_utils=tests)


def test_the_pass_is_left_out_unasked():
    from infc import passes

    assert "quantize_kv" not in [p.name for p in passes.pipeline("bf16")]
    names = [p.name for p in passes.pipeline("bf16", kv=True)]
    assert names[-2:] == ["quantize_kv", "narrow_dtype"] and load("quantize_kv") is PASS


