"""Evaluators agree where they run one function; a weight's error is the error of its product; what is wrong stands out."""
import pytest
import torch
from infc import passes
from infc.compiler.frontends import capture
from infc.compiler.ops.codes import spread, unpack_codes
from infc.compiler.pipeline import run_pipeline
from infc.compiler.quality.evaluate import CapturedEvaluator, StepEvaluator
from infc.compiler.quality.layers import Layer, bits_per_weight, layers, most_to_blame, probes
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse

IDS = list(range(3, 99))
QKV = "model_layers_1_self_attn_qkv_proj_weight"


@pytest.fixture(scope="module")
def captured():
    return capture("random:tiny?layers=3")


def step_graph(captured, quant: str = "none", until: str = "", dtype: str = "fp32"):
    """The step graph of a compile, or as it is when the pass `until` begins."""
    graph = captured.copy()
    scheme = parse(quant)
    options = {"dtype": dtype, "max_sequences": 16, "quantization": None if scheme is None else Plan(scheme)}
    chosen = passes.pipeline(dtype, quant != "none")
    chosen = chosen[: next((i for i, one in enumerate(chosen) if one.name == until), len(chosen))]
    run_pipeline(graph, chosen, allow="approximate", check="off", options=options)
    return graph


def test_a_step_graph_says_what_the_captured_graph_says(captured):
    truth = CapturedEvaluator(captured).logits(IDS, first=10)
    found = StepEvaluator(step_graph(captured)).logits(IDS, first=10)
    assert found.shape == (86, 320) and float((found - truth).abs().max()) < 1e-4 * float(truth.abs().max())
    assert torch.equal(CapturedEvaluator(captured).logits(IDS)[10:], truth)


def test_weights_can_be_replaced_and_are_put_back(captured):
    graph = step_graph(captured)
    evaluator = StepEvaluator(graph)
    plain = evaluator.logits(IDS)
    assert not torch.equal(evaluator.logits(IDS, {QKV: torch.zeros_like(graph.weights[QKV])}), plain)
    assert torch.equal(evaluator.logits(IDS), plain)
    assert torch.equal(evaluator.logits(IDS, {QKV: graph.weights[QKV].clone()}), plain)


def test_the_sampler_is_left_out(captured):
    seen = []

    def call(node, args, kwargs):
        seen.append(str(node.target))
        return node.target(*args, **kwargs)

    StepEvaluator(step_graph(captured)).logits(IDS, call=call)
    assert "infc.paged_attention.default" in seen and not any("sample" in name for name in seen)


@pytest.mark.parametrize("quant", ["w8", "w4", "w4:g64:asym", "w8a8", "w4:channel", "fp8", "fp8a8:tensor", "fp8:g32"])
def test_the_error_is_that_of_the_product(captured, quant: str):
    wide = step_graph(captured, quant, until="quantize_weights")
    found = probes(wide, IDS)
    graph = step_graph(captured, quant)
    every = {layer.weight: layer for layer in layers(graph, found)}
    assert every.keys() == found.keys() and len(every) == 4 * 3 + 1
    for name, layer in every.items():
        x, scheme = found[name].given, parse(layer.scheme)
        codes, scale, offset = (graph.weights.get(f"{name}_{part}") for part in ("codes", "scale", "offset"))
        k = wide.weights[name].shape[1]
        value = codes.double() if scheme.e4m3 else unpack_codes(codes, scheme.bits, k).double()
        if offset is None and not scheme.e4m3: value -= 2 ** (scheme.bits - 1)
        value = value * spread(scale.double(), k, scheme.group)
        if offset is not None: value = value + spread(offset.double(), k, scheme.group)
        w = wide.weights[name].double()
        assert layer.error == pytest.approx(float((x.double() @ (w - value).T).norm() / (x.double() @ w.T).norm()), rel=1e-3)
        assert layer.bits == scheme.stored_bits(k) and layer.values == w.numel() and layer.modules
    assert every[QKV].scheme == str(parse(quant))
    assert every["model_embed_tokens_weight"].scheme.startswith("fp8" if "fp8" in quant else "w8")
    assert {"model.embed_tokens", "lm_head"} <= set(every["model_embed_tokens_weight"].modules)


def test_wide_weights_are_listed_without_an_error(captured):
    every = layers(step_graph(captured, dtype="bf16"), {})
    assert len(every) == 13 and {(layer.scheme, layer.bits, layer.error) for layer in every} == {("bf16", 16.0, None)}
    assert bits_per_weight(every) == 16.0


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.2])
@pytest.mark.parametrize("name", [QKV, "model_layers_2_mlp_down_proj_weight", "model_embed_tokens_weight"])
def test_wrong_scales_stand_out(captured, name: str, factor: float):
    graph = step_graph(captured, "w8")
    found = probes(step_graph(captured, "w8", until="quantize_weights"), IDS)
    assert most_to_blame(layers(graph, found)).startswith("no layer stands out: it is the format")
    graph.weights[f"{name}_scale"] = graph.weights[f"{name}_scale"] * factor
    assert most_to_blame(layers(graph, found)).startswith(f"most to blame is {name} (")


def test_a_kind_is_compared_with_itself():
    every = [Layer(f"q{i}", [f"layers.{i}.q"], "w4", 4.5, 100, 0.1) for i in range(4)]
    every += [Layer(f"d{i}", [f"layers.{i}.d"], "w4", 4.5, 300, 0.5) for i in range(4)]
    assert "no layer stands out" in most_to_blame(every)
    every[1] = Layer("q1", ["layers.1.q"], "w4", 4.5, 100, 0.45)                       # less than any d, and four times what a q has
    assert most_to_blame(every).startswith("most to blame is q1 (layers.1.q, w4): the error of its product is 0.45, 4.5 times")
    every[5] = Layer("d1", ["layers.1.d"], "w4", 4.5, 300, float("nan"))
    assert most_to_blame(every).startswith("most to blame is d1")
    assert most_to_blame([Layer("a", [], "bf16", 16.0, 100)]) == "no weight is held as codes, so it is the KV cache's format, or the dtype"
    assert bits_per_weight([Layer("a", [], "w8", 8.5, 100), Layer("b", [], "w4", 4.5, 300)]) == 5.5
