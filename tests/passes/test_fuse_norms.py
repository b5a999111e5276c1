"""fuse_rms_norm, fuse_add_rms_norm, fuse_layer_norm: every spelling fires, the contract holds, the rest is refused."""
import pytest
import torch
from golden import assert_contract, filecheck, trace
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.rewrite import Report
from infc.passes import canonicalize, fuse_add_rms_norm, fuse_layer_norm, fuse_rms_norm, merge_common
from torch import nn
from torch.nn import functional as F

X, W, BIAS = torch.randn(2, 5, 64), torch.randn(64), torch.randn(64)
B = ({0: "B", 1: "S"},)


class Clean:
    """canonicalize and merge_common, then the pass: what the pipeline gives it."""

    def __init__(self, one):
        self.one, self.name, self.contract, self.check = one, one.name, one.contract, one.check

    def apply(self, graph, report=None):
        canonicalize.PASS.apply(graph)
        merge_common.PASS.apply(graph)
        return self.one.apply(graph, report)


RMS, LAYER = Clean(fuse_rms_norm.PASS), Clean(fuse_layer_norm.PASS)


def llama(x, w):
    h = x.to(torch.float32)
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gemma(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).type_as(x)


def scaled(x, w):
    return x * (torch.rsqrt((x * x).mean(2, keepdim=True) + 1e-6) * w)


def divided(x, w):
    return x / torch.sqrt(x.square().mean(-1, True) + 1e-6) * w


def reciprocal(x, w):
    return x * (1 / torch.sqrt(x.square().mean(-1, True) + 1e-6)) * w


def half_power(x, w):
    return x * (x**2).mean(-1, True).add(1e-6) ** -0.5 * w


def torch_op(x, w):
    return F.rms_norm(x, (64,), w, 1e-6)


RMS_SPELLINGS = [llama, gemma, scaled, divided, reciprocal, half_power, torch_op]


@pytest.mark.parametrize("norm", RMS_SPELLINGS)
def test_rms_norm_fires_and_keeps_its_contract(norm):
    graph = assert_contract(RMS, norm, X, W, dynamic=B, fires=1)
    filecheck(graph, r"""
    CHECK:      [[X:%\w+]]: f32[B,S,64] = input
    CHECK-NEXT: [[W:%\w+]]: f32[64] = input
    CHECK-NEXT: [[Y:%\w+]]: f32[B,S,64] = infc.rms_norm([[X]], [[W]], 1e-06)
    CHECK-NEXT: return [[Y]]
    """)


@pytest.mark.parametrize("norm", [llama, gemma, torch_op])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_keeps_the_upcast(norm, dtype):
    """The norm runs in fp32 and its result is cast: FIELD R08."""
    graph = assert_contract(RMS, norm, X.to(dtype), W.to(dtype))
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    filecheck(graph, rf"""
    CHECK: aten._to_copy(%x, dtype=f32)
    CHECK: [[Y:%\w+]]: {name}[2,5,64] = infc.rms_norm({{{{.*}}}}out_dtype={name})
    CHECK-NEXT: return [[Y]]
    """)


@pytest.mark.parametrize("value", [300.0, 7600.0, 3e4])
@pytest.mark.parametrize("norm", [llama, gemma, torch_op])
def test_rms_norm_of_large_half_values_stays_finite(norm, value):
    """FIELD R08: squares of 300 overflow fp16."""
    x, w = torch.full((1, 4096), value).half(), torch.ones(4096).half()
    norm = (lambda x, w: F.rms_norm(x, (4096,), w, 1e-6)) if norm is torch_op else norm
    graph = trace(norm, x, w)
    assert RMS.apply(graph) >= 1
    (y,) = graph.run(x, w)
    assert torch.equal(y, torch.ones_like(y))


def test_rms_norm_in_a_narrow_dtype_is_not_made_wider():
    """The narrow spelling overflows; the operator, rounding every step to x.dtype, says the same."""
    x, w = torch.full((1, 64), 300.0).half(), torch.ones(64).half()
    graph = trace(scaled, x[None], w)
    expected = graph.run(x[None], w)
    assert RMS.apply(graph) == 1
    assert torch.equal(graph.run(x[None], w)[0], expected[0])


def test_rms_norm_one_plus_weight():
    class Gemma(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(W.clone())

        def forward(self, x):
            return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1.0 + self.w)

    graph = assert_contract(RMS, Gemma(), X, dynamic=B, fires=1)
    filecheck(graph, "CHECK: infc.rms_norm(%x, %add, 1e-06)" if "%add:" in text(graph) else "CHECK: infc.rms_norm")


def test_two_norms_over_one_cast_both_fuse():
    """FIELD R10: the cast is not removed with the first match."""
    def two(x, a, b):
        h = x.float()
        scale = [torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) for eps in (1e-6, 1e-5)]
        return a * (h * scale[0]).to(x.dtype), b * (h * scale[1]).to(x.dtype)

    graph = trace(two, X.bfloat16(), W.bfloat16(), BIAS.bfloat16())
    canonicalize.PASS.apply(graph)                                    # without merge_common the squares are two nodes
    assert fuse_rms_norm.PASS.apply(graph) == 2
    verify(graph)
    fake_propagate(graph)
    filecheck(graph, "CHECK-COUNT-1: aten._to_copy(%x, dtype=f32)\nCHECK-COUNT-2: infc.rms_norm")


@pytest.mark.parametrize(("fn", "reason"), [
    (lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * x, "is not one row of x"),
    (lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * 2.0, "weight is the number 2.0"),
    (lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + w.abs().sum()) * w, "eps is not a number"),
    (lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w.double(), "weight is torch.float64, x is torch.float32"),
    (lambda x, w: F.rms_norm(x, (64,), None, 1e-6) + w, "has no weight"),
    (lambda x, w: F.rms_norm(x, (5, 64), x[0], 1e-6), "normalises 2 axes"),
])
def test_rms_norm_refuses(fn, reason):
    graph, report = trace(fn, X, W), Report("fuse_rms_norm")
    canonicalize.PASS.apply(graph)
    before = text(graph)
    assert fuse_rms_norm.PASS.apply(graph, report) == 0 and text(graph) == before
    assert any(reason in r for r in report.refused.values()), report.refused


@pytest.mark.parametrize("fn", [
    lambda x, w: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w,       # another axis
    lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * w,       # a sum is no mean
    lambda x, w: (x + 1) * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
])
def test_rms_norm_leaves_other_functions_alone(fn):
    graph = trace(fn, X, W)
    canonicalize.PASS.apply(graph)
    before = text(graph)
    assert fuse_rms_norm.PASS.apply(graph) == 0 and text(graph) == before


def residual_norm(x, r, w):
    h = x + r
    return scaled(h, w), h


ADD = Clean(fuse_add_rms_norm.PASS)


class AfterNorms(Clean):
    def apply(self, graph, report=None):
        RMS.apply(graph)
        return super().apply(graph, report)


def test_add_rms_norm_fires_and_keeps_its_contract():
    graph = assert_contract(AfterNorms(fuse_add_rms_norm.PASS), residual_norm, X, X, W, dynamic=({0: "B"}, {0: "B"}, None), fires=1)
    filecheck(graph, r"""
    CHECK:     [[F:%\w+]]: (f32[B,5,64], f32[B,5,64]) = infc.add_rms_norm(
    CHECK-NOT: aten.add
    """)


def test_add_rms_norm_with_the_sum_used_before():
    def fn(x, r, w):
        h = x + r
        return h.sum() + scaled(h, w), h

    assert_contract(AfterNorms(fuse_add_rms_norm.PASS), fn, X, X, W, fires=1)


@pytest.mark.parametrize(("r", "reason"), [(torch.randn(64), "the residual (64,)"), (X.double(), "residual torch.float64")])
def test_add_rms_norm_refuses(r, reason):
    graph, report = trace(residual_norm, X, r, W.to(r.dtype)), Report("fuse_add_rms_norm")
    RMS.apply(graph)
    before = text(graph)
    assert fuse_add_rms_norm.PASS.apply(graph, report) == 0 and text(graph) == before
    assert reason in next(iter(report.refused.values()))


def cohere(x, w, b):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x - mean) * torch.rsqrt(variance + 1e-5)) + b


def by_var(x, w, b):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w + b


def by_division(x, w, b):
    d = x - x.mean(-1, keepdim=True)
    return b + w * (d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("norm", [cohere, by_var, by_division, lambda x, w, b: F.layer_norm(x, (64,), w, b)])
def test_layer_norm_fires_and_keeps_its_contract(norm):
    graph = assert_contract(LAYER, norm, X, W, BIAS, dynamic=B, fires=1)
    filecheck(graph, r"""
    CHECK:      [[X:%\w+]]: f32[B,S,64] = input
    CHECK-NEXT: [[W:%\w+]]: f32[64] = input
    CHECK-NEXT: [[B:%\w+]]: f32[64] = input
    CHECK-NEXT: [[Y:%\w+]]: f32[B,S,64] = infc.layer_norm([[X]], [[W]], [[B]], 1e-05)
    CHECK-NEXT: return [[Y]]
    """)


def test_layer_norm_without_a_bias():
    graph = assert_contract(LAYER, lambda x, w: cohere(x, w, 0), X, W, fires=1)
    filecheck(graph, "CHECK: infc.layer_norm(%x, %y, None, 1e-05)")


def test_layer_norm_plus_a_residual_is_not_a_bias():
    graph, report = trace(cohere, X, W, X), Report("fuse_layer_norm")
    assert LAYER.apply(graph, report) == 1
    filecheck(graph, "CHECK: infc.layer_norm(%x, %y, None, 1e-05)\nCHECK: aten.add.Tensor")
    assert not report.refused                                         # the norm fused: nothing to complain of


def test_layer_norm_in_half_precision_keeps_fp32_statistics():
    assert_contract(LAYER, lambda x, w, b: F.layer_norm(x, (64,), w, b), X.half() * 100, W.half(), BIAS.half(), fires=1)


def test_layer_norm_with_its_normalised_tensor_returned_is_kept():
    """FIELD R10."""
    def fn(x, w, b):
        mean = x.mean(-1, keepdim=True)
        h = (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
        return h * w + b, h

    graph, report = trace(fn, X, W, BIAS), Report("fuse_layer_norm")
    expected = graph.run(X, W, BIAS)
    assert LAYER.apply(graph, report) == 0 and "is also returned" in " ".join(report.refused.values())
    for got, want in zip(graph.run(X, W, BIAS), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("fn", "reason"), [
    (lambda x, w, b: F.layer_norm(x, (64,)) + w, "has no weight"),
    (lambda x, w, b: F.layer_norm(x, (5, 64), x[0], x[1]), "normalises 2 axes"),
])
def test_layer_norm_refuses(fn, reason):
    graph, report = trace(fn, X, W, BIAS), Report("fuse_layer_norm")
    canonicalize.PASS.apply(graph)
    before = text(graph)
    assert fuse_layer_norm.PASS.apply(graph, report) == 0 and text(graph) == before
    assert reason in next(iter(report.refused.values()))
