"""fuse_linear_epilogue: every product with a weight is infc::linear, with the residual it alone feeds."""
import torch
import torch.nn.functional as F
from golden import assert_contract, filecheck, trace
from infc.compiler.ir import text
from infc.compiler.rewrite import Report
from infc.passes.fuse_linear_epilogue import PASS
from torch import nn

X = torch.randn(2, 5, 16)
SIZES = ({0: "B", 1: "S"},)


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_absorbs_bias_and_residual():
    graph = assert_contract(PASS, Block(), X, dynamic=SIZES, fires=2)
    filecheck(graph, r"""
    CHECK:      [[X:%\w+]]: f32[B,S,16] = input
    CHECK-NEXT: [[U:%\w+]]: f32[B,S,32] = infc.linear([[X]], %{{\w*up_weight}}, %{{\w*up_bias}})
    CHECK-NEXT: [[R:%\w+]]: f32[B,S,32] = aten.relu([[U]])
    CHECK-NEXT: [[Y:%\w+]]: f32[B,S,16] = infc.linear([[R]], %{{\w*down_weight}}, %{{\w*down_bias}}, [[X]])
    CHECK-NEXT: return [[Y]]
    """)
    assert PASS.apply(graph) == 0


def test_absorbs_without_a_bias():
    graph = assert_contract(PASS, Block(bias=False), X, dynamic=SIZES, fires=2)
    filecheck(graph, r"CHECK: infc.linear(%{{\w+}}, %{{\w+}}, None, %{{\w+}})")


def test_of_two_products_one_takes_the_other():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.a(x) + self.b(x)

    graph = assert_contract(PASS, Parallel(), X, dynamic=SIZES, fires=2)
    filecheck(graph, """
    CHECK-COUNT-2: infc.linear
    CHECK-NOT: aten.add
    """)


def keeps(forward, reason: str) -> None:
    """The product becomes infc::linear, the sum stays, and the report says why."""

    class Model(Block):
        pass

    Model.forward = forward
    report = Report("fuse_linear_epilogue")
    graph = trace(Model(), X, dynamic=SIZES)
    PASS.apply(graph, report)
    assert any(reason in r for r in report.refused.values()), report.refused
    filecheck(graph, """
    CHECK: infc.linear
    CHECK: aten.add.Tensor
    """)
    assert_contract(PASS, Model(), X, dynamic=SIZES)


def test_keeps_a_product_that_is_returned():
    def forward(self, x):
        y = self.down(self.up(x))
        return x + y, y

    keeps(forward, "also returned")


def test_keeps_a_product_that_is_read_twice():
    keeps(lambda self, x: x + (y := self.down(self.up(x))) + y.relu(), "also used by")


def test_keeps_a_broadcast_sum():
    keeps(lambda self, x: x[:, :1] + self.down(self.up(x)), "not the product's shape")


def test_keeps_a_scaled_sum():
    keeps(lambda self, x: torch.add(x, self.down(self.up(x)), alpha=2), "scaled by 2")


def test_keeps_a_number():
    keeps(lambda self, x: self.down(self.up(x)) + 3.0, "is a number")


def test_refuses_a_matrix_that_is_computed():
    class Computed(nn.Module):
        def forward(self, x):
            return F.linear(x, x[0, :3])

    graph = trace(Computed(), X, dynamic=SIZES)
    before, report = text(graph), Report("fuse_linear_epilogue")
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    assert "computed, not a weight" in "".join(report.refused.values())


def test_a_tied_weight_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    graph = assert_contract(PASS, Tied(), torch.arange(6).reshape(2, 3), dynamic=SIZES, fires=1)
    assert len(graph.weights) == 1
