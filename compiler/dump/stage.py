"""What a dumped stage runs on: its weights and sample inputs from the dump, and its error against the model as captured.

A stage file defines `forward` and calls `main`. Two errors are printed, each the largest |output - truth| over the largest |truth|,
where the truth is what the captured graph gives in fp64 on the same sample:
  fp64          every float, weights and casts included, lifted to fp64: is it the same function?
  own dtypes    as written: was precision thrown away?
Each has a bound, in the stage's JSON file with the reason for it. Exit code 0: both within; 1: one beyond; 2: the dump is damaged.
"""
import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from .. import ops  # noqa: F401    (registers torch.ops.infc)
from ..errors import UserError, nearest
from ..ir import DTYPE_NAMES, tensor_hash

TENSOR = "tensor"
"""The name of the one tensor in each file of a dump."""

POISON = torch.nan
"""What KV caches hold before the step: reading a slot that was not written shows."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Forward = Callable[..., Mapping[str, Any]]


class _Fp64(TorchFunctionMode):
    """Every float dtype that an operator call names, or takes by default, becomes fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):                      # reading a weight from its file is none
            return func(*args, **(kwargs or {}))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return func(*map(_lift, args), **{name: _lift(value) for name, value in (kwargs or {}).items()})
        finally:
            torch.set_default_dtype(default)


def _lift(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return type(value)(map(_lift, value)) if isinstance(value, tuple | list) else value


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


class _Weights:
    """Weights as attributes, read when first used; in fp64 not kept, for they are twice to four times as large."""

    def __init__(self, folder: Path, table: Mapping[str, Mapping[str, Any]], fp64: bool):
        self._folder, self._table, self._fp64 = folder, table, fp64

    def __getattr__(self, name: str) -> Tensor:
        entry = self._table.get(name)
        if entry is None:
            raise UserError(f"the stage has no weight {name!r}; {nearest(name, self._table)}")
        if self._fp64:
            return _wide(read_tensor(self._folder, entry.get("exact_sha256") or entry["sha256"]))
        tensor = read_tensor(self._folder, entry["sha256"])
        setattr(self, name, tensor)
        return tensor


def read_tensor(folder: Path, sha256: str) -> Tensor:
    """One tensor of a dump. Raises UserError, which names the file, where it is missing or damaged."""
    path = folder / file_name(sha256)
    try:
        tensor = load_file(path)[TENSOR]
        if tensor_hash(tensor) == sha256: return tensor
        raise UserError(f"{path} was altered: its sha256 is another one; make the dump again with `infc compile MODEL --dump NEW_FOLDER`")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: the dump is not whole, make it again with `infc compile MODEL --dump NEW_FOLDER`") from error
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}): make the dump again with `infc compile MODEL --dump NEW_FOLDER`") from error


def file_name(sha256: str) -> str:
    """Where a tensor of that content lies in its folder."""
    return f"{sha256[:32]}.safetensors"


def load(path: Path) -> dict[str, Any]:
    """The JSON file of a stage, from its path or that of its .py or .txt twin."""
    file = path.with_suffix(".json")
    try:
        stage = json.loads(file.read_text())
        if isinstance(stage, dict) and isinstance(stage.get("weights"), dict) and isinstance(stage.get("run"), dict):
            return stage
        raise UserError(f"{file} is no stage that can run: make the dump again")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; a stage needs the files beside it, run it inside its dump folder") from error
    except ValueError as error:
        raise UserError(f"{file} is no JSON ({error}): make the dump again") from error


def run(forward: Forward, path: Path, *, fp64: bool) -> dict[str, Any]:
    """The stage's outputs on the dump's sample inputs, in its own dtypes or lifted to fp64."""
    stage, lift = load(path), _wide if fp64 else (lambda tensor: tensor)
    inputs = [lift(read_tensor(path.parent / "samples", entry["sha256"])) for entry in stage["run"]["inputs"].values()]
    caches = SimpleNamespace(**{name: lift(torch.full(entry["shape"], POISON, dtype=_DTYPES[entry["dtype"]]))
                                for name, entry in stage["run"]["kv"].items()})
    weights = _Weights(path.parent / "weights", stage["weights"], fp64)
    with torch.no_grad():
        if not fp64:
            return dict(forward(weights, caches, *inputs))
        with _Fp64():
            return dict(forward(weights, caches, *inputs))


def error_of(value: Any, truth: Tensor) -> float:
    """Largest |value - truth| over the largest finite |truth|; inf where one is finite and the other is not, or shapes differ.

    nan equals nan and inf equals the same inf. A step graph's [T, ...] is compared with the capture's [1, T, ...].
    """
    if not isinstance(value, Tensor) or value.numel() != truth.numel() or value.shape[-1:] != truth.shape[-1:]:
        return math.inf
    if not truth.numel():
        return 0.0
    value, truth = value.reshape(truth.shape).to(torch.float64), truth.to(torch.float64)
    same = (value == truth) | (value.isnan() & truth.isnan())
    if bool((~same & ~(value.isfinite() & truth.isfinite())).any()):
        return math.inf
    gap = float(torch.where(same, 0.0, value - truth).abs().max())
    return gap / float(torch.where(truth.isfinite(), truth, 0.0).abs().max()) if gap else 0.0


def worst_error(outputs: Mapping[str, Any], truths: Mapping[str, Tensor]) -> float:
    """The largest error of the outputs that the capture has as well."""
    return max(error_of(outputs.get(name), truth) for name, truth in truths.items())


def judge(forward: Forward, path: Path) -> dict[str, Any]:
    """{"stage", "outputs", "sample", "own": {"error", "bound", "why"}, "fp64": {...}, "passed"}: both errors and their bounds.

    An error of None is infinite: another shape, or values that are not finite where the truth is.
    """
    stage = load(path)
    told = stage["run"]
    truths = {name: read_tensor(path.parent / "samples", entry["sha256"]) for name, entry in told["truth"].items()}
    report: dict[str, Any] = {"stage": path.stem, "sample": told["sample"], "outputs": sorted(truths)}
    for kind in ("fp64", "own"):
        error = worst_error(run(forward, path, fp64=kind == "fp64"), truths)
        bound = told["bounds"][kind]
        report[kind] = {"error": error if math.isfinite(error) else None, **bound, "passed": error <= bound["bound"]}
    report["passed"] = report["fp64"]["passed"] and report["own"]["passed"]
    return report


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['stage']}: {', '.join(report['outputs'])} on {report['sample']}, against the captured graph in fp64"
    for kind, title in (("fp64", "in fp64"), ("own", "in its own dtypes")):
        found = report[kind]
        error = "infinite" if found["error"] is None else f"{found['error']:.3e}"
        verdict = "ok" if found["passed"] else "BEYOND THE BOUND"
        yield f"  {title:18} error {error}  bound {found['bound']:.3e}  {verdict}  ({found['why']})"


def main(forward: Forward, file: str) -> int:
    """Run a stage, print its errors (--json: as one JSON document), and return its exit code."""
    parser = argparse.ArgumentParser(description="Run this stage on the dump's sample inputs and print its error against the capture.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    asked = parser.parse_args()
    try:
        report = judge(forward, Path(file).resolve())
        lines, code = list(_lines(report)), 0 if report["passed"] else 1
    except UserError as error:
        print(f"infc: {error.message}", file=sys.stderr)
        report, lines, code = {"error": {"message": error.message, "exit_code": error.exit_code}}, [], error.exit_code
    try:
        for line in [json.dumps(report, indent=1)] if asked.json else lines: print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())         # the reader left: nobody to tell
    return code
