"""A Hugging Face checkpoint folder: transformers' own model in fp32, made stateless. No hub, no remote code, no download.

The model runs as transformers defines it, so any architecture that exports can be captured; what the folder lacks is
found out before transformers is imported.
"""
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ...models.fetch import sha256
from ..errors import UserError, nearest
from .checkpoint_folder import check_safetensors, read_json, weight_files
from .messages import first_line
from .model_meta import UNKNOWN


class Stateless(nn.Module):
    """A causal language model as (input_ids, position_ids) -> logits, no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model
        self.training = model.training

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.hf(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def load(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """(stateless model in eval mode, Graph.meta). Raises UserError with one line for a folder it cannot take."""
    config = read_json(folder, "config.json")
    if config.get("auto_map"):
        raise UserError(f"{folder.name} brings its own code (auto_map in config.json); infc runs no code from a checkpoint")
    shards = weight_files(folder)
    for shard in shards:
        check_safetensors(shard)
    transformers = _transformers()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = config.get("model_type")
    if kind not in known:
        raise UserError(f"{folder.name} has model_type {kind!r}, no causal language model of transformers {transformers.__version__}: "
                        f"{nearest(str(kind), known) if kind else 'config.json names none'}")
    model = _load_model(transformers, folder)
    return Stateless(model), describe(model, folder, shards)


def stateless(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """(wrapped model, Graph.meta) of a transformers model in memory; no tokenizer is known."""
    return Stateless(model), config_meta(model.config) | {"name": type(model).__name__, "source": {"kind": "module"}}


def describe(model: nn.Module, folder: Path, shards: Sequence[Path]) -> dict[str, Any]:
    """Graph.meta: sizes from the model's config, tokenizer, template and stop tokens from the folder."""
    config: Any = model.config
    generation = read_json(folder, "generation_config.json", needed=False)
    tokenizer = read_json(folder, "tokenizer_config.json", needed=False)
    tokenizer_file = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    special = {key: _token_text(tokenizer[key]) for key in ("bos_token", "eos_token", "unk_token", "pad_token") if tokenizer.get(key)}
    tokenizer_json = tokenizer_file.read_text("utf-8") if tokenizer_file.is_file() else None
    meta = config_meta(config) | {
        "name": folder.name,
        "chat_template": template.read_text("utf-8") if template.is_file() else _default_template(tokenizer.get("chat_template")),
        "tokenizer_json": tokenizer_json,
        "special_tokens": special,
        "source": {"kind": "huggingface", "file": folder.name, "sha256": _digest([folder / "config.json", *shards])},
    }
    eos = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    meta["eos_token_ids"] = sorted({eos} if isinstance(eos, int) else set(eos or ()))
    meta["add_bos"] = _adds_bos(tokenizer_json, meta["bos_token_id"], folder)
    return meta


def config_meta(config: Any) -> dict[str, Any]:
    """The part of Graph.meta that follows from a transformers config."""
    text = config.get_text_config()
    hidden, q_heads = text.hidden_size, text.num_attention_heads
    eos = text.eos_token_id
    return dict(UNKNOWN) | {
        "architecture": text.model_type, "vocab_size": text.vocab_size, "hidden_size": hidden, "layers": text.num_hidden_layers,
        "q_heads": q_heads, "kv_heads": getattr(text, "num_key_value_heads", None) or q_heads,
        "head_dim": getattr(text, "head_dim", None) or hidden // q_heads,
        "max_positions": getattr(text, "max_position_embeddings", None) or 2048,
        "bos_token_id": text.bos_token_id, "eos_token_ids": sorted({eos} if isinstance(eos, int) else set(eos or ())),
    }  # fmt: skip


def _digest(files: Sequence[Path]) -> str:
    """sha256 over the files' sha256s, in order."""
    return hashlib.sha256("".join(sha256(f) for f in files).encode()).hexdigest()


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _default_template(template: Any) -> str | None:
    if isinstance(template, list):                                # several named ones
        named = {t["name"]: t["template"] for t in template}
        return named.get("default")
    return template


def _adds_bos(tokenizer_json: str | None, bos: int | None, folder: Path) -> bool:
    """Whether the tokenizer puts the beginning-of-text token before a text."""
    if tokenizer_json is None or bos is None:
        return False
    try:
        ids = Tokenizer.from_buffer(tokenizer_json.encode()).encode("a").ids
    except ValueError as error:
        raise UserError(f"{folder.name}/tokenizer.json cannot be read: {first_line(error)}") from error
    return ids[:1] == [bos]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError("a Hugging Face folder needs the transformers package: pip install 'infc[hf]'") from error
    return transformers


def _load_model(transformers: Any, folder: Path) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True,
            output_loading_info=True)  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"transformers cannot load {folder.name}: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"{folder.name} lacks {len(missing)} weights, the first is {missing[0]}: they would be random")
    if report["mismatched_keys"]:
        raise UserError(f"{folder.name}: the shape of {sorted(report['mismatched_keys'])[0]} is not what config.json says")
    wrong = next((name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())), None)
    if wrong:
        raise UserError(f"{folder.name}: weight {wrong} holds values that are not finite")
    return model.eval().requires_grad_(False)
