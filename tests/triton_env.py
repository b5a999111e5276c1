"""Import this before anything of Triton: kernels of this process are interpreted, on the CPU. And how their results are judged."""
import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton was imported before tests/triton_env.py"
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs the extra `gpu`")

from infc.backends.triton.interpret import run  # noqa: E402   # after the environment is set
from infc.backends.triton.registry import kernels  # noqa: E402

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_BITS = {torch.float32: (24, -126), torch.float16: (11, -14), torch.bfloat16: (8, -126)}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def conform(op: str, *, times: int = 1, **arguments: Any) -> Any:
    """Run an operator's kernels and judge each floating-point result against its meaning. Returns the results."""
    found = run(op, **arguments)
    for f, p, e in zip(several(found), several(plain(op, **arguments)), several(exact(op, **arguments)), strict=True): judge(f, p, e, times)
    return found


def plain(op: str, **arguments: Any) -> Any:
    """What PyTorch makes of the call, in the call's own dtypes."""
    return kernels()[op].call(**arguments)


def exact(op: str, **arguments: Any) -> Any:
    """The same with every number, and so every step, in fp64."""
    wide = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for name, value in arguments.items()}
    if wide.get("out_dtype") is not None: wide["out_dtype"] = torch.float64
    return kernels()[op].call(**wide)


def several(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [] if results is None else [results]


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from |x| to the next larger number of dtype, in fp64."""
    bits, least = _BITS[dtype]
    return 2.0 ** (torch.frexp(x.abs().double().clamp(min=2.0**least)).exponent.double() - bits)


def judge(found: Tensor, plain: Tensor, exact: Tensor, times: int = 1) -> None:
    """Per row: the kernel's worst error is at most the plain reference's plus one ulp of the row's largest output; nan and inf as there.

    times=2 where a long sum in fp32 gives fp32, as DESIGN's contract EXACT says of work that is only reordered.
    """
    assert found.shape == plain.shape == exact.shape and found.dtype == plain.dtype
    if not found.numel(): return
    rows = exact.reshape(-1, exact.shape[-1]) if exact.dim() else exact.reshape(1, 1)
    f, p = (x.double().reshape(rows.shape) for x in (found, plain))
    usual = p.isfinite() & rows.isfinite()
    assert torch.equal(f.nan_to_num()[~usual], p.nan_to_num()[~usual]) and torch.equal(f.isnan(), p.isnan()), "nan or inf where it is not"
    zero = torch.zeros(())
    error, own, size = (torch.where(usual, x, zero).abs().amax(-1) for x in (f - rows, p - rows, rows))
    allowed = times * own + ulp(size, found.dtype)
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), f"row {worst}: error {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
