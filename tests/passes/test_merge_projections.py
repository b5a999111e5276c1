"""merge_projections: q, k, v and gate, up become one product each; shared and unlike weights stay apart."""
import torch
import torch.nn.functional as F
from golden import assert_contract, filecheck, trace
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import text
from infc.compiler.rewrite import Report
from infc.passes.merge_projections import PASS
from torch import nn

X = torch.randn(2, 5, 16)
SIZES = ({0: "B", 1: "S"},)


class Attention(nn.Module):
    def __init__(self, biases=(False, False, False), norm=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n, bias=b) for n, b in zip((16, 8, 8), biases, strict=True))
        self.norm = norm

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm: q, k = (t * torch.rsqrt((t * t).mean(-1, keepdim=True) + 1e-6) for t in (q, k))
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


class Gated(nn.Module):
    def __init__(self, act=F.silu):
        super().__init__()
        self.gate_proj, self.up_proj, self.act = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False), act

    def forward(self, x):
        return self.up_proj(x) * self.act(self.gate_proj(x))                     # up written first: columns are gate, up all the same


def test_merges_q_k_v():
    graph = assert_contract(PASS, Attention(), X, dynamic=SIZES, fires=1)
    filecheck(graph, r"""
    CHECK:      [[W:%\w*qkv_proj\w*]]: f32[32,16] = weight
    CHECK-NOT:  = weight
    CHECK:      [[X:%\w+]]: f32[B,S,16] = input
    CHECK:      [[Y:%\w+]]: f32[B,S,32] = aten.linear([[X]], [[W]])
    CHECK-NEXT: f32[B,S,16] = aten.slice.Tensor([[Y]], 2, 0, 16)
    CHECK-NEXT: f32[B,S,8] = aten.slice.Tensor([[Y]], 2, 16, 24)
    CHECK-NEXT: f32[B,S,8] = aten.slice.Tensor([[Y]], 2, 24, 32)
    CHECK-NOT:  aten.linear
    """)
    assert PASS.apply(graph) == 0


def test_merges_past_norms_and_with_biases():
    graph = assert_contract(PASS, Attention(biases=(True,) * 3, norm=True), X, dynamic=SIZES, fires=1)
    filecheck(graph, r"""
    CHECK: %{{\w*qkv_proj_weight\w*}}: f32[32,16] = weight
    CHECK: %{{\w*qkv_proj_bias\w*}}: f32[32] = weight
    """)


def test_merges_gate_and_up_in_that_order():
    model = Gated()
    graph = assert_contract(PASS, model, X, dynamic=SIZES, fires=1)
    merged = next(w for name, w in graph.weights.items() if "gate_up_proj" in name)
    assert torch.equal(merged, torch.cat((model.gate_proj.weight, model.up_proj.weight)))
    assert len(graph.weights) == 1


def test_merges_k_and_v_of_a_cross_attention():
    class Cross(Attention):
        def forward(self, x, y):
            q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    graph = assert_contract(PASS, Cross(), X, torch.randn(2, 7, 16), dynamic=({0: "B", 1: "S"}, {0: "B", 1: "L"}), fires=1)
    filecheck(graph, r"""
    CHECK-DAG: %{{\w*q_proj\w*}}: f32[16,16] = weight
    CHECK-DAG: f32[16,16] = weight
    CHECK:     aten.linear
    """)


def refuses(model: nn.Module, reason: str) -> None:
    graph = trace(model.eval(), X, dynamic=SIZES)
    before, report = text(graph), Report("merge_projections")
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    assert any(reason in r for r in report.refused.values()), report.refused


def test_refuses_a_bias_on_some():
    refuses(Attention(biases=(True, False, True)), "has no bias, the others have one")


def test_refuses_a_shared_weight():
    class Shared(Attention):
        def forward(self, x):
            return super().forward(x).transpose(1, 2).flatten(2) @ self.q_proj.weight

    refuses(Shared(), "is shared with")


def test_refuses_k_and_v_of_one_tied_weight():
    model = Attention()
    model.v_proj.weight = model.k_proj.weight
    refuses(model, "is shared with")


def test_refuses_a_weight_that_is_computed():
    class Computed(Attention):
        def forward(self, x):
            w = self.q_proj.weight * x.mean()
            q, k, v = F.linear(x, w), self.k_proj(x), self.v_proj(x)
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    refuses(Computed(), "is computed, not a weight")


def test_leaves_products_that_are_no_group_alone():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            return self.a(x), self.b(x)

    graph = trace(Two(), X, dynamic=SIZES)
    assert PASS.apply(graph) == 0


def test_a_projection_that_is_returned_keeps_its_value():
    class Returned(Attention):
        def forward(self, x):
            return super().forward(x), self.k_proj(x)

    graph = trace(Returned(), X, dynamic=SIZES)
    before = graph.copy()
    PASS.apply(graph)
    check_exact(Reference(before, graph.sample_inputs()), before, graph)
