"""Text as windows of token ids, by the model's own tokenizer, or ids as they are listed."""
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import UserError

FOLDER = Path(__file__).parent.parent.parent / "models" / "text"
CALIBRATION = FOLDER / "calibration.txt"
HELD_OUT = FOLDER / "heldout.txt"
"""The text that travels with infc (models/text/README.md): one to choose scales on, one to measure on."""

LENGTH = 512
"""Tokens of a window, as llama.cpp measures perplexity; the second half is scored, so that every scored token has 256 before it."""

AT_LEAST = 2
"""Windows. Fewer say nothing of a text."""


@dataclass(frozen=True)
class Text:
    """A file's windows, and how many tokens it has in all."""

    path: Path
    windows: list[list[int]]
    tokens: int


def read(path: Path) -> str:
    """The text of a file. UserError where it is missing, no UTF-8 text, or empty."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is no UTF-8; convert the text, or name another") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); name a text file") from error
    if not text.strip():
        raise UserError(f"{path}: is empty; name a text of some thousand words")
    return text


def encode(text: str, tokenizer_json: str | None, model: str) -> tuple[list[int], list[int]]:
    """(token ids of the whole text without special tokens, what the tokenizer puts before a text: a BOS, or nothing).

    UserError where the model has no tokenizer.
    """
    if not tokenizer_json:
        raise UserError(f"{model} has no tokenizer to read a text with: pass token ids, --data FILE.json with a list of numbers "
                        "(or compile with --unverified, to go on without measuring)")
    tokenizer = load(tokenizer_json, model)
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    around = tokenizer.encode("a").ids
    at = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), 0)
    return tokenizer.encode(text, add_special_tokens=False).ids, around[:at]


def load(tokenizer_json: str, model: str) -> Tokenizer:
    """The tokenizer, cutting and padding nothing. UserError where its JSON is damaged."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json.encode())
    except ValueError as error:
        raise UserError(f"{model}: its tokenizer.json cannot be read ({error}); mend the checkpoint") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_ids(path: Path, tokenizer_json: str | None, model: str, vocab: int) -> tuple[list[int], list[int]]:
    """`encode` of a text's file; of a .json file the ids that it lists, and nothing before them. UserError where either cannot be read."""
    if path.suffix != ".json": return encode(read(path), tokenizer_json, model)
    try:
        found = json.loads(read(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: is no JSON ({error}); give a list of token ids, or a text") from error
    if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
        raise UserError(f"{path}: is no list of token ids; give one, like [12, 7, 1042], or a text")
    strange = next((i for i in found if i >= vocab), None)
    if strange is not None: raise UserError(f"{path}: {strange} is no token of {model}, whose vocabulary has ids 0..{vocab - 1}")
    return found, []


def windows(path: Path, tokenizer_json: str | None, model: str, vocab: int, *, count: int, length: int = LENGTH) -> Text:
    """At most `count` windows of `length` ids, evenly over the whole text, none overlapping; each begins as the tokenizer begins a text.

    Of a calibration text. UserError where it holds fewer than AT_LEAST windows, or cannot be read.
    """
    if not tokenizer_json and path.suffix != ".json":
        raise UserError(f"{model} has no tokenizer to read a calibration text with: list token ids in --calib FILE.json")
    ids, start = token_ids(path, tokenizer_json, model, vocab)
    return Text(path, cut(ids, start, str(path), count=count, length=length), len(ids))


def cut(ids: Sequence[int], start: Sequence[int], where: str, *, count: int, length: int) -> list[list[int]]:
    """The windows of a text that is ids already. start: what each begins with. UserError where there are too few."""
    body = length - len(start)
    found = min(len(ids) // body, count)
    if found < AT_LEAST:
        raise UserError(f"{where}: has {len(ids)} tokens, and {AT_LEAST * body} are needed ({AT_LEAST} windows of {body}); "
                        "name a longer text")
    stride = (len(ids) - body) // (found - 1)
    return [[*start, *ids[i * stride : i * stride + body]] for i in range(found)]
