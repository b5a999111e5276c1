"""A bucket whose steps always have many tokens has a graph of its own, which gives the same values."""
from dataclasses import replace

import pytest
import torch
from infc import passes
from infc.backends import cpu
from infc.backends.program import Store
from infc.compiler import targets
from infc.compiler.bucket_graph import of_bucket
from infc.compiler.contracts import run_plain
from infc.compiler.costs.cost_table import CostTable
from infc.compiler.frontends import capture
from infc.compiler.ir import argument
from infc.compiler.lowering import build_programs, region_cost
from infc.compiler.ops import aten
from infc.compiler.ops.linear_quantized import PRODUCTS
from infc.compiler.options import Options, settled
from infc.compiler.pipeline import run_pipeline
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.verification import step_sample

ROWS, LAYERS = 20, 2


@pytest.fixture(scope="module", params=["w8", "w4a8:asym"])
def graph(request):
    made = capture(f"random:tiny?layers={LAYERS}").copy()
    given = {"dtype": "bf16", "quantization": Plan(parse(request.param)), "bf16_rows": {16: ROWS, 8: ROWS}}
    run_pipeline(made, passes.pipeline("bf16", quantized=True), check="off", allow="approximate", options=given)
    return made


def products(graph):
    """dtype of x, and bf16_rows, of each product of codes."""
    return [(node.args[0].meta["val"].dtype, argument(node, "bf16_rows")) for node in graph.nodes if node.target in PRODUCTS]


def test_what_many_rows_read_is_rounded_where_it_is_made(graph):
    assert of_bucket(graph, ROWS - 1) is graph
    made = of_bucket(graph, ROWS)
    assert products(graph) == [(torch.float32, ROWS)] * (4 * LAYERS + 1)
    sampled = [(torch.float32, ROWS)] * (3 + 1)                      # the last layer's products after its attention, and the head
    assert products(made) == [(torch.bfloat16, 1)] * (4 * (LAYERS - 1) + 1) + sampled
    casts = [len([n for n in g.nodes if n.target is aten._to_copy.default]) for g in (graph, made)]
    assert casts[0] == casts[1]                                                                 # every one rides on an operator


def test_the_values_are_the_same_bit_for_bit(graph):
    made = of_bucket(graph, ROWS)
    for tokens, same in ((ROWS, True), (3 * ROWS, True), (ROWS - 1, False)):
        ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(tokens))
        sample = step_sample(graph, ids, [0, tokens - 1])
        logits = [run_plain(way, sample)[graph.outputs.index("logits")] for way in (graph, made)]
        assert torch.equal(*logits) == same


@pytest.mark.parametrize(("target", "quant", "dtype", "buckets"), [
    ("x86-64-v4-amx", "w8", "bf16", (1, 16, 47, 512)), ("x86-64-v4-bf16", "w8", "bf16", (1, 16, 191, 512)),
    ("x86-64-v4", "w8", "bf16", (1, 16, 128, 512)), ("x86-64-v4-amx", "none", "bf16", (1, 16, 128, 512)),
    ("x86-64-v4-amx", "w8", "fp32", (1, 16, 128, 512)), ("h100", "w8", "bf16", (1, 8, 64, 512, 2048))])
def test_a_default_bucket_ends_where_every_product_is_the_other_one(target, quant, dtype, buckets):
    options = Options(target=target, quant=quant, dtype=dtype)
    assert settled(options, targets.find(target)).buckets == buckets
    assert settled(replace(options, buckets=(3, 64)), targets.find(target)).buckets == (3, 64)


def test_programs_hold_the_one_product_that_their_steps_need(graph):
    store = Store("x86-64-v4-amx", "")
    options = replace(Options(target="x86-64-v4-amx"), buckets=(1, ROWS - 1, 64, 128), max_sequences=4)
    programs, _, _ = build_programs(graph, options, cpu, "x86-64-v4-amx", store, CostTable(graph.weights, region_cost).maxima)

    def names(program):
        return {store.kernels[s.kernel].name for s in program.steps if "linear" in s.op and program.buffers[s.args[0]].shape[0] == "T"}

    few, many = names(programs[0]), names(programs[2])
    assert few and names(programs[1]) == few and not any(name.endswith("_bf16") or "_bf16_from_" in name for name in few)
    assert many and names(programs[3]) == many and all(name.endswith("_bf16") for name in many)
    programs, _, _ = build_programs(graph, replace(options, buckets=(1, 64)), cpu, "x86-64-v4-amx", store, lambda unit, context: (0, 0))
    assert names(programs[0]) == few and all(name.endswith(f"_bf16_from_{ROWS}") for name in names(programs[1]))     # 2 to 64 rows
