"""A Hugging Face folder is captured as transformers runs it; an incomplete or damaged one becomes one clear line."""
import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from infc.compiler import driver  # noqa: E402
from infc.compiler.errors import UserError  # noqa: E402
from infc.compiler.frontends import capture, load  # noqa: E402
from infc.compiler.frontends.checkpoint_folder import check_safetensors  # noqa: E402
from infc.compiler.frontends.widened import widened  # noqa: E402
from infc.models.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    made = tmp_path / "checkpoint"
    model.save_pretrained(made)
    (made / "tokenizer.json").write_text(byte_tokenizer())
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>",
                                                            "eos_token": {"content": "<|im_end|>"}}))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return made


def line(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def test_the_graph_is_transformers_model(folder: Path) -> None:
    graph = capture(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for batch, length in ((1, 1), (2, 3), (3, 33)):
        ids, positions = graph.sample_inputs(batch, length)        # type: ignore[misc]
        with torch.no_grad():
            expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(graph.run(ids, positions)[0], expected)
    assert "model_embed_tokens_weight" in graph.weights and len(graph.weights) == 2 * 9 + 2 + 1
    assert all("hf" not in origin.split(".") for node in graph.nodes for origin in node.meta["origin"])


def test_a_checkpoint_in_fp16_is_captured_in_fp32(folder: Path) -> None:
    """Each weight as it is stored, exactly; the arithmetic is fp32's."""
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    graph = capture(folder)
    assert stored.dtype == torch.float16 and {w.dtype for w in graph.weights.values() if w.is_floating_point()} == {torch.float32}
    assert torch.equal(graph.weights["model_embed_tokens_weight"], stored.float())


def test_meta(folder: Path) -> None:
    _, meta = load(folder)
    assert (meta["architecture"], meta["layers"], meta["q_heads"], meta["kv_heads"], meta["head_dim"]) == ("llama", 2, 6, 2, 8)
    assert (meta["eos_token_ids"], meta["bos_token_id"], meta["add_bos"], meta["max_positions"]) == ([0, 2], 1, False, 64)
    assert meta["special_tokens"] == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} and meta["chat_template"] == CHAT_TEMPLATE
    assert meta["name"] == "checkpoint" and str(folder.parent) not in json.dumps(meta)
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert load(folder)[1]["chat_template"] == "{{ 1 }}"


def test_a_model_in_memory() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(UserError, match="training mode"):
        capture(model.train())
    graph = capture(model.eval())
    assert graph.meta["kv_heads"] == 2 and graph.meta["tokenizer_json"] is None


def _raises(model: Any, ids: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


def _writes(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.lm_head.weight[ids] * model.count.add_(1)


def _fixes_the_length(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.lm_head.weight[ids].reshape(-1, 7, 48)


def _asks_for_a_value(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.lm_head.weight[ids] * (2 if ids.sum() > 0 else 1)


@pytest.mark.parametrize(("forward", "said"), [
    (_raises, "^LlamaForCausalLM cannot be captured: no such thing"), (_writes, "^the module writes to count while"),
    (_fixes_the_length, "^LlamaForCausalLM fixes a size"), (_asks_for_a_value, "decides on the values"),
])
def test_messages_name_what_was_given(forward: Any, said: str) -> None:
    """Not the module that infc puts around it, nor paths in that one."""
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    model.register_buffer("count", torch.zeros(1))
    model.forward = lambda input_ids, **_: SimpleNamespace(logits=forward(model, input_ids))
    with pytest.raises(UserError, match=said) as caught: capture(model)
    assert "Stateless" not in str(caught.value) and "hf" not in str(caught.value)


def test_training_mode_is_told_by_the_modules_own_path() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()
    with pytest.raises(UserError, match=r"^the module \(LlamaForCausalLM\) is in training mode"): capture(model)
    model.eval().model.layers[1].mlp.train()
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp \(LlamaMLP\) is in training mode"): capture(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_captured_in_fp32(dtype: torch.dtype) -> None:
    """Each weight as it is held, exactly, as a checkpoint's; the model given stays as it is, and all passes run on its graph."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).eval().to(dtype)
    held, said = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list[str]()
    graph = capture(model, progress=said.append)
    assert {w.dtype for w in graph.weights.values() if w.is_floating_point()} == {torch.float32} and len(graph.weights) == 2 * 9 + 2 + 1
    assert torch.equal(graph.weights["model_embed_tokens_weight"], held["model.embed_tokens.weight"].float())
    assert said[0] == f"LlamaForCausalLM holds {str(dtype)[6:]}: its weights are widened to fp32, as a checkpoint's are when it is read"
    assert all(tensor.dtype == dtype and torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())
    ids, positions = graph.sample_inputs(2, 3)                     # type: ignore[misc]
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(graph.run(ids, positions)[0], expected)
    report, final = driver.passes_of(model, driver.Options(), lambda event: None)
    assert {one.name: one.fired for one in report.passes}["sample_tokens"] == 1 and final.outputs == ["token", "logits"]


def test_a_widened_module_shares_what_is_wide() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert widened(module, pytest.fail) is module
    module[0].to(torch.bfloat16)
    wide = widened(module, lambda line: None)
    assert wide is not module and wide[1].weight is module[1].weight and wide[0].weight.dtype == torch.float32
    assert module[0].weight.dtype == torch.bfloat16 and torch.equal(wide[0].weight, module[0].weight.float())


@pytest.mark.parametrize("name", ["GPT2", "Qwen3", "Gemma2"])
def test_other_architectures_capture_too(name: str) -> None:
    sizes = dict(SIZES) | ({"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6} if name == "GPT2" else {"head_dim": 8})
    config = getattr(transformers, f"{name}Config")(**sizes)
    graph = capture(getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config).eval())
    assert graph.meta["layers"] == 2 and graph.meta["max_positions"] == 64 and sorted(graph.symbols.values()) == ["B", "S"]


# -------------------------------------------------------------------------------------------------------------- bad folders

def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in line(folder)


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "is no readable JSON" in line(folder)
    (folder / "config.json").write_text("[]")
    assert "an object is expected" in line(folder)


def test_unknown_architecture(folder: Path) -> None:
    edit(folder, "config.json", model_type="lama")
    assert "model_type 'lama'" in (found := line(folder)) and "did you mean 'llama'?" in found


def test_remote_code(folder: Path) -> None:
    edit(folder, "config.json", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    assert "runs no code from a checkpoint" in line(folder)


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in line(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "has no model.safetensors" in line(folder)


def test_missing_and_foreign_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))
    assert "lacks 1 of 2 weight files, the first is model-00002-of-00002.safetensors" in line(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert "files outside the folder" in line(folder)


def test_shards_are_put_together(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    whole = load(folder)[0].state_dict()
    (folder / "model.safetensors.index.json").unlink()
    assert all(torch.equal(whole[name], weight) for name, weight in load(folder)[0].state_dict().items())


def test_every_truncation_of_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 4, 8, 60, 400, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert "truncated" in line(folder), size


def test_an_altered_header(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"

    def head(entry: dict[str, Any], body: bytes = bytes(16)) -> None:
        text = json.dumps({"w": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)

    head({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]})
    check_safetensors(path)
    for entry in ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]}, {"dtype": "F32", "shape": [4]},
                  {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}, {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
                  {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, {"dtype": "F32", "shape": [4], "data_offsets": 7}):
        head(entry)
        with pytest.raises(UserError, match="altered"):
            check_safetensors(path)


def test_a_missing_weight_is_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights, the first is model.layers.1.mlp.up_proj.weight" in line(folder)


def altered(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.lora_A", "lm_head.weight_scale"])
def test_a_tensor_that_has_no_place_is_not_left_out(folder: Path, name: str) -> None:
    altered(folder, lambda weights: weights.update({name: torch.ones(48)}))
    assert f"has 1 tensors that its config.json has no place for, the first is {name}: without them" in line(folder)


def test_layers_that_config_does_not_count(folder: Path) -> None:
    edit(folder, "config.json", num_hidden_layers=1)
    assert "has 9 tensors that its config.json has no place for, the first is model.layers.1." in line(folder)


def test_what_old_checkpoints_keep_beside_their_weights_is_no_weight(folder: Path) -> None:
    altered(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(folder)


def test_codes_are_not_taken_for_weights(folder: Path) -> None:
    def quantize(weights: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        weights[name] = (weights[name] * 1000).round().to(torch.int8)

    altered(folder, quantize)
    assert "model.layers.1.mlp.up_proj.weight is stored as I8, codes of a quantization that infc does not know" in line(folder)


@pytest.mark.parametrize("given", [{"quant_method": "zzz"}, {"quant_method": "gptq", "bits": 4}, 5])
def test_a_config_of_quantized_weights(folder: Path, given: Any) -> None:
    edit(folder, "config.json", quantization_config=given)
    assert "config.json says that its weights are quantized (quantization_config): infc takes wide weights" in line(folder)


def test_a_weight_of_another_shape(folder: Path) -> None:
    edit(folder, "config.json", intermediate_size=128)
    assert line(folder) == ("transformers cannot load checkpoint: model.layers.0.mlp.gate_proj.weight is [64, 48] in the weights, "
                            "config.json makes it [128, 48]")
    edit(folder, "config.json", intermediate_size=64, num_key_value_heads=3)
    assert "model.layers.0.self_attn.k_proj.weight is [16, 48]" in line(folder)
    edit(folder, "config.json", num_key_value_heads=2, vocab_size=301)
    assert "model.embed_tokens.weight is [300, 48] in the weights, config.json makes it [301, 48]" in line(folder)


@pytest.mark.parametrize("changes, reason", [
    ({"num_attention_heads": 5}, "(48) is not a multiple of the number of attention heads (5)"),
    ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float, got str (value: 'x')"),
    ({"eos_token_id": "x"}, "eos_token_id"),
])
def test_a_field_of_another_kind(folder: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], reason: str) -> None:
    edit(folder, "config.json", **changes)
    found = line(folder)
    assert found.startswith("checkpoint/config.json: ") and reason in found
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("eos", ["x", 9999, 300, -1, [2, "x"], 2.0, True, {"a": 1}])
def test_a_stop_token_outside_the_vocabulary(folder: Path, eos: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    wrong = eos[1] if isinstance(eos, list) else eos
    found = line(folder)
    assert found == f"eos_token_id {wrong!r} in checkpoint/generation_config.json is no token: the vocabulary has 300, 0 to 299"


def test_stop_tokens_of_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load(folder)[1]["eos_token_ids"] == [2]
    edit(folder, "config.json", eos_token_id=[5, 2, 5])
    assert load(folder)[1]["eos_token_ids"] == [2, 5]
    edit(folder, "config.json", eos_token_id=None)
    assert load(folder)[1]["eos_token_ids"] == []
    edit(folder, "config.json", eos_token_id=300)
    assert "eos_token_id 300 in checkpoint/config.json is no token" in line(folder)


def test_a_model_without_sdpa_is_captured_as_eager(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**SIZES, head_dim=8)
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    said: list[str] = []
    module, _ = load(tmp_path / "gemma", said.append)
    assert module.hf.config._attn_implementation == "eager"
    assert "transformers has no sdpa attention for gemma: its eager attention is captured" in said


def test_weights_that_are_not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weight model\.norm\.weight: 1 value is not finite, the first at \[3\]: inf; mend the checkpoint"):
        capture(folder)


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "tokenizer.json cannot be read" in line(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0", "model"'])
@pytest.mark.parametrize("bos", [1, None])
def test_a_tokenizer_is_read_at_once(folder: Path, text: str, bos: int | None) -> None:
    (folder / "tokenizer.json").write_text(text)
    edit(folder, "config.json", bos_token_id=bos)
    assert "tokenizer.json cannot be read" in line(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_files_that_are_no_text(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\xff\xfe{}")
    assert f"{name} is no " in line(folder)


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("tokenizer_config.json", {"chat_template": [1, 2]}, "chat_template is neither a text nor a list of named ones"),
    ("tokenizer_config.json", {"chat_template": [{"x": 1}]}, "chat_template is neither a text nor a list of named ones"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is neither a text nor a list of named ones"),
    ("tokenizer_config.json", {"bos_token": {"x": 1}}, "tokenizer_config.json: bos_token is {'x': 1}, a text is expected"),
    ("tokenizer_config.json", {"eos_token": 7}, "tokenizer_config.json: eos_token is 7, a text is expected"),
    ("config.json", {"model_type": ["llama"]}, "has model_type ['llama'], no causal language model"),
    ("config.json", {"model_type": {}}, "has model_type {}, no causal language model"),
    ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings is 0: a model has at least one position"),
    ("config.json", {"max_position_embeddings": -5}, "max_position_embeddings is -5"),
    ("model.safetensors.index.json", {"weight_map": [1, 2]}, "names files outside the folder, or none"),
    ("model.safetensors.index.json", {"weight_map": "x"}, "names files outside the folder, or none"),
])
def test_fields_of_another_kind(folder: Path, name: str, changes: dict[str, Any], reason: str) -> None:
    edit(folder, name, **changes)
    assert reason in line(folder)


@pytest.mark.parametrize(("old", "new"), [('"F32"', '"G32"'), ('"__metadata__":{"format":"pt"}', '"__metadata__":5'),
                                          ("[0,", "[false,")])
def test_a_header_that_only_safetensors_finds_odd(folder: Path, old: str, new: str) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + size].decode()
    assert old in header
    head = header.replace(old, new, 1).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + size :])
    assert line(folder).startswith(("transformers cannot load checkpoint: ", "model.safetensors is altered: "))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_brackets_without_end(folder: Path, name: str) -> None:
    deep = b"[" * 100_000
    (folder / name).write_bytes((struct.pack("<Q", len(deep)) if name.endswith("safetensors") else b"") + deep)
    assert "is no readable JSON" in line(folder) if name == "config.json" else "is altered: its header is no JSON" in line(folder)


def test_paths_and_names() -> None:
    for spec, message in (("./nowhere", "does not exist"), ("nowhere.gguf", "does not exist"), ("smolm2", "did you mean 'smollm2'?")):
        with pytest.raises(UserError, match=message.replace("?", r"\?")):
            load(spec)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a \.gguf file, a Hugging Face folder"):
        load(tmp_path / "model.bin")
