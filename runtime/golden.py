"""Golden prompts: an artifact must still say what the model said when it was compiled, on this machine, through every bucket.

golden.safetensors holds, for each case i: `case{i}.tokens` i32[n], `case{i}.rows` i32[r] (positions) and `case{i}.logits`
f32 or f64 [r, vocab], the captured model's own logits at those positions. The manifest holds the metric and its bound.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .artifact import GOLDEN
from .batch import Work
from .errors import RuntimeFault
from .manifest import BucketInfo
from .tensors import Tensor, parse, tensor

if TYPE_CHECKING:
    import numpy as np

    from .session import Model


class Case(NamedTuple):
    """A prompt and what the captured model said at some of its positions."""

    tokens: Sequence[int]
    rows: Sequence[int]
    logits: "np.ndarray"  # [rows, vocab]


class GoldenReport(msgspec.Struct, frozen=True):
    """What a replay found. errors: the worst of each bucket's cases, in `metric`."""

    metric: str
    bound: float
    error: float  # the worst of all; NaN where an output was NaN
    errors: dict[str, float]
    top1: float  # share of rows whose likeliest token is the recorded one
    passed: bool


def pack(cases: Sequence[Case]) -> dict[str, Tensor]:
    """Cases as tensors for `Parts.golden`."""
    import numpy as np

    packed: dict[str, Tensor] = {}
    for i, case in enumerate(cases):
        packed[f"case{i}.tokens"] = tensor(np.asarray(case.tokens, np.int32))
        packed[f"case{i}.rows"] = tensor(np.asarray(case.rows, np.int32))
        packed[f"case{i}.logits"] = tensor(np.ascontiguousarray(case.logits))
    return packed


def replay(model: "Model", buckets: Sequence[str] = ()) -> GoldenReport:
    """Feed every case through every bucket, as much of it a step as the bucket takes (the rest is padding), and compare.

    buckets: names to try; default, all. A last round runs all cases together. Raises RuntimeFault where the artifact has no
    golden cases.
    """
    info = model.manifest.golden
    if info is None:
        raise RuntimeFault(f"{model.artifact.path}: has no golden cases to replay; compile it again")
    cases = _cases(model)
    errors: dict[str, float] = {}
    right = rows = 0
    for bucket in model.manifest.buckets:
        if buckets and bucket.name not in buckets:
            continue
        worst: list[float] = []
        for case in cases:
            found = _run(model, case, bucket)
            worst.append(_error(info.metric, case.logits, found))
            right += int((found.argmax(-1) == case.logits.argmax(-1)).sum())
            rows += len(case.rows)
        errors[bucket.name] = _worst(worst)
    errors["mixed"] = _worst([_error(info.metric, c.logits, f) for c, f in zip(cases, _run_mixed(model, cases), strict=True)])
    error = _worst(list(errors.values()))
    return GoldenReport(info.metric, info.bound, error, errors, right / max(rows, 1), error <= info.bound)


def _cases(model: "Model") -> list[Case]:
    where = f"{model.artifact.path}/{GOLDEN}"
    data = parse(model.artifact.golden(), where)
    try:
        return [
            Case(data[f"case{i}.tokens"].tolist(), data[f"case{i}.rows"].tolist(), data[f"case{i}.logits"])
            for i in range(len(data) // 3)
        ]
    except KeyError as error:
        raise RuntimeFault(f"{where}: has no tensor {error}; compile the artifact again") from error


def _run(model: "Model", case: Case, bucket: BucketInfo) -> "np.ndarray":
    """The logits at the case's rows, its tokens fed through this bucket alone, as many a step as it takes."""
    import numpy as np

    found: dict[int, np.ndarray] = {}
    with model.sequence() as sequence:
        for at, stop, rows in _steps(case, bucket):
            values = model.run_logits([Work(sequence, case.tokens[at:stop], rows)], True, bucket.name)[1]
            found.update({position: values[position - stop + rows] for position in range(stop - rows, stop)})
    return np.stack([found[row] for row in case.rows])


def _steps(case: Case, bucket: BucketInfo) -> Iterator[tuple[int, int, int]]:
    """(start, stop, sampled rows at the end) of each step: cut where more rows are wanted than the bucket samples."""
    at = 0
    while at < len(case.tokens):
        stop = min(at + bucket.bucket["T"], len(case.tokens))
        wanted = [row for row in case.rows if at <= row < stop]
        if wanted:
            stop = min(stop, wanted[0] + bucket.bucket["R"])
        yield at, stop, stop - wanted[0] if wanted else 0
        at = stop


def _run_mixed(model: "Model", cases: Sequence[Case]) -> "list[np.ndarray]":
    found: list[np.ndarray] = []
    for first in range(0, len(cases), model.limits.sequences):
        group = cases[first : first + model.limits.sequences]
        sequences = [model.sequence() for _ in group]
        try:
            logits = model.step(sequences, [c.tokens for c in group], logits="all").logits
        finally:
            for sequence in sequences:
                sequence.close()
        found += [values[list(c.rows)] for c, values in zip(group, logits, strict=True)]
    return found


def _error(metric: str, recorded: "np.ndarray", found: "np.ndarray") -> float:
    import numpy as np

    a, b = recorded.astype(np.float64), found.astype(np.float64)
    if metric == "max_abs":
        return float(np.abs(a - b).max())
    if metric != "mean_kl":
        raise RuntimeFault(f"golden metric {metric} is unknown to this runtime; update infc")
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def _log_softmax(x: "np.ndarray") -> "np.ndarray":
    import numpy as np

    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _worst(errors: Sequence[float]) -> float:
    """The largest; NaN if any is NaN (max() would lose it), so that NaN never passes a bound."""
    return next((e for e in errors if e != e), max(errors, default=0.0))
