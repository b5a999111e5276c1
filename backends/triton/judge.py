"""How far a kernel may be from its operator's meaning in fp64: no further than PyTorch itself, and one ulp. No tolerance is tuned."""
from typing import Any

import torch
from torch import Tensor

from .registry import kernels

_BITS = {torch.float32: (24, -126), torch.float16: (11, -14), torch.bfloat16: (8, -126)}
"""Bits of the fraction, the leading one counted, and the exponent of the least normal number."""


def plain(op: str, **arguments: Any) -> Any:
    """What PyTorch makes of the call, in the call's own dtypes."""
    return kernels()[op].call(**arguments)


def exact(op: str, **arguments: Any) -> Any:
    """The same with every number, and so every step, in fp64."""
    wide = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for name, value in arguments.items()}
    if wide.get("out_dtype") is not None: wide["out_dtype"] = torch.float64
    return kernels()[op].call(**wide)


def several(results: Any) -> list[Tensor]:
    """The results of a call as a list."""
    return list(results) if isinstance(results, tuple | list) else [] if results is None else [results]


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from |x| to the next larger number of dtype, in fp64."""
    bits, least = _BITS[dtype]
    return 2.0 ** (torch.frexp(x.abs().double().clamp(min=2.0**least)).exponent.double() - bits)


LUCK = 2.0**-18
"""32 ulps of fp32: what is wrong in a row is more."""


def strain(found: Tensor, plain: Tensor, exact: Tensor, times: int = 1, more: Tensor | float = 0.0) -> float:
    """The kernel's worst error of a row over what it may be: the plain reference's worst plus an ulp of the row's largest output.

    At most 1 where it is right; inf where nan or inf stand where the reference has none. times: of the reference's error, 2 where a long
    sum in fp32 gives fp32, as DESIGN's contract EXACT says of work that is only reordered. Another order is lucky in other rows: then a
    row may have the error of the reference's worst one, up to LUCK of its largest output. more: magnitudes, [rows], that were added on
    the way and of which an ulp is allowed too.
    """
    if found.shape != plain.shape or plain.shape != exact.shape or found.dtype != plain.dtype: return float("inf")
    if not found.numel(): return 0.0
    rows = exact.reshape(-1, exact.shape[-1]) if exact.dim() else exact.reshape(1, 1)
    f, p = (x.double().reshape(rows.shape) for x in (found, plain))
    usual = p.isfinite() & rows.isfinite()
    if not torch.equal(f[~usual].nan_to_num(1.5), p[~usual].nan_to_num(1.5)) or not torch.equal(f.isnan(), p.isnan()): return float("inf")
    nothing = torch.zeros((), dtype=torch.float64, device=rows.device)
    error, own, size = (torch.where(usual, x, nothing).abs().amax(-1).cpu() for x in (f - rows, p - rows, rows))
    if times > 1: own = own.maximum((LUCK * size).clamp(max=float(own.max())))
    if isinstance(more, Tensor): more = more.cpu()
    return float((error / (times * own + ulp(size + more, found.dtype))).max())
