"""The graph: ATen and infc operators over named inputs, runnable in eager PyTorch after every pass.

One IR through all passes: a `torch.fx` graph whose placeholders are the weights, then the inputs (then the KV caches),
and whose output is a tuple. Every node carries `meta`:
  val     FakeTensor (symbolic sizes), SymInt, or a tuple of them
  origin  module paths it came from, e.g. ["model.layers.0.self_attn"]
  line    the source line, or ""
  passes  the passes that made or changed it
"""
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.weak import WeakIdKeyDictionary

from .errors import CheckFailed

DIALECTS = ("captured", "optimized")
NAMESPACES = ("aten", "infc")

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip

# What a graph may compute on sizes, besides reading them with aten.sym_size.
SIZE_FUNCTIONS = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.truediv, operator.pow,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_,
    math.ceil, math.floor, math.trunc, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_int, torch.sym_float,
}  # fmt: skip


@dataclass
class Graph:
    """A model as one graph. `module` is edited in place by passes; everything else describes its placeholders."""

    module: fx.GraphModule
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Placeholder name -> real tensor. Tied weights are one placeholder: identity by storage, not by name."""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    symbols: dict[str, str] = field(default_factory=dict)
    """sympy symbol ("s44") -> public dim name ("B")."""
    dialect: str = "captured"
    meta: dict[str, Any] = field(default_factory=dict)
    """Plain JSON data of the model: config, eos ids, max positions, name."""
    kv: list[str] = field(default_factory=list)
    """Placeholder names of the KV caches: k_cache_0, v_cache_0, k_cache_1, ..."""
    exact: dict[str, Tensor] = field(default_factory=dict)
    """fp64 values of weights that were computed at compile time (1 + w): what contract checks in fp64 read."""
    sample_inputs: Callable[..., Any] | None = None
    """-> list of samples at several shapes; a sample is a tuple over `inputs` and then `kv`. Called after each pass: few, and
    every kind of input among them. `sample_inputs.thorough()`, where there is one, gives more: for `--check strict`."""
    blocks: Mapping[str, Any] = field(default_factory=dict)
    """Module path -> how its matrix lies in the model's file (compiler.quant.blocks.Stored), where that is a GGUF."""

    @property
    def nodes(self) -> Any:
        """All nodes in order; safe to edit the graph while walking it."""
        return self.module.graph.nodes

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """Placeholder name -> node, in order: weights, inputs, KV caches."""
        return {str(node.target): node for node in self.module.graph.find_nodes(op="placeholder")}

    @property
    def output(self) -> fx.Node:
        return self.module.graph.output_node()

    def weight(self, node: fx.Node) -> Tensor | None:
        """The real tensor behind a weight placeholder; None for every other node."""
        return self.weights.get(str(node.target)) if node.op == "placeholder" else None

    def add_weight(self, name: str, tensor: Tensor, before: fx.Node | None = None) -> fx.Node:
        """A new weight placeholder after the other weights (or before the placeholder `before`); its name is made unique."""
        if before is None or before.op != "placeholder":
            before = next(node for node in self.nodes if node.op != "placeholder" or node.target not in self.weights)
        with self.module.graph.inserting_before(before):
            node = self.module.graph.placeholder(name)
        node.target = node.name                                      # fx numbers a name that was ever used
        node.meta |= {"val": fake_mode(self).from_tensor(tensor.detach(), static_shapes=True), "origin": [], "line": "", "passes": []}
        self.weights[node.name] = tensor.detach()
        return node

    def drop_weight(self, node: fx.Node) -> None:
        """Remove an unused weight placeholder and its tensor."""
        self.module.graph.erase_node(node)
        del self.weights[str(node.target)]
        self.exact.pop(str(node.target), None)

    def run(self, *inputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> tuple[Any, ...]:
        """Evaluate in eager PyTorch. `inputs` follow `Graph.inputs`, then `Graph.kv` (written in place)."""
        return evaluate(self, inputs, self.weights if weights is None else weights)

    def copy(self) -> "Graph":
        """An independent graph over the same weight tensors. Its Python code is made when called, if ever (0.1 s)."""
        new = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            twin = env[node] = new.node_copy(node, env.__getitem__)
            if twin.name != node.name:
                twin._rename(node.name)
            twin.meta = {k: list(v) if isinstance(v, list) else v for k, v in node.meta.items()}
        return Graph(_LazyGraphModule({}, new), dict(self.weights), list(self.inputs), list(self.outputs), dict(self.symbols),
                     self.dialect, dict(self.meta), list(self.kv), dict(self.exact), self.sample_inputs, self.blocks)

    def restore(self, saved: "Graph") -> None:
        """Become what `saved` (a copy taken earlier) is: how a failed pass is rolled back."""
        self.__dict__.update(saved.__dict__)


# ---------------------------------------------------------------------------------------------------------- evaluation

def evaluate(graph: Graph, inputs: Iterable[Any], weights: Mapping[str, Any],
             call: Callable[[fx.Node, tuple, dict], Any] | None = None) -> tuple[Any, ...]:
    """Run node by node, dropping each value after its last use. `call(node, args, kwargs)` replaces the plain call."""
    values = list(inputs)
    names = graph.inputs + graph.kv
    if len(values) != len(names):
        raise TypeError(f"the graph takes {len(names)} inputs ({', '.join(names)}), got {len(values)}")
    given = dict(zip(names, values, strict=True))
    env: dict[fx.Node, Any] = {}
    last = last_uses(graph.module.graph)
    result: tuple[Any, ...] = ()
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                env[node] = given[name] if name in given else weights[name]
            elif node.op == "output":
                result = fx.map_arg(node.args[0], env.__getitem__)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = call(node, args, kwargs) if call else node.target(*args, **kwargs)  # type: ignore[operator]
            for dead in last.get(node, ()):
                env.pop(dead, None)
    return tuple(result)


def needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What these nodes depend on, themselves included: by data, or through a cache that is read on the way."""
    found, stack = set(nodes), [*nodes]
    while stack:
        node = stack.pop()
        writers = [user for user in node.users if impure(user)] if node.op == "placeholder" else []
        new = [n for n in (*node.all_input_nodes, *writers) if n not in found and n.op != "output"]
        found.update(new)
        stack += new
    return found


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in (node, *node.all_input_nodes):
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def fake_mode(graph: Graph) -> FakeTensorMode:
    """The FakeTensorMode (and with it the ShapeEnv) that the graph's values live in."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, Tensor):
            return val.fake_mode  # type: ignore[attr-defined]
    return FakeTensorMode()


_dispatcher = nullcontext if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else enable_python_dispatcher
"""Under the Python dispatcher, as export runs, PyTorch 2.11 asks no symbolic size for its number. It makes inference a sixth slower."""


def infer(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a call node returns for its arguments' values (FakeTensors and sizes)."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with _dispatcher(), mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def fake_propagate(graph: Graph, *, missing_only: bool = False, accept_changes: bool = False,
                   how: Callable[[fx.Node, FakeTensorMode], Any] = infer) -> int:
    """Infer every node's `val` again from the placeholders (or only the missing ones); returns how many were inferred.

    Keeps the inputs' ShapeEnv. `how` infers one node. Raises CheckFailed when an operator rejects its arguments, or when a
    known value's shape or dtype turns out to be another one (unless `accept_changes`: for passes that change dtypes or dims
    on purpose).
    """
    mode, count = fake_mode(graph), 0
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "call_function" or (missing_only and "val" in node.meta):
                continue
            try:
                val = how(node, mode)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise CheckFailed(f"{where(node)}: {target_name(node.target)} rejects its arguments: {error}") from error
            old = node.meta.get("val", val)
            if not accept_changes and not same_type(old, val):
                raise CheckFailed(f"{where(node)}: recorded as {type_text(old)}, inferred as {type_text(val)}")
            node.meta["val"] = val
            count += 1
    return count


def _equal_sizes(a: Any, b: Any) -> bool:
    """Same structure and dtypes, and sizes that the ShapeEnv proves equal though they are spelled differently."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal_sizes(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.dim() == b.dim() and all(same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    return type(a) is type(b) and same_size(a, b)


def same_size(a: Any, b: Any) -> bool:
    """True when two sizes are equal for every value of the symbols (proved, never assumed from the hint)."""
    return a is b or bool(sympy.simplify(expression(a) - expression(b)) == 0)


def same_type(a: Any, b: Any) -> bool:
    """Same shape and dtype, symbolically; tuples element by element."""
    return signature(a) == signature(b) or _equal_sizes(a, b)


# ---------------------------------------------------------------------------------------------------------------- text

def expression(size: Any) -> sympy.Expr:
    """A size as a sympy expression."""
    return size.node.expr if isinstance(size, SymInt | SymFloat | SymBool) else sympy.sympify(size)


def signature(val: Any) -> Any:
    """A hashable stand-in for a value's shape and dtype."""
    if isinstance(val, Tensor):
        return (val.dtype, tuple(expression(s) if isinstance(s, SymInt) else s for s in val.shape))
    if isinstance(val, tuple | list):
        return tuple(map(signature, val))
    return expression(val) if isinstance(val, SymInt | SymFloat | SymBool) else type(val)


def size_text(size: Any, symbols: Mapping[str, str]) -> str:
    """A size with public dim names and no spaces: `B*S`, `N+1`, `576`."""
    if isinstance(size, int):
        return str(size)
    return _expression_text(expression(size), tuple(symbols.items()))


@lru_cache(maxsize=4096)
def _expression_text(expr: sympy.Expr, symbols: tuple[tuple[str, str], ...]) -> str:
    public = dict(symbols)
    names = {s: sympy.Symbol(public.get(str(s), str(s)), integer=True) for s in expr.free_symbols}
    return str(expr.xreplace(names)).replace(" ", "")


def type_text(val: Any, symbols: Mapping[str, str] | None = None) -> str:
    """`f32[B,S,576]`; `sym[B]` for a size; `(f32[4], f32[4])` for several results; `()` for none."""
    symbols = symbols or {}
    if isinstance(val, Tensor):
        return f"{DTYPE_NAMES.get(val.dtype, str(val.dtype))}[{','.join(size_text(s, symbols) for s in val.shape)}]"
    if isinstance(val, tuple | list):
        return f"({', '.join(type_text(v, symbols) for v in val)})"
    if val is None:
        return "()"
    return f"sym[{size_text(val, symbols)}]" if isinstance(val, SymInt | int) else f"sym[{val}]"


def target_name(target: Any) -> str:
    """`aten.add.Tensor`, `infc.rms_norm` (the overload `default` is left out), `operator.getitem`."""
    if isinstance(target, OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}"
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    return f"{getattr(target, '__module__', '').lstrip('_')}.{getattr(target, '__name__', target)}"


def where(node: fx.Node) -> str:
    """Node, module path and source line, for messages."""
    origin = ", ".join(node.meta.get("origin") or ())
    line = node.meta.get("line") or ""
    return f"%{node.name}" + (f" in {origin}" if origin else "") + (f" [{line}]" if line else "")


def _argument(arg: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return "%" + names[arg]
    if isinstance(arg, tuple | list):
        return f"[{', '.join(_argument(a, names) for a in arg)}]"
    if isinstance(arg, slice):
        return f"slice({_argument(arg.start, names)}, {_argument(arg.stop, names)}, {_argument(arg.step, names)})"
    if isinstance(arg, torch.dtype):
        return DTYPE_NAMES.get(arg, str(arg))
    if isinstance(arg, torch.device | torch.layout | torch.memory_format):
        return str(arg).removeprefix("torch.")
    return repr(arg)


def argument_text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """A node's arguments as the text form spells them: `%x, %w, 1e-05`."""
    if node.op == "output":
        return ", ".join(_argument(a, names) for a in cast(tuple, node.args[0]))
    given = [_argument(a, names) for a in node.args] + [f"{k}={_argument(v, names)}" for k, v in sorted(node.kwargs.items())]
    return ", ".join(given)


def node_text(node: fx.Node, graph: Graph, names: Mapping[fx.Node, str]) -> str:
    """One line of the text form."""
    if node.op == "output":
        return f"return {argument_text(node, names)}"
    if node.op == "placeholder":
        name = str(node.target)
        body = "weight" if name in graph.weights else "kv" if name in graph.kv else "input"
    else:
        body = f"{target_name(node.target)}({argument_text(node, names)})"
    return f"%{names[node]}: {type_text(node.meta.get('val'), graph.symbols)} = {body}"


def text(graph: Graph, *, renumber: bool = False) -> str:
    """The canonical text form, one node a line. `renumber` names nodes by place: equal graphs give equal text."""
    names = {node: str(i) if renumber else node.name for i, node in enumerate(graph.nodes)}
    return "".join(node_text(node, graph, names) + "\n" for node in graph.nodes)


def same_graph(a: Graph, b: Graph) -> bool:
    """Same nodes, arguments, types and public names, whatever the nodes are called. Weights' contents are not compared."""
    return text(a, renumber=True) == text(b, renumber=True) and (a.inputs, a.outputs, a.kv) == (b.inputs, b.outputs, b.kv)


# ---------------------------------------------------------------------------------------------------------------- keys

_HASHES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def tensor_hash(tensor: Tensor) -> str:
    """sha256 of dtype, shape and contents; remembered until the tensor is written to."""
    version, digest = cast(tuple[int | None, str], _HASHES.get(tensor, (None, "")))
    if version != tensor._version:
        head = f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}".encode()
        hasher = hashlib.sha256(head)
        if tensor.numel():
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digest = hasher.hexdigest()
        _HASHES[tensor] = (tensor._version, digest)
    return digest


def tensor_hashes(tensors: Iterable[Tensor]) -> list[str]:
    """`tensor_hash` of each, side by side."""
    with ThreadPoolExecutor() as pool:                            # hashlib releases the GIL: 2 cores, twice the speed
        return list(pool.map(tensor_hash, tensors))


def content_key(graph: Graph) -> str:
    """sha256 over the renumbered text, the public names, `meta` and the weights' content hashes, in placeholder order."""
    hashes = tensor_hashes(graph.weights[name] for name in graph.placeholders if name in graph.weights)
    described = repr((graph.dialect, graph.inputs, graph.outputs, graph.kv, sorted(graph.meta.items(), key=lambda kv: kv[0]), hashes))
    return hashlib.sha256((text(graph, renumber=True) + described).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- house-keeping

def arguments(node: fx.Node) -> tuple[Any, ...]:
    """All arguments in schema order, defaults filled in: one spelling whatever was given by keyword."""
    if not isinstance(node.target, OpOverload):
        return (*node.args, *(v for _, v in sorted(node.kwargs.items())))
    filled = list(node.args)
    for arg in node.target._schema.arguments[len(node.args):]:
        filled.append(node.kwargs.get(arg.name, arg.default_value if arg.has_default_value() else None))
    return tuple(filled)


def argument(node: fx.Node, name: str) -> Any:
    """One argument of an operator call by its schema name; None where the operator has no such argument."""
    for found, value in zip(node.target._schema.arguments, arguments(node), strict=True):  # type: ignore[union-attr]
        if found.name == name:
            return value
    return None


def random(node: fx.Node) -> bool:
    """True when two runs of the node may differ: dropout that is on, sampling, batch statistics in training."""
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return bool(argument(node, "training"))
    if argument(node, "dropout_p") is not None:
        return argument(node, "dropout_p") != 0
    if argument(node, "p") is not None and argument(node, "train") is not None:
        return bool(argument(node, "train")) and argument(node, "p") != 0
    switches = {a.name for a in node.target._schema.arguments} & {"training", "train"}
    return not switches or any(argument(node, name) for name in switches)


def impure(node: fx.Node) -> bool:
    """True when a node does more than return a value: it writes to an argument, or draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.op in ("placeholder", "output")
    return node.target._schema.is_mutable or random(node)


def drop_dead_nodes(graph: Graph) -> int:
    """Erase call nodes without users that only return a value; returns how many. Weights and inputs stay."""
    count = 0
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not impure(node):
            graph.module.graph.erase_node(node)
            count += 1
    return count


# -------------------------------------------------------------------------------------------------------------- verify

# Left by export, meaningless to run: canonicalize removes them, and no pass may bring them back.
FORBIDDEN_WHEN_OPTIMIZED = {"aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range_for_size", "aten.dropout",
                            "aten.alias", "aten.detach", "aten.lift_fresh_copy"}  # fmt: skip


def verify(graph: Graph, dialect: str | None = None) -> None:
    """Raise CheckFailed with node and reason unless the graph is well formed for its dialect."""
    dialect = dialect or graph.dialect
    if dialect not in DIALECTS:
        raise CheckFailed(f"unknown dialect {dialect!r}; known: {', '.join(DIALECTS)}")
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        reason = _fault(node, graph, dialect, seen)
        if reason:
            raise CheckFailed(f"{where(node)}: {reason}")
        seen.add(node)
    if len({node.name for node in seen}) != len(seen):
        names = [node.name for node in seen]
        raise CheckFailed(f"two nodes are called %{next(n for n in names if names.count(n) > 1)}")
    _verify_placeholders(graph)


def _fault(node: fx.Node, graph: Graph, dialect: str, seen: set[fx.Node]) -> str | None:
    for used in node.all_input_nodes:
        if used not in seen:
            return f"uses %{used.name}, which is not defined before it"
    if node.op == "output":
        results = node.args[0]
        if not isinstance(results, tuple | list) or not all(isinstance(r, fx.Node) for r in results):
            return "the output must be a tuple of nodes"
        return None if len(results) == len(graph.outputs) else f"{len(results)} results for outputs {graph.outputs}"
    if "val" not in node.meta:
        return "has no value: run fake_propagate"
    if node.op == "placeholder":
        return None
    if node.op != "call_function":
        return f"is a {node.op}: only placeholders, calls and one output are allowed"
    return _target_fault(node, dialect)


def _target_fault(node: fx.Node, dialect: str) -> str | None:
    name = target_name(node.target)
    if node.target is operator.getitem:
        several = isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta["val"], tuple | list)
        return None if several else "indexes a single value"
    if isinstance(node.target, OpOverload):
        if node.target.namespace not in NAMESPACES:
            return f"calls {name}: only {' and '.join(NAMESPACES)} operators are allowed"
        if dialect == "optimized" and name in FORBIDDEN_WHEN_OPTIMIZED:
            return f"calls {name}, which the optimized dialect does not allow"
        return None
    if node.target in SIZE_FUNCTIONS:
        bad = next((a for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor)), None)
        return f"computes on the tensor %{bad.name} with {name}: that is for sizes only" if bad else None
    return f"calls {name}, which is no operator"


def _verify_placeholders(graph: Graph) -> None:
    found = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    expected = [*graph.weights, *graph.inputs, *graph.kv]
    if len(set(found)) != len(found):
        raise CheckFailed(f"duplicate placeholder {next(n for n in found if found.count(n) > 1)}")
    if set(found) != set(expected) or len(found) != len(expected):
        missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise CheckFailed(f"placeholders and names disagree: without a placeholder {missing}, without an owner {extra}")
    if any(n not in graph.weights for n in found[:len(graph.weights)]):
        raise CheckFailed("weights come first, then inputs and caches")
    if [n for n in found if n in graph.inputs] != graph.inputs:
        raise CheckFailed(f"inputs are out of order: {[n for n in found if n in graph.inputs]}, expected {graph.inputs}")
    placeholders = graph.placeholders
    for name, tensor in graph.weights.items():
        val = placeholders[name].meta["val"]
        if (val.dtype, tuple(val.shape)) != (tensor.dtype, tuple(tensor.shape)):
            raise CheckFailed(f"weight {name} is {type_text(tensor)}, its placeholder says {type_text(val, graph.symbols)}")
