"""models/llama.py computes what Hugging Face's LlamaForCausalLM computes, from the same state_dict."""
import pytest
import torch
from infc.models.llama import Llama, LlamaConfig, RopeScaling, inverse_frequencies
from infc.models.random_weights import random_llama

transformers = pytest.importorskip("transformers")

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
CONFIGS = {
    "gqa, tied": LlamaConfig(96, 48, 80, 2, 6, 2, 8, 128, tied=True),
    "single kv head, untied": LlamaConfig(96, 48, 80, 2, 6, 1, 8, 128, tied=False, rms_eps=1e-6),
    "equal heads, wide heads": LlamaConfig(96, 48, 80, 1, 4, 4, 16, 128, rope_theta=500_000.0),
    "llama 3 scaling": LlamaConfig(96, 48, 80, 2, 4, 2, 16, 512, rope_scaling=SCALING),
}


def peer(config: LlamaConfig) -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        scaling = config.rope_scaling
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
                 "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_max_positions}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=config.q_heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_positions, rms_norm_eps=config.rms_eps, tie_word_embeddings=config.tied, rope_parameters=rope,
        attn_implementation="sdpa")).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str) -> None:
    config = CONFIGS[name]
    model, theirs = random_llama(config, seed=3), peer(config)
    theirs.load_state_dict(model.state_dict(), strict=True)
    ids = torch.randint(config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100).repeat(2, 1)
    with torch.no_grad():
        ours = model(ids, positions)
        expected = theirs(input_ids=ids, position_ids=positions, use_cache=False).logits
        exact = theirs.double()(input_ids=ids, position_ids=positions, use_cache=False).logits
    error, their_error = (ours - exact).abs().max(), (expected - exact).abs().max()
    assert error <= 2 * their_error + torch.finfo(torch.float32).eps * exact.abs().max()


def test_scaled_frequencies_are_transformers_own() -> None:
    config = CONFIGS["llama 3 scaling"]
    assert torch.equal(inverse_frequencies(config), peer(config).model.rotary_emb.inv_freq)


def test_tied_head_is_the_embedding() -> None:
    model = random_llama(CONFIGS["gqa, tied"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_later_tokens_change_nothing_before_them() -> None:
    model = random_llama(CONFIGS["gqa, tied"])
    ids = torch.arange(12).repeat(2, 1)
    ids[1, 8:] += 40
    logits = model(ids, torch.arange(12).repeat(2, 1))
    assert torch.equal(logits[0, :8], logits[1, :8]) and not torch.equal(logits[0, 8:], logits[1, 8:])


def test_random_weights_depend_on_the_seed_alone() -> None:
    config = CONFIGS["gqa, tied"]
    a, b, c = (random_llama(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert all(torch.isfinite(w).all() for w in a.values())


def test_meta_device_costs_no_memory() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, tied=False))
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248          # Llama-3.1-8B's published count
