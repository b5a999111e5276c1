"""A GGUF file's vocabulary as a tokenizer.json: byte-level BPE with its merges, special tokens and pre-tokenizer.

The splitting rule is not in the file, only its name (tokenizer.ggml.pre). Each rule here is that of the Hugging Face
tokenizer the name stands for; llama.cpp's list is in src/llama-vocab.cpp.
"""
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import Sequence as ProcessorSequence
from tokenizers.processors import TemplateProcessing

from ..errors import UserError
from .gguf_file import GGUFFile

CONTROL, USER_DEFINED = 3, 4                                      # tokenizer.ggml.token_type

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> PreTokenizer:
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": _split(LLAMA3),
    "qwen2": _split(QWEN2),
}
SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe"}
WHOLE_WORDS = {"llama-bpe"}                                       # a word in the vocabulary is a token even if no merges lead to it
NORMALIZED = {"qwen2"}                                            # NFC first
BEGINS_TEXTS = {"llama-bpe"}                                      # llama.cpp's default for it when the file does not say


def tokenizer_json(file: GGUFFile) -> str | None:
    """tokenizer.json text; None when the file has no vocabulary. Raises UserError for a kind that is not known."""
    data, name = file.metadata, file.path.name
    kind = data.get("tokenizer.ggml.model")
    if kind is None or kind == "no_vocab":
        return None
    if kind != "gpt2":
        raise UserError(f"{name} has a {kind!r} tokenizer; byte-level BPE ('gpt2') is read. Give the Hugging Face folder instead")
    pre = _rule(data)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted({*PRE_TOKENIZERS, *SAME_AS}))
        raise UserError(f"{name} splits text by the rule {data.get('tokenizer.ggml.pre')!r}; known rules: {known}")
    tokens, merges = data.get("tokenizer.ggml.tokens", []), data.get("tokenizer.ggml.merges", [])
    types = data.get("tokenizer.ggml.token_type", [1] * len(tokens))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if not tokens or len(types) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        counts = f"{len(tokens)} tokens, {len(types)} types, {len(merges)} merges"
        raise UserError(f"{name} is truncated or altered: its vocabulary has {counts}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = next((part for pair in pairs for part in (*pair, "".join(pair)) if part not in vocabulary), None)
    if unknown is not None:
        raise UserError(f"{name} is truncated or altered: a merge uses {unknown!r}, which is not in its vocabulary")
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    if adds_bos(file):
        bos = special_tokens(file)["bos_token"]
        template = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])])
        tokenizer.post_processor = ProcessorSequence([tokenizer.post_processor, template])
    if pre in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in typed if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED])
    return tokenizer.to_str()


def adds_bos(file: GGUFFile) -> bool:
    """Whether a text starts with the beginning-of-text token."""
    data = file.metadata
    default = _rule(data) in BEGINS_TEXTS
    return "tokenizer.ggml.bos_token_id" in data and bool(data.get("tokenizer.ggml.add_bos_token", default))


def _rule(data: dict[str, Any]) -> str | None:
    name = data.get("tokenizer.ggml.pre")
    return SAME_AS.get(name, name) if isinstance(name, str) else None


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Texts of the special tokens, as chat templates name them: bos_token, eos_token, unk_token, pad_token."""
    data: dict[str, Any] = file.metadata
    tokens = data.get("tokenizer.ggml.tokens", [])
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    known = {name: data[f"tokenizer.ggml.{key}"] for name, key in ids.items() if f"tokenizer.ggml.{key}" in data}
    wrong = next((name for name, i in known.items() if not 0 <= i < len(tokens)), None)
    if wrong and tokens:
        raise UserError(f"{file.path.name}: its {wrong} is {known[wrong]}, its vocabulary has {len(tokens)} tokens")
    return {name: tokens[i] for name, i in known.items() if tokens}
