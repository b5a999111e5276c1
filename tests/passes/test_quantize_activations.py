"""quantize_activations: what a product with a quantized weight reads becomes codes, once for all readers; within its KL bound."""
from functools import cache

import pytest
from decoders import before, captured, llama
from golden import filecheck
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.ops import aten, infc
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import Report
from infc.passes import quantize_activations, quantize_weights

PASS = quantize_activations.PASS


@cache
def made():
    return before(captured(llama()), "smooth_channels")


def step(scheme="w8"):
    graph = made().copy()
    quantize_weights.PASS.apply(graph, report := Report("", options={"quantization": Plan(parse(scheme))}))
    return graph, report.options


def rounded(scheme="w8"):
    """(the graph as it was, the changed one, how often the pass fired)."""
    was, options = step(scheme)
    after = was.copy()
    return was, after, PASS.apply(after, Report(PASS.name, options=options))


def test_rows_are_rounded_before_each_product():
    _, after, fired = rounded("w8a8")
    assert fired == 2 * 4 + 1
    verify(after)
    fake_propagate(after)
    filecheck(after, r"""
    CHECK:      [[X:%\w+]]: f32[T,32] = infc.rms_norm(
    CHECK-NEXT: [[P:%\w+]]: (i8[T,32], f32[T,1]) = infc.quantize_rows([[X]], 8, 32)
    CHECK-NEXT: [[C:%\w+]]: i8[T,32] = operator.getitem([[P]], 0)
    CHECK-NEXT: [[S:%\w+]]: f32[T,1] = operator.getitem([[P]], 1)
    CHECK-NEXT: [[R:%\w+]]: f32[T,32] = infc.dequantize_rows([[C]], [[S]], 32, f32)
    CHECK-NEXT: infc.linear([[R]],
    """)


def test_rows_of_e4m3_have_one_scale_each():
    _, after, fired = rounded("fp8a8")
    assert fired == 2 * 4 + 1
    verify(after)
    fake_propagate(after)
    filecheck(after, r"""
    CHECK:      [[X:%\w+]]: f32[T,32] = infc.rms_norm(
    CHECK-NEXT: [[P:%\w+]]: (f8e4m3[T,32], f32[T,1]) = infc.quantize_rows([[X]], 8, 0, e4m3=True)
    CHECK-NEXT: [[C:%\w+]]: f8e4m3[T,32] = operator.getitem([[P]], 0)
    CHECK-NEXT: [[S:%\w+]]: f32[T,1] = operator.getitem([[P]], 1)
    CHECK-NEXT: [[R:%\w+]]: f32[T,32] = infc.dequantize_rows([[C]], [[S]], 0, f32)
    CHECK-NEXT: infc.linear([[R]],
    """)
    was, after, fired = rounded("fp8")
    assert fired == 0 and text(after) == text(was)


def test_rows_in_another_format_than_asked_for_are_caught():
    was, after, _ = rounded("fp8a8")
    node = next(n for n in after.nodes if n.target is infc.quantize_rows.default)
    node.kwargs = {}
    with pytest.raises(CheckFailed, match=r"is rounded to 8 bits in groups of 0, and fp8a8 asks for 8 of e4m3 in groups of 0"):
        PASS.check(was, after)


def test_sixteen_bits_are_the_default_and_a32_leaves_rows_as_they_are():
    _, after, fired = rounded("w4")
    assert fired == 9 and "i16[T,32]" in text(after)
    was, after, fired = rounded("w4a32")
    assert fired == 0 and text(after) == text(was)


def test_one_rounding_for_all_who_read_the_same_value():
    """Of q, k and v, where they are not merged."""
    graph, options = step()
    products = [n for n in graph.nodes if n.target is infc.linear.default]
    products[1].update_arg(0, products[0].args[0])                      # any two of one width: the graph need not run
    fired = PASS.apply(graph, Report(PASS.name, options=options))
    assert fired == 8 and products[0].args[0] is products[1].args[0]


def test_products_with_wide_weights_are_left_alone():
    graph = made().copy()
    was = text(graph)
    assert PASS.apply(graph, Report(PASS.name, options={"quantization": Plan(parse("w8a8"))})) == 0 and text(graph) == was


@pytest.mark.parametrize("scheme", ["w8", "w4:g128", "w8a8", "w8a8:token", "fp8a8", "fp8a8:tensor"])
def test_keeps_its_bound(scheme):
    was, after, _ = rounded(scheme)
    found = PASS.check(was, after)
    assert 0 < found.error <= found.bound
    assert found.error < found.bound / 10 or "a8" in scheme             # 16 bits are far finer than bf16


def test_the_bound_catches_a_scale_that_is_off():
    """16-bit codes whose rows are put back half too large again."""
    was, after, _ = rounded("w8")
    for node in [n for n in after.nodes if n.target is infc.dequantize_rows.default]:
        with after.module.graph.inserting_after(node):
            larger = after.module.graph.call_function(infc.dequantize_rows.default, node.args)
        node.replace_all_uses_with(larger)
        with after.module.graph.inserting_before(larger):
            scale = after.module.graph.call_function(aten.mul.Tensor, (node.args[1], 1.5))
        larger.args = (node.args[0], scale, *node.args[2:])
        after.module.graph.erase_node(node)
    fake_propagate(after, missing_only=True)
    with pytest.raises(CheckFailed, match="KL to the wide graph is"): PASS.check(was, after)


def test_stops_where_it_is_told_to():
    graph, options = step()
    assert PASS.apply(graph, Report(PASS.name, options=options, budget=2)) == 2
