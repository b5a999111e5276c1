"""The gate: what was compiled, beside the captured model, on text that no scale was chosen on; and does it keep its limits."""
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckFailed, UserError
from . import tasks, text
from .evaluate import Evaluator, every_cpu
from .layers import Layer, most_to_blame
from .limits import BROKEN_LAYER, Limit, broken
from .metrics import Comparison

Generate = Callable[[Sequence[int], int], list[int]]
"""(ids, count) -> the greedy continuation, `count` tokens."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    windows: int
    lengths: tuple[int, ...]       # of retrieval prompts
    depths: tuple[float, ...]
    json_prompts: int


GATE = Size(8, (384, 768), (0.1, 0.6), 4)
"""Of a compile: 2,040 scored tokens; 24 s for SmolLM2-135M on a quiet machine (2 vCPUs of a Zen 4), 16 of them the captured model's."""

FULL = Size(32, (512, 1024, 2048), (0.1, 0.5, 0.9), 24)
"""Of `infc quality`."""


@dataclass(frozen=True)
class Model:
    """What a measurement must know of a model."""

    name: str
    vocab: int
    max_positions: int


@dataclass(frozen=True)
class Data:
    """What is measured on: windows of ids, and, where there is a tokenizer, what tasks need."""

    name: str                      # for people: "heldout.txt (travels with infc)"
    sha256: str
    tokens: int
    windows: list[list[int]]
    codec: tasks.Codec | None


def read_data(path: Path | None, tokenizer_json: str | None, model: Model, size: Size) -> Data:
    """The data of a measurement: a text file, a JSON file of token ids, or (path None) the text that travels with infc.

    UserError where it cannot be read, is too short, or is text and the model has no tokenizer.
    """
    length = min(text.LENGTH, model.max_positions)
    where = path or text.HELD_OUT
    ids, start = text.token_ids(where, tokenizer_json, model.name, model.vocab)
    windows = text.cut(ids, start, str(where), count=size.windows, length=length)
    name = where.name + (" (travels with infc)" if path is None else "")
    return Data(name, hashlib.sha256(where.read_bytes()).hexdigest(), len(ids), windows, _codec(tokenizer_json, model, start))


def _codec(tokenizer_json: str | None, model: Model, start: Sequence[int]) -> tasks.Codec | None:
    if not tokenizer_json: return None
    tokenizer = text.load(tokenizer_json, model.name)

    def encode(words: str) -> list[int]:
        return tokenizer.encode(words, add_special_tokens=False).ids

    return tasks.Codec(encode, lambda ids: tokenizer.decode([*ids]), tuple(start))


def measure(ours: Evaluator, reference: Evaluator | None, data: Data, size: Size, max_positions: int, *,
            generate: Generate | None = None, note: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """Every figure, as plain data; without a reference the perplexity alone. CheckFailed for logits that are no distribution.

    generate: our greedy continuation; None leaves out structured output. Tasks that cannot be asked are in "skipped", with the reason.
    """
    began = time.perf_counter()
    found: dict[str, Any] = {"data": data.name, "data_sha256": data.sha256, "data_tokens": data.tokens, "windows": len(data.windows),
                             "length": len(data.windows[0])}
    with every_cpu():
        found |= _windows(ours, reference, data, note)
        if reference is not None:
            asked, skipped = _tasks(ours, reference, data, size, max_positions, generate, note)
            found |= asked | {"skipped": skipped}
    return found | {"seconds": round(time.perf_counter() - began, 3)}


def _windows(ours: Evaluator, reference: Evaluator | None, data: Data, note: Callable[[str], object]) -> dict[str, Any]:
    comparison = Comparison()
    for number, ids in enumerate(data.windows):
        note(f"window {number + 1} of {len(data.windows)}")
        first = len(ids) // 2
        given, targets = ids[:-1], ids[first + 1 :]
        comparison.add(ours.logits(given, first=first), targets, None if reference is None else reference.logits(given, first=first))
    figures = comparison.figures().json()
    change = None if reference is None else figures["ppl"] / figures["reference_ppl"] - 1      # type: ignore[operator]
    return figures | {"ppl_change": change}


def _tasks(ours: Evaluator, reference: Evaluator, data: Data, size: Size, max_positions: int, generate: Generate | None,
           note: Callable[[str], object]) -> tuple[dict[str, Any], dict[str, str]]:
    asked: dict[str, Any] = {"retrieval": None, "json": None}
    if data.codec is None:
        return asked, dict.fromkeys(asked, "it needs the model's tokenizer")
    skipped = {}
    lengths = [length for length in size.lengths if length <= max_positions]
    filler = [token for window in data.windows for token in window[len(data.codec.start):]]
    if not lengths:
        skipped["retrieval"] = f"the model has {max_positions} positions, and {min(size.lengths)} are needed"
    elif len(filler) < min(lengths):
        skipped["retrieval"] = f"the text has {len(filler)} tokens to hide a fact in, and {min(lengths)} are needed"
    else:
        note("retrieval")
        score, each = tasks.retrieval(ours, reference, tasks.probes(
            data.codec, filler, lengths=[n for n in lengths if n <= len(filler)], depths=size.depths))
        asked["retrieval"] = score.json() | {"each": each}
    prompts = tasks.json_prompts(data.codec, size.json_prompts)
    longest = max(map(len, prompts)) + tasks.NEW_TOKENS
    if generate is None:
        skipped["json"] = "nothing generates here: the artifact was not run"
    elif longest > max_positions:
        skipped["json"] = f"the model has {max_positions} positions, and {longest} are needed"
    else:
        note("structured output")
        asked["json"] = tasks.structured(generate, reference, data.codec, prompts).json()
    return asked, skipped


def figures(found: Mapping[str, Any], layers: Sequence[Layer]) -> dict[str, float | None]:
    """What limits are about: metric -> figure; None where it was not measured."""
    errors = [layer.error for layer in layers if layer.error is not None]
    known: dict[str, float | None] = {name: found.get(name) for name in ("ppl", "kl", "kl_p99", "top1")}
    for name in ("retrieval", "json"):
        known[name] = None if found.get(name) is None else found[name]["share"]
    known["layer"] = next((error for error in errors if error != error), max(errors, default=None))        # NaN is the worst
    return known


def judge(found: Mapping[str, Any], limits: Sequence[Limit], layers: Sequence[Layer]) -> list[Limit]:
    """What had to hold: the limits, and BROKEN_LAYER where they do not name `layer` and some weight is held as codes.

    CheckFailed, with figures and the layer most to blame, where one does not hold; UserError where it was not measured.
    """
    known = figures(found, layers)
    if known["layer"] is not None and all(limit.metric != "layer" for limit in limits):
        limits = [*limits, Limit("layer", BROKEN_LAYER)]
    for limit in limits:
        if known[limit.metric] is None:
            nothing = f"the captured model gets none of {found[limit.metric]['asked']} right" if found.get(limit.metric) else (
                "no weight is held as codes")
            reason = found.get("skipped", {}).get(limit.metric, nothing)
            raise UserError(f"--quality limits {limit.metric}, which cannot be measured here: {reason}")
    lines = broken(limits, {name: value for name, value in known.items() if value is not None}, found["reference_ppl"])
    if lines:
        raise CheckFailed(f"quality: {'; '.join(lines)} ({found['tokens']} tokens of {found['data']}); {most_to_blame(layers)}; nothing "
                          "was written: choose a finer format or a better --quant-method, another limit with --quality, or --unverified")
    return [*limits]
