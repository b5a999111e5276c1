"""The table of models: names, spellings of random ones, and what a wrong name is told."""
import subprocess
import sys

import pytest
from infc.models import Model, ModelError, Random, find, table
from infc.models.byte_tokenizer import SPECIAL, byte_tokenizer


def test_entries_are_complete() -> None:
    for name, entry in table().items():
        assert entry.about and entry.config["q_heads"] % entry.config["kv_heads"] == 0, name
    source = table()["smollm2"].source
    assert source is not None and len(source.wheel_sha256) == len(source.member_sha256) == 64


def test_names() -> None:
    assert isinstance(find("smollm2"), Model)
    assert find("tiny") == Random(table()["tiny"], 2, 0)
    assert find("random:smollm2?layers=60&seed=7") == Random(table()["smollm2"], 60, 7)


@pytest.mark.parametrize(("spec", "name"), [
    ("tiny", "tiny"), ("random:tiny", "tiny"), ("random:tiny?layers=3", "random:tiny?layers=3"), ("random:smollm2", "random:smollm2"),
    ("random:smollm2?seed=1&layers=60", "random:smollm2?layers=60&seed=1"),
])
def test_random_models_name_themselves(spec: str, name: str) -> None:
    found = find(spec)
    assert isinstance(found, Random) and found.name == name and find(name) == found


@pytest.mark.parametrize("path", ["./smollm2", "a/b", "model.gguf", "/abs/olute", "C:\\x"])
def test_paths_are_no_names(path: str) -> None:
    assert find(path) is None


@pytest.mark.parametrize(("spec", "message"), [
    ("smolm2", "did you mean 'smollm2'?"),
    ("qqq", "known are smollm2, tiny, llama-1b, llama-8b."),
    ("random:smol2", "did you mean 'smollm2'?"),
    ("random:tiny?layers=0", "bad option 'layers=0'"),
    ("random:tiny?layers=-1", "bad option 'layers=-1'"),
    ("random:tiny?layers", "bad option 'layers'"),
    ("random:tiny?depth=3", "bad option 'depth=3'"),
])
def test_wrong_names_are_told_what_to_write(spec: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        find(spec)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_table_needs_no_torch() -> None:
    code = "import sys, infc.models; infc.models.find('tiny'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_byte_tokenizer_round_trips_any_text() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_tokenizer())
    assert tokenizer.get_vocab_size() == len(SPECIAL) + 256 <= table()["tiny"].config["vocab_size"]
    text = "it's\tnaïve 日本 🎉\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [1, tokenizer.token_to_id("a"), 2]
