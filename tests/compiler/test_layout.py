"""layout and columns: views read off by value, columns taken where they are made."""
import pytest
import torch
from golden import filecheck, trace
from infc.compiler.columns import Columns
from infc.compiler.ir import drop_dead_nodes
from infc.compiler.layout import Layout, NotMoves, column_order, sources, stray_reader

X = torch.randn(2, 3, 8)
SIZES = ({0: "B", 1: "S"},)


def test_runs_a_chain_of_views_on_numbers():
    graph = trace(lambda x: x.unflatten(-1, (2, 4)).transpose(2, 3).flatten(2), X, dynamic=SIZES)
    layout, x, end = Layout(graph), graph.placeholders["x"], graph.output.args[0][0]
    numbers = layout.numbered(x)
    assert torch.equal(layout.run(end, {x: numbers}), numbers.unflatten(-1, (2, 4)).transpose(2, 3).flatten(2))
    assert sources(end)[-1] is x
    order = column_order(numbers.flatten(0, 1), layout.run(end, {x: numbers}).flatten(0, 1))
    assert order is not None and order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_arithmetic_is_no_move():
    graph = trace(lambda x: (x + 1).flatten(1), X, dynamic=SIZES)
    layout, x = Layout(graph), graph.placeholders["x"]
    with pytest.raises(NotMoves, match="add"):
        layout.run(graph.output.args[0][0], {x: layout.numbered(x)})


def test_column_order_wants_every_column_once_and_rows_kept():
    numbers = torch.arange(1, 13).reshape(3, 4)
    assert column_order(numbers, numbers.flip(1)).tolist() == [3, 2, 1, 0]
    assert column_order(numbers, numbers[:, [0, 0, 1, 2]]) is None
    assert column_order(numbers, numbers.flip(0)) is None
    assert column_order(numbers, numbers[:, :3]) is None


def test_finds_who_else_reads_a_part():
    graph = trace(lambda x: (x[..., :4].relu(), x[..., 4:].neg().transpose(1, 2).cos()), X, dynamic=SIZES)
    relu, cos = graph.output.args[0]
    assert stray_reader(graph.placeholders["x"], {relu}) is cos
    assert stray_reader(graph.placeholders["x"], {relu, cos}) is None


def wide(x):
    angle = x[..., None] * torch.tensor([1.0, 0.5])
    return (torch.cat((angle, angle), -1).cos() * 2.0)[:, None]


def test_takes_columns_where_they_are_made():
    graph = trace(wide, torch.randn(2, 3), dynamic=SIZES)
    end = graph.output.args[0][0]
    new = Columns(graph).take(end, 1, 2)
    end.replace_all_uses_with(new)
    drop_dead_nodes(graph)
    filecheck(graph, """
    CHECK-NOT: aten.cat
    CHECK:     f32[B,S,2] = aten.cos
    CHECK-NOT: f32[B,S,4]
    """)
    x = torch.randn(4, 5)
    assert torch.equal(graph.run(x)[0], wide(x)[..., :2])


def test_cuts_where_no_rule_says_how():
    def summed(x):
        return x.cumsum(-1)

    graph = trace(summed, X, dynamic=SIZES)
    end = graph.output.args[0][0]
    graph.output.args = ((Columns(graph).take(end, 2, 3),),)
    assert torch.equal(graph.run(X)[0], summed(X)[..., ::2][..., :3])
