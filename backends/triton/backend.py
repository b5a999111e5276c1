"""The GPU backend as the driver sees it: who claims what, and one cubin per unique kernel, for the target's architecture.

A bucket is replayed at its own sizes, its last rows being padding: tokens without a slot, sequences without tokens. So every size is a
number here, grids and scalars are known when a program is built, and live sizes reach kernels through query_start and context_len alone.
"""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import fx

from ...compiler.errors import CheckFailed
from ...compiler.ir import Graph, target_name
from ...compiler.ops.registry import arguments
from ...compiler.placement import Backend, Claims, Value, claim_each, source_of
from ...runtime.program import ITEM_BYTES
from ...runtime.tensors import Tensor
from ..aten import Aten
from ..launch import Arg, Context, Launch, Out, Scratch
from ..loops import TORCH as OF_LOOPS
from ..loops import Region
from ..program import Store
from ..regions import Loops
from . import build as builder
from . import printer, registry
from .registry import Emit, kernels
from .request import key, request
from .request import source as source_of_launch


@dataclass(frozen=True)
class GpuLaunch(Launch):
    """A step of a kernel that is still to be built: `body` is the key of its code."""

    made: registry.Launch | None = None


@dataclass(frozen=True)
class Kernels:
    """infc operators (and the few ATen ones beside them) that have Triton kernels."""

    name: str = "triton"

    def claim(self, graph: Graph, free: Sequence[fx.Node], context: Context) -> Claims:
        return claim_each(self.name, free, context, _refuse, _lower)


def backends() -> tuple[Backend, ...]:
    """In order of preference: hand-written kernels, generated loops, ATen."""
    return Kernels(), Loops(_lower_region, refuse=printer.refuse), Aten()


def pack(layout: str, *tensors: torch.Tensor) -> np.ndarray:
    """A weight as the kernels read it: row-major, as the graph has it."""
    if layout != "plain" or len(tensors) != 1: raise CheckFailed(f"no GPU kernel reads weights as {layout}")
    return tensors[0].contiguous().reshape(-1).view(torch.uint8).numpy()


def tensors(store: Store) -> dict[str, Tensor]:
    """The weights as the artifact stores them: flat, in order of first use."""
    return {key: Tensor(store.weight_dtypes[key], (array.nbytes // ITEM_BYTES[store.weight_dtypes[key]],), array)
            for key, array in store.weights.items()}


# ---- lowering

@dataclass
class _Meta:
    """Meta tensors for the values a unit uses, at the bucket's sizes, and what in the graph each of them is."""

    context: Context
    owners: dict[int, Arg]
    held: dict[Value, torch.Tensor]

    def of(self, node: fx.Node) -> torch.Tensor:
        """The tensor a node stands for; a reshape shares its source's."""
        value = source_of(node)
        fake = value[0].meta["val"]
        if value not in self.held: self.held[value] = self.own(fake[value[1]] if isinstance(fake, (tuple, list)) else fake, node)
        return self.held[value].reshape([self.context.maximum(size) for size in node.meta["val"].shape])

    def own(self, fake: torch.Tensor, arg: Arg) -> torch.Tensor:
        """A new tensor like this fake one, in memory that is `arg`'s."""
        made = torch.empty([self.context.maximum(size) for size in fake.shape], dtype=fake.dtype, device="meta")
        self.owners[_memory(made)] = arg
        return made

    def filled(self, value: Any) -> Any:
        """An argument of a call: tensors and sizes put in."""
        if isinstance(value, fx.Node):
            found = value.meta["val"]
            return self.of(value) if isinstance(found, torch.Tensor) else self.filled(found)
        if isinstance(value, torch.SymInt): return self.context.maximum(value)
        if isinstance(value, (tuple, list)): return [self.filled(v) for v in value]
        return value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _refuse(node: fx.Node, context: Context) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload): return f"{node.target} is no operator"
    found = kernels().get(node.target.name())
    if found is None or found.call is not node.target: return f"{node.target} has no Triton kernel"
    meta = _Meta(context, {}, {})
    return found.refuse(**{name: meta.filled(value) for name, value in arguments(node).items()})


def _lower(node: fx.Node, context: Context) -> dict[str, tuple[GpuLaunch, ...]]:
    """The ways to run a call, by name, the rule's first; what asks for the same launches as one before it is left out."""
    emit, steps = _lowered(node, context)
    found = {next(iter(emit.offered), ""): steps}
    asked = {_asked(steps)}
    for pick, name in enumerate(emit.offered[1:], 1):
        _, steps = _lowered(node, context, pick)
        if _asked(steps) not in asked: found[name] = steps
        asked.add(_asked(steps))
    return found


def _asked(steps: tuple[GpuLaunch, ...]) -> tuple[Any, ...]:
    return tuple((step.body, step.args, step.grid, step.scalars) for step in steps)


def _lowered(node: fx.Node, context: Context, pick: int = 0) -> tuple[Emit, tuple[GpuLaunch, ...]]:
    found = kernels()[node.target.name()]                                     # type: ignore[union-attr]   # it was claimed
    meta, emit = _Meta(context, {}, {}), Emit(pick)
    given = {name: meta.filled(value) for name, value in arguments(node).items()}
    fakes = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    results = [meta.own(fake, Out(i)) for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)]
    found.lower(emit, *results, **given)
    return emit, _steps(emit, meta.owners, target_name(node.target), context)


def _lower_region(region: Region, context: Context) -> tuple[GpuLaunch, ...]:
    emit, owners = Emit(), dict[int, Arg]()

    def flat(dtype: str, numel: Any, arg: Arg) -> torch.Tensor:
        made = torch.empty(int(numel.value(context.bucket.__getitem__)), dtype=OF_LOOPS[dtype], device="meta")
        owners[_memory(made)] = arg
        return made

    inputs = [flat(o.dtype, o.numel, o.node) for o in region.inputs]
    outputs = [flat(o.dtype, o.numel, Out(i)) for i, o in enumerate(region.outputs)]
    printer.lower(emit, region, {dim: context.bucket[dim] for dim in region.dims}, inputs, outputs)
    return _steps(emit, owners, printer.name(region), context)


def _steps(emit: Emit, owners: Mapping[int, Arg], op: str, context: Context) -> tuple[GpuLaunch, ...]:
    """The launches of a call as steps: each tensor is a buffer's start, and what is no tensor a scalar."""
    owners = {**owners, **{_memory(s): Scratch(s.numel() * s.element_size(), i) for i, s in enumerate(emit.scratch)}}
    steps = []
    for launch in emit.launches:
        args, scalars = [], []
        for at, value in enumerate(v for v in launch.args if v is not None):
            if not isinstance(value, torch.Tensor): scalars.append((at, value))
            elif value.storage_offset(): raise CheckFailed(f"{op}: a launch of {_title(launch)} reads from amid a buffer")
            else: args.append(owners[_memory(value)])
        asked = request(launch, context.target)
        steps.append(GpuLaunch(_title(launch), key(launch, asked, builder.assembler(context.target)), tuple(args), (),
                               (*launch.grid, 1, 1)[:3], tuple(scalars), launch))
    return tuple(steps)


def _title(launch: registry.Launch) -> str:
    """"rows_576x960", "attend_64": the kernel and its sizes."""
    c = launch.constants
    size = f"{c['K']}x{c['N']}" if "K" in c and "N" in c else next((c[n] for n in ("N", "WIDTH", "D", "V") if n in c), "")
    return f"{launch.function.fn.__name__.strip('_')}_{size}".rstrip("_")


# ---- code

SOURCE = "kernels.py"
"""What a dump calls the source of a store."""


def headers_digest() -> str:
    """Nothing: the key of each kernel's code holds the text of all it calls."""
    return ""


def source(store: Store) -> str:
    """The text of every kernel, and of what each calls, with the values of the globals they read."""
    found: dict[str, None] = {}
    for made in _made(store).values():
        name, *parts = source_of_launch(made.function)
        found["\n\n".join((f"# {name}", *parts))] = None
    return "\n\n\n".join(found)


def code(
    store: Store, toolchain: "Toolchain", note: Callable[[str], None], progress: Callable[[float, str], None],
) -> tuple[bytes, dict[str, bytes]]:
    """No shared library, and a cubin for every kernel, by file name; the store's kernels get what the compiler says of them.

    CheckFailed for a kernel that does not compile, or spills where it must not, and is needed; of others the store notes why.
    """
    todo = _made(store)
    optional = {at for at, hashed in enumerate(todo) if hashed not in store.needed}
    built = builder.attempt([*todo.values()], toolchain.isa, optional, note=note,
                            progress=lambda done, of, title: progress(done / of, title))
    files: dict[str, bytes] = {}
    for hashed, one in zip(todo, built, strict=True):
        if isinstance(one, CheckFailed):
            store.refused[hashed] = str(one)
            continue
        made, file = one.made, f"code/{one.sha256}.cubin"
        files[file] = made.cubin
        store.kernels[hashed] = msgspec.structs.replace(
            store.kernels[hashed], symbol=made.symbol, file=file, registers=made.registers, shared_bytes=made.shared,
            spill_bytes=made.spill_stores + made.spill_loads, threads=made.threads, params=made.params, tensor_cores=made.tensor_cores)
    return b"", files


def _made(store: Store) -> dict[str, registry.Launch]:
    """A launch of every kernel that Triton compiles, by its hash."""
    return {hashed: launch.made for hashed, launch in store.launches.items() if isinstance(launch, GpuLaunch) and launch.made}


@dataclass(frozen=True)
class Toolchain:
    """Triton and the assembler it brings, for one architecture."""

    isa: str
    name: str
    identity: str

    def assembly(self, text: str) -> str:
        """Never asked for: there is one cubin a kernel, which `nvdisasm` reads."""
        raise CheckFailed(f"no assembly of {self.isa} is written")


def toolchain(isa: str) -> Toolchain:
    """Triton as it is installed here."""
    import triton

    name = f"Triton {triton.__version__} with ptxas {builder.assembler(isa)}"
    return Toolchain(isa, name, f"{name} for {isa}")
