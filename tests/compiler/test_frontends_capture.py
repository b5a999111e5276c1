"""Capturing a module: dynamic sizes, one placeholder per weight, honest refusals, and the graph is the module."""
import io
import logging
import re
import sys
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from infc.compiler import ir
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.frontends import capture, composites
from infc.compiler.frontends.compare import compare
from infc.compiler.frontends.hushed import hushed
from infc.compiler.frontends.samples import DecoderSamples
from infc.models.llama import LlamaConfig
from infc.models.random_weights import random_llama
from torch import Tensor, nn

CONFIG = LlamaConfig(96, 48, 80, 2, 6, 2, 8, 64)
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
DYNAMIC = {"x": {0: "B", 1: "S"}}


class Module(nn.Module):
    """A module around a function of x."""

    def __init__(self, function, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.register_buffer(name, part) if isinstance(part, Tensor) else self.add_module(name, part)
        self.eval()

    def forward(self, x: Tensor):
        return self.function(self, x)


def take(function, **parts: nn.Module | Tensor) -> ir.Graph:
    return capture(Module(function, **parts), (X,), DYNAMIC)


# -------------------------------------------------------------------------------------------------------------- weights

@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    model = random_llama(CONFIG)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    said = rf"^weight model\.layers\.1\.mlp\.up_proj\.weight: 1 value is not finite, the first at \[3, 5\]: {value}; mend the checkpoint$"
    with pytest.raises(UserError, match=said): capture(model)


@pytest.mark.parametrize("fault", [{"rope_theta": -1.0}, {"rope_theta": 0.0}, {"rope_theta": float("nan")}, {"rms_eps": float("nan")}],
                         ids=str)
def test_a_module_whose_own_logits_are_not_finite(fault: dict[str, float]) -> None:
    said = r"^the module's own logits are not finite \(input_ids \[\d+, \d+\], .* the first at .*: nan\); mend"
    with pytest.raises(UserError, match=said): capture(random_llama(replace(CONFIG, **fault)))


def test_a_buffer_may_hold_infinity() -> None:
    mask = torch.tensor([0.0] * 6 + [float("-inf")] * 2)
    take(lambda module, x: torch.softmax(x + module.mask, -1), mask=mask)


# --------------------------------------------------------------------------------------------------------- a decoder

def test_a_decoder_is_stateless_dynamic_and_named() -> None:
    graph = capture(random_llama(CONFIG))
    ir.verify(graph, "captured")
    assert (graph.inputs, graph.outputs, sorted(graph.symbols.values())) == (["input_ids", "position_ids"], ["logits"], ["B", "S"])
    assert ir.type_text(graph.placeholders["input_ids"].meta["val"], graph.symbols) == "i64[B,S]"
    assert ir.type_text(graph.output.args[0][0].meta["val"], graph.symbols) == "f32[B,S,96]"
    for node in graph.nodes:
        if node.op == "call_function" and "linear" in node.name:
            assert re.match(r"llama\.py:\d+ ", node.meta["line"]) and node.meta["origin"][0].startswith(("model.layers.", "lm_head"))
            assert node.meta["passes"] == []


def test_a_decoder_runs_at_any_batch_and_length_bit_for_bit() -> None:
    model = random_llama(CONFIG)
    graph, samples = capture(model), DecoderSamples(CONFIG.vocab_size, CONFIG.max_positions)
    for batch, length in ((1, 1), (1, 9), (4, 1), (2, 2), (7, 5), (3, 64)):
        sample = samples.at(batch, length, seed=batch)
        assert torch.equal(graph.run(*sample)[0], model(*sample)), (batch, length)


def test_tied_weights_are_one_placeholder() -> None:
    graph = capture(random_llama(CONFIG))
    embedding = graph.placeholders["model_embed_tokens_weight"]
    assert {ir.target_name(user.target) for user in embedding.users} == {"aten.embedding", "aten.linear"}
    assert "lm_head_weight" not in graph.weights and len(graph.weights) == 2 * 9 + 2 + 1


def test_samples_are_real_token_ids() -> None:
    samples = DecoderSamples(96, 64)
    listed = samples()
    assert [tuple(ids.shape) for ids, _ in listed[:2]] == [(2, 9), (1, 1)]
    assert all(ids.shape == positions.shape for ids, positions in listed)
    ids, positions = samples(4, 9, 5)
    assert ids.dtype == positions.dtype == torch.int64 and set(ids.flatten().tolist()) <= set(range(96))
    assert torch.equal(positions[3], torch.arange(9))
    assert torch.equal(samples(4, 9, 5)[0], ids) and not torch.equal(samples(4, 9, 6)[0], ids)


# ------------------------------------------------------------------------------------------------------- weights, outputs

def test_weights_shared_by_storage_and_views_of_one_storage() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = nn.Parameter(first.weight.detach())             # another Parameter over the same memory
    graph = take(lambda m, x: m.a(m.b(x)), a=first, b=second)
    assert list(graph.weights) == ["a_weight"]
    table = torch.randn(4, 8)
    graph = take(lambda m, x: x + m.row + m.other, row=table[0], other=table[1])
    assert len(graph.weights) == 2                                  # one storage, two places in it: two weights


def test_buffers_and_constants_become_weights() -> None:
    graph = take(lambda m, x: x * m.scale + torch.tensor([1.0, 2.0] * 4), scale=torch.rand(8))
    assert len(graph.weights) == 2 and "scale" in graph.weights
    assert not any(node.op == "get_attr" for node in graph.nodes)


def test_unused_weights_are_left_out() -> None:
    assert list(take(lambda m, x: m.used(x), used=nn.Linear(8, 4), unused=nn.Linear(8, 4)).weights) == ["used_weight", "used_bias"]


def test_outputs_keep_number_and_order() -> None:
    graph = take(lambda m, x: (x + 1, x, {"again": x + 1}))
    found = graph.run(X)
    assert len(found) == 3 and torch.equal(found[1], X) and torch.equal(found[0], found[2])
    same = take(lambda m, x: [y := x * 2, y])
    assert same.output.args[0][0] is same.output.args[0][1]


def test_weight_names_do_not_collide_with_inputs() -> None:
    graph = take(lambda m, x: x + m._parts_x, _parts_x=torch.ones(8))
    assert graph.inputs == ["x"] and torch.equal(graph.run(X)[0], X + 1)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.x

    graph = capture(Named().eval(), (X,), DYNAMIC)
    assert graph.inputs == ["x"] and torch.equal(graph.run(X)[0], X + 1)


# ------------------------------------------------------------------------------------------------------------- refusals

def refusal(function, error: type[Exception] = UserError, **parts: nn.Module | Tensor) -> str:
    with pytest.raises(error) as caught:
        take(function, **parts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(8)])
def test_training_mode(part: nn.Module) -> None:
    module = Module(lambda m, x: m.part(x.flatten(0, 1)), part=part)
    module.part.train()
    with pytest.raises(UserError, match=rf"part \({type(part).__name__}\) is in training mode"):
        capture(module, (X,), DYNAMIC)
    module.eval()
    assert torch.equal(capture(module, (X,), DYNAMIC).run(X)[0], module(X))


@pytest.mark.parametrize("function", [
    lambda m, x: F.dropout(x, 0.5, training=True),
    lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    lambda m, x: x + torch.rand_like(x),
    lambda m, x: F.batch_norm(x.transpose(1, 2), None, None, training=True),
])
def test_randomness_and_batch_statistics(function) -> None:
    assert "test_frontends_capture.py:" in refusal(function)


def test_a_size_the_code_fixes_is_named_with_its_line() -> None:
    message = refusal(lambda m, x: x.view(x.shape[0], -1) if x.shape[1] != 5 else x)
    assert "S (axis 1 of x) can only be 5: test_frontends_capture.py:" in message and "x.shape[1] != 5" in message
    message = refusal(lambda m, x: x + torch.ones(3, 5, 8))
    assert "B (axis 0 of x) can only be 3" in message and "S (axis 1 of x) can only be 5" in message


def test_control_flow_on_values() -> None:
    message = refusal(lambda m, x: x if x.sum() > 0 else -x)
    assert "decides on the values of a tensor" in message and "x.sum() > 0" in message


def test_what_pytorch_logs_and_prints_meanwhile_is_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    logger, logged = logging.getLogger("torch.fx.experimental.symbolic_shapes"), io.StringIO()
    handler = logging.StreamHandler(logged)
    logger.addHandler(handler)
    try:
        refusal(lambda m, x: x if x.sum() > 0 else -x)
        with hushed():
            print("a line", file=sys.stderr)
            other = threading.Thread(target=lambda: print("a bar", file=sys.stderr, flush=True))
            other.start()
            other.join()
        assert (logged.getvalue(), capsys.readouterr().err) == ("", "a bar\n")
        logger.warning("after")
        print("after", file=sys.stderr)
        assert logged.getvalue() == "after\n" and capsys.readouterr().err.endswith("after\n")
    finally:
        logger.removeHandler(handler)


def test_a_module_that_writes_to_itself() -> None:
    assert "writes to count" in refusal(lambda m, x: x + m.count.add_(1), count=torch.zeros(1))


def test_a_module_that_fails() -> None:
    assert "cannot be captured" in refusal(lambda m, x: x @ torch.ones(3, 3))


def test_example_sizes_that_would_be_baked_in() -> None:
    for shape, message in (((1, 5, 8), "dim B is 1"), ((3, 0, 8), "dim S is 0"), ((5, 5, 8), "dims B and S are both 5")):
        with pytest.raises(UserError, match=message):
            capture(Module(lambda m, x: x + 1), (torch.zeros(shape),), DYNAMIC)
    with pytest.raises(UserError, match="dynamic names"):
        capture(Module(lambda m, x: x + 1), (X,), {"y": {0: "B"}})


def test_an_unknown_module_without_inputs() -> None:
    with pytest.raises(UserError, match="give example inputs"):
        capture(nn.Linear(2, 2))


def test_a_graph_that_is_not_the_module_is_caught() -> None:
    model = random_llama(CONFIG)
    graph = capture(model)
    graph.weights["model_norm_weight"] = graph.weights["model_norm_weight"] * 1.001
    with pytest.raises(CheckFailed, match="differs from the module in logits"):
        compare(graph, model)


# ----------------------------------------------------------------------------------------------------------- composites

SPELLINGS = {
    "reshape of a view": lambda m, x: x.reshape(x.shape[0], -1),
    "reshape that copies": lambda m, x: x.transpose(1, 2).reshape(x.shape[0], -1),
    "expand and reshape": lambda m, x: x[:, :, None].expand(-1, -1, 3, -1).reshape(x.shape[0], x.shape[1] * 3, 8),
    "casts": lambda m, x: x.to(torch.float64).float().to(x.dtype).to(x).type_as(x).to("cpu") + x.half().float(),
    "contiguous": lambda m, x: x.contiguous() + x.transpose(0, 1).contiguous().transpose(0, 1),
    "chunk": lambda m, x: torch.cat(x.chunk(3, dim=-1)[::-1], -1),
    "narrow": lambda m, x: x.narrow(-1, 2, 3),
    "flatten": lambda m, x: x.flatten(0, 1) + x.transpose(0, 1).flatten().sum(),
    "unflatten": lambda m, x: x.unflatten(-1, (2, 4)).flatten(-2),
    "as another": lambda m, x: x.view_as(x + 1) + x[:1].expand_as(x),
    "swap": lambda m, x: x.swapaxes(0, 2).swapdims(0, 2),
    "idle dropout": lambda m, x: F.dropout(x, 0.5, training=False) + 1,
    "mutation of a temporary": lambda m, x: (x * 2).add_(1).relu_(),
}

WE_LEAVE_OUT = {"casts": {"aten.type_as.default"}, "idle dropout": {"aten.clone.default"}}      # they do nothing there


@pytest.mark.parametrize("name", SPELLINGS)
def test_composites_lower_as_run_decompositions_does(name: str) -> None:
    module = Module(SPELLINGS[name])
    dims = {0: torch.export.Dim("B"), 1: torch.export.Dim("S")}
    with torch.no_grad():
        program = torch.export.export(module, (X,), dynamic_shapes={"x": dims}, strict=False)
    lowered, official = composites.lower(program.graph), program.run_decompositions({})
    assert (lowered is None) == (name == "mutation of a temporary")
    if lowered is not None:
        left_out = operators(official.graph) - operators(lowered)
        assert set(left_out) == WE_LEAVE_OUT.get(name, set()) and not operators(lowered) - operators(official.graph)
        for left in lowered.nodes:
            assert not (left.op == "call_function" and composites.needs_functionalization(left.target))
    graph = take(SPELLINGS[name])
    for shape in ((3, 5, 8), (1, 1, 8), (2, 7, 8)):
        x = torch.randn(shape)
        assert torch.equal(graph.run(x)[0], module(x)), shape


def operators(graph: torch.fx.Graph) -> Counter[str]:
    """What is computed; sizes, asserts and dead nodes aside."""
    graph.eliminate_dead_code()
    names = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return Counter(name for name in names if not re.search("sym_size|assert|built-in", name))
