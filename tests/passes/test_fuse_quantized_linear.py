"""fuse_quantized_linear: products and lookups of codes become one operator on them; the same function to the last bit of fp64."""
from functools import cache

import pytest
import torch
from decoders import before, captured, llama
from golden import filecheck, trace
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.ops import infc
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import Scheme, parse
from infc.compiler.rewrite import Report
from infc.passes import fuse_linear_epilogue, fuse_quantized_linear, quantize_activations, quantize_weights
from torch import nn

PASS = fuse_quantized_linear.PASS


def quantized(graph, scheme):
    for one in (quantize_weights.PASS, quantize_activations.PASS):
        one.apply(graph, Report(one.name, options={"quantization": Plan(parse(scheme))}))
    return graph


@cache
def wide():
    return before(captured(llama()), "smooth_channels")


def step(scheme="w4"):
    return quantized(wide().copy(), scheme)


def test_products_and_lookups_read_codes():
    graph = step("w4a8:asym")
    assert PASS.apply(graph) == 2 * 4 + 2
    verify(graph)
    fake_propagate(graph)
    filecheck(graph, r"""
    CHECK:      [[X:%\w+]]: f32[T,32] = infc.embedding_quantized([[EC:%\w+]], [[ES:%\w+]], None, %input_ids, 8, 32, 32, f32)
    CHECK:      [[N:%\w+]]: f32[T,32] = infc.rms_norm([[X]],
    CHECK-NEXT: infc.linear_quantized([[N]], %{{\w+}}_codes, %{{\w+}}_scale, %{{\w+}}_offset, None, None, 4, 32, 8, 32, None)
    CHECK:      infc.linear_quantized({{.*}}, None, [[X]], 4, 32, 8, 32, None)
    CHECK:      infc.linear_swiglu_quantized({{.*}}, 'silu', 4, 32, 8, 32, None)
    CHECK:      infc.linear_quantized({{.*}}, [[EC]], [[ES]], None, None, None, 8, 32, 8, 32, None)
    CHECK-NOT:  dequantize
    CHECK-NOT:  quantize_rows
    """)
    assert PASS.apply(graph) == 0


def test_e4m3_goes_the_same_way():
    graph = step("fp8a8")
    assert PASS.apply(graph) == 2 * 4 + 2
    verify(graph)
    fake_propagate(graph)
    filecheck(graph, r"""
    CHECK:      [[X:%\w+]]: f32[T,32] = infc.embedding_quantized([[EC:%\w+]], [[ES:%\w+]], None, %input_ids, 8, 0, 32, f32)
    CHECK:      infc.linear_quantized({{.*}}, None, None, None, 8, 0, 8, 0, None)
    CHECK:      infc.linear_swiglu_quantized({{.*}}, 'silu', 8, 0, 8, 0, None)
    CHECK:      infc.linear_quantized({{.*}}, [[EC]], [[ES]], None, None, None, 8, 0, 8, 0, None)
    CHECK-NOT:  dequantize
    CHECK-NOT:  quantize_rows
    """)


def test_rows_of_another_kind_of_codes_are_read_as_they_mean():
    """Of a weight in e4m3 rows in whole numbers are not part of the product: its rows would be e4m3."""
    graph = biased("fp8a8")
    for node in graph.nodes:
        if node.target is infc.quantize_rows.default: node.kwargs = {}
    fake_propagate(graph, accept_changes=True)
    assert PASS.apply(graph) == 2
    filecheck(graph, """
    CHECK: [[X:%\\w+]]: f32[B,S,37] = infc.dequantize_rows(
    CHECK: infc.linear_quantized([[X]], {{.*}}, 8, 0, 0, 0, None)
    """)


@pytest.mark.parametrize("scheme", ["w8", "w4", "w8a8:channel:token", "w4:g128:asym", "w4a32", "fp8", "fp8:tensor", "fp8a8", "fp8a8:g32"])
def test_keeps_its_contract(scheme):
    was = step(scheme)
    after = was.copy()
    PASS.apply(after)
    check_exact(Reference(was, was.sample_inputs()), was, after)


class Biased(nn.Module):
    """Two products of one x, with a bias and a sum; odd sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(37, 5), nn.Linear(37, 5)

    def forward(self, x):
        return self.a(x) + self.b(x).exp()


def biased(scheme):
    graph = trace(Biased(), torch.randn(2, 3, 37), dynamic=({0: "B", 1: "S"},))
    fuse_linear_epilogue.PASS.apply(graph)
    return quantized(graph, scheme)


@pytest.mark.parametrize("scheme", ["w8", "w4", "w4:channel:asym", "w8a8", "fp8", "fp8a8:tensor"])
def test_bias_residual_and_odd_rows(scheme):
    was = biased(scheme)
    after = was.copy()
    assert PASS.apply(after) == 2
    check_exact(Reference(was, [s for s in was.sample_inputs() if bool(s[0].isfinite().all())]), was, after)


def test_rows_that_others_read_stay_for_them():
    """The rounding is part of the product; who else reads the rounded rows still gets them."""
    graph = biased("w8")
    rows = next(n for n in graph.nodes if n.target is infc.dequantize_rows.default)
    graph.output.args = ((*graph.output.args[0], rows),)
    graph.outputs.append("rows")
    assert PASS.apply(graph) == 2 and "infc.dequantize_rows" in text(graph)


def test_wide_weights_and_other_readers_are_left_alone():
    """A weight that is dequantized for something else than a product stays dequantized."""
    graph = biased("w8")
    weight = next(n for n in graph.nodes if n.target is infc.dequantize.default)
    graph.output.args = ((*graph.output.args[0], weight),)
    graph.outputs.append("weight")
    assert PASS.apply(graph) == 2 and text(graph).count("infc.dequantize(") == 1
    plain = wide().copy()
    was = text(plain)
    assert PASS.apply(plain) == 0 and text(plain) == was


def test_rows_from_another_rounding_than_quantize_rows_are_not_absorbed():
    """dequantize_rows of codes that were not made here: the product reads its result, not the codes."""
    codes, scale, w = torch.ones(3, 8, dtype=torch.int8), torch.ones(3, 1), torch.ones(4, 8)
    graph = trace(lambda c, s: infc.linear.default(infc.dequantize_rows.default(c, s, 0, torch.float32), w), codes, scale)
    quantize_weights.PASS.apply(graph, Report("", options={"quantization": Plan(Scheme(8))}))
    assert PASS.apply(graph) == 1
    filecheck(graph, "CHECK: [[X:%\\w+]]: f32[3,8] = infc.dequantize_rows(\nCHECK-NEXT: infc.linear_quantized([[X]], {{.*}}, 0, 0, None)")


def test_stops_where_it_is_told_to():
    assert PASS.apply(step(), Report(PASS.name, budget=4)) == 4
