"""Only the rows that are sampled reach the head, and the token is drawn in the graph.

Rows are picked as early as they can be: everything after the last attention works row by row, so the last layer's output
product and MLP run on sampled rows only (in a prefill of SmolLM2 that saves 2.8 % of the products).
"""
import torch
from torch import fx

from ..compiler.contracts import LIFTED, SAME_FUNCTION, row_error, run_fp64
from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, expression, fake_mode, infer
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, emit
from ..compiler.step_batch import StepSamples
from ..compiler.tokens import new_dims

# One row in, one row out, like everything pointwise: taking fewer rows before them is the same as after.
ROW_BY_ROW = {aten.linear.default, infc.linear.default, infc.rms_norm.default, infc.layer_norm.default, aten.layer_norm.default,
              infc.swiglu.default, infc.linear_swiglu.default, aten._to_copy.default, aten.addmm.default}  # fmt: skip

SETTINGS = ("temperature", "top_k", "top_p", "uniform")


def run(graph: Graph, report: Report) -> int:
    if not graph.kv or len(graph.outputs) != 1:
        report.refuse(graph.output, f"only a step graph with one output is sampled; this one has {len(graph.kv)} caches and "
                      f"{len(graph.outputs)} outputs")
        return 0
    if not report.may_fire(): return 0
    logits = graph.output.all_input_nodes[0]
    rows, *settings = _inputs(graph)
    picked = _pick(graph, logits, rows)
    token = emit(graph, infc.sample.default, (_wide(graph, picked), *settings), like=graph.output)
    token.meta["origin"] = []
    graph.output.args = ((token, picked),)
    graph.outputs = ["token", "logits"]
    if isinstance(graph.sample_inputs, StepSamples): graph.sample_inputs = graph.sample_inputs.for_inputs(graph.inputs)
    return 1


def _inputs(graph: Graph) -> list[fx.Node]:
    """sample_rows and, one number per row, the sampling settings; placed after the inputs that are there."""
    mode = fake_mode(graph)
    (size,) = new_dims(mode, R=4)
    graph.symbols[str(expression(size))] = "R"
    after, made = graph.placeholders[graph.inputs[-1]], []
    for name, dtype in (("sample_rows", torch.int32), ("temperature", torch.float32), ("top_k", torch.int32),
                        ("top_p", torch.float32), ("uniform", torch.float32)):  # fmt: skip
        with graph.module.graph.inserting_after(after): after = graph.module.graph.placeholder(name)
        with mode: val = torch.empty((size,), dtype=dtype)
        after.meta |= {"val": val, "origin": [], "line": "", "passes": []}
        made.append(after)
        graph.inputs.append(name)
    return made


def _pick(graph: Graph, logits: fx.Node, rows: fx.Node) -> fx.Node:
    """The logits of the sampled rows: what feeds nothing else and works row by row gets picked rows from its first inputs on."""
    inside: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        used_elsewhere = any(user not in inside for user in node.users if user.op != "output" or node is not logits)
        if not used_elsewhere and (node is logits or node.users) and _row_sources(node): inside[node] = None
    if logits not in inside: return emit(graph, aten.index_select.default, (logits, 0, rows), like=graph.output)
    picked: dict[fx.Node, fx.Node] = {}
    for node in reversed(inside):
        for source in _row_sources(node):
            if source in inside: continue
            if source not in picked: picked[source] = emit(graph, aten.index_select.default, (source, 0, rows), like=node)
            node.replace_input_with(source, picked[source])
        node.meta["val"] = infer(node, fake_mode(graph))
    return logits


def _row_sources(node: fx.Node) -> list[fx.Node]:
    """The arguments with a row per token, when `node` works row by row; none otherwise."""
    if node.op != "call_function": return []
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    if node.target not in ROW_BY_ROW and not pointwise: return []
    value = node.meta["val"]
    if not value.dim(): return []
    tokens = expression(value.shape[0])
    return [n for n in node.all_input_nodes if n.meta["val"].dim() == value.dim() and expression(n.meta["val"].shape[0]) == tokens]


def _wide(graph: Graph, logits: fx.Node) -> fx.Node:
    if logits.meta["val"].dtype == torch.float32: return logits
    return emit(graph, aten._to_copy.default, (logits,), {"dtype": torch.float32}, like=graph.output)


def check(before: Graph, after: Graph) -> float:
    """The picked logits are the same rows of the old ones, and each row's token is drawn with that row's own settings."""
    worst = 0.0
    assert after.sample_inputs is not None
    for sample in after.sample_inputs():
        given = dict(zip(after.inputs + after.kv, sample, strict=True))
        old = run_fp64(before, [given[name] for name in before.inputs + before.kv], LIFTED)[0]
        picked = old[given["sample_rows"].long()]
        given["temperature"] = (given["temperature"] * picked.std(-1)).float()      # in units of the spread: no row is all but certain
        token, new = run_fp64(after, list(given.values()), LIFTED)[:2]
        error = row_error(new, picked)
        worst = max(worst, error)
        if not error <= SAME_FUNCTION: raise CheckFailed(f"picked rows have other logits: {error:.3g}, bound {SAME_FUNCTION}")
        drawn = infc.sample.default(picked, *(given[name] for name in SETTINGS))
        if not torch.equal(token, drawn): raise CheckFailed(f"tokens are {token.tolist()}, with the rows' own settings {drawn.tolist()}")
    return worst


PASS = Pass("sample_tokens", run, EXACT, requires=("page_kv_cache",), check=check)
