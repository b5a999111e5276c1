"""Loop regions as C++: bit for bit PyTorch where arithmetic is exact, no worse than PyTorch against fp64 where it is not."""
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from loop_programs import fill, program, same
from loop_runner import Case, case, compiled, quick_case
from torch import Tensor

ROWS, WIDTH = 7, 48


def test_programs_equal_eager():
    """48 random programs in one library, then the dynamic ones again at other sizes of their first axis."""
    made = [program(random.Random(seed).randrange) for seed in range(48)]
    cases = [quick_case(p.fn, *p.inputs, symbolic=bool(k % 2)) for k, p in enumerate(made)]
    for p, c, run in zip(made, cases, compiled(cases), strict=True):
        resized = [tuple(fill((n, *t.shape[1:]), t.dtype, n) if spec else t for t, spec in zip(p.inputs, p.dynamic, strict=True))
                   for n in (0, 1, 2, 9)] if any(p.dynamic) and any(c.graph.symbols) and all(p.dynamic) else []
        for inputs in [p.inputs, *resized]:
            for found, expected in zip(run(*inputs), p.fn(*inputs), strict=True):
                assert same(found, expected), "\n".join([*p.lines, str([t.shape for t in inputs]), *c.kernels()])


def no_worse(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Per row: the worst error is at most eager's plus one ulp of the row's largest result. Non-finite results are equal.

    fp64 cannot judge itself to an ulp: there, 1e-9 of the row's largest result, the bound of an EXACT pass.
    """
    found, eager, exact = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.reshape(-1, 1) for t in (found, eager, exact))
    narrow = exact.to(found.dtype)
    special = ~torch.isfinite(narrow)
    assert torch.equal(found[special].nan_to_num(1, 2, 3), narrow[special].nan_to_num(1, 2, 3))
    worst, allowed = ((t.double() - exact).abs().masked_fill(special, 0).amax(-1) for t in (found, eager))
    largest = narrow.masked_fill(special, 0).abs().amax(-1)
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)).double() - largest.double()
    if found.dtype == torch.float64: ulp = 1e-9 * largest
    assert (worst <= allowed + ulp).all(), f"error {worst.max()} where eager has {allowed.max()} and an ulp is {ulp.max()}"


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "erf": torch.erf, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "expm1": torch.expm1, "log1p": torch.log1p, "softplus": F.softplus, "pow": lambda x: x**1.7,
    "reciprocal": torch.reciprocal, "cube": lambda x: x**3,
}


def test_functions_are_as_accurate_as_pytorch():
    """Every exponent of fp32, both signs; fp32, bf16, fp16 and fp64, with and without fused multiply-add."""
    bits = torch.arange(-2**31, 2**31, 60_013, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = bits[~bits.isnan()].sort().values[:71_232].reshape(-1, 64)
    inputs = [x, x.bfloat16(), x.half(), (torch.randn(50, 64) * 3).double()]
    cases = [quick_case(_called(fn), t) for fn in FUNCTIONS.values() for t in inputs]
    for runs in (compiled(cases), compiled(cases, extra=())):
        for c, run in zip(cases, runs, strict=True):
            given, = c.inputs
            no_worse(run()[0], c.graph.run(given)[0], c.graph.run(given.double())[0])


def _called(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x)


def test_scaled_sums():
    """PyTorch fuses x + alpha * y into one rounding where it is vectorised; two roundings may differ, by less than an ulp."""
    x, y = torch.randn(9, 33), torch.randn(9, 33)
    cases = [quick_case(fn, x, y) for fn in (lambda x, y: torch.add(x, y, alpha=3), lambda x, y: torch.sub(x, y, alpha=0.3))]
    for c, run in zip(cases, compiled(cases), strict=True):
        no_worse(run()[0], c.graph.run(x, y)[0], c.graph.run(x.double(), y.double())[0])


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1, keepdim=True), "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1),
    "var": lambda x: x.var(-1), "var0": lambda x: x.var(-1, correction=0, keepdim=True), "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1), "logsumexp": lambda x: torch.logsumexp(x, -1),
    "rms_norm": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), "first_axis": lambda x: x.sum(0), "all": torch.sum,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_reductions_over_odd_lengths(dtype):
    widths = (1, 31, 1023)
    cases, inputs = [], []
    for fn in REDUCTIONS.values():
        for width in widths:
            x = (torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)
            cases.append(quick_case(_called(fn), x))
            inputs.append(x)
    for c, run, x in zip(cases, compiled(cases), inputs, strict=True):
        no_worse(run()[0], c.graph.run(x)[0], c.graph.run(x.double())[0])


def test_reductions_of_special_values():
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1.0, inf, 2.0], [-inf, -inf, -inf], [nan, 1.0, 2.0], [inf, -inf, 0.0], [-inf, 3.0, 1.0], [3e38, 3e38, -3e38]])
    cases = [quick_case(_called(REDUCTIONS[name]), rows[:5]) for name in ("amax", "amin", "softmax", "log_softmax", "logsumexp", "sum")]
    for c, run in zip(cases, compiled(cases), strict=True):
        found, expected = run()[0], c.graph.run(rows[:5])[0]
        assert torch.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True), (c.graph.module.graph, found, expected)


def test_whole_number_reductions_are_exact():
    x, b = torch.arange(35, dtype=torch.int32).reshape(5, 7), torch.rand(5, 7) < 0.4
    fns: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda t: t.sum(-1), x), (lambda t: t.sum(-1, dtype=torch.int32), x), (lambda t: t.amax(-1), x), (lambda t: t.sum(-1), b),
        (lambda t: t.any(-1), b), (lambda t: t.all(-1, keepdim=True), b), (lambda t: t.sum((0, 1)), x), (lambda t: t.prod(-1), x[:, :3]),
        (lambda t: t.float().mean(-1), x)]
    cases = [quick_case(fn, t) for fn, t in fns]
    for c, run in zip(cases, compiled(cases), strict=True): assert same(run()[0], c.graph.run(*c.inputs)[0])


def test_empty_and_single_axes():
    cases = [case(lambda x: (x.sum(-1), torch.softmax(x, -1), x.amax(-1, keepdim=True)), torch.randn(4, 6), dynamic=({0: "T"},)),
             case(lambda x: (x.sum(0), x.mean(0, keepdim=True)), torch.randn(4, 6), dynamic=({0: "T"},))]
    first, second = compiled(cases)
    for live in (0, 1, 5):
        x = torch.randn(live, 6)
        for run, c in ((first, cases[0]), (second, cases[1])):
            for found, eager, exact in zip(run(x), c.graph.run(x), c.graph.run(x.double()), strict=True): no_worse(found, eager, exact)


def test_the_sign_of_zero_and_every_bit():
    x = torch.tensor([0.0, -0.0, 1e-42, -1e-42, float("inf"), -1.0])
    fns: list[Callable[[Tensor], Tensor]] = [
        lambda t: -t, lambda t: t * -1.0, lambda t: t + -0.0, lambda t: torch.where(t == 0, t, -t), lambda t: t.to(torch.bfloat16),
        lambda t: torch.cat([t, -t]), lambda t: t.abs(), lambda t: t / -3.0, lambda t: t.double(), lambda t: 1.0 / t, torch.trunc,
        lambda t: t.round(), lambda t: t.flip(0)]
    cases = [quick_case(_called(fn), x) for fn in fns]
    for c, run in zip(cases, compiled(cases), strict=True):
        found, expected = run()[0], c.graph.run(x)[0]
        assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit()), c.kernels()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool)


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype)


def test_casts_between_all_dtypes():
    values = torch.tensor([0.0, 1.0, 2.5, 3.0, 100.0, 126.5])
    cases = [quick_case(_cast(to), values.to(old)) for old in DTYPES for to in DTYPES if old != to]
    for c, run in zip(cases, compiled(cases), strict=True): assert same(run()[0], c.graph.run(*c.inputs)[0]), c.kernels()
    halves = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.3961e38, float("nan"), float("inf"), 1e-40])
    narrow = quick_case(lambda t: t.to(torch.bfloat16), halves)
    assert same(compiled([narrow])[0]()[0], halves.to(torch.bfloat16)), "ties to even, overflow to infinity, NaN stays"


def test_fp16_by_its_bits():
    """Every fp16 number as fp32 and back, and what lies between them: ties, the ends of the normal range, and past both."""
    every = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.float16)
    numbers = every[every.isfinite()].float()
    between = torch.cat([numbers + step * 2.0**-25 for step in (-1, 1)] + [numbers * (1 + step * 2.0**-12) for step in (-2, -1, 1, 2)])
    past = torch.tensor([65519.996, 65520.0, 65536.0, 3e38, float("inf"), float("nan"), 2.0**-25, 2.0**-25 * 1.0001, 2.0**-26, 1e-40])
    wide = torch.cat([numbers, between, past, -past])
    cases = [quick_case(lambda t: t.float(), every), quick_case(lambda t: t.half(), wide)]
    for c, run in zip(cases, compiled(cases), strict=True):
        found, expected = run()[0], c.graph.run(*c.inputs)[0]
        assert same(found, expected) and torch.equal(found.signbit() | found.isnan(), expected.signbit() | found.isnan())


def test_integers_wrap():
    for dtype in (torch.int32, torch.int64, torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        x = torch.tensor([info.max, info.min, 3, 0], dtype=dtype)
        c = quick_case(lambda t: (t + t, t * t, t - 5, t if t.dtype == torch.uint8 else -t), x)
        for found, expected in zip(compiled([c])[0](), c.graph.run(x), strict=True): assert same(found, expected)


def heavy(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    q = y.view(-1, 3, 16)
    return y, (q + torch.cat([-q[..., 8:], q[..., :8]], -1)).transpose(0, 1).contiguous()


@pytest.mark.parametrize("live", [1, 2, 7, 64])
def test_any_number_of_threads_writes_every_element_once(live):
    c = case(heavy, torch.randn(ROWS, WIDTH), torch.randn(WIDTH), dynamic=({0: "T"}, None))
    inputs = (torch.randn(live, WIDTH), torch.randn(WIDTH))
    alone = compiled([c], threads=1)[0](*inputs)
    for threads in (2, 5, 16):
        for found, expected in zip(compiled([c], threads=threads)[0](*inputs), alone, strict=True): assert torch.equal(found, expected)


@pytest.mark.parametrize("isa", ["portable", "x86-64-v3", "x86-64-v4"])
def test_each_instruction_set_compiles_without_a_warning(isa):
    cases: list[Case] = [case(heavy, torch.randn(ROWS, WIDTH), torch.randn(WIDTH), dynamic=({0: "T"}, None))]
    cases += [quick_case(_called(fn), torch.randn(3, 5)) for fn in FUNCTIONS.values()]
    assert len(compiled(cases, isa=isa, extra=())) == len(cases)
