"""One spelling for each idea, so that every later pass has one to match; what does nothing goes.

Gone: assertions of export, copies and aliases (values have no strides here), casts to the same dtype, views to the same
shape, + 0, * 1, dropout that is off.  One spelling: `reshape` for every view (it holds for any layout, a `view` does not
once its producer changes), `x * x` for powers of two and square, `rsqrt`, `silu`, tanh-`gelu`, `softmax.int`, `linear` for
products with a weight, -1 for the last axis of a reduction, `_to_copy(x, dtype=...)` for every cast.
Randomness that is on (dropout in training, batch statistics) is an error: the graph would not be a function.
"""
import operator
from collections.abc import Callable
from typing import Any, cast

from torch import SymInt, Tensor, fx
from torch._ops import OpOverload

from ..compiler.errors import UserError
from ..compiler.ir import Graph, argument, arguments, drop_dead_nodes, random, same_type, target_name, where
from ..compiler.ops import aten
from ..compiler.rewrite import EXACT, Pass, Report, Rule, emit

Handler = Callable[[Graph, fx.Node], fx.Node | None]
"""Returns what stands for the node from now on, or None to leave it."""

_HANDLERS: dict[Any, Handler] = {}


def _for(*targets: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def _first(node: fx.Node) -> fx.Node:
    x = node.args[0]
    assert isinstance(x, fx.Node), node
    return x


def run(graph: Graph, report: Report) -> int:
    """One walk, producers before consumers, then the spellings that take a pattern."""
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if random(node):
            raise UserError(f"{where(node)}: {target_name(node.target)} is random (training mode, or dropout > 0): "
                            "call model.eval() before the model is captured")
        count += _erase_assertion(graph, node, report) or _respell(graph, node, report)
    count += sum(rule.apply(graph, report) for rule in RULES)
    if count:
        drop_dead_nodes(graph)                             # the sqrt under an rsqrt: a dead user would hold up later rules
    return count


def _erase_assertion(graph: Graph, node: fx.Node, report: Report) -> bool:
    gone = target_name(node.target).startswith(ASSERTIONS) and not node.users and report.may_fire()
    if gone:
        graph.module.graph.erase_node(node)
    return gone


def _respell(graph: Graph, node: fx.Node, report: Report) -> bool:
    handler = _HANDLERS.get(node.target)
    if handler is None:
        return False
    last = node.prev
    new = handler(graph, node)
    if new is None or not _same_value(node, new):
        _undo(graph, last, node)
        return False
    if not report.may_fire():
        _undo(graph, last, node)
        return False
    node.replace_all_uses_with(new)
    graph.module.graph.erase_node(node)
    return True


def _same_value(node: fx.Node, new: fx.Node) -> bool:
    return same_type(node.meta["val"], new.meta["val"])


def _undo(graph: Graph, last: fx.Node, node: fx.Node) -> None:
    while node.prev is not last:
        graph.module.graph.erase_node(node.prev)


ASSERTIONS = ("aten._assert", "aten.sym_constrain", "aten._functional_assert")


# ------------------------------------------------------------------------------------------------------- what does nothing

@_for(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _copy(graph: Graph, node: fx.Node) -> fx.Node | None:
    x = _first(node)
    return None if x.op == "placeholder" and x.target in graph.kv else x      # a cache is written to: its copy is not it


@_for(aten.slice.Tensor, aten.expand.default, aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims)
def _still(graph: Graph, node: fx.Node) -> fx.Node | None:
    x = _first(node)
    if node.target is aten.permute.default:
        dims = [d % len(arguments(node)[1]) for d in arguments(node)[1]]
        return x if dims == sorted(dims) else None
    if node.target is aten.transpose.int:
        rank = x.meta["val"].dim()
        _, a, b = arguments(node)
        return x if a % rank == b % rank else None
    if node.target is aten.slice.Tensor and (argument(node, "step") != 1 or argument(node, "start") not in (None, 0)):
        return None
    return x                                               # same shape (checked by the caller): nothing was cut or repeated


@_for(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def _dropout(graph: Graph, node: fx.Node) -> fx.Node | None:
    return _first(node)                                    # live dropout was refused before


@_for(aten.add.Tensor, aten.sub.Tensor)
def _add(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, y, _ = arguments(node)
    if isinstance(x, fx.Node) and _is_number(y, 0):
        return x
    return y if node.target is aten.add.Tensor and isinstance(y, fx.Node) and _is_number(x, 0) else None


@_for(aten.mul.Tensor, aten.div.Tensor)
def _mul(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, y = arguments(node)
    if isinstance(x, fx.Node) and _is_number(y, 1):
        return x
    if node.target is aten.mul.Tensor:
        return y if isinstance(y, fx.Node) and _is_number(x, 1) else None
    if _is_number(x, 1) and isinstance(y, fx.Node):
        return _reciprocal(graph, node, y)
    return None


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == number


@_for(aten.cat.default)
def _cat(graph: Graph, node: fx.Node) -> fx.Node | None:
    parts, dim = arguments(node)
    if len(parts) == 1:
        return parts[0]
    return _last_axis(graph, node, dim, lambda d: (parts, d))


# ------------------------------------------------------------------------------------------------------------------- casts

@_for(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout)
def _cast(graph: Graph, node: fx.Node) -> fx.Node | None:
    dtype = argument(node, "dtype")
    x = _first(node)
    return _cast_to(graph, node, x, dtype or x.meta["val"].dtype)


@_for(aten.type_as.default)
def _type_as(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, other = arguments(node)
    return _cast_to(graph, node, x, other.meta["val"].dtype)


def _cast_to(graph: Graph, node: fx.Node, x: fx.Node, dtype: Any) -> fx.Node | None:
    if x.meta["val"].dtype == dtype:
        return x
    if x.target is aten._to_copy.default:                  # narrow -> wide -> narrow gives back every bit
        source = _first(x)
        start, middle = source.meta["val"].dtype, x.meta["val"].dtype
        if start == dtype and start.is_floating_point and middle.is_floating_point and start.itemsize < middle.itemsize:
            return source
    if node.target is aten._to_copy.default and node.kwargs == {"dtype": dtype}:
        return None
    return emit(graph, aten._to_copy.default, (x,), {"dtype": dtype}, like=node)


# ------------------------------------------------------------------------------------------------------------------- views

@_for(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, shape = arguments(node)
    if same_type(x.meta["val"], node.meta["val"]):
        return x
    source = x.args[0] if x.target is aten.reshape.default else x             # only the last shape counts
    known = [size if given == -1 and isinstance(size, int) else given
             for given, size in zip(shape, node.meta["val"].shape, strict=True)]
    if node.target is aten.reshape.default and source is x and known == list(shape):
        return None
    return emit(graph, aten.reshape.default, (source, known), like=node)


@_for(aten.t.default)
def _t(graph: Graph, node: fx.Node) -> fx.Node | None:
    x = _first(node)
    return x if x.meta["val"].dim() < 2 else emit(graph, aten.transpose.int, (x, 0, 1), like=node)


@_for(aten.sym_size.int)
def _size(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A known size is written where it is used."""
    size = node.meta["val"]
    if isinstance(size, SymInt):
        return None
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: size if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: size if n is node else n)
    return None


# -------------------------------------------------------------------------------------------------------------- arithmetic

@_for(aten.pow.Tensor_Scalar, aten.square.default)
def _power(graph: Graph, node: fx.Node) -> fx.Node | None:
    x = _first(node)
    exponent = 2 if node.target is aten.square.default else node.args[1]
    if exponent == 1:
        return x
    if exponent == 2:
        return emit(graph, aten.mul.Tensor, (x, x), like=node)
    if exponent == 0.5:
        return emit(graph, aten.sqrt.default, (x,), like=node)
    if exponent == -0.5:
        return emit(graph, aten.rsqrt.default, (x,), like=node)
    return None


@_for(aten.reciprocal.default)
def _reciprocal_of(graph: Graph, node: fx.Node) -> fx.Node | None:
    return _reciprocal(graph, node, _first(node))


def _reciprocal(graph: Graph, node: fx.Node, of: fx.Node) -> fx.Node | None:
    if of.target is not aten.sqrt.default:
        return None
    return emit(graph, aten.rsqrt.default, of.args, like=node)


@_for(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar)
def _scalar(graph: Graph, node: fx.Node) -> fx.Node | None:
    tensor = getattr(aten, node.target._schema.name.split("::")[1]).Tensor  # type: ignore[union-attr]
    return emit(graph, tensor, node.args, dict(node.kwargs), like=node)


# -------------------------------------------------------------------------------------------------------------- reductions

def _last_axis(graph: Graph, node: fx.Node, dim: Any, args: Callable[[int], tuple]) -> fx.Node | None:
    rank = node.meta["val"].dim()
    if not isinstance(dim, int) or dim != rank - 1:
        return None
    return emit(graph, cast(OpOverload, node.target), args(-1), like=node)


@_for(aten.softmax.int, aten._softmax.default)
def _softmax(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, dim, last = arguments(node)
    assert isinstance(x, fx.Node)
    val: Tensor = x.meta["val"]
    dtype = last if node.target is aten.softmax.int and last not in (None, val.dtype) else None
    dim = -1 if dim == val.dim() - 1 else dim
    args = (x, dim, dtype) if dtype else (x, dim)
    if node.target is aten._softmax.default and last:      # half in, fp32 out: on CUDA only
        return None
    if node.target is aten.softmax.int and node.args == args and not node.kwargs:
        return None
    return emit(graph, aten.softmax.int, args, like=node)


@_for(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.var.correction, aten.var.dim)
def _reduce(graph: Graph, node: fx.Node) -> fx.Node | None:
    x = _first(node)
    dims = argument(node, "dim")
    rank = x.meta["val"].dim()
    wanted = [-1] if dims == [rank - 1] else dims
    keep = argument(node, "keepdim")
    if node.target in (aten.var.dim, aten.var.correction):
        given = argument(node, "correction")
        unbiased = argument(node, "unbiased")
        kwargs = {"correction": int(unbiased) if unbiased is not None else 1 if given is None else given, "keepdim": keep}
        if node.target is aten.var.correction and node.args == (x, wanted) and dict(node.kwargs) == kwargs:
            return None
        return emit(graph, aten.var.correction, (x, wanted), kwargs, like=node)
    return None if wanted == dims else emit(graph, cast(OpOverload, node.target), (x, wanted, *node.args[2:]), dict(node.kwargs), like=node)


@_for(operator.getitem)
def _first_of(graph: Graph, node: fx.Node) -> fx.Node | None:
    """native_layer_norm and native_dropout give statistics too: with the first result alone they are the plain operator."""
    source, index = arguments(node)
    if index != 0 or len(source.users) != 1:
        return None
    if source.target is aten.native_layer_norm.default:
        return emit(graph, aten.layer_norm.default, source.args, like=node)
    return _first(source) if source.target is aten.native_dropout.default else None


# ---------------------------------------------------------------------------------------------------------------- products

@_for(aten.mm.default, aten.matmul.default, aten.addmm.default)
def _product(graph: Graph, node: fx.Node) -> fx.Node | None:
    """x @ W with a 2-D weight W is linear(x, W transposed): `fold_constants` then turns the weight over once and for all."""
    bias = None
    if node.target is aten.addmm.default:
        bias, x, w, beta, alpha = arguments(node)
        if beta != 1 or alpha != 1 or bias.meta["val"].dim() != 1:
            return None
    else:
        x, w = arguments(node)
    source = w.args[0] if w.target is aten.transpose.int else w
    if graph.weight(source) is None or w.meta["val"].dim() != 2 or x.meta["val"].dim() < 2:
        return None
    if source is w:
        source = emit(graph, aten.transpose.int, (w, 0, 1), like=node)
    return emit(graph, aten.linear.default, (x, source) if bias is None else (x, source, bias), like=node)


# ---------------------------------------------------------------------------------------------------------- with a pattern

def _silu(x):
    return aten.mul.Tensor(x, aten.sigmoid.default(x))


def _gelu_tanh(x, cubic, root):
    cube = aten.pow.Tensor_Scalar(x, 3)
    inner = aten.mul.Tensor(aten.add.Tensor(x, aten.mul.Tensor(cube, cubic)), root)
    return aten.mul.Tensor(aten.mul.Tensor(x, 0.5), aten.add.Tensor(aten.tanh.default(inner), 1.0))


def _refuse_gelu(x, cubic, root) -> str | None:
    if cubic != 0.044715 or abs(root - 0.7978845608028654) > 1e-15:
        return f"constants {cubic} and {root} are not those of gelu"
    return None


RULES = (
    Rule("silu", _silu, lambda x: aten.silu.default(x)),
    Rule("gelu_tanh", _gelu_tanh, lambda x, cubic, root: aten.gelu.default(x, approximate="tanh"), _refuse_gelu),
)

PASS = Pass("canonicalize", run, EXACT)
