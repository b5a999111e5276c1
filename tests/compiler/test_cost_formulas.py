"""Formulas of a real artifact against a recount, by hand and at other sizes; counting what no operator declares; gathers."""
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from infc.backends.launch import Context
from infc.compiler.costs.cost import Load, kind_of, moved
from infc.compiler.costs.count import Count, count, formulas, totals
from infc.compiler.costs.phases import value
from infc.compiler.ops import aten, by_name, gather
from infc.compiler.placement import Unit
from infc.runtime.artifact import read
from tiny_artifact import tiny
from torch import fx


def unit(op: str, target, arguments: Mapping[str, torch.Tensor], *rest: Any, result: torch.Tensor) -> Unit:
    """One node over placeholders of these names."""
    graph = fx.Graph()
    nodes = []
    for name, tensor in arguments.items():
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = tensor
    node = graph.call_function(target, (*nodes, *rest))
    node.meta["val"] = result
    return Unit(op, "cpu", (node,), ((node, 0),), lambda context: None)


CONTEXT = Context("", {"T": 3, "N": 1, "R": 1, "M": 1}, {})


def test_what_no_operator_declares_reads_and_writes_once():
    x, w = torch.ones(3, 8), torch.ones(8)
    step = unit("aten.mul.Tensor", aten.mul.Tensor, {"x": x, "w": w}, result=x)
    assert count(step, CONTEXT, {"w"}, lambda unit, dims: None) == Count(24, 32, 0, 4 * (24 + 24))


def test_a_region_is_counted_by_its_backend():
    x = torch.ones(3, 8)
    step = unit("loop.mul", aten.mul.Tensor, {"x": x, "w": torch.ones(8)}, result=x)
    assert count(step, CONTEXT, {"w"}, lambda unit, dims: (99, 100 + dims["T"])) == Count(99, 32, 0, 103 - 32)


def test_a_gather_reads_the_rows_it_picks():
    table, ids = torch.ones(1000, 8), torch.zeros(3, dtype=torch.int32)
    step = unit("aten.embedding", aten.embedding.default, {"table": table, "ids": ids}, result=torch.ones(3, 8))
    assert count(step, CONTEXT, {"table"}, lambda unit, dims: None) == Count(0, 96, 0, 96 + 12)
    assert gather.index_select(table, 0, ids).bytes == 2 * 96 + 12
    assert gather.index_select(torch.ones(5, 7), 1, ids).bytes == 2 * 4 * 15 + 12


def test_formulas_are_the_count_at_every_size():
    def at(sizes: Mapping[str, int]) -> Count:
        return Count(5 * sizes["T"] * sizes["N"] + 7, 11, 2 * sizes["T"] ** 2, sizes["N"] + 1, pair_flops=3, key_bytes=4, window=6)

    found = formulas(at, ("T", "N"), {"T": 512, "N": 16})
    assert found["exact"] and [(term[0], sorted(term[1:])) for term in found["flops"]] == [(7, []), (5, ["N", "T"]), (3, ["pairs:6"])]
    load = Load((1, 1, 6), (2, 9, 0), 3)
    assert value(found["flops"], load) == 5 * 8 * 3 + 7 + 3 * load.pairs(6) and value(found["kv"], load) == 2 * 64 + 4 * load.keys(6)


def test_a_formula_that_is_none_says_so():
    def at(sizes: Mapping[str, int]) -> Count:
        return Count(0, min(100, sizes["T"] * 8), 0, 0)

    assert not formulas(at, ("T",), {"T": 512})["exact"]


def test_a_full_table_is_what_a_step_carries():
    assert totals(Count(1, 2, 3, 4, pair_flops=10, key_bytes=100), {"T": 2, "N": 1, "R": 1, "M": 3}) == (1 + 10 * 2 * 96, 9 + 100 * 96)


@pytest.fixture(scope="module")
def costs() -> dict:
    with read(tiny()) as artifact:
        return artifact.report()["costs"]


def test_every_formula_of_an_artifact_is_exact(costs: dict):
    assert all(kernel["exact"] for kernel in costs["kernels"])
    with read(tiny()) as artifact:
        for bucket in artifact.manifest.buckets:
            program = artifact.program(bucket.name)
            steps = [costs["kernels"][i] for i in costs["steps"][bucket.name]]
            assert [step.op for step in program.steps] == [kernel["op"] for kernel in steps]
            assert [kernel["kernel"] for kernel in steps] == [step.kernel for step in program.steps]


def test_steps_recount_at_their_buckets_maxima(costs: dict):
    """A Step's figures are counted from the nodes; the formulas must give them at full tables, but for the spread of packed rows."""
    with read(tiny()) as artifact:
        for bucket in artifact.manifest.buckets:
            most = bucket.bucket
            full = most | {"keys:0": 32 * most["M"] * most["N"], "pairs:0": 32 * most["M"] * most["T"]}
            for step, index in zip(artifact.program(bucket.name).steps, costs["steps"][bucket.name], strict=True):
                kernel = costs["kernels"][index]
                assert value(kernel["flops"], full) == step.flops
                if kernel["kind"] != "gather":
                    assert sum(value(kernel[kind], full) for kind in ("weights", "kv", "activations")) == step.bytes


def test_a_tiny_program_by_hand(costs: dict):
    """The whole of a decode step: every weight that a product reads, twice its size in flops for each token, and the cache's keys."""
    with read(tiny()) as artifact:
        program = artifact.program("step_T1")
    for batch, before in ((1, 9), (4, 33)):
        load = Load((1,) * batch, (before,) * batch, batch)
        kernels = [costs["kernels"][i] for i in costs["steps"]["step_T1"]]
        read_by_products = {i for step in program.steps if kind_of(step.op) == "product" for i in step.args}
        weights = [b for i, b in enumerate(program.buffers) if b.kind == "weight" and i in read_by_products]
        products = [moved(k, load) for k in kernels if k["kind"] == "product"]
        assert sum(m.weights for m in products) == sum(b.bytes for b in weights)
        attention = [moved(k, load) for k in kernels if k["kind"] == "attention"]
        assert sum(m.kv for m in attention) == costs["kv_bytes_per_token"] * batch * (before + 1)
        written = sum(moved(k, load).kv for k in kernels if k["kind"] == "rows")
        assert written == costs["kv_bytes_per_token"] * batch


@pytest.mark.parametrize(("op", "flops"), [("infc::linear", 2 * 3 * 8 * 5), ("infc::rms_norm", 4 * 24)])
def test_an_operators_cost_reaches_its_step(op: str, flops: int):
    x, w = torch.ones(3, 8), torch.ones(5, 8) if op == "infc::linear" else torch.ones(8)
    rest = () if op == "infc::linear" else (1e-6,)
    step = unit(op, by_name(op).call, {"x": x, "w": w}, *rest, result=torch.ones(3, w.shape[0]))
    found = count(step, CONTEXT, {"w"}, lambda unit, dims: None)
    assert (found.flops, found.weights) == (flops, 4 * w.numel()) and found.activations == 4 * (24 + 3 * w.shape[0])
