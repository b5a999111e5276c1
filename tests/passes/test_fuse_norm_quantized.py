"""fuse_norm_quantized: norms write the codes that products read, on targets that have kernels for it; the same function, bit for bit."""
import operator
from functools import cache

import pytest
import torch
from decoders import before, captured, llama
from golden import filecheck, trace
from infc import passes
from infc.compiler import driver
from infc.compiler.contracts import Reference, check_exact, run_plain
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.ops import arguments, infc
from infc.compiler.quant import recipe
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import Report
from infc.passes import fuse_linear_epilogue, fuse_norm_quantized, load
from torch import nn

PASS = fuse_norm_quantized.PASS
SCHEMES = ["w8a8", "fp8a8", "w8a8:channel:token", "w4a8", "fp8a8:tensor"]


def told(budget: int | None = None, gpu: bool = True) -> Report:
    return Report(PASS.name, options={"norm_codes": gpu}, budget=budget)


def coded(graph, scheme):
    """Every product reads codes; rows of x are still rounded by the product itself."""
    for one in map(load, ("quantize_weights", "quantize_activations", "fuse_quantized_linear")):
        one.apply(graph, Report(one.name, options={"quantization": Plan(parse(scheme) if isinstance(scheme, str) else scheme)}))
    return graph


@cache
def wide():
    return before(captured(llama()), "smooth_channels")


def step(scheme):
    return coded(wide().copy(), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_norm_of_a_decoder_gives_codes(scheme):
    graph, report = step(scheme), told()
    assert PASS.apply(graph, report) == 2 * 2 + 1 and not report.refused
    verify(graph)
    fake_propagate(graph)
    assert not [n for n in graph.nodes if n.target is infc.rms_norm.default]
    rounding = [n for n in graph.nodes if n.target in fuse_norm_quantized.PRODUCTS and arguments(n)["x_scale"] is None]
    assert [n.target for n in rounding] == [infc.linear_quantized.default] * 4                        # o_proj and down_proj of each layer
    assert PASS.apply(graph, told()) == 0


def test_what_it_writes():
    graph = step("w4a8")
    PASS.apply(graph, told())
    filecheck(graph, r"""
    CHECK:      [[N:%\w+]]: (i8[T,32], f32[T,1]) = infc.rms_norm_quantized([[X:%\w+]], %{{\w+}}, 1e-05, 32, False, None)
    CHECK-NEXT: [[C:%\w+]]: i8[T,32] = operator.getitem([[N]], 0)
    CHECK-NEXT: [[S:%\w+]]: f32[T,1] = operator.getitem([[N]], 1)
    CHECK-NEXT: infc.linear_quantized([[C]], %{{\w+}}_codes, %{{\w+}}_scale, None, None, None, 4, 32, 8, 32, f32, [[S]], 0)
    CHECK:      infc.linear_swiglu_quantized({{.*}}, 'silu', 4, 32, 8, 32, f32, %{{\w+}}, 0)
    CHECK-NOT:  infc.rms_norm(
    """)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_keeps_its_contract(scheme):
    """The same function in fp64; and in its own dtypes the same bits, also where the KV cache is narrow already."""
    was = step(scheme)
    for graph in (was, narrowed(was)):
        after = graph.copy()
        assert PASS.apply(after, told()) == 5
        check_exact(Reference(graph, graph.sample_inputs()), graph, after)
        for sample in graph.sample_inputs():
            for old, new in zip(run_plain(graph, sample), run_plain(after, sample), strict=True):
                assert torch.equal(old.nan_to_num(1.5), new.nan_to_num(1.5)) and torch.equal(old.isnan(), new.isnan())


def narrowed(graph):
    after = graph.copy()
    assert load("narrow_dtype").apply(after, Report("narrow_dtype", options={"dtype": "bf16"})) == 2
    return after


class Normed(nn.Module):
    """Two products of one norm; `also` says who else reads it, or what it is of."""

    def __init__(self, also: str = "", width: int = 37):
        super().__init__()
        torch.manual_seed(0)
        self.also, self.a, self.b = also, nn.Linear(width, 5), nn.Linear(width, 5)
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        if self.also == "layer norm": y = infc.layer_norm.default(x, self.norm.weight, self.norm.bias, 1e-5)
        elif self.also == "sum":
            y, x = infc.add_rms_norm.default(x, x.sin(), self.weight, 1e-5)
        else: y = infc.rms_norm.default(x, self.weight, 1e-5)
        found = self.a(y) + self.b(y).exp()
        if self.also == "wide": return found, y.sin()
        if self.also == "returned": return found, y
        return (found, x.cos()) if self.also == "sum" else found


def small(scheme="fp8a8", also=""):
    graph = trace(Normed(also), torch.randn(2, 3, 37), dynamic=({0: "B", 1: "S"},))
    fuse_linear_epilogue.PASS.apply(graph)
    return coded(graph, scheme)


@pytest.mark.parametrize(("also", "op"), [("", "rms_norm"), ("layer norm", "layer_norm"), ("sum", "add_rms_norm")])
@pytest.mark.parametrize("scheme", ["fp8a8", "w8a8", "w8a8:channel:token"])
def test_two_products_read_one_rounding(scheme, also, op):
    was = small(scheme, also)
    after = was.copy()
    assert PASS.apply(after, told()) == 1
    verify(after)
    fake_propagate(after)
    (norm,) = [n for n in after.nodes if n.target is getattr(infc, f"{op}_quantized").default]
    codes = next(user for user in norm.users if user.target is operator.getitem and user.args[1] == 0)
    assert [user.target for user in codes.users] == [infc.linear_quantized.default] * 2
    check_exact(Reference(was, [s for s in was.sample_inputs() if bool(s[0].isfinite().all())]), was, after)


@pytest.mark.parametrize(("also", "reason"), [("wide", "its result is also read by %sin, wide"), ("returned", "also returned, wide")])
def test_a_norm_that_others_read_stays_wide(also, reason):
    graph, report = small(also=also), told()
    was = text(graph)
    assert PASS.apply(graph, report) == 0 and text(graph) == was
    (told_reason,) = report.refused.values()
    assert reason in told_reason


def test_a_norm_that_a_product_adds_stays_wide():
    """What a product reads and adds, it reads wide."""
    def model(x, w):
        y = infc.rms_norm.default(x, w, 1e-5)
        return infc.linear_quantized.default(y, codes, scale, None, None, y, 8, 0, 8, 0)

    codes, scale = torch.randint(0, 255, (8, 8), dtype=torch.uint8), torch.rand(8, 1).half()
    graph, report = trace(model, torch.randn(3, 8), torch.rand(8)), told()
    assert PASS.apply(graph, report) == 0
    assert not report.refused                                              # it is no product of codes alone, so nothing was missed


def test_products_that_round_otherwise_keep_the_norm_wide():
    graph, report = small(recipe.from_text("format: 1\nlayers:\n  - 'p_a_weight': w8a8\n  - 'p_b_weight': fp8a8\n", "r.yaml")), told()
    assert PASS.apply(graph, report) == 0
    (reason,) = report.refused.values()
    assert "round its result to different codes" in reason and reason.count("%linear_quantized") == 2


@pytest.mark.parametrize("scheme", ["w4a32", "w8"])
def test_rows_that_are_not_of_eight_bits_are_left_alone(scheme):
    graph, report = step(scheme), told()
    was = text(graph)
    assert PASS.apply(graph, report) == 0 and text(graph) == was and not report.refused


def test_a_program_for_a_cpu_does_not_change():
    """Its products round rows in their own scratch."""
    for target, fires in (("portable", 0), ("x86-64-v4-bf16", 0), ("h100", 5), ("a100", 5)):
        graph = step("w8a8")
        was = text(graph)
        options = driver.pass_options(driver.Options(target=target, quant="w8a8", buckets=(1,), max_sequences=1))
        assert PASS.apply(graph, Report(PASS.name, options=options)) == fires
        assert (text(graph) == was) == (fires == 0)


def test_stops_where_it_is_told_to():
    assert PASS.apply(step("w8a8"), told(budget=3)) == 3


def test_the_last_pass_of_a_quantized_compile_alone():
    assert [one.name for one in passes.pipeline("bf16", quantized=True)][-1] == PASS.name
    assert PASS.name not in [one.name for one in passes.pipeline("bf16", kv=True)]
