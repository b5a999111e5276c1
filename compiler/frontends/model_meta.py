"""Graph.meta: what the runtime must know about a model. Plain JSON, no path in it, every key always there.

    name architecture license        texts (license may be None)
    vocab_size hidden_size layers q_heads kv_heads head_dim max_positions
    eos_token_ids bos_token_id       stop tokens; the beginning-of-text token or None
    add_bos                          whether tokenizer_json puts bos_token_id before a text (chat templates write their own)
    tokenizer_json chat_template     texts, or None
    special_tokens                   {"bos_token": "<s>", ...}: what chat templates may name
    source                           {"kind": "gguf" | "huggingface" | "random" | "module", "file": base name, "sha256": ...}
"""
from collections.abc import Mapping
from typing import Any

from ...models.llama import LlamaConfig

UNKNOWN: Mapping[str, Any] = {
    "license": None, "eos_token_ids": [], "bos_token_id": None, "add_bos": False, "tokenizer_json": None, "chat_template": None,
    "special_tokens": {},
}  # fmt: skip
"""What a model without tokenizer and generation settings says."""


def llama_meta(config: LlamaConfig) -> dict[str, Any]:
    """The meta of one of our own Llamas, without name and source."""
    return dict(UNKNOWN) | {
        "architecture": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "layers": config.layers,
        "q_heads": config.q_heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim, "max_positions": config.max_positions,
    }  # fmt: skip
