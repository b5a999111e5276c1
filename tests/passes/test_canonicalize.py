"""One spelling for each idea; what does nothing goes; live randomness is refused."""
import pytest
import torch
from golden import assert_contract, filecheck, trace
from infc.compiler.errors import UserError
from infc.compiler.ir import text, verify
from infc.passes.canonicalize import PASS
from torch import nn
from torch.nn import functional as F

X = torch.randn(4, 6, 8)
B = ({0: "B"},)


@pytest.mark.parametrize("fn", [
    lambda x: x.clone(), lambda x: x + 0, lambda x: 0.0 + x, lambda x: x - 0, lambda x: x * 1, lambda x: x / 1,
    lambda x: x.float(), lambda x: x.to(torch.float64).to(torch.float32), lambda x: x.type_as(x), lambda x: x[:, :], lambda x: x[:99],
    lambda x: x.view(4, 6, 8), lambda x: x.expand(-1, 6, 8), lambda x: x.permute(0, 1, 2), lambda x: x.transpose(1, 1),
    lambda x: torch.cat([x], 1), lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, 0.0, True), lambda x: x**1,
    lambda x: x.detach(),
])
def test_what_does_nothing_goes(fn):
    graph = assert_contract(PASS, lambda x: (torch.sin(fn(x)),), X)
    filecheck(graph, r"""
    CHECK:      %x: f32[4,6,8] = input
    CHECK-NEXT: [[Y:%\w+]]: f32[4,6,8] = aten.sin(%x)
    CHECK-NEXT: return [[Y]]
    """)


@pytest.mark.parametrize(("fn", "line"), [
    (lambda x: x**2, "aten.mul.Tensor(%x, %x)"),
    (lambda x: x.square(), "aten.mul.Tensor(%x, %x)"),
    (lambda x: x.abs() ** -0.5, "aten.rsqrt(%abs_1)"),
    (lambda x: 1 / torch.sqrt(x.abs()), "aten.rsqrt(%abs_1)"),
    (lambda x: torch.sqrt(x.abs()).reciprocal(), "aten.rsqrt(%abs_1)"),
    (lambda x: x * torch.sigmoid(x), "aten.silu(%x)"),
    (lambda x: torch.sigmoid(x) * x, "aten.silu(%x)"),
    (lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))), "aten.gelu(%x, approximate='tanh')"),
    (lambda x: x.mean(2, keepdim=True), "aten.mean.dim(%x, [-1], True)"),
    (lambda x: torch.var(x, -1, unbiased=False, keepdim=True), "aten.var.correction(%x, [-1], correction=0, keepdim=True)"),
    (lambda x: x.softmax(2), "aten.softmax.int(%x, -1)"),
    (lambda x: torch.softmax(x, -1, dtype=torch.float32), "aten.softmax.int(%x, -1)"),
    (lambda x: x.type(torch.float16), "aten._to_copy(%x, dtype=f16)"),
    (lambda x: x.view(4, -1), "aten.reshape(%x, [4, 48])"),
    (lambda x: x.flatten(1).view(4, 3, 16), "aten.reshape(%x, [4, 3, 16])"),
    (lambda x: x.transpose(1, 2).reshape(4, 48), "aten.reshape(%transpose, [4, 48])"),
    (lambda x: torch.cat([x, x], 2), "aten.cat([%x, %x], -1)"),
    (lambda x: F.layer_norm(x, (8,)), "aten.layer_norm(%x, [8]"),
])
def test_one_spelling(fn, line):
    graph = trace(fn, X)
    PASS.apply(graph)
    verify(graph, "optimized")
    assert line in text(graph)
    before = text(graph)
    assert PASS.apply(graph) == 0 and text(graph) == before          # a second time there is nothing left to do


@pytest.mark.parametrize("fn", [
    lambda x: x**2 + (x.abs() + 1) ** -0.5, lambda x: x * torch.sigmoid(x), lambda x: x.transpose(1, 2).reshape(x.shape[0], -1) * 1,
    lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))), lambda x: 1 / torch.sqrt(x.abs() + 1e-3),
])
def test_keeps_its_contract(fn):
    assert_contract(PASS, fn, X, dynamic=B)


def test_a_product_with_a_weight_is_linear():
    class Conv1D(nn.Module):                                          # GPT-2's
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(5))

        def forward(self, x):
            return torch.addmm(self.b, x, self.w), x @ self.w, x @ x.T

    graph = assert_contract(PASS, Conv1D(), X[0])
    filecheck(graph, r"""
    CHECK-COUNT-2: = aten.linear(
    CHECK:         = aten.matmul(
    """)


def test_assertions_go_and_known_sizes_are_numbers():
    graph = trace(lambda x: x.to(torch.float16) * x.shape[1], X, dynamic=B)
    assert "_assert" in text(graph) and PASS.apply(graph) > 0
    assert "_assert" not in text(graph)
    verify(graph, "optimized")


@pytest.mark.parametrize("fn", [
    lambda x: x + 1, lambda x: x * 0, lambda x: x + 0j if False else x[1:], lambda x: x[:, ::2], lambda x: x.expand(4, 6, 8) * 2,
    lambda x: x.half().float(), lambda x: x.transpose(1, 2), lambda x: 2 / x, lambda x: x**3, lambda x: x.int() * 1.0,
])
def test_what_does_something_stays(fn):
    graph = trace(fn, X)
    out = graph.run(X)[0]
    PASS.apply(graph)
    got = graph.run(X)[0]
    assert got.dtype == out.dtype and torch.equal(got, out)


def test_a_narrowing_cast_stays():
    graph = trace(lambda x: x.half().float(), X)
    PASS.apply(graph)
    filecheck(graph, "CHECK: dtype=f16\nCHECK: dtype=f32")


@pytest.mark.parametrize("module", [
    nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(),
    lambda x: F.dropout(x, 0.1, training=True),
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    lambda x: torch.bernoulli(x.sigmoid()),
])
def test_refuses_live_randomness(module):
    """FIELD R12."""
    graph = trace(module, X)
    before = text(graph)
    with pytest.raises(UserError, match=r"is random .*: call model.eval\(\)"):
        PASS.apply(graph)
    assert "aten" in before


def test_a_returned_value_keeps_its_place():
    """FIELD R10: the same value twice, an input unchanged."""
    graph = assert_contract(PASS, lambda x: (x * 1, x + 0, x.exp()), X)
    assert graph.output.args[0][0] is graph.output.args[0][1] is graph.placeholders["x"]
