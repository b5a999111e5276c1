"""A Hugging Face folder out of a GGUF file: fp32 safetensors, config, tokenizer. python peer_checkpoint.py FILE.gguf FOLDER"""

import json
import sys
from pathlib import Path

from infc.compiler.frontends import gguf
from safetensors.torch import save_file


def main(given: str, folder: str) -> None:
    """Write the checkpoint that transformers, optimum and onnxruntime-genai read."""
    model, meta = gguf.load(Path(given))
    made = Path(folder)
    made.mkdir(parents=True)
    tied = model.config.tied
    weights = {name: w.contiguous() for name, w in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    end, begin = meta["eos_token_ids"][0], meta["bos_token_id"]
    tokens = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    config = model.config
    write(
        made / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.q_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.rms_eps,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": tied,
            "attention_bias": False,
            "mlp_bias": False,
            **tokens,
        },
    )
    write(made / "generation_config.json", tokens)
    (made / "tokenizer.json").write_text(
        meta["tokenizer_json"] if isinstance(meta["tokenizer_json"], str) else json.dumps(meta["tokenizer_json"])
    )
    write(
        made / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": meta["chat_template"],
            **meta["special_tokens"],
            "model_max_length": config.max_positions,
        },
    )


def write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
