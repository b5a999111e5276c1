"""GGUF files of small Llamas, written with the package's own writer."""
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
from gguf import GGMLQuantizationType as Kind
from infc.compiler.frontends import gguf
from infc.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(96, 64, 96, 2, 4, 2, 16, 128, rms_eps=1e-6, rope_theta=50_000.0)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py's `permute`, as it is written there."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, model: Llama, kind: Kind = Kind.F32, *, architecture: str = "llama", skip: str = "",
          extra: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None,
          tokenizer: dict[str, Any] | None = None, kinds: dict[str, Kind] | None = None) -> Path:
    """A GGUF file of the model, matrices quantized to `kind` (those with a part of `kinds` in their name to that)."""
    config = model.config
    writer = gguf_package.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": config.layers, "context_length": config.max_positions, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.q_heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_dim, "rope.dimension_count": config.head_dim,
    }.items():
        if key != skip:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf_package.GGUFValueType.get_type(value))
    for key, value in (tokenizer or {}).items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf_package.GGUFValueType.get_type(value),
                             gguf_package.GGUFValueType.STRING if isinstance(value, list) and isinstance(value[0], str) else None)
    places = {v: k for k, v in gguf.NAMES.items()}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        stem = name.removesuffix(".weight")
        if ".layers." in stem:
            _, _, layer, *rest = stem.split(".")
            stem = f"blk.{layer}." + {v: k for k, v in gguf.LAYER_NAMES.items()}[".".join(rest)]
        else:
            stem = places[stem]
        if stem.endswith(("attn_q", "attn_k")):
            weight = interleaved(weight, config.q_heads if stem.endswith("q") else config.kv_heads)
        one = next((k for part, k in (kinds or {}).items() if part in stem), kind) if weight.ndim == 2 else Kind.F32
        if skip != f"{stem}.weight":
            writer.add_tensor(f"{stem}.weight", gguf_package.quants.quantize(np.ascontiguousarray(weight), one), raw_dtype=one)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
