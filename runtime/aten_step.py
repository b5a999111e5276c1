"""Run one ATen step: the only place of the runtime that imports torch, and only when a program has such a step.

A step's kernel has the symbol `aten::topk.default [{"in":0},5,-1,true,true]`: the operator, then its arguments as JSON.
Objects stand for what JSON has no word for: {"in": k} the k-th tensor read, {"dim": "T"} a live size, {"dtype": "f32"},
{"float": "inf"}. Keyword-only arguments follow as one last object {"kwargs": {...}}.
"""
import ctypes
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from .buffers import OnGpu
from .errors import RuntimeFault

PREFIX = "aten::"


@dataclass(frozen=True)
class View:
    """A buffer at its live shape."""

    address: int
    dtype: str               # "f32", "bf16", ...
    shape: tuple[int, ...]


def is_aten(symbol: str) -> bool:
    """True for the symbol of an ATen step."""
    return symbol.startswith(PREFIX)


def size(name: str, dims: Mapping[str, int]) -> int:
    """The live value of "T" or "N+1"."""
    base, _, plus = name.partition("+")
    return dims[base] + int(plus or 0)


def require(symbol: str, device: str = "cpu") -> Any:
    """torch. Raises RuntimeFault where it is not there, or cannot use the device that torch calls so."""
    needs = f"this artifact has a step that calls {symbol.split()[0]}"
    try:
        import torch
    except ImportError as error:
        raise RuntimeFault(f"{needs}; install torch to run it") from error
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeFault(f"{needs} on {device}, and torch {torch.__version__} here sees no GPU; install a build of torch for CUDA")
    return torch


def call(symbol: str, views: Sequence[View], dims: Mapping[str, int], device: str = "cpu", stream: int = 0) -> None:
    """Run a step whose views are what it reads, then its results: see `run`."""
    reads = 1 + max((int(k) for k in re.findall(r'{"in":(\d+)}', symbol)), default=-1)
    run(symbol, views[:reads], views[reads:], dims, device, stream)


def run(
    symbol: str, inputs: Sequence[View], outputs: Sequence[View], dims: Mapping[str, int], device: str = "cpu", stream: int = 0,
) -> None:
    """Call the operator on `inputs` and copy its results into `outputs`, on torch's `device`.

    On a GPU all of it is sent to `stream`, the one the device's own work goes by: it is ordered with what was sent before and comes
    after, and may not be done when this returns. Raises RuntimeFault where torch is not there, or fails.
    """
    torch = require(symbol, device)
    dtypes = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
              "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool}

    def tensor(view: View) -> Any:
        count = 1
        for extent in view.shape: count *= extent
        dtype = dtypes[view.dtype]
        if count == 0: return torch.empty(view.shape, dtype=dtype, device=device)
        if device != "cpu":
            return torch.as_tensor(OnGpu(view.address, (count * dtype.itemsize,), "|u1"), device=device).view(dtype).reshape(view.shape)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(view.address)
        return torch.frombuffer(memory, dtype=dtype).reshape(view.shape)

    def value(item: Any) -> Any:
        if isinstance(item, list): return [value(i) for i in item]
        if not isinstance(item, dict): return item
        (kind, content), = item.items()
        if kind == "in": return tensor(inputs[content])
        if kind == "dim": return size(content, dims)
        if kind == "dtype": return dtypes[content]
        return float(content)

    target, _, text = symbol.removeprefix(PREFIX).partition(" ")
    name, _, overload = target.partition(".")
    arguments = json.loads(text)
    keywords = arguments.pop()["kwargs"] if arguments and isinstance(arguments[-1], dict) and "kwargs" in arguments[-1] else {}
    try:
        call = getattr(getattr(torch.ops.aten, name), overload)
        with torch.no_grad(), _sent_to(torch, device, stream):
            result = call(*map(value, arguments), **{k: value(v) for k, v in keywords.items()})
            results = result if isinstance(result, (tuple, list)) else (result,)
            for view, found in zip(outputs, results, strict=True):
                if tuple(found.shape) != view.shape:
                    raise RuntimeFault(f"aten::{target} returned shape {tuple(found.shape)}, its buffer holds {view.shape}")
                tensor(view).copy_(found)
    except (RuntimeError, AttributeError, TypeError) as error:       # torch's own, of memory among them; an operator that it lacks
        raise RuntimeFault(f"aten::{target} fails in torch {torch.__version__}: {str(error).splitlines()[0]}") from error


def _sent_to(torch: Any, device: str, stream: int) -> AbstractContextManager[Any]:
    """All work of torch inside goes by that stream; on a CPU there is none."""
    return nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))
