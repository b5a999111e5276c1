"""A GGUF file as a Llama: weights dequantized to fp32, q and k rows put back in half-split order, tokenizer and template.

Only the llama architecture. What the file asks for and models/llama.py does not do (biases, experts, YaRN) is refused by
name; nothing in the file is ignored.
"""
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...models.fetch import sha256
from ...models.llama import Llama, LlamaConfig, inverse_frequencies
from ..errors import UserError, not_finite
from ..quant.blocks import Stored
from .gguf_file import GGUFFile
from .gguf_tokenizer import adds_bos, special_tokens, tokenizer_json
from .model_meta import llama_meta

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"                                # Llama 3.1's scaling, as one divisor per frequency
MAX_SIZE = 1 << 24                                                # of one axis or count: far beyond any model, far from overflow


class StoredLlama(Llama):
    """A Llama that knows how its matrices lie in the file: module path -> blocks, rows in the order of the weight."""

    blocks: dict[str, Stored]


def load(path: Path, digest: str | None = None) -> tuple[StoredLlama, dict[str, Any]]:
    """(model in eval mode, Graph.meta) of a GGUF file. Raises UserError with one line for a file it cannot take."""
    file = GGUFFile(path)
    config = read_config(file)
    model = build(file, config)
    return model, describe(file, config, digest or sha256(path))


def read_config(file: GGUFFile) -> LlamaConfig:
    """LlamaConfig from `llama.*` metadata and the tensor list."""
    name, data = file.path.name, file.metadata
    architecture = data.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{name} has architecture {architecture!r}; the GGUF frontend reads 'llama'. "
                        f"Give the model's Hugging Face folder instead")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{name} has no token_embd.weight: it is not a whole model")
    hidden, q_heads = _count(file, "embedding_length"), _count(file, "attention.head_count")
    head_dim = _count(file, "attention.key_length", hidden // q_heads)
    config = LlamaConfig(
        vocab_size=embedding.shape[0], hidden_size=hidden, intermediate_size=_count(file, "feed_forward_length"),
        layers=_count(file, "block_count"), q_heads=q_heads, kv_heads=_count(file, "attention.head_count_kv", q_heads), head_dim=head_dim,
        max_positions=_count(file, "context_length"), rms_eps=_shortest(_positive(file, "attention.layer_norm_rms_epsilon")),
        rope_theta=_positive(file, "rope.freq_base", 10_000.0), tied="output.weight" not in file.tensors,
    )  # fmt: skip
    _check_supported(file, config)
    return config


def _check_supported(file: GGUFFile, config: LlamaConfig) -> None:
    data, head_dim = file.metadata, config.head_dim
    rotary, value_dim = data.get("llama.rope.dimension_count", head_dim), data.get("llama.attention.value_length", head_dim)
    scaling, experts = data.get("llama.rope.scaling.type", "none"), data.get("llama.expert_count", 0)
    refusals = {
        f"{experts} experts": experts != 0,
        f"value heads of {value_dim} beside key heads of {head_dim}": value_dim != head_dim,
        f"rotary positions on {rotary} of {head_dim} values": rotary != head_dim or head_dim % 2 != 0,
        f"{config.q_heads} query heads over {config.kv_heads} kv heads": config.q_heads % config.kv_heads != 0,
        f"rope scaling {scaling!r}": scaling not in ("none", "linear"),
        f"{config.layers} layers with {len(file.tensors)} tensors": config.layers > len(file.tensors),
    }
    for what, refused in refusals.items():
        if refused:
            raise UserError(f"{file.path.name} asks for {what}, which is not a Llama this frontend reads")


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A size from `llama.KEY`; the same for all layers where the file gives one per layer."""
    value = file.metadata.get(f"llama.{key}", default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if value is None:
        raise UserError(f"{file.path.name} has no llama.{key}: it is truncated, or not a whole model")
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise UserError(f"{file.path.name} is altered, or no Llama: llama.{key} is {value!r}")
    return value


def _positive(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(f"llama.{key}", default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{file.path.name} is altered, or no Llama: llama.{key} is {value!r}")
    return float(value)


def build(file: GGUFFile, config: LlamaConfig) -> StoredLlama:
    """The model around the file's weights: made on the meta device, so each weight is in memory once."""
    with torch.device("meta"):
        model = StoredLlama(config)
    model.blocks = {}
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    places = {_place(name): name for name in file.tensors if name != ROPE_FACTORS}
    _check_tensors(file, wanted, places)

    def read(target: str) -> tuple[str, Tensor]:
        name = places[target]
        rows = file.rows(name)
        heads = {"q_proj": config.q_heads, "k_proj": config.kv_heads}.get(target.split(".")[-2])
        if heads:
            rows = half_split(rows, heads)
        values = file.dequantize(name, rows)
        made = torch.from_numpy(values)
        if not np.isfinite(values).all():
            raise UserError(f"{file.path.name} is altered: tensor {name}: {not_finite(made)}; fetch or convert the file again")
        if values.ndim == 2: model.blocks[target.removesuffix(".weight")] = Stored(rows, file.type_name(name))
        return target, made

    with ThreadPoolExecutor(os.cpu_count()) as pool:              # numpy releases the GIL in its loops
        weights = dict(pool.map(read, wanted))
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    model.model.rotary.inv_freq = _frequencies(file, config)
    return model.eval().requires_grad_(False)


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo convert_hf_to_gguf's `permute`: interleaved (2i, 2i+1) rows of each head back to (i, i + d/2)."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def describe(file: GGUFFile, config: LlamaConfig, digest: str) -> dict[str, Any]:
    """Graph.meta: everything the runtime needs to know about the model, no path in it."""
    data = file.metadata
    ends = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))     # of a text, a turn, a message
    eos = [data[key] for key in ends if key in data]
    return llama_meta(config) | {
        "name": data.get("general.name", file.path.stem),
        "license": data.get("general.license"),
        "eos_token_ids": sorted(set(eos)),
        "bos_token_id": data.get("tokenizer.ggml.bos_token_id"),
        "add_bos": adds_bos(file),
        "chat_template": data.get("tokenizer.chat_template"),
        "tokenizer_json": tokenizer_json(file),
        "special_tokens": special_tokens(file),
        "source": {"kind": "gguf", "file": file.path.name, "sha256": digest},
    }


def _place(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{kind}"
    return f"{NAMES.get(stem, stem)}.{kind}"


def _check_tensors(file: GGUFFile, wanted: dict[str, tuple[int, ...]], places: dict[str, str]) -> None:
    name = file.path.name
    missing, extra = sorted(set(wanted) - set(places)), sorted(set(places) - set(wanted))
    if missing:
        raise UserError(f"{name} lacks {len(missing)} of {len(wanted)} tensors, the first is {missing[0]}: it is not a whole model")
    if extra:
        raise UserError(f"{name} has {len(extra)} tensors a Llama has no place for, the first is {places[extra[0]]}")
    for target, shape in wanted.items():
        found = file.tensors[places[target]].shape
        if found != shape:
            raise UserError(f"{name}: tensor {places[target]} has shape {list(found)}, the metadata says {list(shape)}")


def _frequencies(file: GGUFFile, config: LlamaConfig) -> Tensor:
    frequencies = inverse_frequencies(config)
    if file.metadata.get("llama.rope.scaling.type") == "linear":
        frequencies = frequencies / _positive(file, "rope.scaling.factor")
    if ROPE_FACTORS in file.tensors:
        factors = torch.from_numpy(file.dequantize(ROPE_FACTORS, file.rows(ROPE_FACTORS)))
        if factors.shape != frequencies.shape or not bool((factors > 0).all()):
            raise UserError(f"{file.path.name}: {ROPE_FACTORS} is not {len(frequencies)} positive factors")
        frequencies = frequencies / factors
    return frequencies


def _shortest(value: float) -> float:
    """The decimal a 32-bit float was written from: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
