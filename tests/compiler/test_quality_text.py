"""Text as windows: disjoint, whole, evenly over the text; every file that is no text is one line."""
import hashlib
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infc.compiler.errors import UserError
from infc.compiler.quality import text
from infc.models.byte_tokenizer import byte_tokenizer
from tokenizers import Tokenizer, processors

README = text.FOLDER / "README.md"


def with_bos() -> str:
    """The byte tokenizer, with a BOS before each text."""
    tokenizer = Tokenizer.from_str(byte_tokenizer())
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    return tokenizer.to_str()


@given(tokens=st.integers(0, 3000), start=st.lists(st.just(1), max_size=2), count=st.integers(2, 9), length=st.integers(4, 200))
def test_windows_are_disjoint_runs_of_the_text(tokens: int, start: list[int], count: int, length: int):
    ids = list(range(1000, 1000 + tokens))
    body = length - len(start)
    if tokens < text.AT_LEAST * body:
        with pytest.raises(UserError, match=re.escape(f"t: has {tokens} tokens, and {2 * body} are needed (2 windows of {body})")):
            text.cut(ids, start, "t", count=count, length=length)
        return
    windows = text.cut(ids, start, "t", count=count, length=length)
    assert 2 <= len(windows) <= count and all(len(window) == length and window[: len(start)] == start for window in windows)
    bodies = [window[len(start):] for window in windows]
    assert all(one == list(range(one[0], one[0] + body)) for one in bodies)
    assert all(a[-1] < b[0] for a, b in itertools.pairwise(bodies))
    assert bodies[0][0] == 1000 and bodies[-1][-1] >= ids[-1] - len(bodies)           # from the beginning to the end


def test_the_texts_are_the_ones_that_are_described():
    for path in (text.CALIBRATION, text.HELD_OUT):
        raw = path.read_bytes()
        row = next(line for line in README.read_text("utf-8").splitlines() if line.startswith(f"| {path.name} "))
        assert f"{len(raw):,}" in row and hashlib.sha256(raw).hexdigest() in row and 100_000 < len(raw) < 200_000


def test_no_sentence_is_in_both_texts():
    calibration, held_out = ({s.strip() for s in re.split(r"[.!?]\s", path.read_text("utf-8")) if len(s) > 60}
                             for path in (text.CALIBRATION, text.HELD_OUT))
    assert len(calibration) > 500 and len(held_out) > 500 and not calibration & held_out


def test_a_window_begins_as_the_tokenizer_begins_a_text():
    plain = text.windows(text.HELD_OUT, byte_tokenizer(), "tiny", 320, count=3, length=64)
    marked = text.windows(text.HELD_OUT, with_bos(), "tiny", 320, count=3, length=64)
    assert plain.tokens == marked.tokens == text.HELD_OUT.stat().st_size
    assert all(window[0] == 1 and 1 not in window[1:] for window in marked.windows)
    assert marked.windows[0][1:] == plain.windows[0][:-1]


def test_a_text_that_is_too_short_says_what_is_needed(tmp_path: Path):
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(UserError, match=re.escape("a.txt: has 9 tokens, and 1024 are needed (2 windows of 512); name a longer text")):
        text.windows(tmp_path / "a.txt", byte_tokenizer(), "tiny", 320, count=8)


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b" \n\n", "is empty"), (b"caf\xe9", "byte 3 is no UTF-8"),
                                               (None, "cannot be read (no such file")])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path / "a.txt"
    if content is not None: path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(words)):
        text.read(path)


def test_a_folder_is_no_text(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        text.read(tmp_path)


def test_a_model_without_a_tokenizer_is_told_what_to_pass(tmp_path: Path):
    with pytest.raises(UserError, match=re.escape("nameless has no tokenizer to read a text with: pass token ids, --data FILE.json")):
        text.token_ids(text.HELD_OUT, None, "nameless", 320)
    with pytest.raises(UserError, match=r"nameless has no tokenizer to read a calibration text with: list token ids in --calib FILE\.json"):
        text.windows(text.HELD_OUT, None, "nameless", 320, count=2)
    (tmp_path / "ids.json").write_text(str([*range(20)]))
    for tokenizer in (None, byte_tokenizer()):                       # ids are ids, also where a tokenizer could read the digits
        found = text.windows(tmp_path / "ids.json", tokenizer, "nameless", 320, count=9, length=10)
        assert found.windows == [[*range(10)], [*range(10, 20)]] and found.tokens == 20


def test_a_damaged_tokenizer_is_one_line():
    with pytest.raises(UserError, match=re.escape("broken: its tokenizer.json cannot be read")):
        text.windows(text.HELD_OUT, '{"model": 1}', "broken", 320, count=2)
