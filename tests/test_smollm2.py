"""SmolLM2-135M end to end: infc's tokens beside Hugging Face eager fp32 on the same weights, and bf16's distance from fp32.

The weights come from the package index (models/table.toml); a machine that cannot reach it fails here, with the reason.
"""
from pathlib import Path

import infc
import pytest
import torch
from infc.compiler.frontends import load

pytestmark = pytest.mark.slow

PROMPTS = (
    "What is the capital of France?",
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "List three uses of copper:\n1.",
    "In 1969,",
    "The derivative of x squared is",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make bread you need flour, water, salt and",
)
TOKENS = 64
LONG = "The committee met again in the afternoon and read the minutes of the previous meeting aloud. " * 9   # over one bucket of 128


@pytest.fixture(scope="module")
def hugging_face():
    """transformers' own Llama in fp32 with the weights of the GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module, _ = load("smollm2")
    c = module.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.layers,
        num_attention_heads=c.q_heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, max_position_embeddings=c.max_positions,
        rms_norm_eps=c.rms_eps, rope_theta=c.rope_theta, tie_word_embeddings=True, attention_bias=False)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(module.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("smollm2")
    return {dtype: infc.compile("smollm2", folder / dtype, options=infc.Options(dtype=dtype)).artifact for dtype in ("fp32", "bf16")}


def greedy(model, ids: list[int], count: int) -> list[int]:
    """Plain greedy decoding with transformers' own cache; no logits processor, no stop."""
    found: list[int] = []
    feed, past = torch.tensor([ids]), None
    with torch.no_grad():
        for _ in range(count):
            out = model(input_ids=feed, past_key_values=past, use_cache=True)
            past = out.past_key_values
            found.append(int(out.logits[0, -1].argmax()))
            feed = torch.tensor([[found[-1]]])
    return found


def test_fp32_tokens_are_those_of_hugging_face(hugging_face, artifacts: dict[str, Path]):
    with infc.load(artifacts["fp32"]) as model:
        prompts = [model.tokenizer.encode(text) for text in PROMPTS]
        expected = [greedy(hugging_face, ids, TOKENS) for ids in prompts]
        alone = [model.generate(ids, max_tokens=TOKENS, ignore_eos=True)[0].token_ids for ids in prompts]
        assert alone == expected

        mixed = [model.tokenizer.encode(LONG), prompts[4], prompts[1], model.tokenizer.encode(LONG * 4)]   # the last: two chunks
        together = model.generate(mixed, max_tokens=TOKENS, ignore_eos=True)
        assert len(mixed[3]) > 512, "the longest prompt must need a second chunk"
        assert [o.token_ids for o in together] == [greedy(hugging_face, ids, TOKENS) for ids in mixed]


def divergence(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(truth || other) over rows, in nats."""
    p, q = truth.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_bf16_is_no_further_from_fp32_than_hugging_face_bf16(hugging_face, artifacts: dict[str, Path]):
    with infc.load(artifacts["bf16"]) as model:
        texts = [model.tokenizer.encode(text) for text in (*PROMPTS, LONG)]
        with torch.no_grad():
            truth = torch.cat([hugging_face(input_ids=torch.tensor([ids])).logits[0] for ids in texts])
        ours = []
        for ids in texts:
            with model.sequence() as sequence:
                ours.append(torch.from_numpy(model.step([sequence], [ids], logits="all").logits[0]))
    narrow = hugging_face.to(torch.bfloat16)
    try:
        with torch.no_grad():
            theirs = torch.cat([narrow(input_ids=torch.tensor([ids])).logits[0].float() for ids in texts])
    finally:
        hugging_face.to(torch.float32)
    mine, bound = divergence(truth, torch.cat(ours)), divergence(truth, theirs)
    print(f"KL to fp32 over {len(truth)} positions: infc bf16 {mine:.3g}, transformers bf16 {bound:.3g}")
    assert mine <= bound
