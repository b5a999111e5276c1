"""A GGUF file becomes the Llama it was written from, its tokenizer too; a damaged one becomes one clear line."""
import inspect
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf_package = pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from gguf_files import CONFIG, interleaved, write  # noqa: E402
from infc.compiler.errors import UserError  # noqa: E402
from infc.compiler.frontends import capture, gguf  # noqa: E402
from infc.compiler.frontends.gguf_file import GGUFFile  # noqa: E402
from infc.models.llama import Llama, LlamaConfig, RopeScaling, inverse_frequencies  # noqa: E402
from infc.models.random_weights import random_llama  # noqa: E402
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers  # noqa: E402
from tokenizers.models import BPE  # noqa: E402

TEXT = ["the quick brown fox jumps over the lazy dog, isn't it? 12 times; the fox's dog.", "  two  spaces\n\nand lines\tnaïve 日本 🎉"]


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama(CONFIG, seed=1)


def stored(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """What a weight is after one trip through `kind`; q and k too, since a row is quantized on its own."""
    quantized = gguf_package.quants.quantize(weight.numpy(), kind)
    return torch.from_numpy(np.array(gguf_package.quants.dequantize(quantized, kind))).reshape(weight.shape)


# ------------------------------------------------------------------------------------------------------------ round trips

@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_0])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_in_place_and_order(tmp_path: Path, kind: Kind, tied: bool) -> None:
    original = random_llama(LlamaConfig(**vars(CONFIG) | {"tied": tied}), seed=2)
    found, meta = gguf.load(write(tmp_path / "m.gguf", original, kind))
    assert found.config == original.config and not found.training
    for (name, a), (_, b) in zip(found.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(a, stored(b.detach(), kind) if b.dim() == 2 else b), name
    assert meta["source"]["kind"] == "gguf" and "/" not in str(meta["source"]) and meta["tokenizer_json"] is None


def test_the_file_computes_what_the_model_computes(tmp_path: Path, model: Llama) -> None:
    graph = capture(write(tmp_path / "m.gguf", model))
    sample = graph.sample_inputs(2, 9)                             # type: ignore[misc]
    assert torch.equal(graph.run(*sample)[0], model(*sample))
    assert graph.meta["q_heads"] == 4 and graph.meta["max_positions"] == 128


def test_rope_factors_and_linear_scaling(tmp_path: Path, model: Llama) -> None:
    scaling = RopeScaling(8.0, 1.0, 4.0, 64)
    scaled = inverse_frequencies(LlamaConfig(**vars(CONFIG) | {"rope_scaling": scaling}))
    factors = (inverse_frequencies(CONFIG) / scaled).numpy()
    found, _ = gguf.load(write(tmp_path / "a.gguf", model, tensors={"rope_freqs.weight": factors}))
    torch.testing.assert_close(found.model.rotary.inv_freq, scaled, rtol=1e-6, atol=0)
    found, _ = gguf.load(write(tmp_path / "b.gguf", model, extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}))
    assert torch.equal(found.model.rotary.inv_freq, inverse_frequencies(CONFIG) / 4)


def test_half_split_undoes_the_converters_permutation() -> None:
    for heads, size in ((1, 2), (3, 8), (9, 64)):
        rows = np.arange(heads * size * 5).reshape(heads * size, 5)
        assert np.array_equal(gguf.half_split(interleaved(rows, heads), heads), rows)


# -------------------------------------------------------------------------------------------------------------- tokenizer

def trained() -> tuple[Tokenizer, dict[str, Any]]:
    """A small byte-level BPE with special tokens, and the same as GGUF metadata."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return tokenizer, {
        "ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": tokens, "ggml.merges": [" ".join(m) for m in merges],
        "ggml.token_type": [3 if t in special else 1 for t in tokens],
        "ggml.bos_token_id": 0, "ggml.eos_token_id": 1, "ggml.eot_token_id": 2,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


@pytest.fixture(scope="module")
def vocabulary() -> tuple[Tokenizer, dict[str, Any]]:
    return trained()


@pytest.fixture(scope="module")
def talker(vocabulary: tuple[Tokenizer, dict[str, Any]]) -> Llama:
    return random_llama(LlamaConfig(vocabulary[0].get_vocab_size(), 64, 96, 1, 4, 2, 16, 128))


def test_the_tokenizer_comes_back(tmp_path: Path, vocabulary: tuple[Tokenizer, dict[str, Any]], talker: Llama) -> None:
    original, metadata = vocabulary
    _, meta = gguf.load(write(tmp_path / "m.gguf", talker, tokenizer=metadata))
    found = Tokenizer.from_str(meta["tokenizer_json"])
    for text in (*TEXT, "<s>hi<|user|> there</s>", "", "ünïcödé 🎉🎉"):
        ids = found.encode(text).ids
        assert ids == original.encode(text).ids and found.decode(ids, skip_special_tokens=False) == text
    assert (meta["eos_token_ids"], meta["bos_token_id"], meta["add_bos"]) == ([1, 2], 0, False)
    assert meta["special_tokens"] == {"bos_token": "<s>", "eos_token": "</s>"} and meta["chat_template"].startswith("{{ bos_token }}")


def test_a_beginning_of_text_token_is_added_when_asked_for(tmp_path: Path, vocabulary: tuple[Tokenizer, dict[str, Any]],
                                                           talker: Llama) -> None:
    metadata = vocabulary[1]
    for change, expected in (({"ggml.add_bos_token": True}, True), ({"ggml.pre": "llama-bpe"}, True),
                             ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, False)):
        _, meta = gguf.load(write(tmp_path / f"{len(change)}{expected}.gguf", talker, tokenizer=metadata | change))
        found = Tokenizer.from_str(meta["tokenizer_json"])
        assert meta["add_bos"] is expected and (found.encode("hi").ids[0] == 0) is expected
        assert found.encode("hi", add_special_tokens=False).ids[0] != 0


@pytest.mark.parametrize(("pre", "words"), [
    ("gpt-2", ["x", "12345", "'s", " isn", "'t", "  ", " a"]),
    ("smollm", ["x", "1", "2", "3", "4", "5", "'s", " isn", "'t", "  ", " a"]),
    ("llama-bpe", ["x", "123", "45", "'s", " isn", "'t", "  ", " a"]),
    ("qwen2", ["x", "1", "2", "3", "4", "5", "'s", " isn", "'t", "  ", " a"]),
])
def test_splitting_rules(pre: str, words: list[str]) -> None:
    from infc.compiler.frontends.gguf_tokenizer import PRE_TOKENIZERS

    split = PRE_TOKENIZERS[pre].pre_tokenize_str("".join(words))
    assert [word.replace("Ġ", " ") for word, _ in split] == words


def test_splitting_rules_are_transformers_own() -> None:
    source = pytest.importorskip("transformers.convert_slow_tokenizer")
    from infc.compiler.frontends import gguf_tokenizer

    text = Path(source.__file__).read_text()
    assert gguf_tokenizer.QWEN2 in text
    assert gguf_tokenizer.LLAMA3 in inspect.getsource(source.TikTokenConverter)


@pytest.mark.parametrize(("change", "message"), [
    ({"ggml.pre": "gpt-9"}, "splits text by the rule 'gpt-9'"),
    ({"ggml.model": "llama"}, "has a 'llama' tokenizer"),
    ({"ggml.merges": ["a b", "c"]}, "2 merges"),
    ({"ggml.merges": ["zz qq"]}, "a merge uses 'zz'"),
    ({"ggml.bos_token_id": 4000}, "its bos_token is 4000"),
])
def test_tokenizers_that_cannot_be_read(tmp_path: Path, vocabulary: tuple[Tokenizer, dict[str, Any]], talker: Llama, change: dict[str, Any],
                                        message: str) -> None:
    with pytest.raises(UserError) as caught:
        gguf.load(write(tmp_path / "m.gguf", talker, tokenizer=vocabulary[1] | change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- bad files

def line(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        gguf.load(path)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value) and str(path.parent) not in str(caught.value)
    return str(caught.value)


def test_every_truncation_is_one_clear_line(tmp_path: Path, vocabulary: tuple[Tokenizer, dict[str, Any]], talker: Llama) -> None:
    data = write(tmp_path / "whole.gguf", talker, Kind.Q8_0, tokenizer=vocabulary[1]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 23, 24, 40, 100, 1000, 3000, len(data) // 2, len(data) - 4096, len(data) - 32):
        cut.write_bytes(data[:size])
        assert "truncated" in (found := line(cut)) or "not a GGUF file" in found, size


def test_flipped_bytes_in_the_header_never_crash(tmp_path: Path, model: Llama) -> None:
    data = write(tmp_path / "whole.gguf", model, Kind.F16).read_bytes()
    header = data.index(b"blk.1.ffn_up.weight") + 60
    broken, random = tmp_path / "broken.gguf", np.random.default_rng(0)
    for at in random.integers(0, header, 200):
        broken.write_bytes(data[:at] + bytes([data[at] ^ (1 << random.integers(8))]) + data[at + 1 :])
        try:
            gguf.load(broken)
        except UserError as error:
            assert "\n" not in str(error)                          # any other exception is a failure


def test_flipped_bits_in_each_size_never_crash_or_hang(tmp_path: Path, model: Llama) -> None:
    data = write(tmp_path / "whole.gguf", model, Kind.F16).read_bytes()
    broken = tmp_path / "broken.gguf"
    for key in (b"block_count", b"context_length", b"embedding_length", b"feed_forward_length", b"attention.head_count", b"freq_base",
                b"attention.head_count_kv", b"attention.key_length", b"rope.dimension_count", b"rms_epsilon"):
        at = data.index(key) + len(key)
        for bit in (0, 7, 30, *range(32, 64, 3)):                  # in the value's type, then in the value
            flipped = bytearray(data)
            flipped[at + bit // 8] ^= 1 << bit % 8
            broken.write_bytes(flipped)
            try:
                gguf.load(broken)
            except UserError as error:
                assert "\n" not in str(error)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    other = random_llama(CONFIG)
    other.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    assert "tensor blk.1.ffn_up.weight: 1 value is not finite, the first at [3, 4]: nan; fetch" in line(write(tmp_path / "m.gguf", other))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    assert "starts with b'PK" in line(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 99, 0, 0) + bytes(8))
    assert "version 99" in line(path)
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(8))
    assert "big-endian" in line(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**40) + bytes(8))
    assert "truncated" in line(path)


def test_other_architectures_are_named(tmp_path: Path, model: Llama) -> None:
    assert "architecture 'qwen3'" in line(write(tmp_path / "m.gguf", model, architecture="qwen3"))


@pytest.mark.parametrize(("change", "message"), [
    ({"skip": "block_count"}, "no llama.block_count"),
    ({"skip": "blk.1.ffn_up.weight"}, "lacks 1 of 20 tensors, the first is model.layers.1.mlp.up_proj.weight"),
    ({"skip": "token_embd.weight"}, "no token_embd.weight"),
    ({"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "no place for, the first is blk.0.attn_q.bias"),
    ({"extra": {"llama.expert_count": 8}}, "8 experts"),
    ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
    ({"tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "8 positive factors"),
])
def test_what_the_model_cannot_do_is_refused(tmp_path: Path, model: Llama, change: dict[str, Any], message: str) -> None:
    assert message in line(write(tmp_path / "m.gguf", model, **change))


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    other = random_llama(LlamaConfig(**vars(CONFIG) | {"intermediate_size": 128}))
    other.config = CONFIG
    assert "tensor blk.0.ffn_gate.weight has shape [128, 64], the metadata says [96, 64]" in line(write(tmp_path / "m.gguf", other))


def test_metadata_values_of_every_type(tmp_path: Path, model: Llama) -> None:
    values = {"x.bool": True, "x.int": -5, "x.float": 0.5, "x.text": "naïve", "x.list": [1, 2, 3], "x.words": ["a", "b"]}
    file = GGUFFile(write(tmp_path / "m.gguf", model, extra=values))
    assert {key: file.metadata[key] for key in values} == values


# ------------------------------------------------------------------------------------------------------------- real model

@pytest.mark.slow
def test_smollm2_answers_with_paris() -> None:
    from infc.compiler.frontends import load
    from infc.models import ModelError
    from infc.models.fetch import fetch
    from jinja2 import Environment

    try:
        fetch("smollm2")
    except ModelError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    module, meta = load("smollm2")
    tokenizer = Tokenizer.from_str(meta["tokenizer_json"])
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode(Environment().from_string(meta["chat_template"]).render(messages=messages, add_generation_prompt=True)).ids
    prompt = len(ids)
    with torch.no_grad():
        while len(ids) < prompt + 16 and ids[-1] not in meta["eos_token_ids"]:
            ids.append(int(module(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    assert "Paris" in tokenizer.decode(ids[prompt:]) and meta["license"] == "Apache-2.0"
