"""page_kv_cache: the captured decoder becomes a step over tokens that gives the same logits however the work is cut."""
import pytest
import torch
from golden import filecheck, trace
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.ir import expression, fake_propagate, text, verify
from infc.compiler.ops import infc
from infc.compiler.rewrite import Report
from infc.compiler.step_batch import Pool, step_inputs
from infc.passes.page_kv_cache import PASS, check
from step_decoders import HEAD, KV, VOCAB, Decoder, batch, decoder

INPUTS = ["input_ids", "positions", "slots", "query_start", "context_len", "block_table"]


def paged(**settings):
    before = decoder("rewrite_attention", **settings)
    after = before.copy()
    assert PASS.apply(after) == len(settings.get("windows", (0, 0)))
    verify(after)
    fake_propagate(after)
    return before, after


def test_the_step_graph():
    _, graph = paged(windows=(0, 5))
    assert graph.inputs == INPUTS and graph.outputs == ["logits"]
    assert graph.kv == ["k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    filecheck(graph, r"""
    CHECK:      %input_ids: i32[T] = input
    CHECK-NEXT: %positions: i32[T] = input
    CHECK-NEXT: [[SLOTS:%\w+]]: i32[T] = input
    CHECK-NEXT: [[START:%\w+]]: i32[N+1] = input
    CHECK-NEXT: [[CONTEXT:%\w+]]: i32[N] = input
    CHECK-NEXT: [[TABLE:%\w+]]: i32[N,M] = input
    CHECK-NEXT: %k_cache_0: f32[P,2,32,8] = kv
    CHECK-NEXT: %v_cache_0: f32[P,2,32,8] = kv
    CHECK-NEXT: %k_cache_1: f32[P,2,32,8] = kv
    CHECK-NEXT: %v_cache_1: f32[P,2,32,8] = kv
    CHECK:      {{%\w+}}: f32[T,24] = aten.embedding
    CHECK:      () = infc.kv_write({{%\w+}}, {{%\w+}}, %k_cache_0, %v_cache_0, [[SLOTS]])
    CHECK-NEXT: f32[T,32] = infc.paged_attention({{%\w+}}, %k_cache_0, %v_cache_0, [[START]], [[CONTEXT]], [[TABLE]], 0.35{{\d+}})
    CHECK-NEXT: f32[T,24] = aten.linear
    CHECK:      infc.paged_attention({{%\w+}}, %k_cache_1, %v_cache_1, [[START]], [[CONTEXT]], [[TABLE]], 0.35{{\d+}}, 5
    CHECK:      return {{%\w+}}
    """)


def test_no_transposes_and_no_old_sizes_are_left():
    _, graph = paged()
    assert set(graph.symbols.values()) == {"T", "N", "M", "P"}
    left = {str(s) for n in graph.nodes for v in [n.meta.get("val")] if isinstance(v, torch.Tensor) for d in v.shape for s in
            (expression(d).free_symbols if not isinstance(d, int) else ())}
    assert left <= set(graph.symbols)
    assert not any("transpose" in str(n.target) or "permute" in str(n.target) or "sym_size" in str(n.target) for n in graph.nodes)


@pytest.mark.parametrize("settings", [
    {}, {"windows": (0,)}, {"windows": (3, 0, 40)}, {"windows": (1,)}, {"learned_positions": 128}, {"softcap": 7.0},
    {"windows": (5, 0), "sinks": True},
], ids=str)
def test_keeps_its_contract(settings):
    before, after = paged(**settings)
    assert check(before, after) < 1e-12


def test_sinks_go_along():
    """And the check sees one that is left out, or that is another layer's."""
    before, after = paged(windows=(5, 0), sinks=True)
    first, second = (n for n in after.nodes if n.target is infc.paged_attention.default)
    assert (first.args[7], len(second.args)) == (5, 7) and first.kwargs["sinks"] is not second.kwargs["sinks"]
    assert [tuple(n.kwargs["sinks"].meta["val"].shape) for n in (first, second)] == [(4,), (4,)]
    for wrong in ({"sinks": first.kwargs["sinks"]}, {}):
        second.kwargs = wrong
        with pytest.raises(CheckFailed, match="steps give other logits than the captured graph"): check(before, after)


def test_the_whole_pipeline_keeps_it():
    names = ("fold_constants", "merge_common", "fuse_layer_norm", "fuse_rms_norm", "fuse_rope", "rewrite_attention", "merge_projections")
    before = decoder(*names, windows=(0, 4))
    after = before.copy()
    assert PASS.apply(after) == 2 and check(before, after) < 1e-12


def test_the_check_sees_a_wrong_window():
    before, after = paged(windows=(0, 5))
    (node,) = [n for n in after.nodes if n.target is infc.paged_attention.default and len(n.args) > 7]
    node.update_arg(7, 6)                                      # R07: one key too many
    with pytest.raises(CheckFailed, match="steps give other logits than the captured graph"): check(before, after)


def test_the_check_sees_positions_that_are_ignored():
    before, after = paged()
    positions = after.placeholders["positions"]
    slots = after.placeholders["slots"]
    positions.replace_all_uses_with(slots)
    with pytest.raises(CheckFailed, match="steps give other logits"): check(before, after)


def test_r07_decode_sees_the_window_and_no_more():
    """Changing a token that fell out of every window changes nothing; changing the oldest one inside does."""
    _, graph = paged(windows=(4,))
    prompt = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(1))

    def last(tokens: torch.Tensor) -> torch.Tensor:
        pool = Pool(4)
        stream, caches = pool.stream(tokens), pool.caches(graph)
        for count in (6, 1, 1, 1):
            given = step_inputs([(stream, count)])
            (logits,) = graph.run(*(given[name] for name in graph.inputs), *caches)
        return logits[-1]

    base = last(prompt)
    for index, matters in ((4, False), (5, True)):
        changed = prompt.clone()
        changed[index] = (changed[index] + 1) % VOCAB
        assert torch.equal(last(changed), base) != matters


def test_samples_are_steps_of_the_new_graph():
    _, graph = paged()
    for sample in graph.sample_inputs():
        (logits,) = graph.run(*(t.clone() for t in sample))
        assert logits.shape == (len(sample[0]), VOCAB) and not logits[:-1].isnan().any()    # unowned cache blocks hold NaN
        assert sample[-1].shape[1:] == (KV, 32, HEAD)


# --------------------------------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize(("settings", "reason"), [
    ({"bias": lambda i, j: -0.5 * (i - j)}, "it adds a bias, %add.*, that is no known mask"),
    ({"causal": False}, "its mask is 'none', not causal"),
])
def test_refuses_attention_that_a_cache_cannot_serve(settings, reason):
    graph = decoder("rewrite_attention", **settings)
    before = text(graph)
    with pytest.raises(UserError, match=reason): PASS.apply(graph)
    assert text(graph) == before


def test_refuses_attention_that_was_not_rewritten():
    with pytest.raises(UserError, match=r"it was not rewritten to infc::attention"): PASS.apply(decoder())


def test_refuses_what_mixes_tokens_and_puts_the_graph_back():
    class Shifted(Decoder):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, position_ids) + torch.cumsum(self.embed(input_ids), 1).sum(-1, keepdim=True)

    graph = decoder("rewrite_attention", module=Shifted())
    before = text(graph)
    with pytest.raises(UserError, match=r"%cumsum.*: aten.cumsum is not known to work token by token"): PASS.apply(graph)
    assert text(graph) == before


def test_refuses_what_depends_on_the_length():
    class Averaged(Decoder):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, position_ids) / input_ids.shape[1]

    with pytest.raises(UserError, match="it computes with the size"): PASS.apply(decoder("rewrite_attention", module=Averaged()))


def test_leaves_other_graphs_alone():
    q = torch.randn(2, 4, 5, 8)
    graph = trace(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), q)
    before, report = text(graph), Report(PASS.name)
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    assert ["a decoder takes input_ids, position_ids" in reason for reason in report.refused.values()] == [True]


def test_batch_of_the_captured_graph_is_what_the_steps_give():
    """The captured graph itself on a padded batch agrees with single rows: what the check compares with is the model."""
    before, _ = paged()
    ids, positions = batch(3, 6)
    (all_rows,) = before.run(ids, positions)
    for row in range(3): torch.testing.assert_close(before.run(ids[row:row + 1], positions[:1])[0][0], all_rows[row])
