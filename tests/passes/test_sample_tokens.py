"""sample_tokens: only sampled rows reach the head; tokens are drawn in the graph."""
import pytest
import torch
from golden import filecheck
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.ops import aten, infc
from infc.passes.sample_tokens import PASS, check
from step_decoders import VOCAB, decoder


def sampled(*passes: str, **settings):
    before = decoder("fuse_layer_norm", "fuse_rms_norm", "rewrite_attention", *passes, "page_kv_cache", **settings)
    after = before.copy()
    assert PASS.apply(after) == 1
    verify(after)
    fake_propagate(after)
    return before, after


def test_rows_are_picked_where_the_last_attention_ends():
    _, graph = sampled()
    assert graph.outputs == ["token", "logits"] and graph.symbols[str(graph.placeholders["uniform"].meta["val"].shape[0])] == "R"
    assert graph.inputs[-5:] == ["sample_rows", "temperature", "top_k", "top_p", "uniform"]
    filecheck(graph, r"""
    CHECK:      [[ROWS:%\w+]]: i32[R] = input
    CHECK-NEXT: [[TEMPERATURE:%\w+]]: f32[R] = input
    CHECK-NEXT: [[K:%\w+]]: i32[R] = input
    CHECK-NEXT: [[P:%\w+]]: f32[R] = input
    CHECK-NEXT: [[U:%\w+]]: f32[R] = input
    CHECK:      [[PICKED:%\w+]]: f32[R,32] = aten.index_select({{%paged_attention\w*}}, 0, [[ROWS]])
    CHECK-NEXT: [[OUT:%\w+]]: f32[R,24] = aten.linear([[PICKED]], {{.*}})
    CHECK-NEXT: [[ABOVE:%\w+]]: f32[R,24] = aten.index_select({{%add\w*}}, 0, [[ROWS]])
    CHECK-NEXT: {{%add\w*}}: f32[R,24] = aten.add.Tensor([[ABOVE]], [[OUT]])
    CHECK-NEXT: {{%rms_norm\w*}}: f32[R,24] = infc.rms_norm
    CHECK:      [[NORM:%\w+]]: f32[R,24] = infc.rms_norm
    CHECK-NEXT: [[LOGITS:%\w+]]: f32[R,61] = aten.linear([[NORM]], {{.*}})
    CHECK-NEXT: [[TOKEN:%\w+]]: i32[R] = infc.sample([[LOGITS]], [[TEMPERATURE]], [[K]], [[P]], [[U]])
    CHECK-NEXT: return [[TOKEN]], [[LOGITS]]
    """)


@pytest.mark.parametrize("settings", [{}, {"softcap": 5.0}, {"windows": (0, 3)}], ids=str)
def test_keeps_its_contract(settings):
    before, after = sampled(**settings)
    assert check(before, after) < 1e-12


def test_a_soft_cap_on_the_logits_runs_on_picked_rows_only():
    _, graph = sampled(softcap=5.0)
    (tanh,) = [n for n in graph.nodes if n.target is aten.tanh.default]
    assert str(tanh.meta["val"].shape[0]) != str(graph.placeholders["input_ids"].meta["val"].shape[0])


def test_the_check_sees_other_rows():
    before, after = sampled()
    for pick in [n for n in after.nodes if n.target is aten.index_select.default]: pick.update_arg(2, after.placeholders["top_k"])
    with pytest.raises(CheckFailed, match="picked rows have other logits"): check(before, after)


def test_a_value_used_elsewhere_is_not_cut_through():
    """Hidden states that are also returned are needed for every token."""
    before = decoder("fuse_layer_norm", "fuse_rms_norm", "rewrite_attention", "page_kv_cache")
    norm = [n for n in before.nodes if n.target is infc.rms_norm.default][-1]
    cache, slots = before.placeholders["k_cache_0"], before.placeholders["slots"]
    with before.module.graph.inserting_after(norm):
        spy = before.module.graph.call_function(infc.kv_write.default, (norm, norm, cache, cache, slots))
    spy.meta |= {"val": None, "origin": [], "line": "", "passes": []}
    assert PASS.apply(before) == 1
    (pick,) = [n for n in before.nodes if n.target is aten.index_select.default]
    assert pick.args[0] is norm


def test_greedy_and_sampled_rows_run():
    _, graph = sampled()
    for sample in graph.sample_inputs():
        token, logits = graph.run(*(t.clone() for t in sample))
        temperature = sample[graph.inputs.index("temperature")]
        assert token.dtype == torch.int32 and logits.shape == (len(temperature), VOCAB)
        assert torch.equal(token[temperature == 0].long(), logits[temperature == 0].argmax(-1))


def test_leaves_graphs_without_a_cache_alone():
    graph = decoder("rewrite_attention")
    before = text(graph)
    assert PASS.apply(graph) == 0 and text(graph) == before
