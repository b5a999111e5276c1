"""Fuse the RMSNorm chain: seven x-sized memory trips become two.

The spellings of real models, after `canonicalize` (x*x for pow) and `fold_constants` (`1 + w` as one weight):
the weight on either side, before or after the cast back, multiplied into the scale first; division by the root; and
torch's own operator. Around a cast to fp32 the upcast stays and the cast back becomes `out_dtype`: squares are never
summed in a narrow dtype.
"""
from typing import Any

import torch

from ..compiler.ops import aten, rms_norm
from ..compiler.rewrite import EXACT, Rule, RuleSet

NARROW = (torch.bfloat16, torch.float16)


def _scale(x: Any, eps: Any) -> Any:
    return aten.rsqrt.default(aten.add.Tensor(aten.mean.dim(aten.mul.Tensor(x, x), [-1], True), eps))


def plain(x, w, eps):
    return aten.mul.Tensor(aten.mul.Tensor(x, _scale(x, eps)), w)


def scaled_weight(x, w, eps):
    return aten.mul.Tensor(x, aten.mul.Tensor(_scale(x, eps), w))


def divided(x, w, eps):
    root = aten.sqrt.default(aten.add.Tensor(aten.mean.dim(aten.mul.Tensor(x, x), [-1], True), eps))
    return aten.mul.Tensor(aten.div.Tensor(x, root), w)


def fused(x, w, eps):
    return rms_norm(x, w, eps)


def refuse(x, w, eps) -> str | None:
    if not isinstance(eps, int | float):         return "eps is not a number"
    if not isinstance(w, torch.Tensor):          return f"weight is the number {w}"
    if tuple(w.shape) != tuple(x.shape[-1:]):    return f"weight {tuple(w.shape)} is not one row of x {tuple(x.shape)}"
    if w.dtype != x.dtype:                       return f"weight is {w.dtype}, x is {x.dtype}"
    return None


def cast_then_weight(x, w, eps, dtype):
    """Llama, Qwen, Mistral in bf16: normalise in fp32, cast back, then multiply."""
    return aten.mul.Tensor(aten._to_copy.default(aten.mul.Tensor(x, _scale(x, eps)), dtype=dtype), w)


def fused_cast_then_weight(x, w, eps, dtype):
    return rms_norm(x, aten._to_copy.default(w, dtype=torch.float32), eps, out_dtype=dtype)


def refuse_cast_then_weight(x, w, eps, dtype) -> str | None:
    if x.dtype != torch.float32 or dtype not in NARROW:     return f"casts {x.dtype} to {dtype}, not fp32 to half precision"
    if w.dtype != dtype:                                    return f"weight is {w.dtype}, the normalised x is {dtype}"
    return refuse(x, w.float(), eps)


def weight_then_cast(x, w, eps, dtype):
    """Gemma, OLMo: multiply in fp32, then cast back. The first rules made the norm; its result is cast."""
    return aten._to_copy.default(torch.ops.infc.rms_norm.default(x, w, eps), dtype=dtype)


def fused_weight_then_cast(x, w, eps, dtype):
    return rms_norm(x, w, eps, out_dtype=dtype)


def refuse_weight_then_cast(x, w, eps, dtype) -> str | None:
    return None if dtype.is_floating_point else f"casts to {dtype}"


def aten_op(x, shape, w, eps):
    return aten.rms_norm.default(x, shape, w, eps)


def fused_aten_op(x, shape, w, eps):
    if x.node.meta["val"].dtype in NARROW:                # aten computes half precision in fp32 inside
        wide = [aten._to_copy.default(t, dtype=torch.float32) for t in (x, w)]
        return rms_norm(wide[0], wide[1], eps, out_dtype=x.node.meta["val"].dtype)
    return rms_norm(x, w, eps)


def refuse_aten_op(x, shape, w, eps) -> str | None:
    if w is None:            return "has no weight"
    if eps is None:          return "has no eps of its own"
    if len(shape) != 1:      return f"normalises {len(shape)} axes"
    return refuse(x, w, eps)


PASS = RuleSet("fuse_rms_norm", (
    Rule("plain", plain, fused, refuse),
    Rule("scaled_weight", scaled_weight, fused, refuse),
    Rule("divided", divided, fused, refuse),
    Rule("aten_op", aten_op, fused_aten_op, refuse_aten_op),
    Rule("cast_then_weight", cast_then_weight, fused_cast_then_weight, refuse_cast_then_weight),
    Rule("weight_then_cast", weight_then_cast, fused_weight_then_cast, refuse_weight_then_cast),
), EXACT, requires=("fuse_layer_norm",))      # the inside of a LayerNorm is an RMSNorm of x - mean(x)
