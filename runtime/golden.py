"""Golden prompts: an artifact must still say what the model said when it was compiled, on this machine, through every bucket.

Tokens are checked too: each must be what the program's own logits and the row's settings give. Blocks of the KV pool that are
given back are filled with NaN before they are handed out again, so that reading what nobody wrote shows.

golden.safetensors holds, for each case i: `case{i}.tokens` i32[n], `case{i}.rows` i32[r] (positions) and `case{i}.logits`
f32 or f64 [r, vocab], the captured model's own logits at those positions. The manifest holds the metric and its bound.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .artifact import GOLDEN
from .batch import Work
from .errors import RuntimeFault
from .manifest import BucketInfo
from .options import Sampling
from .tensors import Tensor, parse, tensor

if TYPE_CHECKING:
    import numpy as np

    from .session import Model
    from .stepper import OpenSequence

CHUNK, TOGETHER = 48, 3
"""Tokens of a prompt a step of the mixed round takes (more than a block, and no multiple of one), and sequences in it."""

FEW = (2, 3, 1)
"""Tokens of the sequences that draw beside a case: with it, one for each of the four kinds of settings."""


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
    wrong_tokens: int = 0  # tokens that are not what their own logits and settings give


def pack(cases: Sequence[Case]) -> dict[str, Tensor]:
    """Cases as tensors for `Parts.golden`."""
    import numpy as np

    packed: dict[str, Tensor] = {}
    for i, case in enumerate(cases):
        packed[f"case{i}.tokens"] = tensor(np.asarray(case.tokens, np.int32))
        packed[f"case{i}.rows"] = tensor(np.asarray(case.rows, np.int32))
        packed[f"case{i}.logits"] = tensor(np.ascontiguousarray(case.logits))
    return packed


def replay(model: "Model", buckets: Sequence[str] = (), brief: bool = False) -> GoldenReport:
    """Feed every case through every bucket, as much of it a step as the bucket takes (the rest is padding), and compare.

    buckets: names to try; default, all. brief: where a step takes seconds; of each bucket the longest case that it takes in three steps,
    its draws in one step where there is room, and of the last round the shorter cases. A last round, "mixed", runs all cases together: in
    one step, and then as a service would, some decoding while others begin, in blocks that others gave back. Raises RuntimeFault where the
    artifact has no golden cases.
    """
    info = model.manifest.golden
    if info is None:
        raise RuntimeFault(f"{model.artifact.path}: has no golden cases to replay; compile it again")
    cases = _cases(model)
    errors: dict[str, float] = {}
    right = rows = wrong = 0
    for bucket in model.manifest.buckets:
        if buckets and bucket.name not in buckets:
            continue
        worst: list[float] = []
        for case in _longest(cases, 3 * bucket.bucket["T"]) if brief else cases:
            model.pool.poison()
            found, odd = _run(model, case, bucket, brief)
            wrong += odd
            worst.append(_error(info.metric, case.logits, found))
            right += int((found.argmax(-1) == case.logits.argmax(-1)).sum())
            rows += len(case.rows)
        errors[bucket.name] = _worst(worst)
    if brief: cases = [case for case in cases if len(case.tokens) <= CHUNK] or cases[:1]
    mixed = [*zip(cases, _run_mixed(model, cases), strict=True), *_run_served(model, cases)]
    errors["mixed"] = _worst([_error(info.metric, case.logits, found) for case, found in mixed])
    error = _worst(list(errors.values()))
    return GoldenReport(info.metric, info.bound, error, errors, right / max(rows, 1), error <= info.bound and not wrong, wrong)


def _longest(cases: Sequence[Case], most: int) -> list[Case]:
    """The longest case of at most so many tokens; where all are longer, the shortest."""
    return [max((c for c in cases if len(c.tokens) <= most), key=lambda c: len(c.tokens), default=min(cases, key=lambda c: len(c.tokens)))]


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


def _run(model: "Model", case: Case, bucket: BucketInfo, brief: bool = False) -> "tuple[np.ndarray, int]":
    """The logits at the case's rows, its tokens fed through this bucket alone, as many a step as it takes; and wrong tokens.

    brief: sequences of a few of its first tokens come in beside its last step, and one step draws from all of them.
    """
    import numpy as np

    found: dict[int, np.ndarray] = {}
    wrong = 0
    with ExitStack() as stack:
        sequence = stack.enter_context(model.sequence())
        drawn = [(sequence, case.tokens[-1])]
        for at, stop, rows in _steps(case, bucket):
            works = [Work(sequence, case.tokens[at:stop], rows)]
            if brief and stop == len(case.tokens) and _room(bucket, stop - at, stop):
                beside = [stack.enter_context(model.sequence()) for _ in FEW]
                works += [Work(other, case.tokens[:count], 0) for other, count in zip(beside, FEW, strict=True)]
                drawn += [(other, case.tokens[count]) for other, count in zip(beside, FEW, strict=True)]
            tokens, values = model.run_logits(works, True, bucket.name)
            if rows:
                found.update({position: values[position - stop + rows] for position in range(stop - rows, stop)})
                wrong += int((values.argmax(-1) != tokens).sum())
        if case.rows and case.rows[-1] == len(case.tokens) - 1:
            sequence.truncate(len(case.tokens) - 1)
            wrong += _draw(model, drawn, bucket.name)
    return np.stack([found[row] for row in case.rows]), wrong


def _room(bucket: BucketInfo, now: int, tokens: int) -> bool:
    """Do sequences of FEW tokens fit beside `now` of a case's in a step, may each of them draw, and has the case a token more than they?"""
    sizes = bucket.bucket
    return now + sum(FEW) <= sizes["T"] and len(FEW) < min(sizes["N"], sizes["R"]) and max(FEW) < tokens


def _draw(model: "Model", drawn: "Sequence[tuple[OpenSequence, int]]", bucket: str) -> int:
    """Step the next token of each sequence with settings of every kind; how many of the drawn tokens are wrong.

    Of one sequence each kind is a step, of four a row of one step. The logits are those of a step like the ones that draw: among more
    tokens they may round otherwise. Every sequence is left as it was.
    """
    def step(settings: Sequence[tuple[Sampling, float]], logits: bool) -> "tuple[list[int], np.ndarray]":
        works = [Work(sequence, [token], 1, *setting) for (sequence, token), setting in zip(drawn, settings, strict=True)]
        found = model.run_logits(works, logits, bucket)
        for sequence, _ in drawn: sequence.truncate(sequence.length - 1)
        return found

    kinds = [_kinds(row) for row in step([(Sampling(), 0.0)] * len(drawn), True)[1]]
    wrong = 0
    for first in range(0, 4, len(drawn)):
        asked = [kinds[i][first + i] for i in range(len(drawn))]
        tokens = step([(sampling, uniform) for sampling, uniform, _ in asked], False)[0]
        wrong += sum(token != expected for token, (_, _, expected) in zip(tokens, asked, strict=True))
    return wrong


def _kinds(logits: "np.ndarray") -> list[tuple[Sampling, float, int]]:
    """Settings of four kinds, a uniform number, and the token that must come of them. logits [vocab].

    The number is put in the middle of the token's interval, so that rounding inside the draw cannot move it out. A token that stands far
    above all others would leave the seventh no interval that fp32 can tell apart: the temperature then goes by the distance between them.
    """
    import numpy as np

    wide = logits.astype(np.float64)
    order = np.argsort(-wide, kind="stable")
    top = min(7, len(order))
    spread = float(max(wide.std(), (wide[order[0]] - wide[order[top - 1]]) / 2)) or 1.0
    temperature = float(np.float32(0.3 * spread))                       # a hundred tokens or so share most of the mass
    share = np.exp((wide[order] - wide.max()) / temperature)
    below = np.concatenate(([0.0], np.cumsum(share / share.sum())))     # of each rank: the mass before it
    half, most, few = (int(np.searchsorted(below[1:], mass)) for mass in (0.5, 0.8, 0.3))
    found = []
    for rank, top_k, kept in ((half, 0, len(order)), (top - 1, top, top), (most, 0, most + 1), (few, 0, len(order))):
        cut = top_k == 0 and kept < len(order)                          # top-p: halfway into the last token that is kept
        top_p = float((below[kept - 1] + below[kept]) / 2) if cut else 1.0
        uniform = float((below[rank] + below[rank + 1]) / 2 / below[kept])
        found.append((Sampling(temperature, top_k, top_p), uniform, int(order[rank])))
    return found


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


def _run_served(model: "Model", cases: "Sequence[Case]") -> "Iterator[tuple[Case, np.ndarray]]":
    """Every case twice, a few at a time: prompts in chunks, compared rows token by token, the next case in as one ends."""
    import numpy as np

    waiting = deque([*cases, *reversed(cases)])
    running: list[tuple[Case, OpenSequence, list[np.ndarray]]] = []
    together = min(TOGETHER, model.limits.sequences)
    while waiting or running:
        while waiting and len(running) < together:
            running.append((waiting.popleft(), model.sequence(), []))
        room = max(1, min(CHUNK, model.limits.tokens // len(running)))
        pieces = [_next(case, sequence.length, room) for case, sequence, _ in running]
        try:
            logits = model.step([sequence for _, sequence, _ in running], pieces).logits
        except BaseException:
            for _, sequence, _ in running:
                sequence.close()
            raise
        for (case, sequence, found), values in zip([*running], logits, strict=True):
            if sequence.length - 1 in case.rows:
                found.append(values[-1])
            if sequence.length == len(case.tokens):
                sequence.close()
                model.pool.poison()
                yield case, np.stack(found)
        running = [entry for entry in running if entry[1].length]


def _next(case: Case, done: int, room: int) -> Sequence[int]:
    """The tokens up to the next compared row, at most `room` of them."""
    row = next((row for row in case.rows if row >= done), len(case.tokens) - 1)
    return case.tokens[done:min(row + 1, done + room)]


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
