"""What passes are judged on must be able to show a fault: the few samples of the default level, and what only the many show."""
from collections.abc import Callable

import pytest
import torch
from golden import trace
from infc import passes
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.errors import CheckFailed
from infc.compiler.frontends import capture
from infc.compiler.frontends.samples import DecoderSamples, TensorSamples
from infc.compiler.ir import Graph
from infc.compiler.ops import BLOCK, aten, infc
from infc.compiler.ops.registry import arguments
from infc.compiler.rewrite import emit
from infc.compiler.step_batch import StepSamples
from step_decoders import VOCAB, decoder


def after(graph: Graph, *names: str) -> Graph:
    for name in names: assert passes.load(name).apply(graph)
    return graph


@pytest.fixture(scope="module")
def whole() -> Reference:
    """One layer over [B, S], its rotation and its attention named."""
    graph = after(capture("random:tiny?layers=1"), "canonicalize", "fuse_rope", "rewrite_attention")
    return Reference(graph, graph.sample_inputs())


@pytest.fixture(scope="module")
def step(whole: Reference) -> Reference:
    """The same over tokens, with its cache."""
    graph = after(whole.graph.copy(), "page_kv_cache", "sample_tokens")
    return Reference(graph, graph.sample_inputs())


def node_of(graph: Graph, target: object):
    return next(n for n in graph.nodes if n.target is target)


def setting(target: object, **changes: object) -> Callable[[Graph], None]:
    """Other arguments for the one call of an operator."""
    def fault(graph: Graph) -> None:
        node = node_of(graph, target)
        node.args = tuple((arguments(node) | changes).values())

    return fault


def feeding(name: str, make: Callable[[Graph, object, object], object]) -> Callable[[Graph], None]:
    """Another value where an input was read."""
    def fault(graph: Graph) -> None:
        source = graph.placeholders[name]
        users = list(source.users)
        first = next(n for n in graph.nodes if n in users)
        other = make(graph, source, first)
        for user in users: user.replace_input_with(source, other)

    return fault


def counted_positions(graph, positions, like):
    start = emit(graph, aten.slice.Tensor, (positions, 1, 0, 1), like=like)
    return emit(graph, aten.sub.Tensor, (positions, start), like=like)


def one_less(graph, source, like):
    return emit(graph, aten.clamp.default, (emit(graph, aten.sub.Tensor, (source, 1), like=like), 0), like=like)


WHOLE = {
    "no mask": setting(infc.attention.default, mask="none"),
    "a window of a block": setting(infc.attention.default, window=BLOCK),
    "another scale": setting(infc.attention.default, scale=0.2501),
    "pairs for halves": setting(infc.rope.default, interleaved=True),
    "positions counted twice": feeding("position_ids", lambda g, s, at: emit(g, aten.add.Tensor, (s, s), like=at)),
}

STEP = {
    "a window of 40": setting(infc.paged_attention.default, window=40),
    "a context one short": feeding("context_len", one_less),
    "blocks in order": feeding("block_table", lambda g, s, at: emit(g, aten.clamp.default, (s, 0, 1), like=at)),
    "padding written": feeding("slots", lambda g, s, at: emit(g, aten.clamp.default, (s, 0), like=at)),
    "slots for positions": feeding("positions", lambda g, s, at: g.placeholders["slots"]),
    "the row before": feeding("sample_rows", one_less),
}


def shows(good: Reference, fault: Callable[[Graph], None]) -> None:
    graph = good.graph.copy()
    fault(graph)
    with pytest.raises(CheckFailed, match="another function"):
        check_exact(good, good.graph, graph)


@pytest.mark.parametrize("name", WHOLE)
def test_the_few_samples_of_a_decoder_show(name: str, whole: Reference):
    shows(whole, WHOLE[name])


@pytest.mark.parametrize("name", STEP)
def test_the_few_samples_of_a_step_show(name: str, step: Reference):
    shows(step, STEP[name])


def test_they_show_positions_that_are_counted_instead_of_read():
    """Not with rotations: they depend on differences of positions alone."""
    graph = decoder(learned_positions=64)
    shows(Reference(graph, DecoderSamples(VOCAB, 64)()), feeding("position_ids", counted_positions))


def test_the_few_are_of_every_kind():
    few = DecoderSamples(48, 256)()
    shapes = [tuple(ids.shape) for ids, _ in few]
    assert any(s == 1 for _, s in shapes) and any(b == 1 for b, _ in shapes) and any(b > 1 for b, _ in shapes)
    assert any(s > BLOCK for _, s in shapes) and all(s % 2 for _, s in shapes)
    assert any(not torch.equal(p[0], p[-1]) for _, p in few), "rows that start at different positions"
    assert any(bool((ids[-1, -2:] == ids[-1, -1]).all()) for ids, _ in few if ids.shape[1] > 2), "a padded row"
    assert all(torch.equal(p.diff(dim=1), torch.ones_like(p.diff(dim=1))) for _, p in few), "positions count up: no packed rows"


@pytest.mark.parametrize("longest", [1, 8, 64, 4096])
def test_samples_stay_within_the_model(longest: int):
    samples = DecoderSamples(7, longest)
    many = samples.thorough()
    assert len(many) > 2 * len(samples()) and all(torch.equal(a, b) for a, b in zip(many[0], samples()[0], strict=True))
    for ids, positions in many:
        assert int(ids.min()) >= 0 and int(ids.max()) < 7 and int(positions.min()) >= 0 and int(positions.max()) < longest
    assert max(int(p.max()) for _, p in many) == longest - 1                      # the last position is tried


def test_steps_hold_padding_empty_sequences_and_poison():
    samples = StepSamples(("positions", "slots", "query_start", "context_len", "block_table"), (((1, BLOCK, 4), torch.float32),), 9, 256)
    few, many = samples(), samples.thorough()
    assert any(bool((slots == -1).any()) for _, slots, *_ in few) and any(len(slots) == 1 for _, slots, *_ in few)
    assert any(int(start[-1]) == int(start[-2]) for _, _, start, *_ in few), "an empty sequence"
    assert any(int(context.max()) > BLOCK for *_, context, _, _ in few) and len(many) > len(few)
    for positions, slots, _start, _context, table, cache in many:
        held = set(table.flatten().tolist()) - {0}
        free = [b for b in range(len(cache)) if b not in held]
        assert cache[free].isnan().all() and not cache[sorted(held)].isnan().any()
        assert len(positions) == len(slots)


def test_prompts_start_with_empty_caches_and_sample_every_row():
    names = ("slots", "context_len", "sample_rows", "temperature")
    ((slots, context, rows, temperature, *_),) = StepSamples(names, (((1, BLOCK, 4), torch.float32),), 9, 256).prompts()
    assert len(slots) == len(rows) == len(temperature) == int(context.sum()) and not bool((slots < 0).any())


def test_mask_inputs_hide_a_row_and_pad_another():
    x, mask = torch.randn(3, 5), torch.ones(3, 5, dtype=torch.int64)
    samples = TensorSamples((x, mask, mask.bool()), {i: {0: "B", 1: "S"} for i in range(3)})
    _, hidden, padded = samples()
    for one in (1, 2):
        assert not hidden[one][0].any() and hidden[one][1:].any()
        assert bool((padded[one].int().diff(dim=-1) <= 0).all()) and not padded[one].all() and padded[one].any()
    assert [kind(s[0]) for s in samples.thorough()[3:] for kind in (lambda t: float(t.abs().nan_to_num(9, 9).max()),)] == pytest.approx(
        [2e4, 2e-6, 0.0, 9.0], rel=1.0)


def test_a_graph_that_fails_on_a_sample_is_a_broken_one():
    graph = trace(lambda x: torch.exp(x[:2]), torch.randn(4, 8))
    bad = graph.copy()
    node = node_of(bad, aten.slice.Tensor)
    rows = bad.add_weight("rows", torch.tensor([0, 9]))                # there are 4
    node.replace_all_uses_with(emit(bad, aten.index_select.default, (node.args[0], 0, rows), like=node))
    with pytest.raises(CheckFailed, match=r"%index_select: aten.index_select fails on a sample"):
        check_exact(Reference(graph, graph.sample_inputs()), graph, bad)
