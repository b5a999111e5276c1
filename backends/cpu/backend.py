"""Claims infc operators for hand-written kernels and fused regions for the printer, and makes one C++ file of them."""
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import fx

from ...compiler.errors import UserError
from ...compiler.ir import Graph
from ...compiler.placement import Backend, Claims, claim_each
from ...compiler.reuse import cache_folder
from ...compiler.scratch import scratch
from ...runtime.program import ITEM_BYTES
from ...runtime.tensors import Tensor
from ..aten import Aten
from ..launch import Context
from ..program import Store
from ..regions import Loops
from . import claims, printer
from .pack import LAYOUTS
from .toolchain import KERNELS, assembly, build, find_compiler, flags

SOURCE = "kernels.cpp"
"""What a dump calls the source of a store."""


@dataclass(frozen=True)
class Kernels:
    """infc operators (and the few ATen ones beside them) that a header implements."""

    name: str = "cpu"

    def claim(self, graph: Graph, free: Sequence[fx.Node], context: Context) -> Claims:
        return claim_each(self.name, free, context, claims.refuse, claims.lower)


def backends() -> tuple[Backend, ...]:
    """In order of preference: hand-written kernels, generated loops, ATen."""
    return Kernels(), Loops(printer.launch), Aten()


def pack(layout: str, *tensors: torch.Tensor) -> np.ndarray:
    """A weight as the kernels read it; several tensors where its layout holds codes and their scales."""
    return LAYOUTS[layout](*tensors)


def tensors(store: Store) -> dict[str, Tensor]:
    """The packed weights as the artifact stores them: flat, in order of first use."""
    return {key: Tensor(store.weight_dtypes[key], (array.nbytes // ITEM_BYTES[store.weight_dtypes[key]],), np.ascontiguousarray(array))
            for key, array in store.weights.items()}


def headers_digest() -> str:
    """sha256 over every kernel header: part of each kernel's identity."""
    digest = hashlib.sha256()
    for header in sorted(KERNELS.glob("*.h")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.hexdigest()


def source(store: Store) -> str:
    """One C++ file with every unique kernel of a model and the pool that runs them."""
    includes = "".join(f'#include "{name}"\n' for name in dict.fromkeys(["pool.h", *store.headers]))
    bodies = "".join(
        f'\n// {kernel.name}: {kernel.op}\nextern "C" void {kernel.symbol}(void* const* b, const infc_run* r) {{\n{store.bodies[key]}\n}}\n'
        for key, kernel in store.kernels.items() if not kernel.symbol.startswith("aten::"))
    return includes + bodies


def code(
    store: Store, toolchain: "Toolchain", note: Callable[[str], None], progress: Callable[[float, str], None],
) -> tuple[bytes, dict[str, bytes]]:
    """The shared library of a store, and no other code. Raises as `Toolchain.build` does."""
    return toolchain.build(source(store), cache_folder() / "code", note), {}


@dataclass(frozen=True)
class Toolchain:
    """The compiler of this machine, for one instruction set."""

    isa: str
    name: str                                         # "g++ (Debian 12.2.0-14) 12.2.0"
    identity: str                                     # name and flags: what a key must hold

    def build(self, text: str, cache: Path | None, note: Callable[[str], None]) -> bytes:
        """The shared library of a source; `note` gets a line where the cache is of no use.

        Raises UserError without a compiler or room to compile in, CheckFailed where the source does not compile.
        """
        try:
            with scratch("code") as folder:
                return build(text, self.isa, folder / "kernels.so", cache, note).read_bytes()
        except OSError as error:
            raise UserError(f"cannot compile in the temporary folder {tempfile.gettempdir()}: {error.strerror} (set TMPDIR)") from error

    def assembly(self, text: str) -> str:
        """The assembly of a source, from the same compiler and flags. Raises as `build` does."""
        return assembly(text, self.isa)


def toolchain(isa: str) -> Toolchain:
    """Find the compiler. Raises UserError that names the package to install when there is none."""
    compiler = find_compiler()
    return Toolchain(isa, compiler.version, " ".join((compiler.version, *flags(isa, compiler))))
