"""Fuse the residual add into the RMSNorm after it: the sum is written once and not read back.

Place it after `fuse_linear_epilogue`, which takes the residual adds that follow a matrix product.
"""
from ..compiler.ops import add_rms_norm, aten, infc
from ..compiler.rewrite import EXACT, Rule


def pattern(x, residual, w, eps, out_dtype):
    h = aten.add.Tensor(x, residual)
    return infc.rms_norm.default(h, w, eps, out_dtype), h


def replacement(x, residual, w, eps, out_dtype):
    return add_rms_norm(x, residual, w, eps, out_dtype)


def refuse(x, residual, w, eps, out_dtype) -> str | None:
    if not hasattr(x, "shape") or not hasattr(residual, "shape"):
        return "adds a number, not a residual"
    if x.shape != residual.shape: return f"x is {tuple(x.shape)}, the residual {tuple(residual.shape)}"
    if x.dtype != residual.dtype: return f"x is {x.dtype}, the residual {residual.dtype}"
    return None


PASS = Rule("fuse_add_rms_norm", pattern, replacement, refuse, EXACT)
