"""Fuse LayerNorm: torch's operator over one axis, and its decomposed form, become infc.layer_norm."""
from typing import Any

import torch

from ..compiler.ops import aten, layer_norm
from ..compiler.rewrite import EXACT, Rule, RuleSet


def aten_op(x, shape, w, b, eps, cudnn):
    return aten.layer_norm.default(x, shape, w, b, eps, cudnn)


def fused_aten_op(x, shape, w, b, eps, cudnn):
    return layer_norm(x, w, b, eps)


def refuse_aten_op(x, shape, w, b, eps, cudnn) -> str | None:
    if w is None:            return "has no weight"
    if len(shape) != 1:      return f"normalises {len(shape)} axes"
    return refuse(x, w, eps, b)


def _centred(x: Any) -> Any:
    return aten.sub.Tensor(x, aten.mean.dim(x, [-1], True))


def _normalised(x: Any, eps: Any) -> Any:
    d = _centred(x)
    variance = aten.mean.dim(aten.mul.Tensor(d, d), [-1], True)
    return aten.mul.Tensor(d, aten.rsqrt.default(aten.add.Tensor(variance, eps)))


def _normalised_by_var(x: Any, eps: Any) -> Any:
    variance = aten.var.correction(x, [-1], correction=0, keepdim=True)
    return aten.mul.Tensor(_centred(x), aten.rsqrt.default(aten.add.Tensor(variance, eps)))


def _divided(x: Any, eps: Any) -> Any:
    d = _centred(x)
    variance = aten.mean.dim(aten.mul.Tensor(d, d), [-1], True)
    return aten.div.Tensor(d, aten.sqrt.default(aten.add.Tensor(variance, eps)))


def refuse(x, w, eps, b=None) -> str | None:
    if not isinstance(eps, int | float):  return "eps is not a number"
    for name, t in (("weight", w), ("bias", b)):
        if t is None:                                continue
        if not isinstance(t, torch.Tensor):          return f"{name} is the number {t}"
        if tuple(t.shape) != tuple(x.shape[-1:]):    return f"{name} {tuple(t.shape)} is not one row of x {tuple(x.shape)}"
        if t.dtype != x.dtype:                       return f"{name} is {t.dtype}, x is {x.dtype}"
    return None


def _rules(normalised: Any) -> tuple[Rule, Rule]:
    """With the bias first: its match is the longer one."""
    name = normalised.__name__.strip("_")

    def biased(x, w, eps, b):
        return aten.add.Tensor(aten.mul.Tensor(normalised(x, eps), w), b)

    def unbiased(x, w, eps):
        return aten.mul.Tensor(normalised(x, eps), w)

    return (Rule(f"{name}_biased", biased, lambda x, w, eps, b: layer_norm(x, w, b, eps), refuse),
            Rule(name, unbiased, lambda x, w, eps: layer_norm(x, w, None, eps), refuse))


PASS = RuleSet("fuse_layer_norm", (
    Rule("aten_op", aten_op, fused_aten_op, refuse_aten_op),
    *_rules(_normalised), *_rules(_normalised_by_var), *_rules(_divided),
), EXACT)
