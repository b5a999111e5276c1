"""Run a graph's loop regions as compiled C++ (many in one library) or in the interpreter, and everything else in eager."""
import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from golden import trace
from infc.backends import loops, regions
from infc.backends.cpu import printer
from infc.backends.loop_ops import size as as_expr
from infc.compiler.ir import Graph, expression
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

toolchain = import_module("infc.backends.cpu.toolchain")
KERNELS = Path(printer.__file__).parent / "kernels"
EXACT = ("-ffp-contract=off",)         # no fused multiply-add: bit for bit what PyTorch computes
WARN = ("-Wall", "-Wextra", "-Werror", "-Wno-tautological-compare", "-Wno-unused-variable", "-Wno-unused-parameter")


class Run(ctypes.Structure):
    """infc_run of kernels/pool.h."""

    _fields_ = [("dims", ctypes.POINTER(ctypes.c_int64)), ("thread", ctypes.c_int64), ("threads", ctypes.c_int64),
                ("scratch", ctypes.c_void_p)]


@dataclass
class Case:
    """A traced function with its regions."""

    graph: Graph
    plan: regions.Plan
    inputs: tuple[Tensor, ...]

    def kernels(self) -> list[str]:
        return [printer.body(region, self.dims()) for region in self.plan.regions]

    def dims(self) -> list[str]:
        return sorted(set(self.graph.symbols.values()))

    def live(self, inputs: Sequence[Tensor]) -> dict[str, int]:
        found = {}
        for name, tensor in zip(self.graph.inputs, inputs, strict=True):
            for size, value in zip(self.graph.placeholders[name].meta["val"].shape, tensor.shape, strict=True):
                if expression(size).is_Symbol: found[self.graph.symbols[str(expression(size))]] = value
        return found


def case(fn: Callable[..., Any], *inputs: Tensor, dynamic: Any = ()) -> Case:
    """A captured function, its named dims dynamic."""
    return _case(trace(fn, *inputs, dynamic=dynamic), inputs)


def quick_case(fn: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> Case:
    """The same without torch.export, 30 times faster: every size a number, or every size above 1 symbolic."""
    module = make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    output = module.graph.output_node()
    output.args = (tuple(output.args[0]) if isinstance(output.args[0], (tuple, list)) else (output.args[0],),)
    names = [n.name for n in module.graph.find_nodes(op="placeholder")]
    symbols = {str(f): str(f) for n in module.graph.find_nodes(op="placeholder") for s in n.meta["val"].shape
               for f in expression(s).free_symbols}
    for node in module.graph.find_nodes(op="placeholder"): node.target = node.name
    return _case(Graph(module, inputs=names, outputs=[f"out{i}" for i in range(len(output.args[0]))], symbols=symbols), inputs)


def _case(graph: Graph, inputs: tuple[Tensor, ...]) -> Case:
    for node in list(graph.nodes):
        if "_assert_tensor_metadata" in str(node.target): graph.module.graph.erase_node(node)
    free = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], (Tensor, tuple, list))]
    return Case(graph, regions.find(graph, free, graph.symbols), inputs)


@cache
def library(bodies: tuple[str, ...], isa: str = "", extra: tuple[str, ...] = EXACT) -> ctypes.CDLL:
    """One shared library with every body as k0, k1, ..., with the product's flags for `isa` (this machine's by default)."""
    compiler = toolchain.find_compiler()
    flags = [*toolchain.flags(isa or "portable", compiler), *(() if isa else ("-march=native",)), *extra, *WARN]
    text = '#include "pool.h"\n#include "loops.h"\n' + "".join(
        f'extern "C" void k{i}(void* const* b, const infc_run* r) {{\n{body}\n}}\n' for i, body in enumerate(bodies))
    folder = Path(tempfile.mkdtemp(prefix="infc-loops-"))
    source = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    source.write_text(text)
    made = subprocess.run([compiler.path, *flags, f"-I{KERNELS}", "-o", str(source.with_suffix(".so")), str(source)],
                          capture_output=True, text=True, check=False)
    assert made.returncode == 0, f"{source}\n{made.stderr[:4000]}"
    return ctypes.CDLL(str(source.with_suffix(".so")))


def launch(function: Any, buffers: Sequence[Tensor], dims: Sequence[int], threads: int) -> None:
    """Every thread's share, one after the other."""
    pointers = (ctypes.c_void_p * len(buffers))(*[t.data_ptr() for t in buffers])
    live = (ctypes.c_int64 * max(len(dims), 1))(*dims)
    for thread in range(threads):
        function(pointers, ctypes.byref(Run(live, thread, threads, None)))


def run(c: Case, execute: Callable[[int, loops.Region, list[Tensor]], list[Tensor]],
        inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The graph's outputs: regions by `execute(number, region, inputs)`, other nodes by eager, in a runnable order."""
    inputs = c.inputs if inputs is None else inputs
    values: dict[fx.Node, Any] = {}
    for name, node in c.graph.placeholders.items():
        values[node] = c.graph.weights[name] if name in c.graph.weights else inputs[c.graph.inputs.index(name)]
    live = c.live(inputs)
    waiting = list(enumerate(c.plan.regions))
    for node in c.graph.nodes:
        while ready := [(i, r) for i, r in waiting if all(o.node in values for o in r.inputs)]:
            waiting.remove(ready[0])
            i, region = ready[0]
            outs = execute(i, region, [values[o.node].contiguous() for o in region.inputs])
            for o, out in zip(region.outputs, outs, strict=True):
                values[o.node] = out.reshape([_size(s, live, c.graph.symbols) for s in o.node.meta["val"].shape])
        if node.op == "call_function" and node not in values and all(n in values for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    assert not waiting
    return [values[n] for n in c.graph.output.args[0]]


def _size(size: Any, live: dict[str, int], symbols: dict[str, str]) -> int:
    return int(as_expr(size, symbols).value(live.__getitem__))


def compiled(cases: Sequence[Case], threads: int = 3, isa: str = "", extra: tuple[str, ...] = EXACT) -> list[Callable[..., list[Tensor]]]:
    """For each case a function of its inputs that runs its regions as C++; all of them in one library."""
    bodies = [k for c in cases for k in c.kernels()]
    unique = tuple(dict.fromkeys(bodies))
    lib = library(unique, isa, extra)
    made = []
    for c in cases:
        symbols = [f"k{unique.index(k)}" for k in c.kernels()]

        def call(*inputs: Tensor, c: Case = c, symbols: list[str] = symbols) -> list[Tensor]:
            live = c.live(inputs or c.inputs)

            def execute(i: int, region: loops.Region, given: list[Tensor]) -> list[Tensor]:
                outs = [torch.full((int(o.numel.value(live.__getitem__)),), 77, dtype=loops.TORCH[o.dtype]) for o in region.outputs]
                launch(getattr(lib, symbols[i]), [*given, *outs], [live[d] for d in c.dims()], threads)
                return outs
            return run(c, execute, inputs or None)

        made.append(call)
    return made


def interpreted(c: Case, *inputs: Tensor) -> list[Tensor]:
    live = c.live(inputs or c.inputs)
    return run(c, lambda i, region, given: loops.evaluate(region, given, live), inputs or None)
