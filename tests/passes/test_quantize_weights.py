"""quantize_weights: codes and scales in place of matrices, each once, none further off than its bound; a wrong scale is named."""
from functools import cache

import pytest
import torch
from decoders import VOCABULARY, before, captured, llama
from golden import filecheck, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.ops import infc
from infc.compiler.quant.plan import METHODS, Plan
from infc.compiler.quant.rounding import Quantized, round_to_nearest
from infc.compiler.quant.scheme import Scheme, parse
from infc.compiler.rewrite import Report
from infc.passes import fuse_linear_epilogue, load, quantize_weights
from torch import nn

PASS = quantize_weights.PASS
WINDOWS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()


@cache
def made(**changes):
    return before(captured(llama(**changes)), "smooth_channels")


def step(**changes):
    return made(**changes).copy()


def quantized(graph, scheme="w4", method="rtn", budget=None):
    """(the changed graph, its report, how often the pass fired)."""
    after = graph.copy()
    report = Report(PASS.name, options={"quantization": Plan(parse(scheme), method, WINDOWS)}, budget=budget)
    return after, report, PASS.apply(after, report)


def test_codes_and_scales_stand_where_the_weight_stood():
    after, _, fired = quantized(step(), "w4:asym")
    assert fired == 2 * 4 + 1
    verify(after)
    fake_propagate(after)
    filecheck(after, r"""
    CHECK:      [[EC:%\w+]]: u8[48,32] = weight
    CHECK-NEXT: [[ES:%\w+]]: f16[48,1] = weight
    CHECK:      [[C:%\w+qkv\w+codes]]: u8[64,16] = weight
    CHECK-NEXT: [[S:%\w+]]: f16[64,1] = weight
    CHECK-NEXT: [[O:%\w+]]: f16[64,1] = weight
    CHECK:      [[W:%\w+]]: f32[64,32] = infc.dequantize([[C]], [[S]], [[O]], 4, 32, 32, f32)
    CHECK-NEXT: [[E:%\w+]]: f32[48,32] = infc.dequantize([[EC]], [[ES]], None, 8, 32, 32, f32)
    CHECK:      aten.embedding([[E]],
    CHECK:      infc.linear({{.*}}, [[W]])
    CHECK:      infc.linear({{.*}}, [[E]])
    """)


def test_e4m3_codes_are_of_their_own_type_and_head_and_table_are_e4m3_too():
    after, _, fired = quantized(step(), "fp8")
    assert fired == 2 * 4 + 1
    verify(after)
    fake_propagate(after)
    filecheck(after, r"""
    CHECK:      [[EC:%\w+]]: f8e4m3[48,32] = weight
    CHECK-NEXT: [[ES:%\w+]]: f16[48,1] = weight
    CHECK:      [[C:%\w+qkv\w+codes]]: f8e4m3[64,32] = weight
    CHECK-NEXT: [[S:%\w+]]: f16[64,1] = weight
    CHECK:      [[W:%\w+]]: f32[64,32] = infc.dequantize([[C]], [[S]], None, 8, 0, 32, f32)
    CHECK-NEXT: [[E:%\w+]]: f32[48,32] = infc.dequantize([[EC]], [[ES]], None, 8, 0, 32, f32)
    CHECK:      aten.embedding([[E]],
    CHECK:      infc.linear({{.*}}, [[W]])
    CHECK:      infc.linear({{.*}}, [[E]])
    """)


def test_without_a_plan_nothing_happens():
    graph = step()
    was = text(graph)
    assert PASS.apply(graph) == 0 and text(graph) == was


@pytest.mark.parametrize(("scheme", "method"), [*((s, "rtn") for s in ("w8", "w4:g128", "w8a8")), *(("w4", m) for m in METHODS),
                                                ("w4:channel:asym", "gptq"),
                                                *((s, m) for s in ("fp8", "fp8:g32", "fp8:tensor") for m in ("rtn", "mse"))])
def test_keeps_its_bound(scheme, method):
    was = step()
    after, _, _ = quantized(was, scheme, method)
    found = PASS.check(was, after)
    assert 0 < found.error <= found.bound == 2


@given(st.integers(0, 8), st.sampled_from(["w8", "w4", "w4:asym", "w4:g128", "fp8"]), st.sampled_from(["rtn", "gptq"]), st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_a_doubled_scale_is_caught_and_named(which, scheme, method, row):
    """Of one weight, and even of one row of it."""
    was = step()
    after, _, _ = quantized(was, scheme, "rtn" if scheme == "fp8" else method)
    node = [n for n in after.nodes if n.target is infc.dequantize.default][which]
    name = str(node.args[1].target)
    after.weights[name] = after.weights[name].clone()
    after.weights[name][row] *= 2
    with pytest.raises(CheckFailed, match=rf"{name.removesuffix('_scale')} \(.*\) is .* off its wide values in row {row} .* 2 times"):
        PASS.check(was, after)


def test_scales_that_are_not_finite_are_caught():
    was = step()
    after, _, _ = quantized(was)
    name = next(name for name in after.weights if name.endswith("gate_up_proj_weight_scale"))
    after.weights[name] = torch.full_like(after.weights[name], torch.nan)
    with pytest.raises(CheckFailed, match=name.removesuffix("_scale")): PASS.check(was, after)


# ------------------------------------------------------------------------------------------------- shared, odd and bad weights

class Tied(nn.Module):
    """One matrix that is looked up and multiplied (FIELD R22)."""

    def __init__(self, both: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.both = nn.Embedding(11, 40), both

    def forward(self, ids):
        y = nn.functional.linear(self.embed(ids), self.embed.weight)
        return y + self.embed.weight.sum() if self.both else y


def tied(**changes):
    graph = trace(Tied(**changes), torch.tensor([[1, 2, 3]]), names=("ids",))
    fuse_linear_epilogue.PASS.apply(graph)
    return graph


def test_a_tied_weight_is_quantized_once_and_stored_once():
    was = tied()
    after, report, fired = quantized(was, "w4")
    assert fired == 1 and not report.refused
    assert len(after.weights) == 2
    dequantized = [n for n in after.nodes if n.target is infc.dequantize.default]
    assert len(dequantized) == 1 and len(dequantized[0].users) == 2
    codes = next(w for name, w in after.weights.items() if name.endswith("codes"))
    assert codes.shape == (11, 40)                                      # what is looked up keeps eight bits, and the head with it
    w = next(iter(was.weights.values()))
    expected = round_to_nearest(w, Scheme(8)).dequantized()
    assert torch.equal(after.run(torch.tensor([[1, 2, 3]]))[0], nn.functional.linear(expected[[1, 2, 3]], expected)[None])


class ThreeReaders(nn.Module):
    """One matrix under three spellings and two names: looked up, multiplied by a layer, and multiplied transposed (FIELD R22)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach())      # the same memory, another Parameter

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x) + torch.matmul(x.tanh(), self.embed.weight.transpose(0, 1))


@pytest.mark.parametrize("scheme", ["w8", "w4:asym", "fp8", "fp8:tensor"])
def test_three_readers_of_one_matrix_read_one_rounding_of_it(scheme):
    model, ids = ThreeReaders(), torch.tensor([[1, 2, 3, 10]])
    was = trace(model, ids, names=("ids",))
    for name in ("canonicalize", "fuse_linear_epilogue"): load(name).apply(was)
    assert len(was.weights) == 1
    after, report, fired = quantized(was, scheme)
    assert fired == 1 and not report.refused
    assert sum(w.nbytes for w in after.weights.values()) < sum(w.nbytes for w in was.weights.values()) / 2
    w = round_to_nearest(model.embed.weight.detach(), parse("w8" if scheme == "w4:asym" else scheme)).dequantized().double()
    x = w[ids]
    torch.testing.assert_close(after.run(ids)[0].double(), x @ w.T + x.tanh() @ w.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", ["fp8", "fp8:tensor"])
def test_a_tied_weight_in_e4m3_is_stored_once(scheme):
    was = tied()
    after, _, _ = quantized(was, scheme)
    assert sorted(str(w.dtype) for w in after.weights.values()) == ["torch.float16", "torch.float8_e4m3fn"]
    expected = round_to_nearest(next(iter(was.weights.values())), parse(scheme)).dequantized()
    assert torch.equal(after.run(torch.tensor([[1, 2, 3]]))[0], nn.functional.linear(expected[[1, 2, 3]], expected)[None])


def test_a_weight_that_is_no_matrix_to_all_is_refused():
    graph = tied(both=True)
    was = text(graph)
    after, report, fired = quantized(graph)
    assert fired == 0 and text(after) == was
    assert list(report.refused.values()) == ["also used by %sum_1"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(bad):
    graph = step()
    name = next(name for name in graph.weights if name.endswith("down_proj_weight"))
    graph.weights[name] = graph.weights[name].clone()
    graph.weights[name][3, 5] = bad
    with pytest.raises(UserError, match=rf"^{name}: 1 value is not finite, the first at \[3, 5\]"): quantized(graph)


@pytest.mark.parametrize("width", [40, 48, 17 * 4])
@pytest.mark.parametrize("scheme", ["w4", "w4:g64:asym", "w8:g128", "fp8:g64"])
def test_rows_that_groups_do_not_divide(width, scheme):
    was = step(hidden_size=width)
    after, _, _ = quantized(was, scheme)
    found = PASS.check(was, after)
    assert 0 < found.error <= 1


@pytest.mark.parametrize("scheme", ["w4:asym", "w4:channel"])
@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zeros_by_every_method(scheme, method):
    """FIELD R19: rows of zeros, a column, and a whole weight, as pruning leaves them."""
    was = step()
    names = {part: next(n for n in was.weights if n.endswith(f"layers_0_{part}_weight")) for part in ("mlp_down_proj", "self_attn_o_proj")}
    for name in names.values(): was.weights[name] = was.weights[name].clone()
    down, o = (was.weights[name] for name in names.values())
    down[3], down[:, 7], o[:] = 0, 0, 0
    after, _, _ = quantized(was, scheme, method)
    assert PASS.check(was, after).error <= 2
    found = {str(node.args[0].target).removesuffix("_codes"): node for node in after.nodes if node.target is infc.dequantize.default}
    means = {part: infc.dequantize.default(*(None if a is None else after.weights[str(a.target)] for a in found[name].args[:3]),
                                           *found[name].args[3:]) for part, name in names.items()}
    assert torch.equal(means["self_attn_o_proj"], torch.zeros(32, 32)) and torch.equal(means["mlp_down_proj"][3], torch.zeros(48))
    assert all(bool((after.weights[str(node.args[1].target)] > 0).all()) for node in found.values())
    for sample in after.sample_inputs():
        for ours, theirs in zip(after.run(*map(torch.clone, sample)), was.run(*map(torch.clone, sample)), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())


def test_stops_where_it_is_told_to():
    graph = step()
    _, _, fired = quantized(graph, budget=3)
    assert fired == 3


def test_a_plans_own_codes_are_taken():
    """What the plan gives is what is stored: nothing is rounded again."""
    class Doubling(Plan):
        def quantize(self, w, scheme, name, inputs=None):
            found = round_to_nearest(w, scheme, name)
            return Quantized(found.codes, found.scale * 2, found.offset, scheme, found.k)

    was = step()
    after = was.copy()
    PASS.apply(after, Report(PASS.name, options={"quantization": Doubling(Scheme(4))}))
    with pytest.raises(CheckFailed, match="times what rounding to nearest gives"): PASS.check(was, after)
