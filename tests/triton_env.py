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

from infc.backends.triton.interpret import picks, run  # noqa: E402   # after the environment is set
from infc.backends.triton.judge import exact, plain, several, strain, ulp  # noqa: E402
from infc.backends.triton.registry import kernels  # noqa: E402

__all__ = ["FLOATS", "conform", "exact", "judge", "kernels", "picks", "plain", "randn", "run", "several", "ulp"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def conform(op: str, *, times: int = 1, pick: int = 0, **arguments: Any) -> Any:
    """Run an operator's kernels and judge each floating-point result against its meaning. Returns the results. pick: of its cuts, which."""
    found = run(op, pick, **arguments)
    for f, p, e in zip(several(found), several(plain(op, **arguments)), several(exact(op, **arguments)), strict=True): judge(f, p, e, times)
    return found


def judge(found: Tensor, plain: Tensor, exact: Tensor, times: int = 1) -> None:
    """AssertionError where a result is further from fp64 than `strain` allows."""
    assert (worst := strain(found, plain, exact, times)) <= 1, f"{worst:.3g} times the error that is allowed"
