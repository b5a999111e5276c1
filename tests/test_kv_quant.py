"""--kv-quant from the command line to generated tokens: golden replay, many sequences at once, dirty memory, refusals."""
import json
from pathlib import Path

import infc
import pytest
import torch
from infc.compiler import driver
from infc.compiler.errors import UserError
from infc.models.llama import Llama, LlamaConfig
from infc.passes import quantize_kv
from infc.runtime.batch import Work
from infc.runtime.session import Model
from tiny_artifact import infc as command

PROMPTS = [[(7 * i + 3 * n) % 90 + 1 for i in range(n)] for n in (41, 5, 33, 70, 1)]


def model(layers: int, head_dim: int) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=96, layers=layers, q_heads=4, kv_heads=2, head_dim=head_dim,
                             max_positions=128)).eval()


def compiled(folder: Path, kv: str, dtype: str = "bf16") -> Path:
    """`tiny`, two layers."""
    options = driver.Options(kv_quant=kv, dtype=dtype, buckets=(1, 16), max_sequences=4, reuse=False, unverified=kv != "none")
    result = driver.compile("tiny", folder / "a", options=options)
    assert result.verify["replayed"] and result.verify["error"] <= result.verify["bound"]       # golden replay, every bucket
    return result.artifact


def logits(loaded: Model, tokens: list[int], chunk: int) -> list[float]:
    """Of the last token of a prompt that goes in by chunks."""
    sequence = loaded.sequence()
    try:
        for at in range(0, len(tokens), chunk):
            loaded.run([Work(sequence, tokens[at : at + chunk], 1)])
        return loaded.executor.logits(1)[0].tolist()
    finally:
        sequence.close()


@pytest.mark.parametrize(("kv", "dtype", "dtypes"), [
    ("int8", "bf16", {"i8", "f32"}), ("none,int8", "bf16", {"bf16", "i8", "f32"}), ("int8", "fp32", {"i8", "f32"}),
])
def test_batches_chunks_and_used_blocks_answer_as_one_sequence_alone(tmp_path: Path, kv: str, dtype: str, dtypes: set[str]) -> None:
    artifact = compiled(tmp_path, kv, dtype=dtype)
    with infc.load(artifact, threads=2, kv_tokens=320) as loaded:
        assert {b.dtype for b in loaded.manifest.kv} == dtypes
        alone = [loaded.generate([p], max_tokens=12, ignore_eos=True)[0].token_ids for p in PROMPTS]
        assert len({t for ids in alone for t in ids}) > 2, "a model that repeats itself proves little"
        loaded.pool.poison()                                                                    # R24: used blocks hold NaN and code -1
        together = [o.token_ids for o in loaded.generate(PROMPTS, max_tokens=12, ignore_eos=True)]
        agree = sum(a == b for x, y in zip(alone, together, strict=True) for a, b in zip(x, y, strict=True))
        assert agree >= 0.8 * 12 * len(PROMPTS)          # another order of sums may turn a near tie, and then the text goes its own way
        whole, cut = (torch.tensor(logits(loaded, PROMPTS[0], chunk)) for chunk in (16, 5))
        assert bool(whole.isfinite().all()) and float((whole - cut).abs().max()) <= 0.05 * float(whole.abs().max())


def test_r24_windows_and_formats_layer_by_layer_over_used_blocks(tmp_path: Path) -> None:
    """30 tokens past the window, beside eager PyTorch on the unmodified model: within the pass's bound, and the same in dirty memory."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    eager = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, query_pre_attn_scalar=16, max_position_embeddings=128, sliding_window=8, attn_implementation="eager",
        layer_types=["full_attention", "sliding_attention"] * 2)).eval()
    eager.save_pretrained(tmp_path / "gemma")
    options = driver.Options(kv_quant="int8,none,int8,none", dtype="fp32", buckets=(1, 16), reuse=False, unverified=True, check="off")
    artifact = driver.compile(tmp_path / "gemma", tmp_path / "a", options=options).artifact
    texts = torch.randint(3, 320, (3, 39), generator=torch.Generator().manual_seed(1))

    def decoded(loaded: Model, text: list[int]) -> torch.Tensor:
        sequence, rows = loaded.sequence(), []
        try:
            for start, stop in ((0, 9), *((at, at + 1) for at in range(9, 39))):
                loaded.run([Work(sequence, text[start:stop], 1)])
                rows.append(loaded.executor.logits(1)[0].tolist())
        finally:
            sequence.close()
        return torch.tensor(rows, dtype=torch.float64)

    with infc.load(artifact, threads=2, kv_tokens=96) as loaded:
        found = []
        for text in (*texts.tolist(), texts[0].tolist()):
            found.append(decoded(loaded, text))
            loaded.pool.poison()
    assert all(bool(rows.isfinite().all()) for rows in found) and torch.equal(found[0], found[-1])

    def log_p(logits: torch.Tensor) -> torch.Tensor: return logits.double().log_softmax(-1)

    with torch.no_grad():
        truth, rounded = (log_p(eager.to(dtype)(input_ids=texts, use_cache=False).logits)[:, 8:]
                          for dtype in (torch.float32, torch.bfloat16))
    ours, bf16 = ((truth.exp() * (truth - other)).sum(-1).mean() for other in (torch.stack([log_p(rows) for rows in found[:3]]), rounded))
    assert 0 < ours <= quantize_kv.NOISE["int8"] * bf16


def test_the_command_line_says_what_the_cache_is(tmp_path: Path) -> None:
    done = command("compile", "tiny", "-o", tmp_path / "a.infc", "--kv-quant", "int8", "--unverified", "--quiet", "--no-reuse",
                   "--buckets", "1,16")
    assert done.returncode == 0, done.stderr
    shown = json.loads(command("inspect", tmp_path / "a.infc", "--json").stdout)["manifest"]
    assert {(b["name"].split("_")[1], b["dtype"]) for b in shown["kv"]} == {("cache", "i8"), ("scale", "f32")}
    assert [p["name"] for p in shown["passes"] if p["contract"] == "approximate"] == ["quantize_kv", "narrow_dtype"]
    assert command("verify", tmp_path / "a.infc", "--quiet").returncode == 0


@pytest.mark.parametrize(("arguments", "reason"), [
    (("--kv-quant", "fp8"), "--kv-quant fp8: the target cpu has no fp8 KV cache, only int8"),
    (("--kv-quant", "int4"), "unknown KV format 'int4'"),
    (("--kv-quant", "int8", "--allow", "exact", "--dtype", "fp32"), "--allow exact forbids --kv-quant int8"),
    (("--kv-quant", "int8:keep=1", "--unverified"), "keeps the first and last 1 layers wide, which are all 2 layers of this model"),
])
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = command("compile", "tiny", "-o", tmp_path / "a.infc", "--quiet", *arguments)
    assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "a.infc").exists()


def test_a_head_that_does_not_fit_the_kernel_is_refused(tmp_path: Path) -> None:
    options = driver.Options(kv_quant="int8", buckets=(1,), reuse=False, unverified=True, check="off")
    with pytest.raises(UserError, match="head size 24 is not supported with --kv-quant on this target: multiples of 16 up to 256"):
        driver.compile(model(2, head_dim=24), tmp_path / "a", options=options)


def test_every_choice_has_a_key_of_its_own(tmp_path: Path) -> None:
    """R26."""
    from infc.compiler import keys

    requests = {keys.request("model", driver.Options(kv_quant=kv), "isa", "compiler") for kv in ("none", "int8", "int8:keep=1", "fp8")}
    assert len(requests) == 4
