"""Loop regions as Triton kernels, interpreted: bit for bit PyTorch where arithmetic is exact, no worse than PyTorch where it is not."""
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton_env  # before anything of Triton's
from infc.backends import loops
from infc.backends.index import Dim, Var, expr
from infc.backends.loops import Guard, Operand, Region, Stmt
from infc.backends.triton import build as building
from infc.backends.triton import printer, tiles
from infc.backends.triton import request as asking
from infc.backends.triton.interpret import check_interpreting, poisoned
from infc.backends.triton.registry import Emit, Launch
from loop_programs import fill, program, same
from loop_runner import Case, case, quick_case, run
from torch import Tensor
from triton import language as tl

randn = triton_env.randn
BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
INF, NAN = float("inf"), float("nan")


def launches(region: Region, dims: dict[str, int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Launch]:
    assert printer.refuse(region) is None
    emit = Emit()
    printer.lower(emit, region, dims, inputs, outputs)
    return emit.launches


def execute(region: Region, live: dict[str, int], inputs: Sequence[Tensor], room: int = 0) -> list[Tensor]:
    """The region's outputs, poisoned before; its grid made for sizes that are larger by `room`."""
    check_interpreting()
    outs = [poisoned(torch.empty(int(o.numel.value(live.__getitem__)), dtype=loops.TORCH[o.dtype])) for o in region.outputs]
    for launch in launches(region, {d: n + room for d, n in live.items()}, inputs, outs):
        args = (*inputs, *outs, *(live[d] for d in region.dims))
        with np.errstate(all="ignore"): launch.function[launch.grid](*args, **launch.constants)
    return outs


def found(c: Case, *inputs: Tensor, room: int = 0) -> list[Tensor]:
    live = c.live(inputs or c.inputs)
    return run(c, lambda i, region, given: execute(region, live, given, room), inputs or None)


def judged(c: Case, *inputs: Tensor, ulps: float = 1) -> None:
    given = inputs or c.inputs
    wide = [t.double() if t.is_floating_point() else t for t in given]
    for f, p, e in zip(found(c, *inputs), c.graph.run(*given), c.graph.run(*wide), strict=True): no_worse(f, p, e, ulps)


def no_worse(f: Tensor, eager: Tensor, exact: Tensor, ulps: float = 1) -> None:
    """Per row: the worst error is at most eager's plus so many ulp of the row's largest result. Non-finite results are equal.

    2 ulp where fp32 is the sum of a row, or made of one: exponential, sum and quotient are each rounded, by both in another order.
    """
    assert f.shape == eager.shape == exact.shape and f.dtype == eager.dtype
    if not f.numel(): return
    f, eager, exact = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.reshape(-1, 1) for t in (f, eager, exact))
    narrow = exact.to(f.dtype)
    special = ~torch.isfinite(narrow)
    assert torch.equal(f[special].nan_to_num(1, 2, 3), narrow[special].nan_to_num(1, 2, 3))
    worst, own = ((t.double() - exact).abs().masked_fill(special, 0).amax(-1) for t in (f, eager))
    allowed = own + ulps * triton_env.ulp(narrow.masked_fill(special, 0).abs().amax(-1), f.dtype)
    assert bool((worst <= allowed).all()), f"error {worst.max()} where eager has {own.max()} and {allowed.min()} is allowed"


def called(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x)


# ---- one statement at a time

def region_of(body: Sequence[Stmt], inputs: Sequence[str], n: int, rows: Sequence[Var] = (), outputs: Sequence[str] = ()) -> Region:
    """A region without a graph: rows and n columns."""
    operands = [Operand(None, dtype, expr(n)) for dtype in (*inputs, *(outputs or [body[-1].dtype]))]     # type: ignore[arg-type]
    return Region((), tuple(operands[:len(inputs)]), tuple(operands[len(inputs):]), tuple(rows), J(n), tuple(body))


def J(n: int) -> Var: return Var("j", expr(n))


def primitive(op: str, kinds: Sequence[str], result: str, n: int) -> Region:
    at = expr(J(n))
    body = [Stmt("load", (), kind, True, slot, at) for slot, kind in enumerate(kinds)]
    body.append(Stmt(op, tuple(range(len(kinds))), result, True))
    return region_of([*body, Stmt("store", (len(kinds),), result, True, 0, at)], kinds, n, outputs=[result])


UNARY = ("neg", "abs", "exp", "log", "sin", "cos", "tan", "tanh", "sqrt", "erf", "expm1", "log1p", "atan", "floor", "ceil", "trunc",
         "round", "sign", "not")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
ULPS = {"exp": 1, "log": 1, "tanh": 1.5, "expm1": 1.5, "log1p": 1.5, "atan": 3, "atan2": 3, "tan": 3, "sin": 2, "cos": 2, "erf": 1,
        "pow": 1, "sqrt": 0.5, "fmod": 0}
"""Of fp64. sin, cos, erf, pow and fmod are numpy's here, libdevice's in a GPU. PyTorch's own sqrt and fmod are at times further off."""

FLOATS = torch.cat([torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 0.49999997, 1e-40, -1e-40, 3.4e38, -3.4e38,
                                  8388607.5, 8388609.0, 1e5, 131072.0, -2.0, 3.0, 88.7, -103.9, 2.0**24, 0.6931472]),
                    randn(22, scale=4)])
WHOLE = {"i64": [-(2**63), 2**63 - 1, 2**33], "i32": [-(2**31), 2**31 - 1], "i16": [-(2**15), 2**15 - 1], "i8": [-128, 127],
         "u8": [255, 128]}


def values(kind: str) -> Tensor:
    if kind == "bool": return torch.tensor([False, True])
    if kind in printer.FLOATS: return FLOATS.to(loops.TORCH[kind])
    small = [0, 1, 2, 3, 5, 7, 8, 31, 100] + ([] if kind == "u8" else [-1, -2, -3, -7, -100])
    return torch.tensor(WHOLE[kind] + small, dtype=loops.TORCH[kind])


def sorts(op: str) -> list[str]:
    """The dtypes a primitive has."""
    return [k for k in printer.VALUE if printer.refuse(primitive(op, [k] * arity(op), "bool" if op in COMPARE else k, 4)) is None]


def arity(op: str) -> int: return 1 if op in UNARY else 2


@pytest.mark.parametrize("op", [op for op in loops.PRIMITIVES if op != "where"])
def test_primitives(op: str) -> None:
    """Every pair of values of every dtype."""
    for kind in sorts(op):
        x = values(kind)
        inputs = [x] if arity(op) == 1 else [t.reshape(-1) for t in torch.meshgrid(x, x, indexing="ij")]
        if op in ("idiv", "fmod") and kind not in printer.FLOATS:                 # by 0, and past the largest: no number in C either
            usual = (inputs[1] != 0) & (inputs[1] != -1)
            inputs = [t[usual] for t in inputs]
        region = primitive(op, [kind] * len(inputs), "bool" if op in COMPARE else kind, len(inputs[0]))
        f, = execute(region, {}, inputs)
        if op in ULPS and f.is_floating_point(): close(f, exactly(op, inputs), ULPS[op] if kind == "f32" else max(ULPS[op], 0.501))
        else: assert same(f, *loops.evaluate(region, inputs)), (kind, inputs, f)


def exactly(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """In fp64. PyTorch's fmod is not C's."""
    wide = [t.double() for t in inputs]
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.fmod(*(t.numpy() for t in wide))) if op == "fmod" else loops.PRIMITIVES[op](*wide)


def close(f: Tensor, exact: Tensor, ulps: float) -> None:
    """Each number within so many ulp; nan and inf as there."""
    narrow = exact.to(f.dtype)
    usual = narrow.isfinite() & f.isfinite()
    odd = ~usual & ~(exact.abs().isfinite() & (exact.abs() > 3.4e38))              # at the edge of the range an ulp decides
    assert same(f[odd], narrow[odd]), (f[odd], narrow[odd])
    error = ((f.double() - exact).abs() / triton_env.ulp(exact.nan_to_num(), f.dtype))[usual]
    assert bool((error <= ulps).all()), (error.max(), exact[usual][error.argmax()])


@pytest.mark.parametrize("kind", printer.VALUE)
def test_where(kind: str) -> None:
    x = values(kind)
    inputs = [torch.arange(len(x)) % 3 == 0, x, x.flip(0)]
    assert same(execute(primitive("where", ["bool", kind, kind], kind, len(x)), {}, inputs)[0], torch.where(*inputs))


@pytest.mark.parametrize("old", printer.VALUE)
def test_casts(old: str) -> None:
    for new in printer.VALUE:
        signed = old not in ("u8", "bool") and new not in ("u8", "bool")           # of what does not fit, each machine makes its own
        x = torch.tensor([0.0, 1.0, 2.5, 3.0, 100.0, 127.0, *([-1.0, -2.5, -127.0] if signed else [])]).to(loops.TORCH[old])
        assert same(execute(primitive("cast", [old], new, len(x)), {}, [x])[0], x.to(loops.TORCH[new])), new


def test_casts_round_to_nearest_even() -> None:
    halves = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.3961e38, NAN, INF, -INF, 1e-40, -1e-40, 0.0, 257.0, 1e-45])
    assert same(execute(primitive("cast", ["f32"], "bf16", 12), {}, [halves])[0], halves.bfloat16())
    halves = torch.cat([halves, torch.tensor([65519.996, 65520.0, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-24 * 1.5, 6e-5, -2.5 * 2.0**-24,
                                              1.00048828125, 2049.0])])
    assert same(execute(primitive("cast", ["f32"], "f16", len(halves)), {}, [halves])[0], halves.half())
    every = torch.arange(-2**15, 2**15).to(torch.int16).view(F16)
    assert same(execute(primitive("cast", ["f16"], "f32", len(every)), {}, [every])[0], every.float())
    whole = torch.tensor([2**24 + 1, 2**24 + 3, -(2**31), 257, 2**53 + 1, -(2**63), 2**63 - 1])
    assert same(execute(primitive("cast", ["i64"], "f32", 7), {}, [whole])[0], whole.float())


CONSTANTS = [("f32", 0.1), ("f32", INF), ("f32", -INF), ("f32", NAN), ("f32", -0.0), ("f32", 1e-40), ("f32", 3.4028234663852886e38),
             ("f32", 1e39), ("bf16", 0.1), ("bf16", 3.3961e38), ("f16", 0.1), ("f16", 65520.0), ("i64", -(2**63)),
             ("i64", 2**63 - 1), ("i32", -(2**31)), ("i8", -128), ("u8", 255), ("i16", -32768), ("bool", True), ("bool", False)]


@pytest.mark.parametrize(("kind", "value"), CONSTANTS, ids=str)
def test_constants(kind: str, value: float) -> None:
    body = [Stmt("const", (), kind, value=repr(value)), Stmt("store", (0,), kind, True, 0, expr(J(3)))]
    region = region_of(body, [], 3, outputs=[kind])
    assert same(execute(region, {}, [])[0], *loops.evaluate(region, []))


def test_indices_past_32_bits_are_counted_in_64() -> None:
    big = Stmt("index", (), "i64", True, offset=expr(J(5)) * 2**33 - 2**40)
    region = region_of([big, Stmt("store", (0,), "i64", True, 0, expr(J(5)))], [], 5, outputs=["i64"])
    assert same(execute(region, {}, [])[0], *loops.evaluate(region, []))
    t = Var("i0", expr(Dim("T")))
    copy = [Stmt("load", (), "f32", True, 0, expr(t) * 4096 + J(4096)), Stmt("store", (0,), "f32", True, 0, expr(t) * 4096 + J(4096))]
    region = replace(region_of(copy, ["f32"], 4096, rows=[t], outputs=["f32"]), dims=("T",))
    assert tiles.index_type(region, {"T": 500_000}) == tl.int32 and tiles.index_type(region, {"T": 600_000}) == tl.int64
    masked = replace(copy[0], guards=(Guard(expr(t) * 2**20, expr(0), expr(2**40)),))
    assert tiles.index_type(replace(region, body=(masked, copy[1])), {"T": 4}) == tl.int64


@pytest.mark.parametrize(("body", "reason"), [
    ([Stmt("load", (), "f64", True, 0, expr(0))], "input 0 is f64: the kernels know floats up to fp32"),
    ([Stmt("const", value="1.0", dtype="f32"), Stmt("cast", (0,), "f64")], "it computes cast in f64"),
    ([Stmt("const", value="1", dtype="i32"), Stmt("exp", (0,), "i32")], "exp of i32"),
    ([Stmt("const", value="1.0", dtype="f32"), Stmt("xor", (0, 0), "f32")], "xor of floats"),
    ([Stmt("const", value="True", dtype="bool"), Stmt("add", (0, 0), "bool")], "add of bool"),
])
def test_refuses_with_a_reason(body: list[Stmt], reason: str) -> None:
    store = Stmt("store", (len(body) - 1,), "f32", True, 0, expr(J(4)))
    assert reason in (printer.refuse(region_of([*body, store], [body[0].dtype], 4, outputs=["f32"])) or "")


def test_doubles_in_a_graph_are_refused() -> None:
    region, = quick_case(lambda x: x.double() * 0.1, randn(4)).plan.regions
    assert "f64" in (printer.refuse(region) or "")


# ---- regions of graphs

@pytest.mark.parametrize("index", [tl.int32, tl.int64], ids=str)
def test_programs_equal_eager(index: tl.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 random programs: views, guards, several outputs; those of a run-time size at others, and on a grid made for more."""
    monkeypatch.setattr(printer, "index_type", lambda region, dims: index)
    for seed in range(0, 40, 1 if index == tl.int32 else 4):
        p = program(random.Random(seed).randrange)
        c = quick_case(p.fn, *p.inputs, symbolic=bool(seed % 2))
        resized = [tuple(fill((n, *t.shape[1:]), t.dtype, n) if spec else t for t, spec in zip(p.inputs, p.dynamic, strict=True))
                   for n in (0, 1, 9)] if any(p.dynamic) and any(c.graph.symbols) and all(p.dynamic) else []
        for inputs in [p.inputs, *resized]:
            for f, expected in zip(found(c, *inputs, room=seed % 3), p.fn(*inputs), strict=True):
                assert same(f, expected), "\n".join([*p.lines, str([t.shape for t in inputs]), *texts(c)])


def texts(c: Case) -> list[str]:
    return [printer.source(loops.merge_axes(region)) for region in c.plan.regions]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "erf": torch.erf, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "expm1": torch.expm1, "log1p": torch.log1p, "softplus": F.softplus, "pow": lambda x: x**1.7,
    "reciprocal": torch.reciprocal, "cube": lambda x: x**3,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_accurate_as_pytorch(name: str) -> None:
    """Every exponent of fp32, both signs."""
    bits = torch.arange(-2**31, 2**31, 480_013, dtype=torch.int64).to(torch.int32).view(F32)
    x = bits[~bits.isnan()].sort().values[:8_896].reshape(-1, 64)
    for t in (x, x.bfloat16(), x.half()): judged(quick_case(called(FUNCTIONS[name]), t))


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1, keepdim=True), "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1),
    "var": lambda x: x.var(-1), "var0": lambda x: x.var(-1, correction=0, keepdim=True), "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1), "logsumexp": lambda x: torch.logsumexp(x, -1),
    "rms_norm": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), "first_axis": lambda x: x.sum(0), "all": torch.sum,
    "nested": lambda x: torch.softmax(torch.softmax(x * 3, -1) - x.amin(-1, keepdim=True), -1) * x.amax(-1, keepdim=True),
}
FORMS = {"held": {}, "several rows a program": {"PROGRAMS": 1}, "walked": {"MAX_COLS": 0, "CHUNK": 128}}


SUMS = ("sum", "mean", "first_axis", "all")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_reductions_over_odd_lengths(dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers of both signs; a sum alone of positive ones, as what cancels has no size to judge it by."""
    for constant, value in FORMS[form].items(): monkeypatch.setattr(tiles, constant, value)
    for name, fn in REDUCTIONS.items():
        for width in (1, 300) if dtype == F32 else (31,):
            x = randn(5, width, seed=width, scale=3)
            judged(quick_case(called(fn), (x.abs() if name in SUMS else x).to(dtype)), ulps=2 if dtype == F32 else 1)


@pytest.mark.parametrize("form", FORMS)
def test_reductions_of_special_values(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in FORMS[form].items(): monkeypatch.setattr(tiles, constant, value)
    rows = torch.tensor([[1.0, INF, 2.0], [-INF, -INF, -INF], [NAN, 1.0, 2.0], [INF, -INF, 0.0], [-INF, 3.0, 1.0], [NAN, NAN, -NAN],
                         [-0.0, -1e-40, -1e-45]])
    for fn in (*(REDUCTIONS[n] for n in ("amax", "amin", "softmax", "log_softmax", "logsumexp", "sum")), lambda x: x.prod(-1)):
        for x in (rows, rows.bfloat16(), rows.half()): judged(quick_case(called(fn), x), ulps=2 if x.dtype == F32 else 1)


@pytest.mark.parametrize("form", FORMS)
def test_whole_number_reductions_are_exact(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in FORMS[form].items(): monkeypatch.setattr(tiles, constant, value)
    x, b = torch.arange(35, dtype=I32).reshape(5, 7) - 17, randn(5, 7) < -0.2
    fns: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda t: t.sum(-1), x), (lambda t: t.sum(-1, dtype=I32), x), (lambda t: t.amax(-1), x), (lambda t: t.sum(-1), b),
        (lambda t: t.any(-1), b), (lambda t: t.all(-1, keepdim=True), b), (lambda t: t.sum((0, 1)), x), (lambda t: t.prod(-1), x[:, :3]),
        (lambda t: t.float().mean(-1), x), (lambda t: t.amin(-1), x.long() * 2**40), (lambda t: t.amax(-1), x.to(torch.int8)),
        (lambda t: t.amin(-1), (x + 17).to(torch.uint8)), (lambda t: t.sum(-1, dtype=torch.int8), x.to(torch.int8) * 5)]
    for fn, t in fns:
        c = quick_case(fn, t)
        assert same(found(c)[0], c.graph.run(*c.inputs)[0]), texts(c)


def test_rows_and_columns_of_run_time_length() -> None:
    """One text whatever the sizes; 0 rows, 0 columns, and grids made for more."""
    c = case(lambda x: (x.sum(-1), torch.softmax(x, -1)), randn(4, 6), dynamic=({0: "T", 1: "N"},))
    for t, n in ((0, 3), (1, 1), (5, 33), (3, 0), (2, 5000)): judged(c, randn(t, n).abs(), ulps=2)
    for f, g in zip(found(c), found(c, room=7), strict=True): assert torch.allclose(f, g, rtol=1e-6, atol=0)
    first = case(lambda x: (x.sum(0), x.mean(0, keepdim=True)), randn(4, 6), dynamic=({0: "T"},))
    for t in (0, 1, 5): judged(first, randn(t, 6).abs(), ulps=2)


@pytest.mark.parametrize("columns", [16_384, 50_000])
def test_long_rows(columns: int) -> None:
    x = randn(2, columns, seed=1).abs()
    for fn in (REDUCTIONS["softmax"], REDUCTIONS["sum"], REDUCTIONS["rms_norm"]): judged(quick_case(called(fn), x), ulps=2)


def test_the_sign_of_zero_and_every_bit() -> None:
    x = torch.tensor([0.0, -0.0, 1e-42, -1e-42, INF, -1.0, 0.3, -0.3])
    fns: list[Callable[[Tensor], Tensor]] = [
        lambda t: -t, lambda t: t * -1.0, lambda t: t + -0.0, lambda t: torch.where(t == 0, t, -t), lambda t: t.to(BF16),
        lambda t: t.to(F16), lambda t: torch.cat([t, -t]), lambda t: t.abs(), lambda t: t / -3.0, lambda t: 1.0 / t, torch.trunc,
        torch.floor, torch.ceil, lambda t: t.round(), lambda t: t.flip(0)]
    for fn in fns:
        c = quick_case(called(fn), x)
        f, expected = found(c)[0], c.graph.run(x)[0]
        assert torch.equal(f, expected) and torch.equal(f.signbit(), expected.signbit()), texts(c)


def test_integers_wrap() -> None:
    for dtype in (I32, I64, torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        x = torch.tensor([info.max, info.min, 3, 0], dtype=dtype)
        c = quick_case(lambda t: (t + t, t * t, t - 5, t if t.dtype == torch.uint8 else -t), x)
        for f, expected in zip(found(c), c.graph.run(x), strict=True): assert same(f, expected)


def rope(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.unsqueeze(1).to(F32) * frequencies
    return angles.cos(), angles.sin()


def heavy(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    q = y.view(-1, 3, 16)
    return y, (q + torch.cat([-q[..., 8:], q[..., :8]], -1)).transpose(0, 1).contiguous()


FREQUENCIES = 10_000.0 ** (-torch.arange(32) / 32)
ROPE = case(rope, torch.arange(7), FREQUENCIES, dynamic=({0: "T"}, None))
HEAVY = case(heavy, randn(7, 48), randn(48, seed=1), dynamic=({0: "T"}, None))


def test_rope_to_position_131072() -> None:
    region = max(ROPE.plan.regions, key=lambda r: len(r.outputs))
    assert region.dims == ("T",)
    for positions in ([*range(7)], [131_071, 105_616, 105_614, 65_536, 99_991], []):
        judged(ROPE, torch.tensor(positions, dtype=I64), FREQUENCIES)


def test_norms_halves_and_transposes() -> None:
    for live in (1, 7, 64): judged(HEAVY, randn(live, 48, seed=live), HEAVY.inputs[1], ulps=3)         # two norms in one sum
    same_bits = found(HEAVY), found(HEAVY, room=9)
    assert all(torch.equal(a, b) for a, b in zip(*same_bits, strict=True))


def test_a_tile_that_turns_rows_into_columns_is_square() -> None:
    x, y = randn(70, 45), randn(45, 70, seed=1)
    c = quick_case(lambda x, y: x.t() + y, x, y)
    assert tiles.tile(loops.merge_axes(c.plan.regions[0]), 45, 70) == (32, 32, 4)
    assert same(found(c)[0], x.t() + y)


def test_row_values_of_a_region_without_reductions_are_stored_once() -> None:
    t, j = Var("i0", expr(5)), Var("j", expr(2000))
    body = [Stmt("load", (), "f32", False, 0, expr(t)), Stmt("load", (), "f32", True, 1, expr(j)), Stmt("add", (0, 1), "f32", True),
            Stmt("neg", (0,), "f32"), Stmt("store", (2,), "f32", True, 0, expr(t) * 2000 + j),
            Stmt("store", (3,), "f32", False, 1, expr(t))]
    sizes = [5, 2000, 10_000, 5]
    operands = [Operand(None, "f32", expr(n)) for n in sizes]                      # type: ignore[arg-type]
    region = Region((), tuple(operands[:2]), tuple(operands[2:]), (t,), j, tuple(body))
    inputs = [randn(5), randn(2000)]
    assert all(same(*pair) for pair in zip(execute(region, {}, inputs), loops.evaluate(region, inputs), strict=True))


# ---- requests, keys, code

def asked(c: Case, **sizes: int) -> list[Launch]:
    """The launches of a case on meta tensors."""
    made = []
    for region in c.plan.regions:
        live = {d: sizes.get(d, 512) for d in region.dims}
        inputs, outputs = ([torch.empty(int(o.numel.value(live.__getitem__)), dtype=loops.TORCH[o.dtype], device="meta") for o in operands]
                           for operands in (region.inputs, region.outputs))
        made += launches(region, live, inputs, outputs)
    return made


def key(launch: Launch) -> str:
    return asking.key(launch, asking.request(launch, "sm_90a"), "12.9")


def test_one_text_and_one_build_for_every_bucket() -> None:
    small, large = asked(ROPE, T=128)[-1], asked(ROPE, T=1003)[-1]
    assert small.function is large.function and small.grid != large.grid and key(small) == key(large)
    request = asking.request(small, "sm_90a")
    assert request.signature["size_T"] == "i32" and request.aligned == (0, 1, 2, 3) and "def loop_mul_sin_cos_Tx32" in request.text
    others = [asked(HEAVY)[0], replace(small, constants={**small.constants, "INDEX": tl.int64}), replace(small, warps=8)]
    assert len({key(small), *map(key, others)}) == 4


def test_keys_hold_the_text_and_all_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, = asked(quick_case(lambda x: torch.softmax(x, -1), randn(4, 40)))
    before = key(launch)
    found(quick_case(lambda x: torch.softmax(x, -1), randn(4, 40)))          # interpreting adds names to a module of kernels
    asking._read.cache_clear()
    assert key(launch) == before
    text = "\n".join(asking.source(launch.function))
    assert "elementwise.row_max(" in text and "1.44269504088896341" in text and "0x7FFFFFFF" in text
    monkeypatch.setattr("infc.backends.triton.elementwise._in_order", sys.modules["infc.backends.triton.elementwise"]._times)
    asking._read.cache_clear()
    assert key(launch) != before
    asking._read.cache_clear()


@pytest.mark.slow
def test_a_key_is_the_same_in_another_process() -> None:
    code = (f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
            "import test_triton_loops as t; print(t.key(t.asked(t.ROPE)[-1]))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [key(asked(ROPE)[-1])]


def everything(x: Tensor, n: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Every function and every cast that a graph can ask for."""
    y = x.sign() + x.floor() + x.ceil() + x.trunc() + x.round() + x.abs() + torch.tan(x) + torch.atan(x) - x.clamp(-1, 1)
    for fn in FUNCTIONS.values(): y = y + fn(x)
    m = (n // 3) * (n % 5) + n.abs() - (n & 12) + (n | 3) - (n ^ 5) + ~n + torch.maximum(n, -n)
    whole = m.to(torch.int8) + m.to(torch.int16) + m.to(torch.uint8) + b.to(I32)
    rows = b.any(-1), n.amax(-1), n.prod(-1), whole.to(BF16).sum(-1), x.prod(-1)
    return y, whole, torch.where(b | ~(n < 3), m.float(), y).bfloat16(), *rows


def builds(cases: Sequence[Case], arch: str, cache: Path, **sizes: int) -> list[building.Code]:
    """Built without a spill, and nothing of this machine in them."""
    codes = building.build([launch for c in cases for launch in asked(c, **sizes)], arch, cache=cache)
    for code in codes:
        assert building.programs_at_once(code) and not code.made.spill_stores and not code.made.spill_loads
        for word in (".py", "/tmp", str(Path(__file__).parents[2]), "site-packages", "infc_generated"):
            assert word.encode() not in code.made.cubin
    return codes


def test_rope_and_softmax_build(tmp_path: Path) -> None:
    rope, softmax = builds([ROPE, quick_case(REDUCTIONS["softmax"], torch.ones(512, 576, dtype=BF16))], "sm_90a", tmp_path)[-2:]
    assert rope.symbol == "loop_mul_sin_cos_Tx32" and softmax.symbol == "loop_max_sub_exp_sum_512x576"
    assert rope.made.params == ("u64",) * 4 + ("u32",) + ("u64",) * 2 and rope.made.registers <= 128 and softmax.made.registers <= 64


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
def test_everything_builds(arch: str, tmp_path: Path) -> None:
    square, softmax = torch.ones(64, 64), REDUCTIONS["softmax"]
    lengths = [torch.ones(512, n, dtype=dtype) for n in (64, 576, 16_384, 50_000) for dtype in (BF16, F16, F32)]
    dynamic = case(softmax, randn(4, 6), dynamic=({0: "T", 1: "N"},))
    assert asked(dynamic, T=2**20, N=4096)[0].constants["INDEX"] == tl.int64
    builds([ROPE, HEAVY, dynamic], arch, tmp_path, T=2**26, N=4096)
    many = [randn(64, 64)] * 40                                                 # 40 values of a point at a time
    builds([quick_case(lambda *xs: [x * y for x, y in zip(xs, [sum(xs)] * 40, strict=True)], *many)], arch, tmp_path)
    builds([ROPE, HEAVY, dynamic, quick_case(everything, square, square.long(), square > 0), quick_case(torch.exp, randn(())),
            *(quick_case(called(softmax), x) for x in lengths), quick_case(REDUCTIONS["nested"], torch.ones(512, 4096))], arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_every_primitive_builds(arch: str, tmp_path: Path) -> None:
    """Of every dtype, those that no operator asks for too."""
    made: list[Launch] = []
    for op in loops.PRIMITIVES:
        for kind in sorts(op) if op != "where" else printer.VALUE:
            kinds = ["bool", kind, kind] if op == "where" else [kind] * arity(op)
            result = "bool" if op in COMPARE else kind
            made += launches(primitive(op, kinds, result, 512), {}, *([torch.empty(512, dtype=loops.TORCH[k], device="meta") for k in part]
                                                                      for part in (kinds, [result])))
    assert len(building.build(made, arch, cache=tmp_path)) > 150
