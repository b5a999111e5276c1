"""Codes of a weight by itself: half a step off at most, whatever the weight (FIELD R19), never a warning, refused with its name."""
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.errors import UserError
from infc.compiler.ops.codes import E4M3, E4M3_MAX, groups, spread
from infc.compiler.quant.rounding import F16_TINY, WORST, Quantized, bounded, encode, least_squares, round_to_nearest, row_errors, scales
from infc.compiler.quant.scheme import Scheme, e4m3, parse
from torch import Tensor

FLOATS = [e4m3(), e4m3(32), e4m3(128)]
SCHEMES = [Scheme(bits, group, symmetric) for bits in (4, 8) for group in (0, 32, 64, 128) for symmetric in (True, False)] + FLOATS
METHODS = [round_to_nearest, least_squares]

scheme = st.sampled_from(SCHEMES)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def matrix(n: int, k: int, seed: int, outliers: int = 0, magnitude: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn((n, k), generator=generator) * magnitude
    for place in range(outliers): w[(seed + place) % n, int(torch.randint(k, (1,), generator=generator))] = 50 * magnitude
    return w


def sound(found: Quantized, n: int, k: int) -> None:
    """Of the right shapes, with scales that are finite and above 0."""
    assert found.codes.shape == (n, -(-k * found.scheme.bits // 8)) and found.codes.dtype == (E4M3 if found.scheme.e4m3 else torch.uint8)
    shape = (1, 1) if found.scheme.tensor else (n, groups(k, found.scheme.group))
    for part in (found.scale, found.offset):
        if part is not None: assert part.shape == shape and part.dtype == torch.float16
    assert (found.offset is None) == found.scheme.symmetric
    assert bool((found.scale > 0).all()) and bool(found.dequantized().isfinite().all())


@given(st.integers(1, 4), st.integers(1, 150), scheme, st.integers(0, 3), st.sampled_from([1e-6, 1e-2, 1.0]), st.integers(0, 999))
@settings(max_examples=150, deadline=None)
def test_nothing_is_further_off_than_half_a_step(n, k, scheme, outliers, magnitude, seed):
    """And what f16 takes from the scale, times the largest code, and from the offset. A step of e4m3 is an eighth of the value's power of
    two, and a 512th from 2**-6 down; its scales are rounded up, which takes nothing."""
    w = matrix(n, k, seed, outliers, magnitude)
    found = round_to_nearest(w, scheme)
    sound(found, n, k)
    top = E4M3_MAX if scheme.e4m3 else 2 ** (scheme.bits - 1) if scheme.symmetric else 2**scheme.bits
    step = spread(found.scale.float(), k, scheme.group)
    slack = top * (step * 2**-11 + F16_TINY / 2)
    if scheme.e4m3: step, slack = step * 2 ** (w / step).abs().clamp(min=2.0**-6).log2().floor() / 8, step * 1e-5
    if found.offset is not None: slack += spread(found.offset.float().abs(), k, scheme.group) * 2**-11 + F16_TINY
    assert bool(((found.dequantized() - w).abs() <= step / 2 + slack).all())


@given(st.integers(1, 4), st.integers(1, 150), scheme, st.integers(0, 3), st.integers(0, 999), st.booleans())
@settings(max_examples=60, deadline=None)
def test_least_squares_is_no_worse_than_nearest_in_what_it_minimizes(n, k, scheme, outliers, seed, weighed):
    w = matrix(n, k, seed, outliers)
    importance = torch.rand(k, generator=torch.Generator().manual_seed(seed)) if weighed else None
    found, plain = least_squares(w, scheme, "w", importance), round_to_nearest(w, scheme)
    sound(found, n, k)
    by = torch.ones(k) if importance is None else importance
    ours, theirs = (((q.dequantized() - w).square() * by).sum(1) for q in (found, plain))
    assert bool((ours <= theirs * (1 + 1e-5) + 1e-12).all())


def test_an_outlier_is_clipped_where_that_pays():
    w = matrix(1, 1024, 3)
    w[0, 5] = 5.0
    found, plain = least_squares(w, Scheme(4, 0)), round_to_nearest(w, Scheme(4, 0))
    assert float(found.scale[0, 0]) < 0.95 * float(plain.scale[0, 0]) and float(row_errors(w, found)) < 0.95 * float(row_errors(w, plain))


@given(scheme, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_sign_changes_the_sign(scheme, seed):
    """Symmetric formats leave out the lowest code, so that -w has the codes of w, mirrored."""
    w = matrix(3, 40, seed)
    if scheme.symmetric: assert torch.equal(round_to_nearest(-w, scheme).dequantized(), -round_to_nearest(w, scheme).dequantized())


@given(st.integers(1, 3), st.integers(1, 70), scheme, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_what_codes_can_say_is_found_again(n, k, scheme, seed):
    """A weight on the grid of its own range comes back every bit."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-scheme.top, scheme.top) if scheme.symmetric else (0, 2**scheme.bits - 1)
    codes = torch.randint(int(low), int(high) + 1, (n, k), generator=generator).float()
    if scheme.e4m3: codes = torch.randint(127, (n, k), generator=generator, dtype=torch.uint8).view(E4M3).float()
    codes[:, :: scheme.group or k] = high                                   # each group reaches the end of its range,
    if not scheme.symmetric and k > 1: codes[:, 1 :: scheme.group or k] = low                               # and the other
    w = codes * 2.0**-7
    if scheme.symmetric or (k - 1) % (scheme.group or k):                   # a last group of one value has no range of its own
        assert torch.equal(round_to_nearest(w, scheme).dequantized(), w)


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2), st.sampled_from(METHODS), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_one_scale_for_a_whole_weight_is_that_of_the_weight_as_one_row(n, k, outliers, method, seed):
    w, scheme = matrix(n, k, seed, outliers), e4m3(tensor=True)
    found, row, plain = method(w, scheme), method(w.reshape(1, -1), e4m3()), round_to_nearest(w, scheme)
    sound(found, n, k)
    same = torch.equal(found.dequantized(), row.dequantized().reshape(n, k))
    assert same or (torch.equal(found.scale, plain.scale) and bool((row_errors(w, Quantized(
        row.codes.reshape(n, k), row.scale, None, scheme, k)) > WORST * row_errors(w, plain)).any()))
    assert bool((row_errors(w, found) <= WORST * row_errors(w, plain)).all())


def test_e4m3_keeps_small_values_that_integers_of_a_row_lose():
    """A share of each value, down to 2**-15 of the largest: with an outlier, bytes that stand for whole numbers give 0."""
    w = torch.full((1, 64), 1e-3)
    w[0, 0] = 1.0
    floats, whole = (round_to_nearest(w, scheme).dequantized()[0, 1] for scheme in (e4m3(), Scheme(8, 0)))
    assert float(whole) == 0 and abs(float(floats) - 1e-3) <= 1e-3 * 2**-4


# --------------------------------------------------------------------------------------------------------------- bad weights

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_constants_and_tiny_values(method, scheme):
    """FIELD R19: a zero row, a zero group, a row whose scale is below f16's normal range, and one constant."""
    w = matrix(5, 128, 0)
    w[0], w[1, 16:96], w[2], w[3], w[4] = 0, 0, 1e-6, 0.3, 1e-12
    found = method(w, scheme, "w")
    sound(found, 5, 128)
    means = found.dequantized()
    assert torch.equal(means[0], torch.zeros(128))
    if scheme.group == 32: assert torch.equal(means[1, 32:96], torch.zeros(64))
    assert bool(((means[2] - 1e-6).abs() < 3e-7).all()) and bool(((means[3] - 0.3).abs() < 0.3 * 2**-10).all())
    assert bool((means[4].abs() <= F16_TINY).all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", [*SCHEMES, e4m3(tensor=True)], ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-6, 0.3, -0.3, 1e-12])
def test_a_weight_of_one_value_throughout(method, scheme, value):
    """FIELD R19: zeros stay zeros, whatever the scale; any other value keeps its sign, and all of it that f16 scales can hold."""
    w = torch.full((3, 70), value)
    found = method(w, scheme, "w")
    sound(found, 3, 70)
    means = found.dequantized()
    if abs(value) >= 1e-6: assert bool((means.sign() == w.sign()).all()) and bool(((means - w).abs() <= abs(value) * 0.3).all())
    if abs(value) == 0.3: assert bool(((means - w).abs() <= 0.3 * 2**-10).all())
    if value == 0: assert torch.equal(means, w)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", [*SCHEMES, e4m3(tensor=True)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(method, bad, scheme):
    w = matrix(3, 64, 0)
    w[1, 17] = bad
    said = rf"^mlp_weight: 1 value is not finite, the first at \[1, 17\]: {bad}; such a weight cannot be quantized: leave it wide with a"
    with pytest.raises(UserError, match=said): method(w, scheme, "mlp_weight")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("scheme", "value"), [("w4", 1e6), ("w8", 1e7), ("w8:asym", -1e5), ("fp8", 4e7), ("fp8:tensor", 4e7)])
def test_a_scale_beyond_f16_is_refused_by_name(method, scheme, value):
    w = matrix(2, 64, 0)
    w[0, 0] = value
    chosen = parse(scheme)
    assert chosen is not None
    with pytest.raises(UserError, match=r"huge: a scale of .* is beyond f16"): method(w, chosen, "huge")


# ------------------------------------------------------------------------------------------------------------------ bounded

def test_rows_that_are_too_far_off_keep_what_nearest_gives():
    w, scheme = matrix(4, 64, 1), Scheme(4)
    plain = round_to_nearest(w, scheme)
    wrong = plain.scale.clone()
    wrong[2] *= 2
    found = bounded(w, Quantized(plain.codes, wrong, None, scheme, 64), plain)
    assert torch.equal(found.dequantized(), plain.dequantized())
    doubled = Quantized(plain.codes, wrong, None, scheme, 64)
    assert float((row_errors(w, doubled) / row_errors(w, plain))[2]) > 2 * WORST


def test_rows_that_are_not_taken_keep_what_nearest_gives():
    w, scheme = matrix(4, 64, 1), Scheme(4, symmetric=False)
    plain, found = round_to_nearest(w, scheme), least_squares(w, scheme)
    mixed = bounded(w, found, plain, torch.tensor([True, False, True, False])).dequantized()
    assert torch.equal(mixed[0::2], found.dequantized()[0::2]) and torch.equal(mixed[1::2], plain.dequantized()[1::2])


def test_encode_takes_scales_as_they_are():
    w, scheme = matrix(2, 40, 0), Scheme(8, 32)
    low, high = w.new_full((2, 2), -4.0), w.new_full((2, 2), 4.0)
    found = encode(w, *scales(low, high, scheme, "w"), scheme)
    assert torch.equal(found.scale, (torch.full((2, 2), 4.0) / 127).half()) and float((found.dequantized() - w).abs().max()) < 4 / 127
