"""Models by name: real weights fetched into the user's cache, or seeded random ones with a byte tokenizer."""
from collections.abc import Callable
from typing import Any

from ...models import Model, ModelError, Random
from ...models.byte_tokenizer import CHAT_TEMPLATE, SPECIAL, byte_tokenizer
from ...models.fetch import fetch
from ...models.llama import Llama, LlamaConfig, RopeScaling
from ...models.random_weights import random_llama
from ..errors import UserError
from .model_meta import llama_meta


def load(found: Model | Random, progress: Callable[[str], None]) -> tuple[Llama, dict[str, Any]]:
    """(model in eval mode, Graph.meta). Raises UserError when the weights cannot be fetched."""
    return _random(found, progress) if isinstance(found, Random) else _real(found, progress)


def llama_config(settings: dict[str, Any]) -> LlamaConfig:
    """The `config` table of an entry as a LlamaConfig."""
    sizes = dict(settings)
    scaling = sizes.pop("rope_scaling", None)
    return LlamaConfig(**sizes, rope_scaling=RopeScaling(**scaling) if scaling else None)


def _real(model: Model, progress: Callable[[str], None]) -> tuple[Llama, dict[str, Any]]:
    from . import gguf

    try:
        path = fetch(model.name, progress)
    except ModelError as error:
        raise UserError(str(error)) from error
    assert model.source is not None
    progress(f"reading {path.name}")
    module, meta = gguf.load(path, model.source.member_sha256)
    return module, meta | {"name": model.name, "license": model.license}


def _random(wanted: Random, progress: Callable[[str], None]) -> tuple[Llama, dict[str, Any]]:
    progress(f"making random weights for {wanted.name}")
    config = llama_config(wanted.model.config | {"layers": wanted.layers})
    return random_llama(config, wanted.seed), llama_meta(config) | {
        "name": wanted.name, "eos_token_ids": [2], "bos_token_id": 1, "tokenizer_json": byte_tokenizer(), "chat_template": CHAT_TEMPLATE,
        "special_tokens": {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]},
        "source": {"kind": "random", "file": wanted.model.name, "seed": wanted.seed},
    }  # fmt: skip
