"""Only the rows that are sampled reach the head, and the token is drawn in the graph."""
import torch
from torch import fx

from ..compiler.contracts import SAME_FUNCTION, row_error, run_fp64
from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, expression, fake_mode, infer
from ..compiler.ops import aten, infc
from ..compiler.rewrite import EXACT, Pass, Report, emit
from ..compiler.step_batch import StepSamples
from ..compiler.tokens import new_dims

# One row in, one row out, and one argument with rows: taking fewer rows before them is the same as after.
ROW_BY_ROW = {aten.linear.default, infc.linear.default, infc.rms_norm.default, infc.layer_norm.default, aten.layer_norm.default,
              infc.swiglu.default, infc.linear_swiglu.default, aten._to_copy.default, aten.addmm.default}  # fmt: skip


def run(graph: Graph, report: Report) -> int:
    if not graph.kv or len(graph.outputs) != 1 or not report.may_fire(): return 0
    logits = graph.output.all_input_nodes[0]
    rows, *settings = _inputs(graph)
    cut, chain = _cut(logits)
    picked = emit(graph, aten.index_select.default, (cut, 0, rows), like=chain[0] if chain else graph.output)
    for node in chain:
        node.replace_input_with(cut, picked)
        cut, picked = node, node
    _infer_again(graph, chain)
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


def _cut(logits: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Where rows are picked, and what then runs on the picked rows only: up to the last value that has other uses.

    A residual add ends it: both its sides would have to be picked, and the add itself rides on the product before it.
    """
    node, chain = logits, []
    while True:
        source = _single_source(node)
        if source is None or len(node.users) != 1: return node, chain
        chain.insert(0, node)
        node = source


def _single_source(node: fx.Node) -> fx.Node | None:
    """The one argument with a row per token, when `node` works row by row."""
    if node.op != "call_function": return None
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    if node.target not in ROW_BY_ROW and not pointwise: return None
    tokens = node.meta["val"].shape[0]
    sources = [n for n in node.all_input_nodes if n.meta["val"].dim() and expression(n.meta["val"].shape[0]) == expression(tokens)]
    return sources[0] if len(sources) == 1 else None


def _infer_again(graph: Graph, chain: list[fx.Node]) -> None:
    for node in chain: node.meta["val"] = infer(node, fake_mode(graph))


def _wide(graph: Graph, logits: fx.Node) -> fx.Node:
    if logits.meta["val"].dtype == torch.float32: return logits
    return emit(graph, aten._to_copy.default, (logits,), {"dtype": torch.float32}, like=graph.output)


def check(before: Graph, after: Graph) -> float:
    """The picked logits are the same rows of the old ones, and a row at temperature 0 gives its argmax."""
    worst = 0.0
    assert after.sample_inputs is not None
    for sample in after.sample_inputs():
        given = dict(zip(after.inputs + after.kv, sample, strict=True))
        old = run_fp64(before, [given[name] for name in before.inputs + before.kv])[0]
        token, new = run_fp64(after, sample)[:2]
        picked = old[given["sample_rows"].long()]
        error = row_error(new, picked)
        worst = max(worst, error)
        if not error <= SAME_FUNCTION: raise CheckFailed(f"picked rows have other logits: {error:.3g}, bound {SAME_FUNCTION}")
        greedy = given["temperature"] == 0
        if not torch.equal(token[greedy].long(), picked[greedy].argmax(-1)): raise CheckFailed("a row at temperature 0 is not its argmax")
    return worst


PASS = Pass("sample_tokens", run, EXACT, requires=("page_kv_cache",), check=check)
