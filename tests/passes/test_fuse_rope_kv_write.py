"""fuse_rope_kv_write: from the merged product to q and the cache in one step, columns proved or put right."""
import torch
from decoders import OneLayer, before, captured, llama
from golden import filecheck
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import Graph, fake_propagate, text, verify
from infc.compiler.ops import aten
from infc.compiler.rewrite import Report, emit
from infc.passes.fuse_rope_kv_write import PASS
from torch import nn


def fuse(model: nn.Module, fires: int) -> Graph:
    """The step graph of `model` after the pass, which kept its contract (caches included)."""
    graph = before(captured(model), "fuse_rope_kv_write")
    was, report = graph.copy(), Report("fuse_rope_kv_write")
    assert PASS.apply(graph, report) == fires, report.refused
    verify(graph)
    fake_propagate(graph)
    check_exact(Reference(was, graph.sample_inputs()), was, graph)
    return graph


def refuses(graph: Graph, reason: str) -> None:
    written, report = text(graph), Report("fuse_rope_kv_write")
    assert PASS.apply(graph, report) == 0 and text(graph) == written
    assert any(reason in r for r in report.refused.values()), report.refused


def test_fuses_every_layer_with_one_set_of_angles():
    filecheck(fuse(llama(), 2), r"""
    CHECK:      [[C:%\w+]]: f32[T,4] = aten.cos
    CHECK-NEXT: [[S:%\w+]]: f32[T,4] = aten.sin
    CHECK:      [[Y:%\w+]]: f32[T,64] = infc.linear
    CHECK-NEXT: [[Q:%\w+]]: f32[T,4,8] = infc.rope_kv_write([[Y]], [[C]], [[S]], %k_cache_0, %v_cache_0, %slots, 4, 2, False)
    CHECK-NEXT: infc.paged_attention([[Q]], %k_cache_0, %v_cache_0,
    CHECK:      infc.rope_kv_write(%{{\w+}}, [[C]], [[S]], %k_cache_1, %v_cache_1, %slots, 4, 2, False)
    CHECK-NOT:  infc.rope(
    CHECK-NOT:  infc.kv_write(
    """)


def test_equal_heads_and_bias():
    fuse(type("Mha", (OneLayer,), {"q_heads": 2, "kv_heads": 2})(), 1)


class PerHead(OneLayer):
    """GPT-NeoX: the columns of each head lie together, q k v, q k v, ..."""

    q_heads = kv_heads = 2

    def heads(self, y):
        return y.unflatten(-1, (self.q_heads, 3, self.head)).unbind(3)


class KeysFirst(OneLayer):
    def heads(self, y):
        k, v, q = y.unflatten(-1, (-1, self.head)).split((self.kv_heads, self.kv_heads, self.q_heads), 2)
        return q, k, v


def test_puts_columns_right():
    for model in (PerHead(), KeysFirst()):
        graph = fuse(model, 1)
        assert len(graph.weights) == len(dict(model.named_parameters())) + 1       # reordered, not stored twice; and inv_freq


def test_refuses_to_reorder_a_shared_weight():
    class Shared(KeysFirst):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, position_ids) + (self.embed(input_ids) @ self.qkv.weight.transpose(0, 1))[..., :1]

    refuses(before(captured(Shared()), "fuse_rope_kv_write"), "cannot be moved")


def test_refuses_a_norm_between_projection_and_rotation():
    class Normed(OneLayer):                                                       # Qwen3
        def rotate(self, x, positions):
            return super().rotate(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.inv_freq.repeat(2), positions)

    refuses(before(captured(Normed()), "fuse_rope_kv_write"), "q passes through")


def test_refuses_heads_in_another_order():
    class Tiled(OneLayer):
        def heads(self, y):
            q, k, v = super().heads(y)
            return q, k, v.flip(3)

    refuses(before(captured(Tiled()), "fuse_rope_kv_write"), "v passes through")


def test_refuses_when_the_rotated_key_is_returned():
    graph = before(captured(OneLayer()), "fuse_rope_kv_write")
    rotated = next(n for n in graph.nodes if n.name.startswith("getitem") and n.args[1] == 1 and "rope" in n.args[0].name)
    extra = emit(graph, aten.neg.default, (rotated,), like=graph.output)
    graph.output.args = ((*graph.output.args[0], extra),)
    graph.outputs.append("k")
    refuses(graph, "the rotated value is also")
