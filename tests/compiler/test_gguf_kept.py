"""A GGUF's low-bit blocks become codes bit for bit: merged, permuted and shared as their weights are, or they are refused with a reason."""
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

gguf_package = pytest.importorskip("gguf")
from decoders import before  # noqa: E402
from gguf import GGML_QUANT_SIZES  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from gguf_files import CONFIG, write  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from infc import passes  # noqa: E402
from infc.compiler.errors import UserError  # noqa: E402
from infc.compiler.frontends import capture  # noqa: E402
from infc.compiler.ir import Graph  # noqa: E402
from infc.compiler.quant import recipe  # noqa: E402
from infc.compiler.quant.blocks import KINDS, Stored, _read, format_of, kept, stored  # noqa: E402
from infc.compiler.quant.matrices import matrices  # noqa: E402
from infc.compiler.quant.plan import Plan  # noqa: E402
from infc.compiler.quant.rounding import Quantized  # noqa: E402
from infc.compiler.quant.scheme import Scheme  # noqa: E402
from infc.compiler.rewrite import Report  # noqa: E402
from infc.compiler.verification import step_sample  # noqa: E402
from infc.models.llama import LlamaConfig  # noqa: E402
from infc.models.random_weights import random_llama  # noqa: E402
from torch import fx  # noqa: E402

IDS = torch.arange(7, 60)


@cache
def _captured(tied: bool, kind: Kind, kinds: tuple) -> Graph:
    model = random_llama(LlamaConfig(**vars(CONFIG) | {"tied": tied}), seed=3)
    with tempfile.TemporaryDirectory() as folder:
        return before(capture(write(Path(folder) / "m.gguf", model, kind, kinds=dict(kinds))), "quantize_weights")


def graph_of(*, tied: bool = True, kind: Kind = Kind.Q4_1, kinds: dict[str, Kind] | None = None) -> Graph:
    """A file of a random Llama, captured and brought to quantize_weights."""
    return _captured(tied, kind, tuple((kinds or {}).items())).copy()


def quantized(graph: Graph, quant: str, method: str = "rtn") -> Graph:
    asked = recipe.read(quant)
    assert asked is not None
    graph = graph.copy()
    for name in passes.QUANTIZATION:
        passes.load(name).apply(graph, Report(name, options={"quantization": Plan(asked, method)}))
    return graph


def logits(graph: Graph) -> torch.Tensor:
    return graph.run(*step_sample(graph, IDS, range(len(IDS))))[graph.outputs.index("logits")]


def weight(graph: Graph, name: str) -> fx.Node:
    return graph.placeholders[name]


# -------------------------------------------------------------------------------------------------------------------- blocks

@given(st.data(), st.sampled_from([Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]), st.integers(1, 3), st.integers(1, 3))
def test_any_block_means_what_the_gguf_package_makes_of_it(data: st.DataObject, kind: Kind, n: int, blocks: int) -> None:
    size = GGML_QUANT_SIZES[kind][1]
    given_bytes = data.draw(st.binary(min_size=n * blocks * size, max_size=n * blocks * size))
    rows = np.frombuffer(given_bytes, np.uint8).reshape(n, blocks, size).copy()
    rows[..., 1] &= 0xBF                                            # an f16 below 2: finite; its sign, zero and subnormals stay
    if kind is Kind.Q4_1: rows[..., 3] &= 0xBF
    rows = rows.reshape(n, -1)
    found = _read(Stored(rows, kind.name))
    again = Quantized(found.packed(), found.scale, found.offset, KINDS[kind.name], found.codes.shape[1])
    expected = torch.from_numpy(np.array(gguf_package.quants.dequantize(rows, kind)))
    assert torch.equal(again.dequantized(), expected)
    assert sum(t.nbytes for t in (again.codes, again.scale, again.offset) if t is not None) == rows.nbytes


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_kept_bit_for_bit_in_the_bytes_of_the_file(kind: Kind, tied: bool) -> None:
    graph = graph_of(tied=tied, kind=kind)
    every = matrices(graph)
    assert len(every) == 2 * 4 + (1 if tied else 2)                 # qkv and gate_up are merged, q and k permuted in the file
    for node in every:
        found = stored(graph, node)
        assert isinstance(found, Quantized), found
        assert torch.equal(found.dequantized(), graph.weights[str(node.target)])
        assert found.scheme == KINDS[kind.name]
        held = sum(t.nbytes for t in (found.codes, found.scale, found.offset) if t is not None)
        assert held == sum(graph.blocks[path].rows.nbytes for path in node.meta["origin"])
        assert 8 * held / graph.weights[str(node.target)].numel() == {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5}[kind.name]


@pytest.mark.parametrize(("kinds", "scheme"), [
    ({"attn_v": Kind.Q8_0}, Scheme(8, 32, False)),                  # beside Q4_1
    ({"attn_v": Kind.Q8_0, "attn_q": Kind.Q4_0, "attn_k": Kind.Q4_0}, Scheme(8)),
    ({"attn_v": Kind.Q4_0}, Scheme(4, 32, False)),
])
def test_merged_parts_of_several_kinds_get_the_format_that_holds_all_exactly(kinds: dict, scheme: Scheme) -> None:
    graph = graph_of(kinds=kinds)
    node = weight(graph, "model_layers_0_self_attn_qkv_proj_weight")
    found = stored(graph, node)
    assert isinstance(found, Quantized) and found.scheme == scheme == format_of(graph, node)
    assert torch.equal(found.dequantized(), graph.weights[str(node.target)])


def test_what_cannot_be_kept_says_why() -> None:
    graph = graph_of(kinds={"attn_v": Kind.F16, "ffn_down": Kind.Q5_0})
    assert stored(graph, weight(graph, "model_layers_0_self_attn_qkv_proj_weight")) == (
        "model.layers.0.self_attn.v_proj is F16 in the file; Q4_0, Q4_1, Q8_0 can be kept")
    assert "down_proj is Q5_0 in the file" in str(stored(graph, weight(graph, "model_layers_1_mlp_down_proj_weight")))
    name = "model_layers_0_mlp_gate_up_proj_weight"
    graph.weights[name] = graph.weights[name].flip(0)                # up before gate: the same values, other rows
    assert "a pass changed its values or their order" in str(stored(graph, weight(graph, name)))
    graph.blocks = {}
    assert stored(graph, weight(graph, name)) == "the model was not read from a GGUF file"


# ---------------------------------------------------------------------------------------------------------------- in the passes

@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_keep_gives_the_logits_of_the_dequantized_weights(kind: Kind) -> None:
    graph = graph_of(kind=kind)
    assert torch.equal(logits(quantized(graph, "keepa32")), logits(graph))       # the operators' fp32 sums are the wide products' own


def test_keep_leaves_wide_what_has_no_blocks_and_says_so() -> None:
    graph = graph_of(kinds={"token_embd": Kind.F16})
    made = quantized(graph, "keep")
    assert "model_embed_tokens_weight" in made.weights
    assert str(recipe.of(made)).endswith('"model.embed_tokens": none\n  - "lm_head": none\n')
    assert made.meta["notes"] == ["a weight stays wide: it has no blocks to keep, model.embed_tokens is F16 in the file; "
                                  "Q4_0, Q4_1, Q8_0 can be kept"]
    with pytest.raises(UserError, match="no weight's blocks can be kept"):
        quantized(graph_of(kind=Kind.F16), "keep")


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_a_scheme_that_is_the_files_own_format_takes_its_codes(method: str) -> None:
    graph = graph_of(kind=Kind.Q8_0)
    made = quantized(graph, "w8a8", method)
    for node in matrices(graph):
        found = stored(graph, node)
        assert isinstance(found, Quantized) and torch.equal(made.weights[f"{node.target}_codes"], found.codes)
        assert torch.equal(made.weights[f"{node.target}_scale"], found.scale)
    assert "notes" not in made.meta


def test_another_scheme_is_what_was_asked_for_and_the_file_is_mentioned() -> None:
    graph = graph_of(kind=Kind.Q4_1)
    made = quantized(graph, "w8")
    assert all(kept(graph, node, Scheme(8)) is None and kept(graph, node, Scheme(4)) is None for node in matrices(graph))
    assert str(recipe.of(made)) == 'format: 1\nlayers:\n  - "*": w8\n'
    assert made.meta["notes"] == ["the file holds 9 of 9 weights as w4:asym (5 bits a weight), which became w8 (8.5) as asked; --quant "
                                  "keep keeps the file's own codes"]
    (said,) = quantized(graph, "w4").meta["notes"]                  # 4.5 bits are fewer than the file's 5; the table's 8.5 are not
    assert said.startswith("the file holds 1 of 9 weights")


def test_a_recipe_keeps_some_and_rounds_others() -> None:
    graph = graph_of()
    made = quantized(graph, 'format: 1\nlayers:\n  - "*": keepa8\n  - "model.layers.0.*": w8\n  - "*.down_proj": none\n')
    text = str(recipe.of(made))
    for line in ('"*": w4a8:asym', '"model.layers.0.self_attn.q_proj": w8', '"model.layers.0.mlp.down_proj": none'):
        assert f"  - {line}\n" in text
    again = quantized(graph, text)                                  # the canonical recipe needs no `keep`: the format is the file's own
    assert all(torch.equal(t, again.weights[name]) for name, t in made.weights.items()) and len(made.weights) == len(again.weights)


def test_a_kept_weight_passes_the_check_of_the_pass() -> None:
    graph = graph_of()
    made = graph.copy()
    one = passes.load("quantize_weights")
    asked = recipe.read("keep")
    assert asked is not None
    one.apply(made, Report(one.name, options={"quantization": Plan(asked)}))
    assert one.check is not None
    assert one.check(graph, made).error == 0.0                      # type: ignore[union-attr]
