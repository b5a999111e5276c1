"""narrow_dtype: weights, product inputs and caches in 16 bits; fp32 sums; no further from fp32 than eager PyTorch in those."""
import importlib
from functools import cache

import pytest
import torch
from decoders import before, captured, llama
from golden import filecheck, trace
from infc.compiler.divergence import divergences
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import argument, fake_propagate, target_name, text, verify
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import Report
from infc.passes import fuse_linear_epilogue, fuse_quantized_linear, narrow_dtype, quantize_activations, quantize_weights
from torch import nn

PASS = narrow_dtype.PASS


def step(**changes):
    return before(captured(llama(**changes)), "narrow_dtype")


def fp16() -> Report:
    return Report("narrow_dtype", options={"dtype": "fp16"})


def test_narrows_a_step_graph():
    graph = step()
    assert PASS.apply(graph) == 2 * 4 + 1 + 2                                     # weights of 2 layers, the tied one, 2 attentions
    verify(graph)
    fake_propagate(graph)
    filecheck(graph, r"""
    CHECK:      [[E:%\w+]]: bf16[48,32] = weight
    CHECK:      %k_cache_0: bf16[P,2,32,8] = kv
    CHECK:      [[X:%\w+]]: bf16[T,32] = aten.embedding([[E]],
    CHECK-NEXT: [[H:%\w+]]: f32[T,32] = aten._to_copy([[X]], dtype=f32)
    CHECK:      [[N:%\w+]]: bf16[T,32] = infc.rms_norm([[H]],
    CHECK-NEXT: [[Y:%\w+]]: f32[T,64] = infc.linear([[N]], {{.*}}, out_dtype=f32)
    CHECK-NEXT: [[Q:%\w+]]: bf16[T,4,8] = infc.rope_kv_write([[Y]], {{.*}}, out_dtype=bf16)
    CHECK-NEXT: [[A:%\w+]]: bf16[T,32] = infc.paged_attention([[Q]], {{.*}}, out_dtype=bf16)
    CHECK-NEXT: [[O:%\w+]]: f32[T,32] = infc.linear([[A]], {{.*}}, None, [[H]], out_dtype=f32)
    CHECK-NEXT: [[M:%\w+]]: bf16[T,32] = infc.rms_norm([[O]],
    CHECK-NEXT: [[G:%\w+]]: bf16[T,48] = infc.linear_swiglu([[M]], {{.*}}, out_dtype=bf16)
    CHECK-NEXT: [[D:%\w+]]: f32[T,32] = infc.linear([[G]], {{.*}}, None, [[O]], out_dtype=f32)
    CHECK:      [[L:%\w+]]: f32[R,48] = infc.linear(%{{\w+}}, [[E]], out_dtype=f32)
    CHECK-NEXT: infc.sample([[L]],
    CHECK-NOT:  dtype=bf16)
    """)
    assert PASS.apply(graph) == 0


@cache
def unquantized():
    return before(captured(llama()), "smooth_channels")


def of_codes(scheme):
    graph = unquantized().copy()
    for one in (quantize_weights.PASS, quantize_activations.PASS, fuse_quantized_linear.PASS):
        one.apply(graph, Report(one.name, options={"quantization": Plan(parse(scheme))}))
    return graph


def bf16_rows_of(graph):
    return [argument(node, "bf16_rows") for node in graph.nodes if node.target in narrow_dtype.CODED_PRODUCTS]


@pytest.mark.parametrize(("scheme", "dtype", "rows"), [
    ("w8", "bf16", 192), ("w4:asym", "bf16", 192), ("w8a8", "bf16", 0), ("w4a8:asym", "bf16", 48), ("w8:asym", "fp16", 0),
    ("w8:asym", "fp32", 0)])
def test_products_of_codes_and_many_rows_are_narrow(scheme, dtype, rows, monkeypatch):
    graph, offered = of_codes(scheme), {16: 48, 8: 48} if rows == 48 else {16: 192}
    report = Report("narrow_dtype", options={"dtype": dtype, "bf16_rows": offered})
    assert bool(PASS.apply(graph, report)) == (dtype != "fp32")                   # attentions and caches, at least
    assert bf16_rows_of(graph) == [rows] * (2 * 4 + 1)
    verify(graph)
    fake_propagate(graph)
    assert PASS.apply(graph, report) == 0
    monkeypatch.setattr(importlib.import_module("infc.compiler.ops.linear_quantized"), "BF16_MAX_K", 32)
    # rows of 48 have no such product then
    long = of_codes(scheme)
    PASS.apply(long, report)
    assert sorted(bf16_rows_of(long)) == sorted([0] * 2 + [rows] * (2 * 3 + 1))
    narrow = of_codes(scheme)
    PASS.apply(narrow, Report("narrow_dtype", options={"dtype": dtype}))          # a target without such products
    assert bf16_rows_of(narrow) == [0] * (2 * 4 + 1)


@pytest.mark.parametrize("tied", [True, False])
def test_keeps_its_bound(tied):
    was = step(tied=tied)
    graph = was.copy()
    PASS.apply(graph)
    ours, eager = divergences(was, graph)
    assert 0 < ours <= eager
    found = narrow_dtype.check(was, graph)
    assert (found.error, found.bound) == (ours, eager)
    assert all(graph.weights[n].dtype == torch.bfloat16 for n in graph.weights if graph.weights[n].dim() == 2)


def test_the_bound_catches_coarser_weights():
    was = step()
    graph = was.copy()
    PASS.apply(graph)
    graph.weights = {n: (w * 64).round() / 64 if w.dtype == torch.bfloat16 else w for n, w in graph.weights.items()}
    with pytest.raises(CheckFailed, match="KL to fp32"):
        narrow_dtype.check(was, graph)


def test_fp16_is_the_same_rewrite_with_a_bound_of_its_own():
    """Eager fp16 is the yardstick: three more bits, 64 times less KL."""
    was = step()
    wide, graph = was.copy(), was.copy()
    assert PASS.apply(graph, fp16()) == PASS.apply(wide)
    assert text(graph).replace("f16", "bf16") == text(wide)
    found = narrow_dtype.check(was, graph)
    assert 0 < found.error <= found.bound < narrow_dtype.check(was, wide).bound / 8 and "eager fp16" in found.promise


def test_what_overflows_fp16_is_refused_by_name():
    """A gate whose product passes 65504: bf16 holds it, fp16 does not."""
    was = step()
    at, = [n for n in was.nodes if target_name(n.target) == "infc.linear_swiglu"][:1]
    was.weights[str(at.args[1].target)] *= 3e4
    graph = was.copy()
    PASS.apply(graph, fp16())
    with pytest.raises(CheckFailed, match=r"%linear_swiglu overflows: its values reach \S+, and fp16 ends at 65504; use --dtype bf16"):
        narrow_dtype.check(was, graph)
    wide = was.copy()
    PASS.apply(wide)
    narrow_dtype.check(was, wide)


def test_a_cache_that_overflows_is_refused_too():
    was = step()
    at, = [n for n in was.nodes if target_name(n.target) == "infc.rope_kv_write"][:1]
    weight = was.weights[str(at.args[0].args[1].target)]
    weight[-2 * 8:] *= 1e6                                                        # the rows of v: q and k stay small
    graph = was.copy()
    PASS.apply(graph, fp16())
    with pytest.raises(CheckFailed, match="rope_kv_write overflows"): narrow_dtype.check(was, graph)


def test_a_weight_beyond_fp16_stays_wide():
    was, report = step(), fp16()
    at, = [n for n in was.nodes if target_name(n.target) == "infc.linear_swiglu"][:1]
    was.weights[str(at.args[1].target)][0, 0] = 7e4
    graph = was.copy()
    assert PASS.apply(graph, report) == 10 and graph.weights[str(at.args[1].target)].dtype == torch.float32
    assert list(report.refused.values()) == ["it holds 7e+04, and fp16 ends at 65504"]


def test_other_readers_get_a_cast_not_a_narrow_value():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x):
            y = self.a(x)
            return self.b(y), y                                                   # y is returned: it stays fp32

    graph = trace(Branch(), torch.randn(2, 16), dynamic=({0: "B"},))
    fuse_linear_epilogue.PASS.apply(graph)
    assert PASS.apply(graph) == 2
    filecheck(graph, r"""
    CHECK:      [[Y:%\w+]]: f32[B,16] = infc.linear(
    CHECK-NEXT: [[N:%\w+]]: bf16[B,16] = aten._to_copy([[Y]], dtype=bf16)
    CHECK-NEXT: [[Z:%\w+]]: f32[B,8] = infc.linear([[N]],
    CHECK-NEXT: return [[Z]], [[Y]]
    """)


def test_one_cast_serves_all_products():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.a(x), self.b(x)

    graph = trace(Two(), torch.randn(2, 16))
    fuse_linear_epilogue.PASS.apply(graph)
    PASS.apply(graph)
    assert text(graph).count("aten._to_copy") == 1


def test_refuses_a_weight_that_others_read():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return self.a(x) + self.a.weight.sum()

    graph = trace(Shared(), torch.randn(2, 16))
    fuse_linear_epilogue.PASS.apply(graph)
    written, report = text(graph), Report("narrow_dtype")
    assert PASS.apply(graph, report) == 0 and text(graph) == written
    assert "used by" in "".join(report.refused.values())


def test_does_nothing_where_fp32_was_asked_for():
    graph = step()
    written = text(graph)
    assert PASS.apply(graph, Report("narrow_dtype", options={"dtype": "fp32"})) == 0 and text(graph) == written


def test_every_prefix_of_its_rewrites_runs():
    was = step(layers=1)
    for budget in range(1, 7):
        graph = was.copy()
        assert PASS.apply(graph, Report("narrow_dtype", budget=budget)) == min(budget, 6)
        verify(graph)
        fake_propagate(graph)
        for sample in graph.sample_inputs():
            graph.run(*map(torch.clone, sample))
