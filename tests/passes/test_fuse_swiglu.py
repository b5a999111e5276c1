"""fuse_swiglu: the gate and its product in one operator, for every activation, split and order of columns."""
import pytest
import torch
import torch.nn.functional as F
from golden import assert_contract, filecheck, trace
from infc.compiler.ir import text
from infc.compiler.rewrite import Report
from infc.passes.fuse_swiglu import PASS
from torch import nn

X = torch.randn(2, 5, 16)
SIZES = ({0: "B", 1: "S"},)
ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Merged(nn.Module):
    """One product, split in two by `split`."""

    def __init__(self, split=lambda y: y.chunk(2, -1), act=F.silu, bias=False):
        super().__init__()
        self.gate_up, self.split, self.act = nn.Linear(16, 24, bias=bias), split, act

    def forward(self, x):
        gate, up = self.split(self.gate_up(x))
        return up * self.act(gate)


SPLITS = {
    "chunk": lambda y: y.chunk(2, -1),
    "slice": lambda y: (y[..., :12], y[..., 12:]),
    "unflatten": lambda y: y.unflatten(-1, (2, 12)).unbind(-2),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("split", SPLITS)
def test_fuses_with_the_product(split, act):
    graph = assert_contract(PASS, Merged(SPLITS[split], ACTS[act]), X, dynamic=SIZES, fires=1)
    filecheck(graph, rf"""
    CHECK:      [[W:%\w+]]: f32[24,16] = weight
    CHECK:      [[X:%\w+]]: f32[B,S,16] = input
    CHECK:      [[Y:%\w+]]: f32[B,S,12] = infc.linear_swiglu([[X]], [[W]], '{act}')
    CHECK-NEXT: return [[Y]]
    """)
    assert PASS.apply(graph) == 0


@pytest.mark.parametrize("split", [lambda y: y.chunk(2, -1)[::-1], lambda y: (y[..., ::2], y[..., 1::2])], ids=["up first", "alternating"])
def test_puts_columns_in_another_order_right(split):
    model = Merged(split)
    graph = assert_contract(PASS, model, X, dynamic=SIZES, fires=1)
    filecheck(graph, "CHECK: infc.linear_swiglu")
    gate, up = split(model.gate_up.weight.T)
    assert torch.equal(next(iter(graph.weights.values())), torch.cat((gate, up), -1).T) and len(graph.weights) == 1


def test_a_bias_keeps_the_product_apart():
    model, report = Merged(bias=True), Report("fuse_swiglu")
    graph = trace(model, X, dynamic=SIZES)
    assert PASS.apply(graph, report) == 1 and "bias" in "".join(report.refused.values())
    filecheck(graph, r"""
    CHECK:      [[Y:%\w+]]: f32[B,S,24] = aten.linear
    CHECK-NEXT: [[Z:%\w+]]: f32[B,S,12] = infc.swiglu([[Y]], 'silu')
    CHECK-NEXT: return [[Z]]
    """)
    assert_contract(PASS, model, X, dynamic=SIZES, fires=1)


@pytest.mark.parametrize("extra", [lambda y, g: y, lambda y, g: y.sum(-1), lambda y, g: g, lambda y, g: y[..., :12] + 1],
                         ids=["product returned", "product reduced", "active gate returned", "gate read elsewhere"])
def test_a_product_with_other_readers_stays(extra):
    class Shared(Merged):
        def forward(self, x):
            y = self.gate_up(x)
            gate, up = y.chunk(2, -1)
            active = F.silu(gate)
            return active * up, extra(y, active)

    graph = assert_contract(PASS, Shared(), X, dynamic=SIZES, fires=1)
    filecheck(graph, """
    CHECK: aten.linear
    CHECK: infc.swiglu
    """)


def refuses(model: nn.Module, reason: str | None) -> None:
    graph = trace(model, X, dynamic=SIZES)
    before, report = text(graph), Report("fuse_swiglu")
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    assert (reason is None and not report.refused) or (reason and any(reason in r for r in report.refused.values())), report.refused


def test_refuses_parts_that_are_not_halves():
    refuses(Merged(lambda y: (y[..., :8], y[..., 8:16])), "not all columns")
    refuses(Merged(lambda y: (y[..., :12], y[..., 11:23])), "not all columns")


def test_refuses_two_products():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    refuses(Two(), "did not merge")


def test_refuses_to_move_columns_that_others_read():
    class Shared(Merged):
        def forward(self, x):
            y = self.gate_up(x)
            up, gate = y.chunk(2, -1)
            return F.silu(gate) * up, y

    refuses(Shared(), "cannot be moved")


def test_leaves_a_plain_activation_alone():
    class Swish(nn.Module):
        def forward(self, x):
            return x * F.silu(x)

    refuses(Swish(), None)
