"""Folders of many architectures, tiny and random: compiled in fp32, they say what transformers eager says."""
from pathlib import Path
from typing import Any

import infc
import pytest
import torch

transformers = pytest.importorskip("transformers")

WINDOW, PROMPT, TOKENS = 16, 41, 12                               # the prompt is longer than the window, and than one block of the cache
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": 320, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
}
NORMED = SIZES | {"head_dim": 16}
GEMMA = NORMED | {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
SUNK = SIZES | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
"""Attention sinks: a factor on the result (GraniteSWA), a column beside the scores (Flint), one in the windows alone (MiMoV2Flash)."""
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3": NORMED, "Mistral": SIZES | {"sliding_window": WINDOW}, "GPT2": GPT2,
    "Llama": SIZES, "Qwen2": SIZES, "Olmo2": SIZES, "Gemma2": GEMMA, "Gemma3Text": GEMMA, "GPTJ": GPT2 | {"rotary_dim": 8},
    "GraniteSWA": SUNK | {"attention_multiplier": 0.25}, "Flint": SUNK | {"head_dim": 16, "mlp_only_layers": [0, 1]},
    "MiMoV2Flash": SUNK | {"head_dim": 16, "v_head_dim": 16, "mlp_layer_types": ["dense", "dense"]},
    "GPTNeoX": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
FAST = ("Qwen3", "Mistral", "GPT2", "Flint")                      # q/k norms, a window, learned positions, sinks: the others are slow


def random_model(kind: str) -> Any:
    """Layers large beside the embeddings, so that greedy tokens vary; norms and biases off their 1 and 0."""
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(getattr(transformers, f"{kind}Config")(**CONFIGS[kind]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            large = weight.dim() > 1 and not any(part in name for part in ("embed", "wte", "wpe", "head"))
            weight.mul_(10 if large else 1).add_(torch.randn_like(weight) * (2 if "sinks" in name else 0.05))
    return model


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The whole text again for each token: no cache, so a window or a position cannot be wrong on both sides."""
    text = list(ids)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids):]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_greedy_tokens_are_those_of_transformers_eager(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, 320, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = greedy(model, ids, TOKENS)
    assert len(set(expected)) > 2, "a model that repeats itself proves little"
    options = infc.Options(dtype="fp32", check="off", reuse=False)
    artifact = infc.compile(tmp_path / name, tmp_path / "model.infc", options=options).artifact
    with infc.load(artifact) as compiled:
        assert compiled.generate([ids], max_tokens=TOKENS, ignore_eos=True)[0].token_ids == expected


@pytest.mark.parametrize("name", [n if n == "GPT2" else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_every_step_has_a_gpu_kernel_and_the_programs_are_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified on reference operators: a buffer of another value, or of another part of a split, shows."""
    device = pytest.importorskip("infc.backends.triton.device", reason="needs the extra `gpu`")
    monkeypatch.setattr(device, "interprets", lambda: False)
    random_model(name).save_pretrained(tmp_path / name)
    options = infc.Options(target="h100", check="off", reuse=False, buckets=(1, 16, 64), max_sequences=8)
    made = infc.compile(tmp_path / name, tmp_path / "model.infc", options=options)
    assert made.verify["passed"] and made.verify["reference"] and set(made.verify["errors"]) == {*made.program, "mixed"}
    assert all(program["aten_steps"] == 0 for program in made.program.values())


def test_a_head_size_no_kernel_has_is_refused_in_one_line(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES | {"hidden_size": 96})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    with pytest.raises(infc.UserError) as caught:
        infc.compile(tmp_path / "llama", tmp_path / "model.infc", options=infc.Options(check="off", reuse=False))
    assert str(caught.value) == "head size 24 is not supported on this target: multiples of 16 up to 256"
