"""Every row kernel, interpreted, against its operator's meaning in fp64. Shapes are odd on purpose."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_env import FLOATS, conform, exact, judge, kernels, plain, randn, run

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
SHAPES = [(1, 1), (3, 7), (2, 5, 1023), (2, 4096), (0, 8)]
FEW = settings(max_examples=8, deadline=None, derandomize=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 16384)], ids=str)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, b = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1), randn(shape[-1], dtype=dtype, seed=2)
    conform("infc::rms_norm", x=x, w=w, eps=1e-5)
    conform("infc::layer_norm", times=2 if dtype == F32 else 1, x=x + 3, w=w, b=b, eps=1e-5)
    conform("infc::add_rms_norm", x=x, residual=randn(*shape, dtype=dtype, seed=3), w=w, eps=1e-6)


@pytest.mark.parametrize("x_type", FLOATS, ids=str)
@pytest.mark.parametrize("w_type", FLOATS, ids=str)
@pytest.mark.parametrize("out", [None, *FLOATS], ids=str)
def test_norms_of_mixed_dtypes(x_type: torch.dtype, w_type: torch.dtype, out: torch.dtype | None) -> None:
    x, w = randn(3, 100, dtype=x_type), randn(100, dtype=w_type, seed=1)
    conform("infc::rms_norm", x=x, w=w, eps=1e-5, out_dtype=out)
    y, h = conform("infc::add_rms_norm", x=x, residual=w.expand(3, 100).contiguous(), w=w, eps=1e-5, out_dtype=out)
    assert y.dtype == (out or x_type) and h.dtype == torch.promote_types(x_type, w_type)
    if x_type == w_type: conform("infc::layer_norm", x=x, w=w, b=None, eps=1e-5, out_dtype=out)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_keep_nan_inf_and_tiny_rows_to_themselves(op: str) -> None:
    x = randn(5, 33)
    x[0, 3], x[1, 32], x[2], x[3] = torch.nan, torch.inf, 0.0, 1e-30
    bias = {"b": None} if op == "layer_norm" else {}
    found = conform(f"infc::{op}", x=x, w=randn(33, seed=1), eps=1e-5, **bias)
    assert not found[2:].isnan().any()


@FEW
@given(st.integers(1, 4), st.integers(1, 70), st.sampled_from(FLOATS), st.floats(1e-3, 1e3), st.sampled_from([1e-5, 1e-6, 1.0]))
def test_norms_of_any_width_and_size(rows: int, n: int, dtype: torch.dtype, scale: float, eps: float) -> None:
    x, w = randn(rows, n, dtype=dtype, seed=n, scale=scale), randn(n, dtype=dtype, seed=1)
    conform("infc::rms_norm", x=x, w=w, eps=eps)
    conform("infc::layer_norm", x=x, w=w, b=w, eps=eps)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 2046), (2, 3072), (0, 8)], ids=str)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype, act: str) -> None:
    gate_up = randn(*shape, dtype=dtype, scale=3)
    gate_up.flatten()[:4] = torch.tensor([-90.0, 90.0, -1e4, 1e4], dtype=dtype)[: gate_up.numel()]
    conform("infc::swiglu", gate_up=gate_up, act=act)
    conform("infc::swiglu", gate_up=gate_up, act=act, out_dtype=F32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("angles", FLOATS, ids=str)
def test_rope(dtype: torch.dtype, angles: torch.dtype, interleaved: bool) -> None:
    shapes = ((17, (2, 4, 5), (1, 1, 5)), (20, (2, 4, 5), (2, 1, 5)), (32, (7, 3), (7, 1)), (1, (9,), (9,)), (5, (9,), (1,)))
    for half, lead, shared in shapes:
        width = 40 if half < 21 else 2 * half
        q, k = randn(*lead, width, dtype=dtype), randn(*lead, width, dtype=dtype, seed=1)
        angle = randn(*shared, half, seed=2)
        conform("infc::rope", q=q, k=k, cos=angle.cos().to(angles), sin=angle.sin().to(angles), interleaved=interleaved)


def test_rope_of_fewer_kv_heads_and_a_short_angle() -> None:
    q, k = randn(2, 6, 3, 16), randn(2, 2, 3, 16, seed=1)
    for shape in ((3, 8), (1, 3, 8), (8,)):
        conform("infc::rope", q=q, k=k, cos=randn(*shape, seed=2), sin=randn(*shape, seed=3), interleaved=False)


def caches(pages: int, heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.full((pages, heads, 32, width), 7.0, dtype=dtype), torch.full((pages, heads, 32, width), -7.0, dtype=dtype))


def paged(op: str, given: dict, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run kernel, reference and the reference in fp64 on copies of the caches, and judge all that is written, and all that is not."""
    found, same, wide = ([c.clone() for c in kv] for _ in range(3))
    y = run(op, **given, k_cache=found[0], v_cache=found[1])
    p = plain(op, **given, k_cache=same[0], v_cache=same[1])
    wide = [c.double() for c in wide]
    e = exact(op, **given, k_cache=wide[0], v_cache=wide[1])
    if p is not None: judge(y, p, e)
    for f, s, w in zip(found, same, wide, strict=True): judge(f, s, w)


SLOTS = [0, 33, -1, 95, 64, -1, 31]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cache", FLOATS, ids=str)
@pytest.mark.parametrize("slots_type", [I32, I64], ids=str)
def test_kv_write(dtype: torch.dtype, cache: torch.dtype, slots_type: torch.dtype) -> None:
    for heads, width in ((2, 40), (1, 1), (9, 130)):
        given = {"k": randn(7, heads, width, dtype=dtype), "v": randn(7, heads, width, dtype=dtype, seed=1),
                 "slots": torch.tensor(SLOTS, dtype=slots_type)}
        paged("infc::kv_write", given, caches(3, heads, width, cache))


HEADS = [(9, 3, 64, 32), (4, 4, 80, 40), (3, 1, 40, 17), (2, 2, 2, 1), (4, 1, 256, 64)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "cache"), [*((HEADS[2], d, c) for d in FLOATS for c in FLOATS),
                                                       *((shape, d, d) for shape in HEADS for d in (BF16, F32))], ids=str)
def test_rope_kv_write(shape: tuple[int, int, int, int], cache: torch.dtype, dtype: torch.dtype, interleaved: bool) -> None:
    q_heads, kv_heads, width, half = shape
    angle = randn(7, half, seed=2)
    given = {"qkv": randn(7, (q_heads + 2 * kv_heads) * width, dtype=dtype), "cos": angle.cos(), "sin": angle.sin(),
             "slots": torch.tensor(SLOTS, dtype=I32), "q_heads": q_heads, "kv_heads": kv_heads, "interleaved": interleaved,
             "out_dtype": None if cache == dtype else cache}
    paged("infc::rope_kv_write", given, caches(3, kv_heads, width, cache))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8, I64, torch.bool], ids=str)
@pytest.mark.parametrize("ids", [I32, I64], ids=str)
def test_embedding(dtype: torch.dtype, ids: torch.dtype) -> None:
    for width in (1, 7, 1025):
        table = (randn(50, width) * 9).to(dtype)
        index = torch.tensor([[0, 49, 3], [3, 3, 17]], dtype=ids)
        assert torch.equal(run("aten::embedding", weight=table, indices=index), plain("aten::embedding", weight=table, indices=index))


@FEW
@given(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.integers(-3, 3), st.lists(st.integers(0, 5), max_size=5))
def test_index_select(shape: tuple[int, ...], dim: int, ids: list[int]) -> None:
    shape = shape or (6,)
    dim = max(-len(shape), min(dim, len(shape) - 1))
    given = {"self": torch.arange(int(torch.tensor(shape).prod())).reshape(shape).int(), "dim": dim,
             "index": torch.tensor([i for i in ids if i < shape[dim]], dtype=I32)}
    assert torch.equal(run("aten::index_select", **given), plain("aten::index_select", **given))


def test_an_index_outside_the_table_gives_zeros() -> None:
    table = randn(5, 9)
    for ids in ([0, -1, 4, 5], [2**31 - 1, -(2**31), 3, 1]):
        index = torch.tensor(ids, dtype=I32)
        wanted = torch.stack([table[i] if 0 <= i < 5 else torch.zeros(9) for i in ids])
        assert torch.equal(run("aten::embedding", weight=table, indices=index), wanted)
        assert torch.equal(run("aten::index_select", self=table, dim=0, index=index), wanted)
        wide = torch.tensor(ids, dtype=I64) + 2**33                      # not cut to 32 bits
        assert not run("aten::index_select", self=table, dim=0, index=wide).any()


NUMBERS = (*FLOATS, torch.int8, torch.uint8, torch.int16, I32, I64, torch.bool)


PAIRS = [(s, t) for s in NUMBERS for t in NUMBERS if F32 in (s, t) or I32 in (s, t) or s == t]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    signed = source.is_signed and target.is_signed                       # of what does not fit, each machine makes its own
    x = torch.tensor([0.0, 1.0, 2.5, 3.0, 100.49, 127.0, -0.0, *([-1.0, -2.5, -127.0] if signed else [])] * 150).to(source)
    assert torch.equal(run("aten::_to_copy", self=x, dtype=target), x.to(target))
    assert run("aten::_to_copy", self=x[:0], dtype=target).shape == (0,)


@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_casts_round_to_nearest_even(target: torch.dtype) -> None:
    x = torch.cat([randn(4000), randn(1000) * 1e6, randn(1000) * 1e-6,
                   torch.tensor([1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-8, 65519.9, 65520.0, torch.inf, -torch.inf, torch.nan, 1e-37])])
    found, wanted = run("aten::_to_copy", self=x, dtype=target), x.to(target)
    assert torch.equal(found.nan_to_num(1.5), wanted.nan_to_num(1.5))
    whole = torch.tensor([2**24 + 1, 2**24 + 3, -(2**31), 257, 1025])
    assert torch.equal(run("aten::_to_copy", self=whole, dtype=target), whole.to(target))


REFUSED = [
    ("infc::rms_norm", {"x": randn(2, 16385), "w": randn(16385), "eps": 1e-5}, "rows of 16385: 1 to 16384 are known"),
    ("infc::rms_norm", {"x": randn(2, 0), "w": randn(0), "eps": 1e-5}, "rows of 0"),
    ("infc::rms_norm", {"x": randn(2, 8).double(), "w": randn(8), "eps": 1e-5}, "x is torch.float64"),
    ("infc::rms_norm", {"x": randn(8, 2).T, "w": randn(8), "eps": 1e-5}, "x is not contiguous"),
    ("infc::rms_norm", {"x": randn(2, 8), "w": randn(1), "eps": 1e-5}, "w is (1,), x has rows of 8"),
    ("infc::rms_norm", {"x": randn(2, 8), "w": randn(8), "eps": 1e-5, "out_dtype": torch.float64}, "results in torch.float64"),
    ("infc::layer_norm", {"x": randn(2, 8), "w": randn(8), "b": randn(4), "eps": 1e-5}, "b is (4,), x has rows of 8"),
    ("infc::add_rms_norm", {"x": randn(2, 8), "residual": randn(8), "w": randn(8), "eps": 1e-5}, "the residual is (8,), x is (2, 8)"),
    ("infc::swiglu", {"gate_up": randn(2, 7), "act": "silu"}, "(2, 7) has no two halves"),
    ("infc::swiglu", {"gate_up": randn(2, 8), "act": "relu"}, "activation 'relu' is none of"),
    ("infc::rope", {"q": randn(1, 1, 1, 1, 4), "k": randn(1, 4), "cos": randn(2), "sin": randn(2), "interleaved": False}, "q has 5 axes"),
    ("infc::rope", {"q": randn(1, 4), "k": randn(1, 4), "cos": randn(3), "sin": randn(3), "interleaved": False}, "rotary width 6 > head"),
    ("aten::index_select", {"self": randn(3), "dim": 0, "index": torch.zeros((), dtype=I64)}, "indices ()"),
    ("aten::embedding", {"weight": randn(3, 4), "indices": torch.zeros(2, dtype=torch.int16)}, "indices are torch.int16"),
    ("aten::_to_copy", {"self": randn(3), "dtype": torch.float64}, "a cast to torch.float64"),
    ("aten::_to_copy", {"self": randn(3).to(torch.complex64)}, "a cast from torch.complex64"),
]


@pytest.mark.parametrize(("op", "arguments", "reason"), REFUSED, ids=[f"{op}-{reason[:20]}" for op, _, reason in REFUSED])
def test_refuses_with_a_reason(op: str, arguments: dict, reason: str) -> None:
    assert reason in (kernels()[op].refuse(**arguments) or "")
    with pytest.raises(ValueError, match="^" + op): run(op, **arguments)


@pytest.mark.parametrize("index", [torch.tensor([[4, 0, -1], [2, -5, 1]]), torch.tensor([3], dtype=I32)], ids=["i64", "i32"])
def test_index(index: torch.Tensor) -> None:
    table = randn(5, 3, 7)
    assert torch.equal(run("aten::index.Tensor", self=table, indices=[index]), table[index.long()])
    assert kernels()["aten::index.Tensor"].refuse(self=table, indices=[None, index]) == "2 indices: one, of the first axis, is known"


CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
HALF = {"int8": 0.5 + 2.0**-12, "fp8": 2.0**-4 + 2.0**-12}             # largest error: in steps of the scale, as a share of the value


def coded(op: str, given: dict, heads: int, widths: tuple[int, int], format: str) -> None:
    """Run kernel and wide reference in fp64: what is written means that, to half a step of its codes; elsewhere nothing is written."""
    found = {f"{name}_cache": torch.full((3, heads, 32, width), 7.0).to(CODES[format]) for name, width in zip("kv", widths, strict=True)}
    found |= {f"{name}_scale": torch.full((3, heads, 32, 1), -7.0) for name in "kv"}
    wide = {f"{name}_cache": torch.full((3, heads, 32, width), -7.0 * 7.0, dtype=torch.float64)
            for name, width in zip("kv", widths, strict=True)}
    plainly = {name: cache.to(torch.float32) for name, cache in wide.items()}
    y, alone = run(op, **given, **found, format=format), op.removesuffix("_quantized")
    p, e = plain(alone, **given, **plainly), exact(alone, **given, **wide)
    if p is not None: judge(y, p, e)
    for name in "kv":
        codes, scale, meant = found[f"{name}_cache"].double(), found[f"{name}_scale"].double(), wide[f"{name}_cache"]
        lost = meant.isnan().any(-1, keepdim=True)
        assert torch.equal(scale.isnan(), lost)                         # one NaN, and a head's token has no scale
        unit = scale.abs() if format == "int8" else torch.maximum(meant.abs(), scale.abs() * 2.0**-6)
        error = (codes * scale - meant).abs() / unit.clamp(min=1e-28)
        assert float(error[~lost.expand_as(error)].max()) <= HALF[format]


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kv_write_quantized(dtype: torch.dtype, format: str) -> None:
    for heads, widths in ((2, (40, 40)), (1, (1, 3)), (9, (130, 64))):
        k, v = (randn(7, heads, width, dtype=dtype, seed=i) for i, width in enumerate(widths))
        k[0, 0], k[1, 0, 0], v[3] = 0.0, torch.nan, v[3] * (1e4 if dtype == torch.float16 else 1e20)
        coded("infc::kv_write_quantized", {"k": k, "v": v, "slots": torch.tensor(SLOTS, dtype=I32)}, heads, widths, format)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [(shape, d) for shape in HEADS for d in FLOATS], ids=str)
def test_rope_kv_write_quantized(shape: tuple[int, int, int, int], dtype: torch.dtype, interleaved: bool, format: str) -> None:
    q_heads, kv_heads, width, half = shape
    angle = randn(7, half, seed=2)
    qkv = randn(7, (q_heads + 2 * kv_heads) * width, dtype=dtype)
    qkv[4, q_heads * width :] = 0.0
    qkv[6, q_heads * width] = torch.nan
    given = {"qkv": qkv, "cos": angle.cos(), "sin": angle.sin(), "slots": torch.tensor(SLOTS, dtype=I32), "q_heads": q_heads,
             "kv_heads": kv_heads, "interleaved": interleaved}
    coded("infc::rope_kv_write_quantized", given, kv_heads, (width, width), format)
