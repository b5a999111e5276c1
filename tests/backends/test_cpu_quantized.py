"""Products and lookups of weights held as codes: against the operator's reference in fp64, on every instruction set and format."""
import itertools
from collections.abc import Iterator

import pytest
import torch
from cpu_kernels import CONTEXT, ISAS, Library, T, call, judge_sums, mean_error, meta
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from infc.backends.cpu import claims
from infc.compiler.ops.codes import groups, pack_codes, rounded_rows, weight
from infc.compiler.ops.registry import by_name
from infc.compiler.targets import TARGETS
from torch import Tensor, fx

F32, BF16, F16, I32, I64 = torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64
ROWS = (*range(1, 17), 17, 33, 100, 513)
OPS = torch.ops.infc

# (bits, group, offset, act_bits, act_group): groups of 32 in every combination, each other group with both widths
HOW = [(bits, 32, offset, act, 32) for bits, offset, act in itertools.product((4, 8), (False, True), (8, 16))]
HOW += [(8, 0, False, 16, 32), (8, 0, True, 8, 0), (4, 0, True, 8, 32), (8, 64, True, 16, 32), (4, 64, True, 16, 0), (4, 64, False, 8, 32),
        (8, 128, True, 8, 32), (4, 128, True, 16, 32), (4, 128, False, 8, 32), (8, 32, False, 8, 0)]
SHAPES = ((576, 960), (32, 33), (1536, 70), (75, 33), (6, 70))
SWIGLUS = ((64, 48), (75, 21))
FORMATS = [*itertools.product((4, 8), (0, 32, 64, 128), (False, True))]         # each way to store a weight
SMALL = ((1, 1), (17, 3), (48, 4), (64, 1), (100, 3), (2048, 4))                # no K and no N that a kernel likes


def codes_of(n: int, k: int, how: tuple, seed: int = 0) -> dict[str, Tensor]:
    """Random codes, scales and perhaps offsets, as compiler.ops.codes holds them."""
    bits, group, offset = how[:3]
    pick = torch.Generator().manual_seed(seed + 7 * n + k)
    codes = torch.randint(0, 2**bits, (n, k), generator=pick, dtype=torch.uint8)
    scale = (torch.rand(n, groups(k, group), generator=pick) + 0.5).mul(2.0 ** -bits).half()
    made = {"codes": pack_codes(codes, bits), "scale": scale}
    if offset: made["offset"] = (-scale.float() * 2 ** (bits - 1) * (torch.rand(scale.shape, generator=pick) * 0.4 + 0.8)).half()
    return made


def small(how: tuple) -> tuple[tuple[int, int], ...]:
    """Of a format, the largest, where every code is, and half of the others: each is met by eight formats."""
    return (*SMALL[FORMATS.index(how[:3]) // 2 % 2:-1:2], SMALL[-1])


SMALL_CASES = [(how, k, n) for how in FORMATS for k, n in small(how)]


def metas(n: int, k: int, how: tuple) -> dict[str, Tensor | None]:
    bits, group, offset = how[:3]
    count = groups(k, group)
    return {"codes": meta(n, -(-k * bits // 8), dtype=torch.uint8), "scale": meta(n, count, dtype=F16),
            "offset": meta(n, count, dtype=F16) if offset else None}


def numbers(how: tuple) -> dict[str, int]:
    return {"bits": how[0], "group": how[1], "act_bits": how[3], "act_group": how[4]}


def shapes(how: tuple) -> tuple[tuple[int, int], ...]:
    return SHAPES if how[1] == 32 and how[4] == 32 else ((576, 70), (75, 33))


def x_dtype(how: tuple) -> torch.dtype:
    return (F32, BF16)[HOW.index(how) % 3 % 2]


def name_of(op: str, how: tuple, *rest: object) -> str:
    return "-".join(str(x) for x in (op, *how, *rest))


def nodes() -> dict[str, fx.Node]:
    """Every case by name: the operator calls that the library holds."""
    out: dict[str, fx.Node] = {}
    for how in HOW:
        for k, n in shapes(how):
            dtype = x_dtype(how)
            out[name_of("linear", how, k, n)] = call(OPS.linear_quantized.default, x=meta(T, k, dtype=dtype), bias=None, residual=None,
                                                     out_dtype=F32, **metas(n, k, how), **numbers(how))
    for how in ((8, 32, False, 16, 32), (4, 64, True, 8, 32)):
        out[name_of("all", how)] = call(OPS.linear_quantized.default, x=meta(T, 75, dtype=BF16), bias=meta(33, dtype=BF16),
                                        residual=meta(T, 33), out_dtype=BF16, **metas(33, 75, how), **numbers(how))
        for (k, f), act in itertools.product(SWIGLUS, ("silu", "gelu", "gelu_tanh")):
            for dtype in (F32, BF16):
                out[name_of("swiglu", how, k, f, act, dtype)] = call(
                    OPS.linear_swiglu_quantized.default, x=meta(T, k, dtype=dtype), act=act, out_dtype=dtype, **metas(2 * f, k, how),
                    **numbers(how))
    for how in FORMATS:
        bits, group, _ = how
        for index, dtype in ((I32, F32), (I64, BF16)):
            out[name_of("embedding", how, dtype)] = call(
                OPS.embedding_quantized.default, indices=meta(T, dtype=index), bits=bits, group=group, k=147, out_dtype=dtype,
                **metas(70, 147, how))
    for how, k, n in SMALL_CASES:
        given_ = {"x": meta(T, k), **metas(n, k, how), **numbers((*how, 16, 0))}
        out[name_of("small", how, k, n)] = call(OPS.linear_quantized.default, bias=None, residual=None, out_dtype=F32, **given_)
        pair = {**given_, **metas(2 * n, k, how)}
        out[name_of("small swiglu", how, k, n)] = call(OPS.linear_swiglu_quantized.default, act="silu", out_dtype=F32, **pair)
    for act_bits, act_group in itertools.product((8, 16), (0, 32)):
        how = (8, 0, False, act_bits, act_group)
        out[name_of("identity", how)] = call(OPS.linear_quantized.default, x=meta(T, 75), bias=None, residual=None, out_dtype=F32,
                                             **metas(75, 75, how), **numbers(how))
    return out


# products of integers are the same code with AMX as without
@pytest.fixture(scope="module", params=[pytest.param(isa, marks=pytest.mark.slow if isa == "x86-64-v4-amx" else ()) for isa in ISAS])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    made = Library(request.param, nodes(), tmp_path_factory.mktemp("quantized"))
    yield made
    made.close()


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def both(op: str, **kwargs: object) -> tuple[Tensor, Tensor]:
    """The reference in the tensors' own dtypes, and in fp64 on the same values."""
    reference = by_name(f"infc::{op}").reference
    kwargs = {"offset": None, **kwargs}
    def wide(v: object) -> object: return v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
    exact = {k: v if k in ("scale", "offset") else wide(v) for k, v in kwargs.items() if k != "out_dtype"}
    return reference(**kwargs), reference(**exact)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_linear(library: Library, how: tuple) -> None:
    for k, n in shapes(how):
        case = name_of("linear", how, k, n)
        w = codes_of(n, k, how)
        for i, rows in enumerate(ROWS):
            x = randn(rows, k, dtype=x_dtype(how), seed=rows)
            poisoned = torch.cat((x, torch.full((2, k), torch.nan, dtype=x_dtype(how))))
            (y,) = library.run(case, {"x": poisoned, **w}, [rows], threads=1 + i % 3)
            plain, exact = both("linear_quantized", x=x, **w, bias=None, residual=None, out_dtype=F32, **numbers(how))
            judge_sums(y, plain, exact)
            if k >= 576 and rows >= 100:           # many samples, the real model's lengths: not worse than torch's own product
                assert mean_error(y, exact) <= mean_error(plain, exact)


@pytest.mark.parametrize("how", [(8, 32, False, 16, 32), (4, 64, True, 8, 32)], ids=str)
def test_linear_with_bias_and_residual(library: Library, how: tuple) -> None:
    w, bias = codes_of(33, 75, how), randn(33, dtype=BF16)
    for i, rows in enumerate(ROWS):
        given_ = {"x": randn(rows, 75, dtype=BF16, seed=rows), **w, "bias": bias, "residual": randn(rows, 33)}
        (y,) = library.run(name_of("all", how), given_, [rows], threads=1 + i % 3)
        judge_sums(y, *both("linear_quantized", **given_, out_dtype=BF16, **numbers(how)))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("how", [(8, 32, False, 16, 32), (4, 64, True, 8, 32)], ids=str)
def test_linear_swiglu(library: Library, how: tuple, dtype: torch.dtype, act: str) -> None:
    for k, f in SWIGLUS:
        w, results = codes_of(2 * f, k, how), []
        for i, rows in enumerate(ROWS):
            x = randn(rows, k, dtype=dtype, seed=rows) / 2
            (y,) = library.run(name_of("swiglu", how, k, f, act, dtype), {"x": x, **w}, [rows], threads=1 + i % 3)
            results.append((y, *both("linear_swiglu_quantized", x=x, **w, act=act, out_dtype=dtype, **numbers(how))))
        judge_sums(*(torch.cat(part) for part in zip(*results, strict=True)))          # few outputs each


# of each group both widths and both offsets, of 32 all four: the product with the identity knows the others
BOTH_WAYS = [how for how in FORMATS if how[1] == 32 or how[2] == ((how[0] == 8) ^ (how[1] == 64))]
MANY = 33                              # rows from which the products below are of bf16
BF16_SHAPES = ((75, 33), (6, 70), (1536, 70))


def bf16_x(how: tuple) -> torch.dtype:
    """Of a format, the dtype of x: each width has both."""
    return (F32, BF16)[(FORMATS.index(how) // 2 + how[2]) % 2]


def bf16_nodes() -> dict[str, fx.Node]:
    out: dict[str, fx.Node] = {}
    for how in BOTH_WAYS:
        dtype, more = bf16_x(how), {**numbers((*how, 16, 0)), "bf16_rows": MANY}
        for k, n in (*BF16_SHAPES, (576, 960)) if how[1] == 32 else BF16_SHAPES[:1]:
            out[name_of("linear", how, k, n)] = call(OPS.linear_quantized.default, x=meta(T, k, dtype=dtype), bias=None, residual=None,
                                                     out_dtype=F32, **metas(n, k, how), **more)
        out[name_of("all", how)] = call(OPS.linear_quantized.default, x=meta(T, 75, dtype=dtype), bias=meta(33, dtype=BF16),
                                        residual=meta(T, 33), out_dtype=BF16, **metas(33, 75, how), **more)
        out[name_of("swiglu", how)] = call(OPS.linear_swiglu_quantized.default, x=meta(T, 75, dtype=dtype), act="silu", out_dtype=dtype,
                                           **metas(42, 75, how), **more)
    for how, k, n in SMALL_CASES:
        out[name_of("small", how, k, n)] = call(OPS.linear_quantized.default, x=meta(T, k), bias=None, residual=None, out_dtype=F32,
                                                **metas(n, k, how), **numbers((*how, 16, 0)), bf16_rows=1)
    return out


@pytest.fixture(scope="module", params=[isa for isa in ISAS if TARGETS[isa].bf16_rows])
def bf16_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    made = Library(request.param, bf16_nodes(), tmp_path_factory.mktemp("bf16"))
    yield made
    made.close()


@pytest.mark.parametrize("how", BOTH_WAYS, ids=str)
def test_products_of_many_rows_are_of_bf16(bf16_library: Library, how: tuple) -> None:
    dtype, more = bf16_x(how), {**numbers((*how, 16, 0)), "bf16_rows": MANY}
    for k, n in (*BF16_SHAPES, (576, 960)) if how[1] == 32 else BF16_SHAPES[:1]:
        w = codes_of(n, k, how)
        for i, rows in enumerate((1, 17, MANY - 1, MANY, 100, 513)):
            x = randn(rows, k, dtype=dtype, seed=rows)
            poisoned = torch.cat((x, torch.full((2, k), torch.nan, dtype=dtype)))
            (y,) = bf16_library.run(name_of("linear", how, k, n), {"x": poisoned, **w}, [rows], threads=1 + i % 3)
            plain, exact = both("linear_quantized", x=x, **w, bias=None, residual=None, out_dtype=F32, **more)
            judge_sums(y, plain, exact)
            if k >= 576 and rows >= 100: assert mean_error(y, exact) <= mean_error(plain, exact)
            fine = both("linear_quantized", x=x, **w, bias=None, residual=None, out_dtype=F32, **more | {"bf16_rows": 0})[1]
            assert torch.equal(exact, fine) == (rows < MANY)
    w, bias, pair = codes_of(33, 75, how), randn(33, dtype=BF16), codes_of(42, 75, how)
    for i, rows in enumerate((MANY - 1, MANY, 200)):
        given_ = {"x": randn(rows, 75, dtype=dtype, seed=rows), **w, "bias": bias, "residual": randn(rows, 33)}
        (y,) = bf16_library.run(name_of("all", how), given_, [rows], threads=1 + i)
        judge_sums(y, *both("linear_quantized", **given_, out_dtype=BF16, **more))
        given_ = {"x": randn(rows, 75, dtype=dtype, seed=rows) / 2, **pair}
        (y,) = bf16_library.run(name_of("swiglu", how), given_, [rows], threads=1 + i)
        judge_sums(y, *both("linear_swiglu_quantized", **given_, act="silu", out_dtype=dtype, **more))


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_the_identity_reads_the_weight_back_as_bf16(bf16_library: Library, how: tuple) -> None:
    """Every code of every format, any K and N, to the bit: scale * code + offset rounded in fp32, then to bf16."""
    bits, group, _ = how
    for k, n in small(how):
        w = codes_of(n, k, how)
        (y,) = bf16_library.run(name_of("small", how, k, n), {"x": torch.eye(k), **w}, [k], threads=2)
        assert torch.equal(y, weight(w["codes"], w["scale"], w.get("offset"), bits, group, k, F32).bfloat16().float().T)


def meant(w: dict[str, Tensor], how: tuple, k: int) -> Tensor:
    """What stored codes mean, in fp64 and without our own arithmetic: nibble by nibble, group by group."""
    bits, group, offset = how[:3]
    column = torch.arange(k)
    code = w["codes"].long()[:, column // (8 // bits)] >> (column % (8 // bits) * bits) & 2**bits - 1
    at = column // group if group else column * 0
    start = w["offset"].double()[:, at] if offset else -(2 ** (bits - 1)) * w["scale"].double()[:, at]
    return code.double() * w["scale"].double()[:, at] + start


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_a_product_with_the_identity_reads_the_weight_back(library: Library, how: tuple) -> None:
    """FIELD R20: every code of every format, any K and N: a row with a single 1 is exact in 16 bits, so nothing is summed or rounded but
    the scale of that row (1 / 32512) and the value itself."""
    for k, n in small(how):
        w, pair, x = codes_of(n, k, how), codes_of(2 * n, k, how, seed=1), torch.eye(k)
        (y,) = library.run(name_of("small", how, k, n), {"x": x, **w}, [k], threads=2)
        expected = meant(w, how, k).T
        assert bool(((y.double() - expected).abs() <= 2.0**-21 * expected.abs().amax()).all()) and bool(expected.any(0).all())
        (y,) = library.run(name_of("small swiglu", how, k, n), {"x": x, **pair}, [k], threads=3)
        gate, up = meant(pair, how, k).T.chunk(2, 1)
        expected = gate * gate.sigmoid() * up
        assert bool(((y.double() - expected).abs() <= 2.0**-21 * expected.abs().amax()).all())


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
def test_embedding(library: Library, bits: int, group: int, offset: bool) -> None:
    how = (bits, group, offset)
    w = codes_of(70, 147, how)
    for rows, (index, dtype) in itertools.product((1, 2, 17, 100), ((I32, F32), (I64, BF16))):
        ids = torch.randint(0, 70, (rows,)).to(index)
        (y,) = library.run(name_of("embedding", how, dtype), {**w, "indices": ids}, [rows], threads=3)
        expected, _ = both("embedding_quantized", **w, indices=ids, bits=bits, group=group, k=147, out_dtype=dtype)
        assert torch.equal(y, expected)
    outside = torch.tensor([-1, 70, 3], dtype=I32)
    (y,) = library.run(name_of("embedding", how, F32), {**w, "indices": outside}, [3])
    assert bool((y[:2] == 0).all()) and bool((y[2] != 0).any())


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_codes_of_x_are_the_operators_bit_for_bit(library: Library, data: st.DataObject) -> None:
    """Through a weight that is the identity, with scale 1: what comes out is what the codes mean, one rounding each."""
    act_bits, act_group = data.draw(st.sampled_from([8, 16])), data.draw(st.sampled_from([0, 32]))
    rows, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 999))
    pick = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 75, generator=pick) * 10.0 ** data.draw(st.integers(-34, 30))
    if data.draw(st.booleans()): x[:, ::7] *= 100                      # outliers
    if data.draw(st.booleans()): x = (x / x.abs().max() * 254).round() / 2        # many ties
    if data.draw(st.booleans()): x[rows // 2] = 0
    w = {"codes": torch.full((75, 75), 128, dtype=torch.uint8) + torch.eye(75, dtype=torch.uint8), "scale": torch.ones(75, 1, dtype=F16)}
    (y,) = library.run(name_of("identity", (8, 0, False, act_bits, act_group)), {"x": x, **w}, [rows], threads=2)
    assert torch.equal(y, rounded_rows(x, act_bits, act_group))


@pytest.mark.parametrize("how", [(8, 32, False, 8, 32), (8, 32, False, 16, 32), (4, 64, True, 16, 0), (8, 32, False, 8, 0)], ids=str)
def test_zero_rows_and_rows_that_are_not_finite(library: Library, how: tuple) -> None:
    k, n = shapes(how)[0]
    case = name_of("linear", how, k, n)
    x = randn(40, k, dtype=x_dtype(how))
    x[3], x[7, 5], x[11, 40], x[12, 0] = 0, torch.nan, torch.inf, -torch.inf
    (y,) = library.run(case, {"x": x, **codes_of(n, k, how)}, [40])
    assert bool((y[3] == 0).all())
    for row in (7, 11, 12): assert not bool(y[row].isfinite().any())
    rest = [i for i in range(40) if i not in (7, 11, 12)]
    assert bool(y[rest].isfinite().all())


def test_no_rows_is_no_work(library: Library) -> None:
    how = (8, 32, False, 8, 32)
    (y,) = library.run(name_of("linear", how, 75, 33), {"x": torch.empty(0, 75, dtype=x_dtype(how)), **codes_of(33, 75, how)}, [0])
    assert y.shape == (0, 33)


def refusal(**changed: object) -> str | None:
    how = (8, 32, False, 16, 32)
    usual = {"x": meta(T, 64), **metas(48, 64, how), "bias": None, "residual": None, **numbers(how)}
    return claims.refuse(call(OPS.linear_quantized.default, **usual | changed), CONTEXT)      # type: ignore[arg-type]


def test_refusals() -> None:
    assert refusal() is None
    assert "act_bits 0" in str(refusal(act_bits=0))
    assert "codes are torch.float8_e4m3fn: a product here is of whole numbers" in str(
        refusal(codes=meta(48, 64, dtype=torch.float8_e4m3fn)))
    assert "groups of 16" in str(refusal(group=16, scale=meta(48, 4, dtype=F16)))
    assert "groups of 64" in str(refusal(act_group=64))
    assert "float64" in str(refusal(x=meta(T, 64, dtype=torch.float64)))
    assert "K = 32800" in str(refusal(x=meta(T, 32800), **metas(48, 32800, (8, 32, False))))


def test_a_computed_weight_is_refused() -> None:
    how = (8, 32, False, 16, 32)
    node = call(OPS.linear_quantized.default, x=meta(T, 64), **metas(48, 64, how), bias=None, residual=None, **numbers(how))
    scale = node.kwargs["scale"]
    assert isinstance(scale, fx.Node)
    with node.graph.inserting_before(node):
        twice = node.graph.call_function(torch.ops.aten.add.Tensor, (scale, scale))
    twice.meta["val"] = scale.meta["val"]
    node.update_kwarg("scale", twice)
    assert "scale is computed" in str(claims.refuse(node, CONTEXT))
