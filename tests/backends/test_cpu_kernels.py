"""Every CPU kernel against its operator's reference in fp64, on every instruction set this machine has."""
import itertools
from collections.abc import Iterator

import pytest
import torch
from cpu_kernels import ISAS, Library, R, T, call, judge, judge_sums, mean_error, meta
from infc.compiler.ops.registry import by_name
from infc.compiler.ops.sample import GREEDY_BELOW
from torch import Tensor, fx

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 100, 513)
OPS = torch.ops.infc
ATEN = torch.ops.aten

# (K, N): the real model's, panels cut short, an odd K, a K of several chunks, a K shorter than a vector
SHAPES = ((576, 960), (48, 33), (75, 16), (1536, 70), (6, 5))
NORMS = (576, 1, 7, 1023)
SWIGLUS = ((64, 48), (75, 21))
X_DTYPES = (F32, BF16)


def nodes() -> dict[str, fx.Node]:
    """Every case by name: the operator calls that the library holds."""
    out: dict[str, fx.Node] = {}
    for dtype, (k, n) in itertools.product(X_DTYPES, SHAPES):
        x, w = meta(T, k, dtype=dtype), meta(n, k, dtype=dtype)
        out[f"linear-{dtype}-{k}x{n}"] = call(OPS.linear.default, x=x, w=w, out_dtype=F32)
    for dtype in X_DTYPES:
        x, w = meta(T, 48, dtype=dtype), meta(33, 48, dtype=dtype)
        out[f"linear-all-{dtype}"] = call(OPS.linear.default, x=x, w=w, bias=meta(33, dtype=dtype), residual=meta(T, 33), out_dtype=BF16)
        for (k, f), act in itertools.product(SWIGLUS, ("silu", "gelu", "gelu_tanh")):
            out[f"linear_swiglu-{dtype}-{k}x{f}-{act}"] = call(
                OPS.linear_swiglu.default, x=meta(T, k, dtype=dtype), w=meta(2 * f, k, dtype=dtype), act=act, out_dtype=dtype)
        for act in ("silu", "gelu", "gelu_tanh"):
            out[f"swiglu-{dtype}-{act}"] = call(OPS.swiglu.default, gate_up=meta(T, 70, dtype=dtype), act=act)
        for n in NORMS:
            x, w = meta(T, n, dtype=dtype), meta(n)
            out[f"rms_norm-{dtype}-{n}"] = call(OPS.rms_norm.default, x=x, w=w.to(dtype), eps=1e-5, out_dtype=BF16 if n == 576 else None)
            out[f"add_rms_norm-{dtype}-{n}"] = call(OPS.add_rms_norm.default, x=x, residual=x, w=w.to(dtype), eps=1e-5)
            out[f"layer_norm-{dtype}-{n}"] = call(OPS.layer_norm.default, x=x, w=w.to(dtype), b=w.to(dtype), eps=1e-5)
        out[f"embedding-{dtype}"] = call(ATEN.embedding.default, weight=meta(100, 75, dtype=dtype), indices=meta(T, dtype=I32))
        tied = call(ATEN.embedding.default, weight=meta(100, 75, dtype=dtype), indices=meta(T, dtype=torch.int64))
        weight = tied.kwargs["weight"]
        tied.graph.call_function(OPS.linear.default, (weight, weight))
        out[f"embedding-tied-{dtype}"] = tied
        out[f"select-{dtype}"] = call(ATEN.index_select.default, self=meta(T, 37, dtype=dtype), dim=0, index=meta(R, dtype=I32))
        out[f"cast-{dtype}"] = call(ATEN._to_copy.default, self=meta(T, 37, dtype=dtype), dtype=F32 if dtype == BF16 else BF16)
        for inter in (False, True):
            out[f"rope-{dtype}-{inter}"] = call(
                OPS.rope.default, q=meta(2, 4, T, 40, dtype=dtype), k=meta(2, 2, T, 40, dtype=dtype), cos=meta(1, 1, T, 17),
                sin=meta(1, 1, T, 17), interleaved=inter)
    out["sample"] = call(OPS.sample.default, logits=meta(R, 1000), temperature=meta(R), top_k=meta(R, dtype=I32), top_p=meta(R),
                         uniform=meta(R))
    out["sample-49152"] = call(OPS.sample.default, logits=meta(R, 49152), temperature=meta(R), top_k=meta(R, dtype=I32),
                               top_p=meta(R), uniform=meta(R))
    return out


@pytest.fixture(scope="module", params=ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    made = Library(request.param, nodes(), tmp_path_factory.mktemp("kernels"))
    yield made
    made.close()


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def both(op: str, **kwargs: object) -> tuple[Tensor, Tensor]:
    """The reference in the tensors' own dtypes, and in fp64 on the same values."""
    reference = by_name(f"infc::{op}").reference
    def wide(v: object) -> object: return v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
    exact = {k: wide(v) for k, v in kwargs.items() if k != "out_dtype"}
    return reference(**kwargs), reference(**exact)


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_linear(library: Library, dtype: torch.dtype, k: int, n: int) -> None:
    w = randn(n, k, dtype=dtype)
    for i, rows in enumerate(ROWS):
        x = randn(rows, k, dtype=dtype, seed=rows)
        poisoned = torch.cat((x, torch.full((2, k), torch.nan, dtype=dtype)))
        (y,) = library.run(f"linear-{dtype}-{k}x{n}", {"x": poisoned, "w": w}, [rows], threads=1 + i % 3)
        plain, exact = both("linear", x=x, w=w, out_dtype=F32)
        judge_sums(y, plain, exact)
        if k >= 576 and rows >= 100:           # many samples, the real model's lengths: not worse than torch's own product
            assert mean_error(y, exact) <= mean_error(plain, exact)


@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_linear_with_bias_and_residual(library: Library, dtype: torch.dtype) -> None:
    w, bias = randn(33, 48, dtype=dtype), randn(33, dtype=dtype)
    for i, rows in enumerate(ROWS):
        x, residual = randn(rows, 48, dtype=dtype, seed=rows), randn(rows, 33)
        given = {"x": x, "w": w, "bias": bias, "residual": residual}
        (y,) = library.run(f"linear-all-{dtype}", given, [rows], threads=1 + i % 3)
        judge_sums(y, *both("linear", **given, out_dtype=BF16))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("k", "f"), SWIGLUS)
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_linear_swiglu(library: Library, dtype: torch.dtype, k: int, f: int, act: str) -> None:
    w, results = randn(2 * f, k, dtype=dtype) / 4, []
    for i, rows in enumerate(ROWS):
        x = randn(rows, k, dtype=dtype, seed=rows)
        (y,) = library.run(f"linear_swiglu-{dtype}-{k}x{f}-{act}", {"x": x, "w": w}, [rows], threads=1 + i % 3)
        results.append((y, *both("linear_swiglu", x=x, w=w, act=act, out_dtype=dtype)))
    judge_sums(*(torch.cat(part) for part in zip(*results, strict=True)))              # few outputs each


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_swiglu(library: Library, dtype: torch.dtype, act: str) -> None:
    for rows in ROWS:
        x = randn(rows, 70, dtype=dtype, seed=rows) * 3
        (y,) = library.run(f"swiglu-{dtype}-{act}", {"gate_up": x}, [rows])
        judge(y, *both("swiglu", gate_up=x, act=act))


@pytest.mark.parametrize("n", NORMS)
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_norms(library: Library, dtype: torch.dtype, n: int) -> None:
    w, b = randn(n, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    for i, rows in enumerate(ROWS):
        x, residual, threads = randn(rows, n, dtype=dtype) + 3, randn(rows, n, dtype=dtype, seed=5), 1 + i % 3
        (y,) = library.run(f"rms_norm-{dtype}-{n}", {"x": x, "w": w}, [rows], threads)
        judge(y, *both("rms_norm", x=x, w=w, eps=1e-5, out_dtype=BF16 if n == 576 else None))
        y, h = library.run(f"add_rms_norm-{dtype}-{n}", {"x": x, "residual": residual, "w": w}, [rows], threads)
        plain, exact = both("add_rms_norm", x=x, residual=residual, w=w, eps=1e-5)
        judge(y, plain[0], exact[0])
        assert torch.equal(h, plain[1])
        (y,) = library.run(f"layer_norm-{dtype}-{n}", {"x": x, "w": w, "b": b}, [rows], threads)
        judge(y, *both("layer_norm", x=x, w=w, b=b, eps=1e-5))


@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_rows_by_index(library: Library, dtype: torch.dtype) -> None:
    table, x = randn(100, 75, dtype=dtype), randn(50, 37, dtype=dtype)
    for rows in (1, 2, 3, 17, 100):
        ids = torch.randint(0, 100, (rows,), dtype=I32)
        (y,) = library.run(f"embedding-{dtype}", {"weight": table, "indices": ids}, [rows], threads=3)
        assert torch.equal(y, table[ids.long()])
        (y,) = library.run(f"embedding-tied-{dtype}", {"weight": table, "indices": ids.long()}, [rows], threads=3)
        assert torch.equal(y, table[ids.long()])
        picked = torch.randint(0, 50, (rows,), dtype=I32)
        (y,) = library.run(f"select-{dtype}", {"self": x, "index": picked}, [50, 0, rows])
        assert torch.equal(y, x[picked.long()])
        (y,) = library.run(f"cast-{dtype}", {"self": x}, [50])
        assert torch.equal(y, x.to(y.dtype))


def test_cast_of_special_values(library: Library) -> None:
    x = torch.full((1, 37), 1.0)
    x[0, :8] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 3.4e38, 1.00390625, 1.01171875, 1e-30])
    (y,) = library.run(f"cast-{F32}", {"self": x}, [1])
    assert torch.equal(y.isnan(), x.isnan()) and torch.equal(y.nan_to_num(0.5), x.bfloat16().nan_to_num(0.5))
    assert y[0, 3].signbit()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_rope(library: Library, dtype: torch.dtype, interleaved: bool) -> None:
    for length in (1, 5, 33):
        q, k = randn(2, 4, length, 40, dtype=dtype), randn(2, 2, length, 40, dtype=dtype)
        cos, sin = randn(1, 1, length, 17), randn(1, 1, length, 17, seed=9)
        given = {"q": q, "k": k, "cos": cos, "sin": sin}
        found = library.run(f"rope-{dtype}-{interleaved}", given, [length], threads=3)
        plain, exact = both("rope", **given, interleaved=interleaved)
        for f, p, e in zip(found, plain, exact, strict=True): judge(f, p, e)


@pytest.mark.parametrize("name", ["sample", "sample-49152"])
def test_sample(library: Library, name: str) -> None:
    vocab, rows = (1000, 64) if name == "sample" else (49152, 12)
    logits = randn(rows, vocab) * 3
    logits[0, 7] = logits[0, 900] = 50.0                               # a tie: the lowest index wins
    logits[1] = 2.5                                                    # all equal
    pick = torch.Generator().manual_seed(3)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.6]).repeat(rows // 4)
    top_k = torch.tensor([0, 1, 5, 50, 3, vocab], dtype=I32).repeat(rows)[:rows].contiguous()
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.01, 0.3]).repeat(rows)[:rows].contiguous()
    uniform = torch.rand(rows, generator=pick)
    given = {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p, "uniform": uniform}
    expected = by_name("infc::sample").reference(**given)
    for threads in (1, 2, 3):
        (token,) = library.run(name, given, [0, 0, rows], threads)
        assert torch.equal(token, expected)


def test_argmax_ignores_nan_and_takes_the_lowest_index(library: Library) -> None:
    logits = torch.full((3, 1000), -torch.inf)
    logits[0, [17, 400, 999]] = 1.0
    logits[1] = torch.nan
    logits[1, 999] = -5.0
    given = {"logits": logits, "temperature": torch.zeros(3), "top_k": torch.zeros(3, dtype=I32), "top_p": torch.ones(3),
             "uniform": torch.zeros(3)}
    for threads in (1, 2, 3):
        (token,) = library.run("sample", given, [0, 0, 3], threads)
        assert token.tolist() == [17, 999, 0]


def settings(rows: int, temperature: float, top_k: int = 0, uniform: float = 0.99) -> dict[str, Tensor]:
    return {"temperature": torch.full((rows,), temperature), "top_k": torch.full((rows,), top_k, dtype=I32), "top_p": torch.ones(rows),
            "uniform": torch.full((rows,), uniform)}


@pytest.mark.parametrize("temperature", [1e-45, 2.9e-39, 1e-38, 9e-31, GREEDY_BELOW, 1e-29, torch.nan])
def test_a_tiny_temperature_is_greedy(library: Library, temperature: float) -> None:
    logits = randn(3, 1000)
    logits[2, [40, 500]] = 9.0                                         # a tie, of which the second is drawn where it is drawn
    given = {"logits": logits, **settings(3, temperature)}
    expected = by_name("infc::sample").reference(**given)
    assert expected.tolist() == [*logits[:2].argmax(-1), 500 if temperature >= GREEDY_BELOW else 40]
    for top_k in (0, 7):
        (token,) = library.run("sample", {**given, **settings(3, temperature, top_k)}, [0, 0, 3], threads=2)
        assert torch.equal(token, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 5, 990])
def test_nan_and_infinite_logits(library: Library, temperature: float, top_k: int) -> None:
    logits = randn(6, 1000)
    logits[0, ::2] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[2, :20] = torch.nan
    logits[3, [700, 900]] = torch.inf
    logits[4, 3:] = torch.nan
    logits[5, 100:] = -torch.inf
    for uniform in (0.0, 0.3, 0.99):
        given = {"logits": logits, **settings(6, temperature, top_k, uniform)}
        expected = by_name("infc::sample").reference(**given)
        assert expected[1:4].tolist() == [0, 0, 700]
        for threads in (1, 2, 3):
            (token,) = library.run("sample", given, [0, 0, 6], threads)
            assert torch.equal(token, expected)


def test_no_rows_is_no_work(library: Library) -> None:
    (y,) = library.run(f"linear-{F32}-48x33", {"x": torch.empty(0, 48), "w": randn(33, 48)}, [0])
    assert y.shape == (0, 33)
