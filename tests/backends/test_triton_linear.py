"""Products on Triton, interpreted, against their meaning in fp64: every cut (one row, few, many, split K), odd sizes, each dtype."""
from triton_env import FLOATS, conform, exact, kernels, picks, plain, randn, run, ulp  # isort: skip  # before anything of Triton

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.triton.kernels.linear import Tiles, cuts, one_row_cuts, tiles
from infc.backends.triton.registry import Emit
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 7, 3), (1, 65, 1030), (2, 1, 1), (5, 70, 600), (16, 64, 2048), (17, 33, 513), (70, 200, 300), (130, 40, 96)]


def weight(n: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return randn(n, k, dtype=dtype, seed=seed, scale=k**-0.5)


def times(dtype: torch.dtype | None) -> int:
    """Sums in another order: twice the reference's own error where nothing coarser hides it."""
    return 2 if dtype == F32 else 1


@pytest.mark.parametrize(("rows", "n", "k", "dtype"), [(*shape, dtype) for shape in SHAPES for dtype in FLOATS
                                                       if dtype == BF16 or shape[0] < 17], ids=str)
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = randn(rows, k, dtype=dtype), weight(n, k, dtype)
    conform("infc::linear", times=times(dtype), x=x, w=w)
    conform("infc::linear", times=times(dtype), x=x, w=w, bias=randn(n, dtype=dtype, seed=2), residual=randn(rows, n, dtype=dtype, seed=3))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "f", "k"), [(1, 65, 1030), (5, 33, 600), (18, 70, 96)])
def test_swiglu(rows: int, f: int, k: int, dtype: torch.dtype, act: str) -> None:
    conform("infc::linear_swiglu", times=times(dtype), x=randn(rows, k, dtype=dtype, scale=2), w=weight(2 * f, k, dtype), act=act)


@pytest.mark.parametrize(("dtype", "out"), [pair for pair in product(FLOATS, FLOATS) if pair[0] != pair[1]], ids=str)
def test_results_of_another_dtype(dtype: torch.dtype, out: torch.dtype) -> None:
    for rows in (1, 6):
        x, w = randn(2, rows, 80, dtype=dtype)[:1], weight(40, 80, dtype)          # a leading axis as well
        found = conform("infc::linear", times=2, x=x, w=w, residual=randn(1, rows, 40, dtype=F32, seed=3), out_dtype=out)
        assert found.dtype == out and found.shape == (1, rows, 40)
        conform("infc::linear_swiglu", times=2, x=x, w=w, act="silu", out_dtype=out)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 300), st.sampled_from(FLOATS), st.booleans(), st.booleans())
def test_any_size(rows: int, n: int, k: int, dtype: torch.dtype, bias: bool, residual: bool) -> None:
    x, w = randn(rows, k, dtype=dtype), weight(n, k, dtype)
    b, r = randn(n, dtype=dtype, seed=2) if bias else None, randn(rows, n, dtype=dtype, seed=3) if residual else None
    if dtype != F32:
        conform("infc::linear", x=x, w=w, bias=b, residual=r)
        return
    # One sum can come out exact by luck in one order and not in another: an ulp of the magnitudes added is always allowed.
    found, wide = run("infc::linear", x=x, w=w, bias=b, residual=r), exact("infc::linear", x=x, w=w, bias=b, residual=r)
    own = (plain("infc::linear", x=x, w=w, bias=b, residual=r) - wide).abs()
    assert bool(((found - wide).abs() <= own + ulp(x.double().abs() @ w.double().abs().T + wide.abs(), F32)).all())


def test_a_row_of_nan_or_inf_stays_alone() -> None:
    x = randn(20, 96, dtype=BF16)
    x[3], x[19, 5] = torch.nan, torch.inf
    clean = run("infc::linear", x=x.nan_to_num(0.0, 0.0), w=weight(70, 96, BF16))
    found = run("infc::linear", x=x, w=weight(70, 96, BF16))
    keep = torch.tensor([row not in (3, 19) for row in range(20)])
    assert torch.equal(found[keep], clean[keep]) and found[3].isnan().all() and not found[19].isfinite().any()


@pytest.mark.parametrize("act", [None, "silu"])
def test_split_and_whole_sums_agree_and_every_cut_is_taken(act: str | None) -> None:
    n, k = 128, 4096
    cuts = {rows: tiles(rows, n, k, BF16, act is not None) for rows in (2, 16, 17, 33, 65, 513)}
    assert {cut.block_m for cut in cuts.values()} >= {16, 32, 64, 128} and all(cut.split > 1 for cut in cuts.values())
    assert tiles(16, 128_256, k, BF16, pair=False).split == 1           # enough tiles: one launch
    name, more = ("infc::linear", {}) if act is None else ("infc::linear_swiglu", {"act": act})
    conform(name, x=randn(16, k, dtype=BF16), w=weight(n, k, BF16), **more)


def test_a_split_covers_k_once() -> None:
    """Each part's columns, as the kernel cuts them, for sizes that do not divide."""
    for k, cut in product((600, 2048, 2049, 5000, 14_336), (Tiles(16, 64, 128, 8, 4, 4), Tiles(16, 64, 64, 4, 4, 4))):
        each = -(-k // (cut.block_k * cut.split)) * cut.block_k
        assert [c for part in range(cut.split) for c in range(min(part * each, k), min((part + 1) * each, k))] == list(range(k))


def test_one_row_is_one_launch() -> None:
    for n, k in ((4096, 4096), (4096, 14_336), (128_256, 4096), (7, 3)):
        emit, meta = Emit(), {"dtype": BF16, "device": "meta"}
        kernels()["infc::linear"].lower(emit, torch.empty(1, n, **meta), x=torch.empty(1, k, **meta), w=torch.empty(n, k, **meta))
        assert len(emit.launches) == 1 and not emit.scratch


def test_no_rows_is_no_launch() -> None:
    assert run("infc::linear", x=randn(0, 8), w=randn(3, 8)).shape == (0, 3)


@pytest.mark.parametrize(("change", "reason"), [
    ({"x": randn(2, 8, dtype=F16)}, "x is torch.float16, w is torch.float32"),
    ({"w": randn(8, 3).T}, "w is not contiguous"),
    ({"w": randn(0, 8)}, r"a weight of \(0, 8\) is empty"),
    ({"bias": torch.ones(3, dtype=torch.float64)}, "bias is torch.float64"),
    ({"out_dtype": torch.float64}, "results in torch.float64"),
])
def test_refuses(change: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason): run("infc::linear", **{"x": randn(2, 8), "w": randn(3, 8)} | change)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 70, 600), (5, 70, 600), (70, 140, 200), (130, 140, 200)])
def test_every_cut_gives_what_the_product_means(rows: int, n: int, k: int) -> None:
    arguments = {"x": randn(rows, k, dtype=BF16), "w": weight(n, k, BF16), "bias": randn(n, dtype=BF16, seed=2)}
    pair = {"x": randn(rows, k, dtype=F16), "w": weight(2 * n, k, F16), "act": "silu"}
    for op, call in (("infc::linear", arguments), ("infc::linear_swiglu", pair)):
        several = picks(op, **call)
        assert 2 <= len(several) <= 4
        for pick in several: conform(op, pick=pick, **call)


def test_cuts_of_real_sizes() -> None:
    """The rule's first, no two alike, at most four, a part of two steps at least; fp32 has one: larger tiles of it spill."""
    for rows, (n, pair) in product((2, 32, 64, 512, 2048), ((4096, False), (14_336, True))):
        several = cuts(rows, n, 4096, BF16, pair)
        assert several[0] == tiles(rows, n, 4096, BF16, pair) and 2 <= len({*several}) == len({*map(str, several)}) <= 4
        assert all(cut.split * cut.block_k * 2 <= 4096 for cut in several)
    assert cuts(8, 4096, 4096, F32, pair=False) == [tiles(8, 4096, 4096, F32, pair=False)]
    assert [*map(str, one_row_cuts(4096, 4096, pair=False))] == [
        "1x4x1024, 4 warps, 3 stages", "1x2x1024, 4 warps, 3 stages", "1x1x1024, 4 warps, 3 stages", "1x8x1024, 8 warps, 3 stages"]


def test_a_call_offers_once_and_what_stands_beside_the_rule_may_not_spill() -> None:
    emit = Emit(1)
    assert emit.choice(["a", "a", "b"]) == "b" and emit.offered == ("a", "b")
    with pytest.raises(ValueError, match="once"): emit.choice(["c"])
    for one in (emit, rule := Emit()): one(None, grid=(1,), args=(), spills_ok=True)
    assert not emit.launches[0].spills_ok and rule.launches[0].spills_ok
