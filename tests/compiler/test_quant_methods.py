"""Codes chosen by what a weight is multiplied with: the statistics by hand, and methods that are better on text they have not seen."""
import pytest
import torch
from decoders import VOCABULARY, before, captured, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.errors import UserError
from infc.compiler.ops.codes import rounded_rows, spread
from infc.compiler.quant import awq
from infc.compiler.quant.gptq import _Codes, damped, gptq, output_errors
from infc.compiler.quant.matrices import matrices, products
from infc.compiler.quant.plan import METHODS, Plan
from infc.compiler.quant.recipe import from_text
from infc.compiler.quant.rounding import WORST, least_squares, round_to_nearest, row_errors
from infc.compiler.quant.scheme import Scheme, e4m3
from infc.compiler.quant.statistics import ROWS, Inputs, collect, inputs_of
from torch import Tensor

SCHEMES = [Scheme(bits, group, symmetric) for bits in (4, 8) for group in (0, 32, 128) for symmetric in (True, False)]


def rows(count: int, k: int, seed: int, *, outliers: int = 2, structure: int = 7) -> Tensor:
    """Inputs as products see them: correlated columns (the same for every seed), a few of them large."""
    mix = torch.randn((k, k), generator=torch.Generator().manual_seed(structure)) / k**0.5 + torch.eye(k)
    x = torch.randn((count, k), generator=torch.Generator().manual_seed(seed)) @ mix
    x[:, :outliers] *= 20
    return x


def inputs(x: Tensor) -> Inputs:
    return Inputs(len(x), x.abs().mean(0), x.square().mean(0), x.abs().amax(0), x[:ROWS])


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(seed))


def output_error(w: Tensor, found: Tensor, x: Tensor) -> float:
    return float((x @ (found - w).T).square().mean())


# --------------------------------------------------------------------------------------------------------------------- gptq

@given(st.integers(1, 6), st.integers(1, 140), st.sampled_from(SCHEMES), st.integers(0, 99), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_gptq_is_no_worse_than_nearest_where_it_was_chosen(n, k, scheme, seed, outliers):
    """Row by row, and within its bound, for fewer rows of x than columns too."""
    w, x = weight(n, k, seed), rows(50, k, seed, outliers=min(outliers, k))
    gram = x.T @ x / len(x)
    found, plain = gptq(w, scheme, "w", gram), round_to_nearest(w, scheme)
    assert found.codes.shape == plain.codes.shape and found.scale.shape == plain.scale.shape
    assert bool((output_errors(w, found, gram) <= output_errors(w, plain, gram) * (1 + 1e-5)).all())
    assert bool((row_errors(w, found) <= WORST * row_errors(w, plain) * (1 + 1e-5)).all())


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.bits == 4], ids=str)
def test_gptq_is_better_on_rows_it_has_not_seen(scheme):
    """Than rounding to nearest by far, and than the best ranges."""
    w, seen, held_out = weight(64, 192), rows(2000, 192, 1), rows(500, 192, 2)
    error = {name: output_error(w, q.dequantized(), held_out) for name, q in {
        "rtn": round_to_nearest(w, scheme), "mse": least_squares(w, scheme), "gptq": gptq(w, scheme, "w", seen.T @ seen / 2000)}.items()}
    assert error["gptq"] < 0.6 * error["rtn"] and error["gptq"] < 0.8 * error["mse"]


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.bits == 4], ids=str)
def test_gptq_of_independent_inputs_is_no_worse_than_the_best_range(scheme):
    """Nothing can be made up for by another column: what is left is the choice of scales, which sweeps solve for."""
    w, gram = weight(8, 64), 2 * torch.eye(64)
    ours, best = (output_errors(w, found, gram).sum() for found in (gptq(w, scheme, "w", gram), least_squares(w, scheme)))
    assert ours <= best


@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from(SCHEMES), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_sweep_makes_nothing_worse(n, k, scheme, seed):
    """But for what f16 takes from scales and offsets: of each value at most a 2**-11 of its two parts, in the norm of the Gram matrix."""
    w, x = weight(n, k, seed), rows(60, k, seed, outliers=min(2, k))
    gram = damped(x.T @ x / len(x))
    codes = _Codes(w, scheme, "w", gram)
    codes.compensate()
    for _ in range(3):
        before = output_errors(w, codes.quantized(), gram).sum()
        codes.sweep()
        after = codes.quantized()
        offset = 0.0 if after.offset is None else spread(after.offset.float(), k, scheme.group)
        parts = (after.dequantized() - offset).abs() + abs(offset)
        lost = ((parts @ gram.abs()) * parts).sum().sqrt() * 2.0**-11
        assert output_errors(w, after, gram).sum().sqrt() <= before.sqrt() + lost


def test_every_column_keeps_its_place():
    """Columns are chosen in another order than they lie in, groups whole: with fine steps the weight itself comes back."""
    w, size = weight(3, 100), torch.rand(100, generator=torch.Generator().manual_seed(2)).exp() ** 4
    found = gptq(w, Scheme(8, 32, False), "w", torch.diag(size))
    assert float((found.dequantized() - w).abs().max()) < 6 / 255
    made = _Codes(w, Scheme(8, 32), "w", torch.diag(size))
    for group, first, last in made.groups:
        its = made.order[first:last]
        assert sorted(its.tolist()) == [*range(32 * group, min(32 * group + 32, 100))]
        assert bool((size[its].diff() <= 0).all())


def test_columns_that_are_never_other_than_zero_do_no_harm():
    w, x = weight(4, 64), rows(100, 64, 0)
    x[:, 10:20] = 0
    found = gptq(w, Scheme(4), "w", x.T @ x / 100)
    assert bool(found.dequantized().isfinite().all())
    nothing = gptq(w, Scheme(4), "w", torch.zeros(64, 64))
    assert bool((row_errors(w, nothing) <= WORST * row_errors(w, round_to_nearest(w, Scheme(4)))).all())


def test_gptq_refuses_what_is_not_finite_by_name():
    w = weight(4, 32)
    w[2, 1] = torch.nan
    with pytest.raises(UserError, match="o_proj: 1 value is not finite"): gptq(w, Scheme(4), "o_proj", torch.eye(32))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_leaves_rows_of_zeros_alone(scheme):
    """FIELD R19: a zero row stays zeros exactly, and zero groups and columns end with scales that are finite and above 0."""
    w, x = weight(6, 160), rows(100, 160, 0)
    w[0], w[1, :128], w[:, 40], w[2], w[3, 1:] = 0, 0, 0, 1e-6, 0
    found = gptq(w, scheme, "w", x.T @ x / 100)
    assert torch.equal(found.dequantized()[0], torch.zeros(160)) and bool(found.dequantized().isfinite().all())
    assert bool(found.scale.isfinite().all() & (found.scale > 0).all()) and (scheme.symmetric or bool(found.offset.isfinite().all()))
    nothing = gptq(torch.zeros(3, 160), scheme, "w", x.T @ x / 100)
    assert torch.equal(nothing.dequantized(), torch.zeros(3, 160)) and bool((nothing.scale > 0).all())


# ------------------------------------------------------------------------------------------------------------------ factors

def power_of_two(s: Tensor) -> bool:
    return torch.equal(s.log2(), s.log2().round())


@given(st.integers(1, 80), st.integers(0, 99), st.sampled_from([awq.activation_aware, awq.outliers_moved]))
@settings(max_examples=40, deadline=None)
def test_factors_are_powers_of_two_and_lose_not_a_bit(k, seed, factors):
    x, w = rows(20, k, seed, outliers=min(2, k)), weight(3, k, seed)
    x[:, seed % k] = 0                                                          # a column that nothing is known of
    for s in factors(inputs(x), w.abs().amax(0)):
        assert power_of_two(s) and bool((s >= 2.0**-awq.LIMIT).all()) and float(s[seed % k]) == 1
        assert torch.equal(w * s / s, w) and torch.equal(x / s * s, x)


def test_factors_are_found_where_inputs_have_outliers():
    """4 bits: columns with large inputs get more precision. The gain holds on rows that the search has not seen."""
    size = torch.randn(128, generator=torch.Generator().manual_seed(5)).exp2() ** 2
    w, seen, held_out = weight(64, 128), rows(400, 128, 1) * size, rows(200, 128, 2) * size
    plan = Plan(Scheme(4), "awq")
    s = awq.search([("w", w, Scheme(4))], inputs(seen), awq.activation_aware, plan.quantize)
    assert s is not None and float(s[size > 4].mean()) > float(s[size < 0.5].mean())
    found = plan.quantize(w * s, Scheme(4), "w", inputs(seen).divided(s)).dequantized() / s
    assert output_error(w, found, held_out) < 0.9 * output_error(w, plan.quantize(w, Scheme(4), "w", inputs(seen)).dequantized(), held_out)


def test_outliers_move_out_of_rows_that_are_rounded_to_a_byte():
    """8-bit rows with one scale each: an outlier costs all others their precision until it is moved into the weight."""
    scheme = Scheme(8, 32, act_bits=8, act_group=0)
    w, seen, held_out = weight(64, 128), rows(400, 128, 1, outliers=3), rows(200, 128, 2, outliers=3)
    s = awq.search([("w", w, scheme)], inputs(seen), awq.outliers_moved, Plan(scheme, "smooth").quantize)
    assert s is not None and bool((s[:3] > s[3:].median()).all())

    def error(s: Tensor) -> float:
        y = rounded_rows(held_out / s, 8, 0) @ round_to_nearest(w * s, scheme).dequantized().T
        return float((y - held_out @ w.T).square().mean())

    assert error(s) < 0.2 * error(torch.ones(128))


def test_nothing_is_moved_where_that_is_of_no_use():
    """Inputs that are all alike, and a format as fine as the weight needs."""
    x = torch.ones(50, 32) * torch.tensor([[1.0, -1.0]]).repeat(50, 16)
    assert awq.search([("w", weight(4, 32), Scheme(4))], inputs(x), awq.activation_aware, Plan(Scheme(4), "awq").quantize) is None


# --------------------------------------------------------------------------------------------------------------- statistics

def step():
    return before(captured(llama()), "smooth_channels")


def windows(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def test_statistics_are_those_of_what_products_read():
    """Against every product's input, seen from outside, over all windows."""
    graph, text = step(), windows(3, 40)
    nodes = [node for node, reason in matrices(graph).items() if not reason]
    found = collect(graph, nodes, text)
    assert set(found) == {str(node.target) for node in nodes}                   # the tied head reads its weight in a product too
    for node in nodes:
        product = products(node)[0]
        values = []
        for window in text:
            twin = graph.copy()
            inner = next(n for n in twin.nodes if n.name == product.name)
            twin.output.args = ((inner.args[0],),)
            values.append(twin.run(*inputs_of(graph, window))[0])
        x = torch.cat(values)
        its = found[str(node.target)]
        assert its.count == len(x) == 120 and its.rows.shape == (120, x.shape[1])
        for ours, expected in ((its.mean, x.abs().mean(0)), (its.square, x.square().mean(0)), (its.largest, x.abs().amax(0))):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_rows_are_kept_evenly_and_no_more_than_asked_for():
    found = collect(graph := step(), [*matrices(graph)], windows(5, 60))
    assert all(len(its.rows) <= ROWS + 5 and its.count == 300 for its in found.values())


def test_divided_is_what_is_collected_of_divided_rows():
    x = rows(40, 16, 0)
    by = torch.arange(1, 17).float()
    ours, expected = inputs(x).divided(by), inputs(x / by)
    for name in ("mean", "square", "largest", "rows"): torch.testing.assert_close(getattr(ours, name), getattr(expected, name))


def test_statistics_of_some_weights_are_those_among_all():
    """What comes after them is not run, caches of later layers included."""
    graph, text = step(), windows(2, 30)
    nodes = [*matrices(graph)]
    some = next(node for node in nodes if "layers_0_mlp_gate_up" in str(node.target))
    found, every = (collect(graph, asked, text)[str(some.target)] for asked in ([some], nodes))
    assert torch.equal(found.mean, every.mean)


def test_values_that_are_not_finite_and_an_absent_text_are_refused():
    graph = step()
    with pytest.raises(UserError, match="--calib FILE"): collect(graph, [*matrices(graph)], [])
    name = next(name for name in graph.weights if "layernorm" in name)
    graph.weights[name] = graph.weights[name] * torch.nan
    with pytest.raises(UserError, match="_weight: what it is multiplied with on the calibration text is not finite"):
        collect(graph, [*matrices(graph)], windows(2, 9))


# --------------------------------------------------------------------------------------------------------------------- plan

@pytest.mark.parametrize("method", METHODS)
def test_every_method_quantizes_with_and_without_inputs(method):
    w, x = weight(4, 40), rows(60, 40, 0)
    plan = Plan(Scheme(4), method)
    for found in (plan.quantize(w, Scheme(4), "w"), plan.quantize(w, Scheme(4), "w", inputs(x))):
        assert bool((row_errors(w, found) <= WORST * row_errors(w, round_to_nearest(w, Scheme(4)))).all())


@pytest.mark.parametrize(("scheme", "method"), [(Scheme(8), "rtn"), (Scheme(8, 0, False), "rtn"), (Scheme(4), "gptq"),
                                                (e4m3(), "rtn")], ids=str)
def test_auto_goes_by_the_bits(scheme, method):
    assert Plan(scheme, "auto").how(scheme) is METHODS[method]


@pytest.mark.parametrize(("asked", "method", "reads"), [
    (Scheme(8), "auto", False), (Scheme(4), "auto", True), (Scheme(8), "gptq", True), (Scheme(4), "rtn", False),
    ("'*': w8", "auto", False), ("'*': none", "auto", False), ("'*': keep", "auto", False), ("'*': w4:g64", "auto", True),
])
def test_a_text_is_read_where_a_method_looks_at_it(asked, method, reads):
    if isinstance(asked, str): asked = from_text(f"format: 1\nlayers:\n  - {asked}\n", "r.yaml")
    assert Plan(asked, method).reads_text == reads


def test_eight_bits_need_no_text_and_four_do():
    graph = step()
    nodes = [*matrices(graph)]
    assert len([*Plan(Scheme(8), "auto").codes(graph, dict.fromkeys(nodes, Scheme(8)))]) == len(nodes)
    with pytest.raises(UserError, match=r"no tokenizer to read a calibration text with, which --quant-method auto looks at"):
        [*Plan(Scheme(4), "auto").codes(graph, dict.fromkeys(nodes, Scheme(4)))]


@pytest.mark.parametrize("method", METHODS)
def test_e4m3_is_by_rounding_or_ranges_alone(method):
    """Also as a line of a recipe."""
    w = weight(4, 40)
    for asked in (e4m3(), e4m3(0, 8, tensor=True), from_text("format: 1\nlayers:\n  - '*': w4\n  - 'a.*': fp8\n", "r.yaml")):
        if method in ("rtn", "mse"): assert Plan(asked, method).quantize(w, e4m3(), "w").scheme.e4m3
        else:
            with pytest.raises(UserError, match=rf"--quant-method {method} is for integer codes, .* auto, rtn, mse$"): Plan(asked, method)


def test_an_unknown_method_is_refused():
    with pytest.raises(UserError, match="unknown quantization method 'gtpq'; did you mean 'gptq'"): Plan(Scheme(4), "gtpq")


def test_methods_that_look_at_a_text_need_a_tokenizer():
    graph = step()
    with pytest.raises(UserError, match=r"no tokenizer to read a calibration text with, .* choose rtn or mse"):
        [*Plan(Scheme(4), "awq").codes(graph, dict.fromkeys(matrices(graph), Scheme(4)))]
    assert len([*Plan(Scheme(4), "mse").codes(graph, dict.fromkeys(matrices(graph), Scheme(4)))]) == len(matrices(graph))


def test_token_ids_in_a_file_are_what_windows_of_ids_are(tmp_path):
    """As --data reads them: a list of numbers is no text, and a model without a tokenizer can be calibrated."""
    graph, ids = step(), windows(1, 3 * 64)[0]
    (tmp_path / "ids.json").write_text(str(ids))
    schemes = dict.fromkeys(matrices(graph), Scheme(4))
    codes = [dict(Plan(Scheme(4), "awq", calibration).codes(graph, schemes))
             for calibration in (tmp_path / "ids.json", [ids[:64], ids[64:128], ids[128:]])]
    assert all(torch.equal(codes[0][node].codes, codes[1][node].codes) for node in schemes)
    (tmp_path / "ids.json").write_text(str([*ids, VOCABULARY]))
    with pytest.raises(UserError, match=r"ids\.json: 48 is no token of .*, whose vocabulary has ids 0\.\.47"):
        [*Plan(Scheme(4), "awq", tmp_path / "ids.json").codes(graph, schemes)]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_tables_have_no_statistics(method):
    """A lookup weighs no columns: what is looked up is rounded with least squared error, though a head may share it."""
    graph = step()
    found = dict(Plan(Scheme(4), method, windows(2, 20)).codes(graph, dict.fromkeys(matrices(graph), Scheme(4))))
    table = next(n for n in matrices(graph) if "embed" in n.name)
    w = graph.weights[str(table.target)]
    assert len(found) == len(matrices(graph)) and torch.equal(found[table].codes, least_squares(w, Scheme(4), "w").codes)
