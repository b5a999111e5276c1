"""Loop regions: right in the interpreter on any program, one region where one is possible, none where it would be wrong."""
import pytest
import torch
from golden import trace
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends import loops
from infc.backends.index import ZERO, Dim, Div, Expr, Mod, Var, expr, product
from infc.backends.launch import Context, Launch
from infc.backends.loop_ops import refuse
from infc.backends.loop_views import reindex, unravel
from infc.backends.regions import Loops, find
from infc.compiler.ir import Graph, fake_propagate
from infc.compiler.placement import Placement, Value, place
from loop_programs import fill, program, same
from loop_runner import Case, case, interpreted, quick_case
from torch import fx


def check(c: Case, *inputs: torch.Tensor) -> None:
    for found, expected in zip(interpreted(c, *inputs), c.graph.run(*(inputs or c.inputs)), strict=True):
        assert same(found, expected), "\n".join(map(loops.text, c.plan.regions))


@settings(max_examples=120, deadline=None)
@given(st.data(), st.booleans())
def test_any_program_equals_eager(data, symbolic):
    made = program(lambda n: data.draw(st.integers(0, n - 1)))
    c = quick_case(made.fn, *made.inputs, symbolic=symbolic)
    for found, expected in zip(interpreted(c), made.fn(*made.inputs), strict=True):
        assert same(found, expected), "\n".join([*made.lines, *map(loops.text, c.plan.regions)])


# --- index arithmetic ----------------------------------------------------------------------------------------------------

def divisors(e: Expr) -> list[Expr]:
    return [a.den for atoms, _ in e.terms for a in atoms if isinstance(a, Div | Mod)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data(), st.booleans())
def test_reindex_is_row_major_reshape(shape, data, symbolic):
    flat = int(torch.tensor(shape).prod())
    target, left = [], flat
    while left > 1:
        target.append(data.draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= target[-1]
    lead = [expr(Dim("T"))] if symbolic else []
    old, new = [*lead, *map(expr, shape)], [*lead, *map(expr, target)]
    axes = [expr(Var(f"i{k}", s)) for k, s in enumerate(new)]
    found = reindex(tuple(axes), tuple(new), tuple(old))
    live = 5
    at = torch.arange(live * flat if symbolic else flat).reshape([live] * symbolic + target)
    grid = torch.meshgrid(*map(torch.arange, at.shape), indexing="ij") if at.dim() else ()
    values = {"T": live} | {f"i{k}": i for k, i in enumerate(grid)}
    position = ZERO
    for i, s in zip(found, old, strict=True): position = position * s + i
    assert torch.equal(torch.as_tensor(position.value(values.__getitem__)).expand(at.shape), at)
    assert not any(loops.dims_of(d) for i in found for d in divisors(i)), "divides by a run-time size"


def test_split_then_merge_leaves_no_division():
    heads, width = expr(9), expr(64)
    column = expr(Var("j", heads * width))
    h, d = unravel(column, [heads, width])
    assert str(h * width + d) == "j" and str((expr(Var("i", expr(Dim("T")))) * 576 + column) // 576) == "i"


def test_a_run_time_size_divides_itself_away():
    t, j = Var("t", expr(Dim("T"))), Var("h", expr(9))
    merged = expr(j) * expr(Dim("T")) + expr(t)
    assert str(merged // expr(Dim("T"))) == "h" and str(merged % expr(Dim("T"))) == "t"
    assert str(product([expr(Dim("N")) + 1, expr(2)])) == "2*N + 2"


# --- grouping ------------------------------------------------------------------------------------------------------------

FREQUENCY = torch.arange(32) / 32


def shared(positions):
    angles = positions.unsqueeze(1).to(torch.float32) * FREQUENCY
    return angles.cos() * 1.5, angles.sin()


def test_rope_angles_are_one_region_with_two_outputs():
    c = case(shared, torch.arange(7, dtype=torch.int32), dynamic=({0: "T"},))
    region = c.plan.regions[-1]
    assert len(c.plan.regions) == 1 and [str(o.numel) for o in region.outputs] == ["32*T", "32*T"]
    assert [str(v.size) for v in (*region.rows, region.col)] == ["T", "32"] and region.dims == ("T",)
    for live in (7, 1, 0, 33): check(c, torch.arange(live, dtype=torch.int32))


def softmax_of(x, bias):
    return torch.softmax(x * 0.125 + bias, -1)


def test_softmax_with_its_scale_and_bias_is_one_region():
    c = quick_case(softmax_of, torch.randn(3, 4, 33), torch.randn(4, 1))
    region, = c.plan.regions
    assert [region.body[i].op for i in region.reductions] == ["max", "sum"]


def test_an_intermediate_that_is_also_an_output_is_stored_by_the_same_region():
    c = quick_case(lambda x: ((y := x * 2), torch.relu(y.flatten() + 1)), torch.randn(4, 6))
    region, = c.plan.regions
    assert len(region.outputs) == 2
    check(c)


def test_a_diamond_around_an_opaque_node_stays_open():
    c = quick_case(lambda x: (a := x * 2) + torch.cumsum(a, -1), torch.randn(4, 6))
    assert len(c.plan.regions) == 2 and "no loop form" in next(iter(c.plan.refused.values()))
    check(c)


def test_regions_do_not_wait_for_each_other_in_a_circle():
    """p feeds an opaque node whose result meets p again, twice: joining (p, s) or (q, r) would each be a circle."""
    def crossing(x, y):
        p, q = x + 1, y * 2
        r, s = torch.cumsum(p, -1) + q, torch.cumsum(q, -1) + p
        return r * s
    c = quick_case(crossing, torch.randn(3, 5), torch.randn(3, 5))
    check(c)
    graph = c.graph
    free = [n for n in graph.nodes if n.op == "call_function" and "cumsum" not in str(n.target)]
    opaque = [n for n in graph.nodes if "cumsum" in str(n.target)]
    units = Loops(lambda region, context: Launch("", "", (), ())).claim(graph, free, Context("portable", {})).units
    assert sum(len(u.nodes) for u in units) == len(free) and opaque


def test_a_broadcast_does_not_repeat_an_exponential():
    x, y = torch.randn(4, 1, 8), torch.randn(4, 9, 8)
    assert len(quick_case(lambda x, y: torch.exp(x).expand(4, 9, 8) * y, x, y).plan.regions) == 2
    assert len(quick_case(lambda x, y: (x * 3).expand(4, 9, 8) * y, x, y).plan.regions) == 1
    per_row = quick_case(lambda x, y: torch.exp(x) * y, torch.randn(4, 1), torch.randn(4, 8))
    assert len(per_row.plan.regions) == 1, "once per row is no repetition"


def test_reductions_over_different_rows_are_two_regions():
    c = quick_case(lambda x: x.sum(-1).sum(-1), torch.randn(4, 6))
    assert len(c.plan.regions) == 2
    check(quick_case(lambda x: x.sum((-1, -2)), fill((3, 4, 6), torch.int32, 0)))


# --- views ---------------------------------------------------------------------------------------------------------------

def test_a_view_is_computed_by_each_reader():
    def fn(x):
        piece = x[:, 2:5]
        return torch.cumsum(piece * 2, 0), piece + 1
    c = quick_case(fn, torch.randn(4, 6))
    assert [r.inputs[0].node.op for r in c.plan.regions] == ["placeholder"] * 2
    units = placed(c).units
    view = next(n for n in c.graph.nodes if "slice" in n.name)
    results = [value for u in units for value in u.results]
    assert sum(view in u.nodes for u in units) == 2 and len(results) == len(set(results))
    check(c)


def placed(c: Case) -> Placement:
    return place(c.graph, [Loops(lambda region, context: Launch("", "", (), ())), _Opaque()], Context("portable", {}))


def test_regions_that_only_store_pieces_of_one_split_run_after_its_source():
    """GPT-2's attention: one product split in three, each piece stored by its own region for a step outside."""
    c = quick_case(lambda x: [torch.cumsum(p, 1) for p in torch.cumsum(x, 0).split([2, 3, 4], -1)], torch.randn(4, 9))
    units = placed(c).units
    assert all(u.nodes for u in units) and sorted(i for u in units for n, i in u.results if "split" in n.name) == [0, 1, 2]
    done = set[Value]()
    for unit in units:
        assert {value for value in unit.reads if value[0].op == "call_function"} <= done, unit.op
        done.update(unit.results)
    check(c)


class _Opaque:
    name = "opaque"

    def claim(self, graph, free, context):
        from infc.compiler.placement import Claims, Unit
        return Claims([Unit(str(n.target), self.name, (n,), ((n, 0),), lambda c: None) for n in free])


def test_only_what_a_step_outside_needs_is_stored():
    c = quick_case(lambda x: torch.cumsum((x * 2).transpose(0, 1), 0), torch.randn(4, 6))
    region, = c.plan.regions
    assert [o.node.name for o in region.outputs] == ["transpose"]
    alias_only = quick_case(lambda x: torch.cumsum(x.view(6, 4).unsqueeze(0), 1), torch.randn(4, 6))
    assert alias_only.plan.regions == []


def test_each_piece_of_a_split_that_is_needed_is_an_output():
    c = quick_case(lambda x: [torch.cumsum(p, 0) for p in x.split([2, 3, 4], -1)], torch.randn(4, 9))
    assert sum(len(r.outputs) for r in c.plan.regions) == 3
    check(c)


# --- refusals ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fn, inputs, reason", [
    (lambda x: torch.cumsum(x, 0), (torch.randn(3),), "no loop form"),
    (lambda x: x + 1, (torch.randn(3).to(torch.complex64),), "complex64"),
    (lambda x: x // 0, (torch.arange(3),), "positive constant"),
    (lambda x, y: torch.remainder(x, y), (torch.arange(3), torch.arange(1, 4)), "positive constant"),
    (lambda x: torch.nn.functional.pad(x, (1, 1), mode="reflect"), (torch.randn(2, 3),), "reflection_pad1d"),
])
def test_refuses_with_a_reason(fn, inputs, reason):
    c = quick_case(fn, *inputs)
    assert not c.plan.regions and all(reason in r for r in c.plan.refused.values()) and c.plan.refused


def test_refuses_a_size_that_is_no_polynomial():
    c = case(lambda x: x[::2] * 2, torch.randn(8), dynamic=({0: "T"},))
    assert not c.plan.regions and "not a polynomial" in " ".join(c.plan.refused.values())


def test_never_reads_a_buffer_that_a_step_writes():
    graph = fx.Graph()
    cache, new = graph.placeholder("cache"), graph.placeholder("new")
    graph.call_function(torch.ops.aten.copy_.default, (cache, new))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (cache, 2.0))
    safe = graph.call_function(torch.ops.aten.mul.Tensor, (new, 2.0))
    graph.output((doubled, safe))
    mode = torch._subclasses.FakeTensorMode()
    for node in (cache, new): node.meta["val"] = mode.from_tensor(torch.randn(4, 8))
    made = Graph(fx.GraphModule(torch.nn.Module(), graph), inputs=["cache", "new"], outputs=["a", "b"])
    fake_propagate(made, missing_only=True)
    plan = find(made, [n for n in graph.nodes if n.op == "call_function"], {})
    assert [r.outputs[0].node for r in plan.regions] == [safe]
    assert plan.refused[doubled] == "reads cache, which is written in place"


def test_refuse_speaks_of_one_node():
    graph = trace(lambda x: torch.cumsum(x * 2, 0), torch.randn(3))
    reasons = [refuse(n) for n in graph.nodes if n.op == "call_function"]
    assert reasons[0] is None and "cumsum" in (reasons[1] or "")


# --- cost and text -------------------------------------------------------------------------------------------------------

def test_cost_by_hand():
    region, = case(shared, torch.arange(7, dtype=torch.int32), dynamic=({0: "T"},)).plan.regions
    flops = 4 * 7 * 32                                  # mul, cos, mul, sin
    assert loops.cost(region, {"T": 7}) == (flops, 4 * 7 + 4 * 32 + 2 * 4 * 7 * 32)
    region, = quick_case(lambda x: x[:, :2].sum(-1), torch.randn(5, 10)).plan.regions
    assert loops.cost(region) == (10, 4 * 10 + 4 * 5)   # two of ten columns are read


def test_equal_work_has_equal_text():
    c = quick_case(lambda x, y: (torch.cumsum(torch.relu(x), 0), torch.cumsum(torch.relu(y), 0)), torch.randn(3, 4), torch.randn(3, 4))
    first, second = map(loops.text, c.plan.regions)
    assert first == second
    merged = loops.merge_axes(c.plan.regions[0])
    assert merged.rows == () and str(merged.col.size) == "12"
