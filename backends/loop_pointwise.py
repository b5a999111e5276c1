"""Loop forms of pointwise operators, in PyTorch's arithmetic: bf16 and fp16 are computed in fp32 and each result rounded."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .loop_build import OPMATH, Call, Handler, Lowering, Refused, handles
from .loops import DTYPES, EXPENSIVE

aten = torch.ops.aten

Emit = Callable[..., int]


class Math:
    """Primitives in one dtype, so that a formula reads as a formula."""

    def __init__(self, build: Lowering, dtype: str) -> None:
        self.build, self.dtype = build, dtype

    def __getattr__(self, op: str) -> Emit:
        op = op.rstrip("_")
        dtype = "bool" if op in ("lt", "le", "gt", "ge", "eq", "ne") else self.dtype
        return lambda *args: self.build.emit(op, *[self.const(a) if isinstance(a, float) else a for a in args], dtype=dtype)

    def const(self, value: float) -> int:
        return self.build.const(value, self.dtype)


def sigmoid(m: Math, x: int) -> int: return m.div(1.0, m.add(1.0, m.exp(m.neg(x))))


def silu(m: Math, x: int) -> int: return m.div(x, m.add(1.0, m.exp(m.neg(x))))


def gelu(m: Math, x: int) -> int: return m.mul(m.mul(x, 0.5), m.add(1.0, m.erf(m.mul(x, math.sqrt(0.5)))))


def gelu_tanh(m: Math, x: int) -> int:
    inner = m.mul(math.sqrt(2 / math.pi), m.add(x, m.mul(0.044715, m.mul(m.mul(x, x), x))))
    return m.mul(m.mul(0.5, x), m.add(1.0, m.tanh(inner)))


def power(m: Math, x: int, e: int | float) -> int:
    """x**e, with the special cases PyTorch has (aten/src/ATen/native/cpu/PowKernel.cpp)."""
    if e == 2: return m.mul(x, x)
    if e == 3: return m.mul(m.mul(x, x), x)
    if e == 0.5: return m.sqrt(x)
    if e == -0.5: return m.div(1.0, m.sqrt(x))
    if e == -1: return m.div(1.0, x)
    if e == -2: return m.div(1.0, m.mul(x, x))
    return m.pow(x, float(e))


def unary(formula: Callable[[Math, int], int], *targets: Any, floats: bool = True) -> None:
    """Operators of one tensor, computed in the opmath of the result's dtype. floats: refuse integers."""
    def handler(c: Call) -> int:
        dtype = OPMATH.get(c.dtype, c.dtype)
        if floats and dtype not in ("f64", "f32"): raise Refused(f"{c.node.target} of {dtype}")
        expensive = _guard_recompute(c)
        return c.result(expensive(formula, Math(c.build, dtype), c.operand(c.node.args[0], dtype)))

    handles(*targets)(handler)


def _guard_recompute(c: Call) -> Callable[..., int]:
    """Runs a formula; refuses when it has an expensive primitive that a broadcast would repeat at every column."""
    def run(formula: Callable[..., int], *args: Any) -> int:
        start = len(c.build.body)
        value = formula(*args)
        new = c.build.body[start:]
        if not c.whole and any(s.element and s.op in EXPENSIVE for s in new):
            raise Refused(f"{c.node.name} would be computed again and again: {c.node.target} is broadcast or sliced")
        return value

    return run


for _name, _op in {
    "exp": "exp", "log": "log", "sin": "sin", "cos": "cos", "tan": "tan", "tanh": "tanh", "sqrt": "sqrt", "erf": "erf",
    "expm1": "expm1", "log1p": "log1p", "atan": "atan",
}.items():
    unary(lambda m, x, op=_op: getattr(m, op)(x), getattr(aten, _name).default)

for _name in ("neg", "abs", "floor", "ceil", "trunc", "round", "sign"):
    unary(lambda m, x, op=_name: getattr(m, op)(x) if m.dtype in ("f64", "f32") or op in ("neg", "abs", "sign") else x,
          getattr(aten, _name).default, floats=False)

unary(sigmoid, aten.sigmoid.default)
unary(silu, aten.silu.default)
unary(lambda m, x: m.div(1.0, m.sqrt(x)), aten.rsqrt.default)
unary(lambda m, x: m.div(1.0, x), aten.reciprocal.default)
unary(lambda m, x: m.max(x, m.build.const(0, m.dtype)), aten.relu.default, floats=False)
unary(lambda m, x: m.mul(x, x), aten.square.default, floats=False)


@handles(aten.gelu.default)
def _gelu(c: Call) -> int:
    dtype = OPMATH.get(c.dtype, c.dtype)
    formula = {"none": gelu, "tanh": gelu_tanh}[c.arg("approximate")]
    return c.result(_guard_recompute(c)(formula, Math(c.build, dtype), c.operand(c.arg("self"), dtype)))


@handles(aten.softplus.default)
def _softplus(c: Call) -> int:
    def formula(m: Math, x: int) -> int:
        beta = float(c.arg("beta"))
        scaled = m.mul(x, beta)
        return m.where(m.gt(scaled, float(c.arg("threshold"))), x, m.div(m.log1p(m.exp(scaled)), beta))

    dtype = OPMATH.get(c.dtype, c.dtype)
    return c.result(_guard_recompute(c)(formula, Math(c.build, dtype), c.operand(c.arg("self"), dtype)))


@handles(aten.leaky_relu.default)
def _leaky_relu(c: Call) -> int:
    dtype = OPMATH.get(c.dtype, c.dtype)
    m, x = Math(c.build, dtype), c.operand(c.arg("self"), dtype)
    return c.result(m.where(m.gt(x, 0.0), x, m.mul(x, float(c.arg("negative_slope")))))


@handles(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor)
def _add(c: Call) -> int:
    if c.dtype == "bool": return _logical(c, "or")
    dtype = OPMATH.get(c.dtype, c.dtype)
    m, alpha = Math(c.build, dtype), c.arg("alpha")
    left, right = c.operands(c.arg("self"), c.arg("other"))
    if "rsub" in str(c.node.target): left, right = right, left
    if alpha != 1 and "rsub" not in str(c.node.target): right = m.mul(right, c.build.const(alpha, dtype))
    elif alpha != 1: raise Refused("rsub with alpha")
    return c.result((m.add if "add" in str(c.node.target) else m.sub)(left, right))


@handles(aten.mul.Tensor, aten.mul.Scalar)
def _mul(c: Call) -> int:
    if c.dtype == "bool": return _logical(c, "and")
    dtype = OPMATH.get(c.dtype, c.dtype)
    return c.result(Math(c.build, dtype).mul(*c.operands(c.arg("self"), c.arg("other"))))


@handles(aten.div.Tensor, aten.div.Scalar)
def _div(c: Call) -> int:
    dtype = OPMATH.get(c.dtype, c.dtype)
    return c.result(Math(c.build, dtype).div(*c.operands(c.arg("self"), c.arg("other"))))


@handles(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _div_mode(c: Call) -> int:
    mode = "floor" if c.node.target == aten.floor_divide.default else c.arg("rounding_mode")
    dtype, other = OPMATH.get(c.dtype, c.dtype), c.arg("other")
    m = Math(c.build, dtype)
    if mode is None: return _div(c)
    if dtype in ("f64", "f32"):
        if mode == "floor": raise Refused("floor division of floats")
        return c.result(m.trunc(m.div(*c.operands(c.arg("self"), other))))
    if isinstance(other, fx.Node) or other <= 0: raise Refused("integer division by anything but a positive constant")
    x, n = c.operand(c.arg("self"), dtype), c.build.const(other, dtype)
    quotient = m.idiv(x, n)
    if mode == "trunc": return c.result(quotient)
    low = c.build.emit("lt", x, m.mul(quotient, n), dtype="bool")       # truncated up: x was negative and not a multiple
    return c.result(m.sub(quotient, c.build.cast(low, dtype)))


@handles(aten.remainder.Scalar, aten.remainder.Tensor)
def _remainder(c: Call) -> int:
    dtype, other = OPMATH.get(c.dtype, c.dtype), c.arg("other")
    if isinstance(other, fx.Node) or other <= 0 or dtype in ("f64", "f32"):
        raise Refused("remainder by anything but a positive constant integer")
    m, x, n = Math(c.build, dtype), c.operand(c.arg("self"), dtype), c.build.const(other, dtype)
    rest = m.sub(x, m.mul(m.idiv(x, n), n))
    negative = c.build.emit("lt", rest, c.build.const(0, dtype), dtype="bool")
    return c.result(m.where(negative, m.add(rest, n), rest))


@handles(aten.pow.Tensor_Scalar)
def _pow(c: Call) -> int:
    dtype, e = OPMATH.get(c.dtype, c.dtype), c.arg("exponent")
    if dtype not in ("f64", "f32") and e not in (2, 3): raise Refused(f"integer power {e}")
    return c.result(_guard_recompute(c)(power, Math(c.build, dtype), c.operand(c.arg("self"), dtype), e))


@handles(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow_tensor(c: Call) -> int:
    dtype = OPMATH.get(c.dtype, c.dtype)
    if dtype not in ("f64", "f32"): raise Refused("integer power by a tensor")
    m = Math(c.build, dtype)
    return c.result(_guard_recompute(c)(m.pow, *c.operands(c.arg("self"), c.arg("exponent"))))


@handles(aten.maximum.default, aten.minimum.default)
def _extremum(c: Call) -> int:
    op, dtype = ("max" if c.node.target == aten.maximum.default else "min"), OPMATH.get(c.dtype, c.dtype)
    if dtype == "bool": return _logical(c, "or" if op == "max" else "and")
    return c.result(c.build.emit(op, *c.operands(c.arg("self"), c.arg("other")), dtype=dtype))


@handles(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor)
def _clamp(c: Call) -> int:
    dtype = OPMATH.get(c.dtype, c.dtype)
    value = c.operand(c.arg("self"), dtype)
    names = [a.name for a in c.node.target._schema.arguments]  # type: ignore[union-attr]
    for op, name in (("max", "min"), ("min", "max")):
        bound = c.arg(name) if name in names else None
        if bound is not None: value = c.build.emit(op, value, c.rounded(bound, c.dtype), dtype=dtype)
    return c.result(value)


def _common(c: Call, left: Any, right: Any) -> str:
    """The dtype two operands are compared in."""
    def sample(arg: Any) -> Any:
        if not isinstance(arg, fx.Node): return arg
        val = arg.meta["val"]
        return val if isinstance(val, torch.Tensor) else 0
    dtype = torch.result_type(sample(left), sample(right))
    if dtype not in DTYPES: raise Refused(f"dtype {dtype} has no loop form")
    return DTYPES[dtype]


def _compare(op: str) -> Handler:
    def handler(c: Call) -> int:
        left, right = c.arg("self"), c.arg("other")
        dtype = _common(c, left, right)
        return c.result(c.build.emit(op, c.rounded(left, dtype), c.rounded(right, dtype), dtype="bool"))
    return handler


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    handles(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(_compare(_name))


def _logical(c: Call, op: str) -> int:
    return c.build.emit(op, c.operand(c.arg("self"), "bool"), c.operand(c.arg("other"), "bool"), dtype="bool")


for _name, _op in {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}.items():
    handles(getattr(aten, _name).default)(lambda c, op=_op: _logical(c, op))


@handles(aten.logical_not.default)
def _logical_not(c: Call) -> int:
    return c.build.emit("not", c.operand(c.arg("self"), "bool"), dtype="bool")


for _name, _op in {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}.items():
    handles(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(
        lambda c, op=_op: c.build.emit(op, c.operand(c.arg("self"), c.dtype), c.operand(c.arg("other"), c.dtype), dtype=c.dtype))


@handles(aten.bitwise_not.default)
def _bitwise_not(c: Call) -> int:
    return c.build.emit("not", c.operand(c.arg("self"), c.dtype), dtype=c.dtype)


@handles(aten.isnan.default)
def _isnan(c: Call) -> int:
    dtype = _common(c, c.arg("self"), 0)
    x = c.rounded(c.arg("self"), dtype)
    return c.build.emit("ne", x, x, dtype="bool")


@handles(aten.isinf.default)
def _isinf(c: Call) -> int:
    dtype = _common(c, c.arg("self"), 0)
    dtype = OPMATH.get(dtype, dtype)
    if dtype not in ("f64", "f32"): raise Refused("isinf of integers")
    m = Math(c.build, dtype)
    return m.eq(m.abs(c.operand(c.arg("self"), dtype)), math.inf)


@handles(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(c: Call) -> int:
    chosen = c.operand(c.arg("condition"), "bool"), c.operand(c.arg("self"), c.dtype), c.operand(c.arg("other"), c.dtype)
    return c.build.emit("where", *chosen, dtype=c.dtype)


@handles(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(c: Call) -> int:
    chosen = c.operand(c.arg("mask"), "bool"), c.operand(c.arg("value"), c.dtype), c.operand(c.arg("self"), c.dtype)
    return c.build.emit("where", *chosen, dtype=c.dtype)


@handles(aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default, view=True)
def _clone(c: Call) -> int:
    return c.at(c.node.args[0], c.index)  # type: ignore[arg-type]


@handles(aten._to_copy.default, aten.to.dtype)
def _to_copy(c: Call) -> int:
    return c.operand(c.node.args[0], c.dtype)
