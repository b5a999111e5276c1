"""A Hugging Face checkpoint folder: transformers' own model in fp32, made stateless. No hub, no remote code, no download.

The model runs as transformers defines it, so any architecture that exports can be captured; what the folder lacks is
found out before transformers is imported.
"""
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn

from ...models.fetch import sha256
from ..errors import UserError, nearest
from .checkpoint_folder import check_safetensors, read_json, read_text, weight_files
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


def load(folder: Path, progress: Callable[[str], None] = lambda line: None) -> tuple[nn.Module, dict[str, Any]]:
    """(stateless model in eval mode, Graph.meta). Raises UserError with one line for a folder it cannot take."""
    config = read_json(folder, "config.json")
    if config.get("auto_map"):
        raise UserError(f"{folder.name} brings its own code (auto_map in config.json); infc runs no code from a checkpoint")
    if config.get("quantization_config") is not None:
        raise UserError(f"{folder.name}/config.json says that its weights are quantized (quantization_config): infc takes wide weights "
                        "from a folder and quantizes them itself (--quant), or a GGUF file's own blocks (--quant keep)")
    shards = weight_files(folder)
    stored = {name: tensor for shard in shards for name, tensor in check_safetensors(shard).items()}
    transformers = _transformers()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise UserError(f"{folder.name} has model_type {kind!r}, no causal language model of transformers {transformers.__version__}: "
                        f"{nearest(str(kind), known) if kind else 'config.json names none'}")
    model = _load_model(transformers, folder, {name: shape for name, (_, shape) in stored.items()}, progress)
    _check_dtypes(model, folder, {name: dtype for name, (dtype, _) in stored.items()})
    return Stateless(model), describe(model, folder, shards)


def stateless(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """(wrapped model, Graph.meta) of a transformers model in memory; no tokenizer is known."""
    config: Any = model.config
    return Stateless(model), config_meta(config, getattr(config, "eos_token_id", None), "its config") | {
        "name": type(model).__name__, "source": {"kind": "module"}}


def describe(model: nn.Module, folder: Path, shards: Sequence[Path]) -> dict[str, Any]:
    """Graph.meta: sizes from the model's config, tokenizer, template and stop tokens from the folder."""
    config: Any = model.config
    generation = read_json(folder, "generation_config.json", needed=False)
    tokenizer = read_json(folder, "tokenizer_config.json", needed=False)
    tokenizer_file = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    special = {key: _token_text(folder, key, tokenizer[key])
               for key in ("bos_token", "eos_token", "unk_token", "pad_token") if tokenizer.get(key)}
    tokenizer_json = read_text(tokenizer_file) if tokenizer_file.is_file() else None
    where = "generation_config.json" if "eos_token_id" in generation else "config.json"
    eos = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    meta = config_meta(config, eos, f"{folder.name}/{where}") | {
        "name": folder.name,
        "chat_template": read_text(template) if template.is_file() else _default_template(folder, tokenizer.get("chat_template")),
        "tokenizer_json": tokenizer_json,
        "special_tokens": special,
        "source": {"kind": "huggingface", "file": folder.name, "sha256": _digest([folder / "config.json", *shards])},
    }
    meta["add_bos"] = _adds_bos(tokenizer_json, meta["bos_token_id"], folder)
    return meta


def config_meta(config: Any, eos: Any, where: str) -> dict[str, Any]:
    """The part of Graph.meta that follows from a transformers config, and the stop tokens, which stand in `where`."""
    text = config.get_text_config()
    hidden, q_heads = text.hidden_size, text.num_attention_heads
    return dict(UNKNOWN) | {
        "architecture": text.model_type, "vocab_size": text.vocab_size, "hidden_size": hidden, "layers": text.num_hidden_layers,
        "q_heads": q_heads, "kv_heads": getattr(text, "num_key_value_heads", None) or q_heads,
        "head_dim": getattr(text, "head_dim", None) or hidden // q_heads,
        "max_positions": _positions(getattr(text, "max_position_embeddings", None)),
        "bos_token_id": text.bos_token_id, "eos_token_ids": _stop_tokens(eos, text.vocab_size, where),
    }  # fmt: skip


def _positions(given: Any) -> int:
    if given is None: return 2048
    if type(given) is not int or given < 1: raise UserError(f"max_position_embeddings is {given!r}: a model has at least one position")
    return given


def _stop_tokens(eos: Any, vocab: int, where: str) -> list[int]:
    """Distinct ids, in order. eos: an id, a list of them, or None."""
    ids = list(eos) if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < vocab]
    if wrong:
        raise UserError(f"eos_token_id {wrong[0]!r} in {where} is no token: the vocabulary has {vocab}, 0 to {vocab - 1}")
    return sorted(set(ids))


def _digest(files: Sequence[Path]) -> str:
    """sha256 over the files' sha256s, in order."""
    return hashlib.sha256("".join(sha256(f) for f in files).encode()).hexdigest()


def _token_text(folder: Path, key: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str): raise UserError(f"{folder.name}/tokenizer_config.json: {key} is {token!r}, a text is expected")
    return text


def _default_template(folder: Path, template: Any) -> str | None:
    match template:
        case None | str(): return template
        case [*named] if all(isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str) for t in named):
            return {t["name"]: t["template"] for t in named}.get("default")
        case _:
            raise UserError(f"{folder.name}/tokenizer_config.json: chat_template is neither a text nor a list of named ones")


def _adds_bos(tokenizer_json: str | None, bos: int | None, folder: Path) -> bool:
    """Whether the tokenizer puts the beginning-of-text token before a text. UserError for what is no tokenizer."""
    if tokenizer_json is None: return False
    try:
        ids = Tokenizer.from_buffer(tokenizer_json.encode()).encode("a").ids
    except ValueError as error:
        raise UserError(f"{folder.name}/tokenizer.json cannot be read: {first_line(error)}") from error
    return bos is not None and ids[:1] == [bos]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError("a Hugging Face folder needs the transformers package: pip install 'infc[hf]'") from error
    return transformers


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """transformers reports by bars and tables on stderr; what matters of them becomes our one line."""
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _load_model(transformers: Any, folder: Path, shapes: Mapping[str, Sequence[int]], progress: Callable[[str], None]) -> nn.Module:
    from huggingface_hub.errors import StrictDataclassError  # a wrong field of config.json

    errors = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError, ArithmeticError, AssertionError,
              SafetensorError, StrictDataclassError)  # fmt: skip

    def attempt(attention: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, attn_implementation=attention,
            use_safetensors=True, output_loading_info=True)

    with _quiet(transformers.utils.logging):
        try:
            try:
                model, report = attempt("sdpa")
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
                progress(f"transformers has no sdpa attention for {folder.name}: its eager attention is captured")
                model, report = attempt("eager")
        except StrictDataclassError as error:
            raise UserError(f"{folder.name}/config.json: {' '.join(str(error).split())}") from error
        except errors as error:                                   # whatever the architecture's own constructor raises, too
            reason = _other_shape(transformers, folder, shapes, errors) or first_line(error)
            raise UserError(f"transformers cannot load {folder.name}: {reason}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"{folder.name} lacks {len(missing)} weights, the first is {missing[0]}: they would be random")
    extra = sorted(report["unexpected_keys"])
    if extra:
        raise UserError(f"{folder.name} has {len(extra)} tensors that its config.json has no place for, the first is {extra[0]}: without "
                        "them it would be another model")
    return model.eval().requires_grad_(False)


def _check_dtypes(model: Any, folder: Path, dtypes: Mapping[str, str]) -> None:
    """UserError for weights stored as whole numbers: codes of a quantization, which transformers takes for values."""
    for name, weight in model.named_parameters():
        for stored in (name, name.removeprefix(f"{model.base_model_prefix}.")):
            if weight.is_floating_point() and not dtypes.get(stored, "F").lstrip("B").startswith("F"):
                raise UserError(f"{folder.name}: {stored} is stored as {dtypes[stored]}, codes of a quantization that infc does not know: "
                                "give wide weights, and quantize them with --quant")


def _other_shape(transformers: Any, folder: Path, shapes: Mapping[str, Sequence[int]], errors: tuple[type[Exception], ...]) -> str | None:
    """The first tensor of the files whose shape is not what config.json makes of it; None when all agree."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except errors:                                                # it was no shape that went wrong
        return None
    for name, weight in model.named_parameters():
        for stored in (name, name.removeprefix(f"{model.base_model_prefix}.")):   # checkpoints of the bare model lack the prefix
            if stored in shapes and list(shapes[stored]) != list(weight.shape):
                return f"{stored} is {list(shapes[stored])} in the weights, config.json makes it {list(weight.shape)}"
    return None
