"""What the CPU kernels refuse, with the reason, and what a claimed node becomes."""
import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_kernels import CONTEXT, M, N, P, R, T, call, meta
from infc.backends.aten import Aten
from infc.backends.cpu import claims
from infc.backends.cpu.backend import Kernels
from infc.backends.cpu.toolchain import build
from infc.backends.launch import Out, Weight
from infc.compiler.errors import UserError
from infc.compiler.ir import Graph
from infc.compiler.placement import place
from torch import fx

OPS, ATEN = torch.ops.infc, torch.ops.aten
BF16, F64, I32 = torch.bfloat16, torch.float64, torch.int32


def attention(**changes: object) -> fx.Node:
    given = {"q": meta(T, 4, 32), "k_cache": meta(P, 2, 32, 32), "v_cache": meta(P, 2, 32, 32), "query_start": meta(N + 1, dtype=I32),
             "context_len": meta(N, dtype=I32), "block_table": meta(N, M, dtype=I32), "scale": 0.1}
    return call(OPS.paged_attention.default, **(given | changes))


def rope(**changes: object) -> fx.Node:
    given = {"q": meta(T, 4, 32), "k": meta(T, 2, 32), "cos": meta(T, 1, 8), "sin": meta(T, 1, 8), "interleaved": False}
    return call(OPS.rope.default, **(given | changes))


def computed_weight() -> fx.Node:
    node = call(OPS.linear.default, x=meta(T, 8), w=meta(4, 8))
    node.kwargs["w"].op = "call_function"
    return node


REFUSED = {
    "float64": (lambda: call(OPS.rms_norm.default, x=meta(T, 8, dtype=F64), w=meta(8, dtype=F64), eps=1e-5), "x is torch.float64"),
    "norm weight": (lambda: call(OPS.rms_norm.default, x=meta(T, 8), w=meta(1), eps=1e-5), "not one row of x"),
    "computed weight": (computed_weight, "w is computed"),
    "long rows": (lambda: call(OPS.linear.default, x=meta(T, 40000), w=meta(4, 40000)), "K = 40000"),
    "block size": (lambda: attention(k_cache=meta(P, 2, 16, 32), v_cache=meta(P, 2, 16, 32)), "blocks of 16"),
    "head size": (lambda: attention(q=meta(T, 4, 40), k_cache=meta(P, 2, 32, 40), v_cache=meta(P, 2, 32, 40)),
                  "head size 40 is not supported on this target: multiples of 16 up to 256"),
    "wide head": (lambda: attention(q=meta(T, 4, 512), k_cache=meta(P, 2, 32, 512), v_cache=meta(P, 2, 32, 512)),
                  "head size 512 is not supported on this target"),
    "other q": (lambda: attention(q=meta(T, 4, 32, dtype=BF16)), "the cache is torch.float32"),
    "rope of other rows": (lambda: rope(cos=meta(T, 2, 8), sin=meta(T, 2, 8)), "cos is"),
    "rope of mixed ranks": (lambda: rope(cos=meta(1, 1, T, 8), sin=meta(1, 1, T, 8)), "the kernel knows"),
    "scale": (lambda: attention(scale=-1.0), "not positive"),
    "index dtype": (lambda: attention(context_len=meta(N, dtype=torch.int64)), "not i32"),
    "columns by index": (lambda: call(ATEN.index_select.default, self=meta(4, 4), dim=1, index=meta(2, dtype=I32)), "dim 1"),
    "cast": (lambda: call(ATEN._to_copy.default, self=meta(4, 4), dtype=F64), "torch.float64"),
    "unknown": (lambda: call(ATEN.sin.default, self=meta(4)), "no CPU kernel for aten.sin"),
    "vocabulary": (lambda: call(OPS.sample.default, logits=meta(R, 600_000), temperature=meta(R), top_k=meta(R, dtype=I32), top_p=meta(R),
                                uniform=meta(R)), "600000 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    make, reason = REFUSED[case]
    assert reason in (claims.refuse(make(), CONTEXT) or "")


def test_a_tied_embedding_reads_the_products_weight() -> None:
    node = call(ATEN.embedding.default, weight=meta(100, 64, dtype=BF16), indices=meta(T, dtype=I32))
    weight = node.kwargs["weight"]
    assert claims.lower(node, CONTEXT).args[0] == Weight(weight, "plain")
    node.graph.call_function(OPS.linear.default, (weight, weight))
    assert claims.lower(node, CONTEXT).args[0] == Weight(weight, "bf16_n32k2")


def test_a_launch_names_its_sizes_and_arguments() -> None:
    node = call(OPS.linear.default, x=meta(T, 48, dtype=BF16), w=meta(96, 48, dtype=BF16), residual=meta(T, 96), out_dtype=torch.float32)
    launch = claims.lower(node, CONTEXT)
    x, w, residual = node.kwargs["x"], node.kwargs["w"], node.kwargs["residual"]
    assert launch.name == "linear_bf16_48x96_residual" and launch.headers == ("linear.h",)
    assert launch.args == (x, Weight(w, "bf16_n32k2"), residual, Out(0))
    assert launch.body == ("infc::linear<infc::bf16, float, float, float>"
                           "(r, r->dims[0], 48, 96, b[0], b[1], nullptr, b[2], b[3]);")


def test_a_number_in_a_launch_is_that_number_in_its_code(tmp_path: Path) -> None:
    values = [math.nan, math.inf, -math.inf, 1e-5, -0.5, 0.0]
    bodies = [claims.lower(call(OPS.rms_norm.default, x=meta(T, 8), w=meta(8), eps=eps), CONTEXT).body for eps in values]
    source = ""
    for i, body in enumerate(bodies):
        eps = body.removesuffix(", b[0], b[1], b[2]);").rpartition(", ")[2]
        source += f'extern "C" float eps_{i}() {{ return {eps}; }}\n'
    library = ctypes.CDLL(str(build(source, "portable", tmp_path / "eps.so")))
    for i, value in enumerate(values):
        function = library[f"eps_{i}"]
        function.restype = ctypes.c_float
        assert np.float32(function()).tobytes() == np.float32(value).tobytes(), bodies[i]


def test_rope_of_tokens_in_a_row_is_a_batch_of_rows_of_length_one() -> None:
    assert claims.refuse(rope(), CONTEXT) is None
    q, k = claims.lower(rope(), CONTEXT).body.splitlines()
    assert q == "infc::rope_rows<float, false>(r, r->dims[0], 4, 1, 32, 8, false, b[0], b[2], b[3], b[4]);"
    assert k == "infc::rope_rows<float, false>(r, r->dims[0], 2, 1, 32, 8, false, b[1], b[2], b[3], b[5]);"
    one = claims.lower(rope(cos=meta(1, 1, 8), sin=meta(1, 1, 8)), CONTEXT).body
    assert one.count("8, true, b[") == 2, "one row of cosines for every token"


def test_a_head_size_no_kernel_has_is_one_line_about_the_model() -> None:
    node = attention(q=meta(T, 4, 24), k_cache=meta(P, 2, 32, 24), v_cache=meta(P, 2, 32, 24))
    graph = Graph(fx.GraphModule(torch.nn.Module(), node.graph))
    with pytest.raises(UserError) as caught:
        place(graph, [Kernels(), Aten()], CONTEXT)
    assert str(caught.value) == "head size 24 is not supported on this target: multiples of 16 up to 256"
