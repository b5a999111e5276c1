"""A search meets its limit with fewer bytes than one format for all, the same each time; its estimates and reuse are what they claim."""
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from decoders import VOCABULARY, before, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from infc import passes
from infc.compiler import driver
from infc.compiler.errors import UserError
from infc.compiler.frontends import capture
from infc.compiler.ir import Graph
from infc.compiler.quality import limits
from infc.compiler.quality.metrics import Comparison, Figures, divergence
from infc.compiler.quant import search
from infc.compiler.quant.matrices import matrices
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.recipe import from_text
from infc.compiler.quant.rounding import round_to_nearest
from infc.compiler.quant.scheme import Scheme
from infc.compiler.quant.search import Option, efficient

WINDOWS = [torch.randint(VOCABULARY, (48,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]
PLAN = Plan(Scheme(8), calibration=WINDOWS)
HEAD = 'format: 1\nlayers:\n  - "*": '


@pytest.fixture(scope="module")
def wide() -> Graph:
    """A tied Llama of two layers before quantize_weights."""
    return before(capture(llama(tied=True)), "quantize_weights")


@pytest.fixture(scope="module")
def untied() -> Graph:
    return before(capture(llama(tied=False)), "quantize_weights")


def found(graph: Graph, quality: str, candidates: str = search.CANDIDATES, **given: Any) -> search.Found:
    return search.search(graph.copy(), PLAN, limits.parse(quality), candidates=search.parse_candidates(candidates), **given)


def kl(graph: Graph, recipe: str) -> float:
    """Of a recipe's weights, measured here: all windows, all rows."""
    weights = [w for w, reason in matrices(graph).items() if not reason]
    schemes = from_text(recipe, "r.yaml").schemes(graph, weights)
    rounded = {str(w.target): round_to_nearest(graph.weights[str(w.target)], s).dequantized() for w, s in schemes.items()}
    step, comparison = search.StepEvaluator(graph), Comparison()
    for ids in WINDOWS:
        comparison.add(step.logits(ids[:-1], rounded), ids[1:], step.logits(ids[:-1]))
    value = comparison.figures().kl
    assert value is not None
    return value


# ---------------------------------------------------------------------------------------------------------------- the choice

def test_a_limit_is_met_with_fewer_bytes_than_one_format_for_all(wide: Graph) -> None:
    limit = 4 * kl(wide, 'format: 1\nlayers:\n  - "*": w8\n')
    made = found(wide, f"kl<={limit}")
    assert kl(wide, str(made.recipe)) <= limit and made.figures is not None and made.figures.kl is not None and made.figures.kl <= limit
    every = [wide.weights[str(node.target)] for node in matrices(wide)]
    assert made.bytes < sum(w.numel() * Scheme(8).stored_bits(w.shape[1]) / 8 for w in every)
    schemes = {line.choice for line in made.recipe.lines}
    assert Scheme(8) in schemes and len(schemes) > 1                 # some are coarser


def test_the_same_search_gives_the_same_recipe(wide: Graph) -> None:
    assert found(wide, "kl<=0.01").json() == found(wide, "kl<=0.01").json()


def test_a_better_method_saves_more_under_the_same_limit(wide: Graph) -> None:
    """What is measured are the codes that a compile would choose; also weights in order, some of them known by then."""
    limit, sizes = kl(wide, 'format: 1\nlayers:\n  - "*": w4\n') / 2, {}
    for method in ("rtn", "auto"):
        plan = Plan(Scheme(8), method, WINDOWS)
        made = search.search(wide.copy(), plan, limits.parse(f"kl<={limit}"), candidates=search.parse_candidates("w4,w8"))
        sizes[method] = made.bytes
        weights = [w for w, reason in matrices(wide).items() if not reason]
        schemes = made.recipe.schemes(wide, weights)
        again = {str(w.target): codes.dequantized() for w, codes in plan.codes(wide, schemes)}
        trial, comparison = search._Trial(wide, plan), Comparison()
        for ids in WINDOWS:
            comparison.add(trial.evaluator.logits(ids[:-1], again), ids[1:], trial.evaluator.logits(ids[:-1]))
        assert (comparison.figures().kl or 0.0) <= limit
    assert sizes["auto"] < sizes["rtn"]


def test_a_wider_limit_never_costs_more_bytes(wide: Graph) -> None:
    sizes = [found(wide, f"kl<={limit}").bytes for limit in (1e-9, 1e-4, 1e-3, 1e-2, 1e-1, 10)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1]


def test_what_nothing_but_wide_weights_can_meet_stays_wide(wide: Graph) -> None:
    made = found(wide, "kl<=0")
    assert str(made.recipe) == 'format: 1\nlayers:\n  - "*": none\n' and made.figures is None
    with pytest.raises(UserError, match=r"^no choice of these formats keeps kl<=0 with 2 standard errors to spare on \d+ calib"):
        found(wide, "kl<=0", "w4,w8")


def test_every_limit_counts(wide: Graph) -> None:
    loose = found(wide, "kl<=0.05")
    assert loose.figures is not None and loose.figures.kl_p99 is not None
    tight = loose.figures.kl_p99 / 10
    both = found(wide, f"kl<=0.05,kl_p99<={tight:.6f}")
    assert both.bytes > loose.bytes and both.figures is not None and both.figures.kl_p99 is not None and both.figures.kl_p99 <= tight


def test_time_spends_nothing_on_a_table_that_is_only_looked_up(untied: Graph) -> None:
    weights = {str(node.target): node for node in matrices(untied)}
    table, head = weights["model_embed_tokens_weight"], weights["lm_head_weight"]
    trial = search._Trial(untied, PLAN)
    order = {}
    for goal in search.GOALS:
        options, _ = search._options(trial, [*weights.values()], WINDOWS[0], [Scheme(4), None], goal, 2, lambda *_: None)
        order[goal] = [move.weight for move in search._moves(options)]
    assert order["time"][-1] is table and order["time"].index(head) <= order["bytes"].index(head)
    assert search._read(table, None, 2) == 2 * 32                     # one row, in bf16
    assert search._read(head, None, 2) == search._stored(head, None, 2) == 2 * 48 * 32


def test_activations_of_eight_bits_are_part_of_what_is_measured(wide: Graph) -> None:
    a16, a8 = found(wide, "kl<=1", "w8"), found(wide, "kl<=1", "w8a8")
    assert a8.figures is not None and a16.figures is not None and a8.bytes == a16.bytes
    assert a8.figures.kl is not None and a16.figures.kl is not None and a8.figures.kl > 1.2 * a16.figures.kl


def test_e4m3_is_a_format_to_choose(wide: Graph) -> None:
    """With one scale a weight it has the fewest bytes of these; integers in groups are the finer, and what a narrower limit asks for."""
    loose, tight = found(wide, "kl<=1", "w8,fp8:tensor"), found(wide, f"kl<={kl(wide, HEAD + 'fp8:tensor') / 4}", "w8,fp8:tensor")
    assert [str(line) for line in loose.recipe.lines] == ['"*": fp8:tensor'] and loose.bytes < tight.bytes
    assert any(str(line.choice) == "w8" for line in tight.recipe.lines)


def test_progress_is_shown_weight_by_weight_and_measurement_by_measurement(wide: Graph) -> None:
    said: list[tuple[str, float]] = []
    made = found(wide, "kl<=0.01", progress=lambda text, share: said.append((text, share)))
    assert sum(text.startswith("sensitivity of") for text, _ in said) == len(matrices(wide))
    assert sum(text.startswith("measuring") for text, _ in said) == made.measured
    assert any(text.startswith("codes of") for text, _ in said)
    assert all(0 <= share <= 1 for _, share in said)


@pytest.mark.parametrize(("quality", "said"), [
    ("ppl<=25", "a perplexity is of one text"), ("kl<=0.1,json>=90%", "formats can be searched for ppl, kl, kl_p99, top1"),
])
def test_limits_that_no_search_can_hold_to(wide: Graph, quality: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        found(wide, quality)


def test_wrong_goals_and_candidates() -> None:
    with pytest.raises(UserError, match="--search-for speed: choose one of bytes, time"):
        search.check([], "speed")
    with pytest.raises(UserError, match="--candidates 'none' names no format to choose"):
        search.parse_candidates("none")
    with pytest.raises(UserError, match="unknown quantization 'w3'"):
        search.parse_candidates("w8, w3")


# ------------------------------------------------------------------------------------------------------------------ knapsack

OPTION = st.builds(Option, st.none(), st.integers(1, 40).map(float), st.integers(0, 60).map(lambda n: n / 64))
OPTIONS = st.lists(OPTION, min_size=1, max_size=5)


@given(OPTIONS)
def test_a_hull_is_convex_and_nothing_lies_below_it(options: list[Option]) -> None:
    hull = efficient(options)
    assert hull[0].kl == min(o.kl for o in options) and hull[-1].bytes == min(o.bytes for o in options)
    prices = [(b.kl - a.kl) / (a.bytes - b.bytes) for a, b in pairwise(hull)]
    assert all(price > 0 for price in prices) and prices == sorted(prices)
    for option in options:                                           # each costs at least what the hull's line through a corner says
        for corner, price in zip(hull, prices, strict=False):
            assert option.kl >= corner.kl + price * (corner.bytes - option.bytes) - 1e-9


@given(st.lists(OPTIONS, min_size=1, max_size=4))
@settings(max_examples=60)
def test_no_other_choice_has_fewer_bytes_for_as_much_kl(every: list[list[Option]]) -> None:
    options: Any = dict(enumerate(every))
    moves = [*search._moves(options)]
    for count in range(len(moves) + 1):
        made: Sequence[Option] = [*search._made(options, moves[:count]).values()]
        spent, size = sum(o.kl for o in made), sum(o.bytes for o in made)
        assert size <= min(sum(o.bytes for o in other) for other in product(*every) if sum(o.kl for o in other) <= spent + 1e-12)
    start = sum(efficient(its)[0].bytes for its in every)
    assert [*accumulate((m.saves for m in moves), lambda a, b: a - b, initial=start)][-1] == sum(efficient(its)[-1].bytes for its in every)


@pytest.mark.parametrize("large", [0.9, 5.0])
def test_a_weight_too_large_for_the_limit_does_not_end_the_search(large: float) -> None:
    """The cheapest move by the byte costs more than all that is allowed: the weights after it still become what they may."""
    coarse = Scheme(4)
    options: Any = {"table": [Option(None, 1e6, 0.0), Option(coarse, 1.0, large)]}
    options |= {f"w{i}": [Option(None, 100.0, 0.0), Option(coarse, 50.0, 0.1)] for i in range(20)}

    class Judge:
        limits, seen = limits.parse("kl<=1"), 0

        def holds(self, chosen: Any, progress: Any) -> tuple[bool, Figures]:
            self.seen += 1
            kl = sum(large if weight == "table" else 0.1 for weight in chosen)
            return kl <= 1, Figures(100, 1.0, 1.0, kl, kl, 1.0)

    judge: Any = Judge()
    taken = [move.weight for move in search._Walk(judge, options, lambda *_: None).down([*search._moves(options)])]
    assert taken == (["table", "w0"] if large < 1 else [f"w{i}" for i in range(10)]) and judge.seen < 12


# --------------------------------------------------------------------------------------------------------------- sensitivity

@pytest.mark.parametrize("left_out", ["", "merge_projections"])      # without it k and v change a cache that q's attention reads
def test_a_run_from_the_changed_weight_on_is_the_whole_run(left_out: str) -> None:
    graph = capture(llama())
    for name in passes.PIPELINE[: passes.PIPELINE.index("smooth_channels")]:
        if name != left_out: passes.load(name).apply(graph)
    trial = search._Trial(graph, PLAN)
    values = search._Values(trial, WINDOWS[0], 8)
    truth = trial.evaluator.logits(WINDOWS[0], first=8).double().log_softmax(-1)
    for node in matrices(graph):
        rounded = round_to_nearest(graph.weights[str(node.target)], Scheme(4)).dequantized()
        whole = trial.evaluator.logits(WINDOWS[0], {str(node.target): rounded}, first=8).double().log_softmax(-1)
        assert values.kl(node, rounded) == pytest.approx(float(divergence(truth, whole).mean()), rel=1e-3, abs=1e-9)


def test_a_finer_candidate_is_estimated_and_measured_to_be_far_better(wide: Graph) -> None:
    trial = search._Trial(wide, PLAN)
    schemes = search.parse_candidates("w4,w8")
    options, sensitivity = search._options(trial, [*matrices(wide)], WINDOWS[0], schemes, "bytes", 2, lambda *_: None)
    values = search._Values(trial, WINDOWS[0], search._first(WINDOWS[0]))
    for node, its in options.items():
        fine = next(o for o in its if o.scheme == Scheme(8))
        coarse = sensitivity[str(node.target)]
        assert coarse > 50 * fine.kl > 0                              # codes of a step 1/18 as wide
        assert coarse > 20 * values.kl(node, trial.nearest(node, Scheme(8)))


@given(st.integers(2, 400), st.floats(0, 3))
def test_shifted_figures_are_worse_by_the_errors(n: int, spare: float) -> None:
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(n, 11, generator=generator)
    comparison = Comparison()
    comparison.add(logits + 0.1 * torch.randn(n, 11, generator=generator), torch.randint(11, (n,), generator=generator).tolist(), logits)
    plain, worse, better = (search.shifted(comparison, s) for s in (0.0, spare, -spare))
    figures = comparison.figures().json()
    assert all(plain[name] == pytest.approx(figures[name]) for name in search.SEARCHED)
    for name in ("ppl", "kl", "kl_p99"): assert better[name] <= plain[name] <= worse[name]
    assert better["top1"] >= plain["top1"] >= worse["top1"]


@pytest.mark.parametrize(("options", "said"), [
    ({"quant": "auto", "quality": "ppl<=25"}, "a perplexity is of one text"),
    ({"quant": "auto", "candidates": "w3"}, "unknown quantization 'w3'"),
    ({"quant": "auto", "search_for": "speed"}, "--search-for speed: choose one of bytes, time"),
    ({"quant": "w8", "candidates": "w4"}, "--candidates and --search-for are about a search"),
    ({"quant": "none", "search_for": "time"}, "--candidates and --search-for are about a search"),
    ({"quant": "auto", "allow": "exact", "dtype": "fp32"}, "--allow exact forbids --quant auto"),
])
def test_wrong_requests_are_one_line_before_anything_is_captured(options: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        driver.compile("tiny", options=driver.Options(**options))
    assert said in error.value.message and "\n" not in error.value.message
