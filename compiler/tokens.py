"""Turn values over [B, S, ...] into values over [T, ...]: any mix of sequences, one row per token.

Each captured value is stated again with its batch dim gone and its token dim first; the other dims keep their order. What
works on tokens one by one works on any mix of them; an operator that does not is refused by name. Transposes between
[B,S,H,D] and [B,H,S,D] vanish on the way: both are [T,H,D].
"""
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .ir import Graph, expression, infer, same_size, target_name, type_text, where
from .ops import aten, infc
from .rewrite import arguments, emit

COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int}  # fmt: skip
CASTS = {aten._to_copy.default, aten.to.dtype, aten.type_as.default}
COUNTS = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}

# Work on each row of the last axis by itself: which arguments hold tokens.
ROW_WISE = {
    aten.linear.default: (0,), infc.linear.default: (0, 3), infc.rms_norm.default: (0,), infc.add_rms_norm.default: (0, 1),
    infc.layer_norm.default: (0,), aten.layer_norm.default: (0,), aten.rms_norm.default: (0,), infc.swiglu.default: (0,),
    infc.linear_swiglu.default: (0,), aten.matmul.default: (0,), aten.mm.default: (0,), aten.addmm.default: (1,),
    aten.embedding.default: (1,),
}  # fmt: skip

# Take one axis, or several, by number: where that argument stands.
BY_AXIS = {
    aten.mean.dim: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.softmax.int: 1, aten._softmax.default: 1, aten.cat.default: 1,
    aten.slice.Tensor: 1, aten.select.int: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.chunk.default: 2,
    aten.unbind.int: 1, aten.index_select.default: 1, aten.flip.default: 1, aten.narrow.default: 1,
}  # fmt: skip


class Refused(Exception):
    """A value cannot be stated per token; the message says which and why."""


def new_dims(mode: FakeTensorMode, **hints: int) -> list[SymInt]:
    """One fresh symbolic size per name."""
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    example = torch.empty(tuple(hints.values()), device="meta")
    fake = mode.from_tensor(example, symbolic_context=dynamic, source=ConstantSource("_".join(hints)))
    return list(fake.shape)  # type: ignore[arg-type]


class Tokens:
    """Rewrites one graph in place, node by node in order; `rules` adds operators (attention) to the ones known here."""

    def __init__(self, graph: Graph, batch: Any, length: Any, positions: fx.Node, rules: dict[Any, Callable[["Tokens", fx.Node], fx.Node]]):
        self.graph, self.positions, self.rules = graph, positions, rules
        self.batch, self.length = expression(batch), expression(length)
        self.captured: dict[fx.Node, Any] = {node: node.meta.get("val") for node in graph.nodes}
        self.now: dict[fx.Node, Any] = {}                      # captured node -> the node that stands for it
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.T, self.N, self.M, self.P = new_dims(self.mode, T=7, N=3, M=5, P=11)

    # ------------------------------------------------------------------------------------------------------- the walk

    def run(self) -> None:
        """State every live value per token. Raises Refused; the graph is then in between, and the caller restores it."""
        live = self._live()
        for node in list(self.graph.nodes):
            if node.op == "placeholder": self._placeholder(node)
            elif node.op == "call_function" and node in live: self._call(node)
        output = self.graph.output
        output.args = (tuple(self.now[n] for n in output.args[0]),)  # type: ignore[union-attr]
        output.meta.pop("val", None)
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users and not _writes(node): self.graph.module.graph.erase_node(node)

    def _live(self) -> set[fx.Node]:
        live, todo = set(), [self.graph.output]
        while todo:
            node = todo.pop()
            if node in live or isinstance(self.captured[node], SymInt): continue
            live.add(node)
            todo += node.all_input_nodes
        return live

    def _placeholder(self, node: fx.Node) -> None:
        self.now[node] = node
        weight = self.graph.weight(node)
        if weight is not None: node.meta["val"] = self.mode.from_tensor(weight, static_shapes=True)
        elif node.target in self.graph.inputs: node.meta["val"] = self.fake((self.T,), torch.int32)

    def _call(self, node: fx.Node) -> None:
        new = self.now[node] = self.rules[node.target](self, node) if node.target in self.rules else self._rule(node)(node)
        expected, found = self.captured[node], new.meta["val"]
        if isinstance(expected, Tensor) and not self._is(found, self.step_shape(expected)):
            shape = [str(s) for s in self.step_shape(expected)]
            raise Refused(f"{where(node)}: {target_name(node.target)} gives {type_text(found)} per token, expected [{', '.join(shape)}]")

    def _rule(self, node: fx.Node) -> Callable[[fx.Node], fx.Node]:
        target = node.target
        if not any(self._moving(n) for n in (node, *node.all_input_nodes)): return self._same
        if target in COPIES: return lambda n: self.now[n.all_input_nodes[0]]
        if target in VIEWS: return self._view
        if target in (aten.transpose.int, aten.permute.default): return self._permute
        if target is aten.expand.default: return self._expand
        if target in COUNTS: return self._count
        if target in (aten.matmul.default, aten.bmm.default) and self._is_outer(node): return self._outer
        if target in ROW_WISE: return self._rows
        if target in BY_AXIS: return self._axis
        if target is infc.rope.default: return self._rope
        if target is operator.getitem: return self._same
        if target is aten.index.Tensor: return self._lookup
        if target in CASTS or (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags): return self._pointwise
        raise Refused(f"{where(node)}: {target_name(target)} is not known to work token by token")

    # --------------------------------------------------------------------------------------------------------- layouts

    def token_dim(self, val: Tensor) -> int | None:
        """Where a captured value's tokens lie: its dim S, or B*S. Refused when there are several."""
        found = [d for d, s in enumerate(val.shape) if self._has(s, self.length)]
        if len(found) > 1 or any(not same_size(val.shape[d], n) for d in found for n in [self._token_size(val, d)]):
            raise Refused(f"a value {type_text(val, self.graph.symbols)} is not one row per token")
        return found[0] if found else None

    def _token_size(self, val: Tensor, dim: int) -> Any:
        merged = self.batch_dim(val) is None and self._has(val.shape[dim], self.batch)
        return self.length * self.batch if merged else self.length

    def batch_dim(self, val: Tensor) -> int | None:
        """Where a captured value's batch lies."""
        return next((d for d, s in enumerate(val.shape) if expression(s) == self.batch), None)

    def others(self, val: Tensor) -> list[int]:
        """The dims that are neither tokens nor batch."""
        return [d for d in range(val.dim()) if d not in (self.token_dim(val), self.batch_dim(val))]

    def step_shape(self, val: Tensor) -> list[Any]:
        """The shape per token of a captured value."""
        rest = [val.shape[d] for d in self.others(val)]
        return rest if self.token_dim(val) is None else [self.T, *rest]

    def fake(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A value of the new graph."""
        with self.mode: return torch.empty(tuple(shape), dtype=dtype)

    @staticmethod
    def _has(size: Any, symbol: sympy.Expr) -> bool:
        return isinstance(size, SymInt) and bool(expression(size).free_symbols & symbol.free_symbols)

    def _moving(self, node: fx.Node) -> bool:
        """Does the value depend on batch or tokens?"""
        val = self.captured.get(node)
        parts = val if isinstance(val, tuple | list) else [val]
        return any(self._has(s, sym) for v in parts if isinstance(v, Tensor) for s in v.shape for sym in (self.batch, self.length))

    @staticmethod
    def _is(found: Any, shape: list[Any]) -> bool:
        if not isinstance(found, Tensor) or found.dim() != len(shape): return False
        return all(same_size(a, b) for a, b in zip(found.shape, shape, strict=True))

    # ----------------------------------------------------------------------------------------------------------- rules

    def _again(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """The same node on other arguments: it keeps its name and its history."""
        node.args, node.kwargs = tuple(args), kwargs if kwargs is not None else node.kwargs
        node.meta["val"] = infer(node, self.mode)
        return node

    def _stand_in(self, node: fx.Node) -> Any:
        if node not in self.now: raise Refused(f"{where(next(iter(node.users)))}: it computes with the size %{node.name}")
        return self.now[node]

    def _same(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._stand_in)
        return self._again(node, args, kwargs)

    def _view(self, node: fx.Node) -> fx.Node:
        source, val = node.args[0], self.captured[node]
        self._check_view(node, self.captured[source], val)     # type: ignore[index]
        return self.shaped(self.now[source], self.step_shape(val), like=node)    # type: ignore[index]

    def shaped(self, node: fx.Node, shape: list[Any], like: fx.Node) -> fx.Node:
        """`node` viewed in another shape, straight from what was first viewed; nothing where the shape is the same."""
        while not self._is(node.meta["val"], shape) and node.target is aten.reshape.default: node = node.args[0]    # type: ignore
        if self._is(node.meta["val"], shape): return node
        return emit(self.graph, aten.reshape.default, (node, [-1 if s is self.T else s for s in shape]), like=like)

    def _check_view(self, node: fx.Node, old: Tensor, new: Tensor) -> None:
        """Run on numbered elements of one sequence, the view must leave each token's elements in their order."""
        sizes = dict.fromkeys(self.length.free_symbols, 3) | dict.fromkeys(self.batch.free_symbols, 1)
        numbers = torch.arange(torch.Size(self._at(old.shape, sizes)).numel()).reshape(self._at(old.shape, sizes))
        if not torch.equal(self._front(numbers, old).flatten(), self._front(numbers.reshape(self._at(new.shape, sizes)), new).flatten()):
            raise Refused(f"{where(node)}: it mixes the elements of different tokens")

    @staticmethod
    def _at(shape: Sequence[Any], sizes: dict[Any, int]) -> list[int]:
        return [int(sympy.Integer(expression(s).xreplace(sizes))) for s in shape]

    def _front(self, numbers: Tensor, val: Tensor) -> Tensor:
        token, batch = self.token_dim(val), self.batch_dim(val)
        if (token is None) != (batch is None) and token is None: return numbers
        order = [d for d in (token, batch) if d is not None]
        return numbers.permute(*order, *self.others(val))

    def _permute(self, node: fx.Node) -> fx.Node:
        source, val = node.args[0], self.captured[node.args[0]]    # type: ignore[index]
        order = list(range(val.dim()))
        if node.target is aten.permute.default: order = [d % val.dim() for d in node.args[1]]    # type: ignore
        else:
            a, b = (d % val.dim() for d in node.args[1:])          # type: ignore[operator]
            order[a], order[b] = order[b], order[a]
        others = self.others(val)
        rest = [others.index(d) for d in order if d in others]
        if rest == sorted(rest): return self.now[source]           # type: ignore[index]
        first = [] if self.token_dim(val) is None else [0]
        return emit(self.graph, aten.permute.default, (self.now[source], [*first, *(len(first) + d for d in rest)]), like=node)    # type: ignore

    def _expand(self, node: fx.Node) -> fx.Node:
        source, val = node.args[0], self.captured[node]
        aligned, shape = self.aligned(source, val, node), self.step_shape(val)    # type: ignore[arg-type]
        if self._is(aligned.meta["val"], shape): return aligned
        return emit(self.graph, aten.expand.default, (aligned, [-1, *shape[1:]]), like=node)

    def _count(self, node: fx.Node) -> fx.Node:
        """arange(S) counts positions, which start at 0 by the contract of capture."""
        given, val = arguments(node), self.captured[node]
        start, step = (given[0] if COUNTS[node.target] else 0), (given[2] if node.target is aten.arange.start_step else 1)    # type: ignore
        if start != 0 or step != 1 or self.token_dim(val) is None: raise Refused(f"{where(node)}: it counts other than 0, 1, 2, ... S-1")
        if val.dtype == torch.int32: return self.positions
        return emit(self.graph, aten._to_copy.default, (self.positions,), {"dtype": val.dtype}, like=node)

    def _is_outer(self, node: fx.Node) -> bool:
        return all(same_size(self.captured[a].shape[d], 1) for a, d in zip(node.args, (-1, -2), strict=True))    # type: ignore

    def _outer(self, node: fx.Node) -> fx.Node:
        """A product over an axis of length 1 is a product of elements: how rotary angles are often written."""
        args = tuple(self.aligned(arg, self.captured[node], node) for arg in node.args)    # type: ignore[arg-type]
        return emit(self.graph, aten.mul.Tensor, args, like=node)

    def _rows(self, node: fx.Node) -> fx.Node:
        given = list(node.args)
        for index, arg in enumerate(node.args):
            if not isinstance(arg, fx.Node): continue
            if self._moving(arg) and index not in ROW_WISE[node.target]:    # type: ignore[index]
                raise Refused(f"{where(node)}: its argument %{arg.name} differs from token to token")
            val = self.captured[arg]
            if self._moving(arg) and node.target is not aten.embedding.default and self.token_dim(val) == val.dim() - 1:
                raise Refused(f"{where(node)}: it works along the tokens")
            given[index] = self.now[arg]
        if node.target in (aten.matmul.default, aten.mm.default) and self.captured[node.args[1]].dim() != 2:    # type: ignore[index]
            raise Refused(f"{where(node)}: a product with {type_text(self.captured[node.args[1]])} is not one row by one weight")    # type: ignore
        return self._again(node, given, fx.map_arg(node.kwargs, self._stand_in))

    def _axis(self, node: fx.Node) -> fx.Node:
        given, place = list(arguments(node)), BY_AXIS[node.target]    # type: ignore[index]
        first = given[0][0] if isinstance(given[0], list | tuple) else given[0]
        val = self.captured[first]
        axes = given[place] if isinstance(given[place], list | tuple) else [given[place]]
        if node.target is aten.slice.Tensor and self._same_shape(node, first): return self.now[first]
        mapped = [self._axis_now(node, val, axis) for axis in axes]
        given[place] = mapped if isinstance(given[place], list | tuple) else mapped[0]
        if node.target is aten.cat.default: given[0] = [self.now[part] for part in given[0]]
        else: given[0] = self.now[first]
        given[1:] = fx.map_arg(given[1:], self._stand_in)
        while len(given) > len(node.args) and given[-1] == node.target._schema.arguments[len(given) - 1].default_value: given.pop()    # type: ignore
        return self._again(node, given, {})

    def _same_shape(self, node: fx.Node, source: fx.Node) -> bool:
        return all(same_size(a, b) for a, b in zip(self.captured[node].shape, self.captured[source].shape, strict=True))

    def _axis_now(self, node: fx.Node, val: Tensor, axis: int) -> int:
        """The number of an axis per token; counted from the end where it was."""
        others, first = self.others(val), int(self.token_dim(val) is not None)
        if axis % val.dim() not in others: raise Refused(f"{where(node)}: it works along the tokens")
        return others.index(axis % val.dim()) + first - (first + len(others) if axis < 0 else 0)

    def _rope(self, node: fx.Node) -> fx.Node:
        q, k, cos, sin, style = node.args
        turned = [self.aligned(angles, self.captured[q], node) for angles in (cos, sin)]    # type: ignore[arg-type, index]
        return self._again(node, (self.now[q], self.now[k], *turned, style))    # type: ignore[index]

    def _lookup(self, node: fx.Node) -> fx.Node:
        """Rows of a fixed table by a value of each token, or the same entries of every token's value."""
        table: Any = node.args[0]
        indices: Any = node.args[1]
        used = [axis for axis, index in enumerate(indices) if index is not None]
        if not self._moving(table) and indices == [indices[0]]: return self._again(node, (self.now[table], [self.now[indices[0]]]))
        if len(used) != 1 or self._moving(indices[used[0]]):
            raise Refused(f"{where(node)}: its indices into %{table.name} are not one row per token")
        axis = self._axis_now(node, self.captured[table], used[0])
        return self._again(node, (self.now[table], [*[None] * axis, self.now[indices[used[0]]]]))

    def _pointwise(self, node: fx.Node) -> fx.Node:
        val = self.captured[node]
        if node.target is aten.type_as.default: args: Any = tuple(self.now[a] for a in node.args)    # type: ignore[index]
        else: args = fx.map_arg(node.args, lambda n: self.aligned(n, val, node))
        return self._again(node, args, fx.map_arg(node.kwargs, self._stand_in))

    def aligned(self, node: fx.Node, out: Tensor, user: fx.Node) -> fx.Node:
        """An operand as it broadcasts against `out` once tokens come first.

        Its dims of 1 in the place of batch and tokens go; a dim it lacks between tokens and the rest comes in as 1.
        """
        now, val = self._stand_in(node), self.captured[node]
        if not isinstance(val, Tensor) or val.dim() == 0: return now
        shift = out.dim() - val.dim()
        token, batch = self.token_dim(out), self.batch_dim(out)
        own = self.token_dim(val)
        if own is not None and own + shift != token: raise Refused(f"{where(user)}: %{node.name} has its tokens in another dim")
        kept = [d for d in self.others(val) if d + shift not in (token, batch)]
        missing = [d for d in self.others(out) if d < shift] if own is not None else []
        shape = [val.shape[d] for d in kept]
        return self.shaped(now, [self.T, *(1 for _ in missing), *shape] if own is not None else shape, like=user)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
