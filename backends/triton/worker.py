"""Compiles kernels in a process of its own, where Triton compiles whatever the parent does: requests in, code out, on pipes.

A request that fails ends the process with a traceback, whose last lines the parent reads; so does a crash of the compiler. It imports no
torch of its own, as that is most of the time it takes to start.
"""
import contextlib
import hashlib
import importlib
import io
import os
import re
import struct
import sys
from functools import cache
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any, BinaryIO

import msgspec

from ...compiler.errors import CheckFailed

ARCHS = {"sm_80": 80, "sm_89": 89, "sm_90a": 90, "sm_100a": 100}
"""Architectures code is built for, and their number in Triton: it builds 90 and later with the "a" features of that chip."""

ALIGNED = 16
"""Bytes of the widest load; also what Triton's own launcher looks for."""

_LENGTH = struct.Struct("<Q")


class Dtype(msgspec.Struct, frozen=True, tag=True):
    """A constant that is a dtype of Triton."""

    name: str


class Function(msgspec.Struct, frozen=True, tag=True):
    """A constant that is a function of Triton's language."""

    module: str
    name: str


Constant = bool | int | float | str | None | Dtype | Function


class Request(msgspec.Struct, frozen=True):
    """One kernel to compile. `signature` and `constants` are by argument name, in the kernel's order; `aligned` are argument positions."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[str, Constant]
    aligned: tuple[int, ...]
    warps: int
    stages: int
    arch: str
    text: str = ""                       # of a generated module; where there is none, `module` is imported

    @property
    def title(self) -> str:
        """How a message calls it."""
        chosen = ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in self.constants.items())
        return f"{self.name}[{', '.join(filter(None, (chosen, f'{self.warps} warps', f'{self.stages} stages')))}] for {self.arch}"


class Generated(ExecutionLoader):
    """Makes a module of a text. Its name and its file's follow from the text alone, and `inspect` finds the text here."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name = f"infc_generated_{hashlib.sha256(text.encode()).hexdigest()}"

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_filename(self, fullname: str) -> str:
        return f"{self.name}.py"


@cache
def generated(text: str) -> ModuleType:
    """The module of a text, made once."""
    loader = Generated(text)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


class Binary(msgspec.Struct, frozen=True):
    """What the compiler made of one request, as it says itself. Bytes, but for registers (per thread) and threads (per program)."""

    cubin: bytes
    symbol: str
    params: tuple[str, ...]              # as PTX types them: "u64" for a pointer or i64, "u32", "f32"
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    tensor_memory: int
    threads: int
    tensor_cores: str                    # "wgmma", "tcgen05", "mma" or "": what its products run on


def send(pipe: BinaryIO, message: Any) -> None:
    """One message, its length before it."""
    raw = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(raw)) + raw)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes | None:
    """The next message's bytes, or None where the other side is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size: return None
    raw = pipe.read(_LENGTH.unpack(head)[0])
    return raw if len(raw) == _LENGTH.unpack(head)[0] else None


def main() -> None:
    """Answer requests until there are no more. The first message is the parent's sys.path: kernels are found as there."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                                            # what else is printed goes with the errors
    requests = sys.stdin.buffer
    first = receive(requests)
    if first is None: return
    sys.path += [folder for folder in msgspec.msgpack.decode(first, type=list[str]) if folder not in sys.path]
    while (raw := receive(requests)) is not None:
        send(answers, compile_one(msgspec.msgpack.decode(raw, type=Request)))


def compile_one(asked: Request) -> Binary:
    """Raises whatever Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(generated(asked.text) if asked.text else importlib.import_module(asked.module), asked.name)
    source = ASTSource(function, asked.signature, {name: _value(c) for name, c in asked.constants.items()},
                       {(position,): [["tt.divisibility", ALIGNED]] for position in asked.aligned})
    log = io.StringIO()
    with contextlib.redirect_stdout(log):                    # TRITON_DUMP_PTXAS_LOG prints there
        made = triton.compile(source, target=GPUTarget("cuda", ARCHS[asked.arch], 32),
                              options={"num_warps": asked.warps, "num_stages": asked.stages})
    for what in ("global_scratch_size", "profile_scratch_size"):
        if getattr(made.metadata, what, 0): raise CheckFailed(f"it needs {what} {getattr(made.metadata, what)}, which no launch gives")
    used = resources(log.getvalue())
    ptx = made.asm["ptx"]
    return Binary(made.asm["cubin"], made.metadata.name, params(ptx), used["registers"], used["spill_stores"], used["spill_loads"],
                  used["stack"], max(made.metadata.shared, 0) + used["static_shared"], made.metadata.tmem_size,
                  32 * made.metadata.num_warps, tensor_cores(ptx))


def _value(constant: Constant) -> Any:
    from triton import language as tl

    if isinstance(constant, Dtype): return tl.dtype(constant.name)
    if isinstance(constant, Function): return getattr(importlib.import_module(constant.module), constant.name)
    return constant


_RESOURCES = {
    "registers": r"Used (\d+) registers", "spill_stores": r"(\d+) bytes spill stores", "spill_loads": r"(\d+) bytes spill loads",
    "stack": r"(\d+) bytes stack frame", "static_shared": r"(\d+) bytes smem",
}
_ALWAYS = ("registers", "spill_stores", "spill_loads", "stack")


def resources(log: str) -> dict[str, int]:
    """Registers per thread and bytes, from what `ptxas -v` says. CheckFailed where it does not say them."""
    found = {name: [int(n) for n in re.findall(pattern, log)] for name, pattern in _RESOURCES.items()}
    missing = [name for name in _ALWAYS if not found[name]]
    if missing: raise CheckFailed(f"ptxas reports no {missing[0]}: its output is not understood")
    return {name: max(numbers, default=0) for name, numbers in found.items()}


def params(ptx: str) -> tuple[str, ...]:
    """The types of a kernel's parameters, in order; pointers Triton appends among them."""
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    if entry is None: raise CheckFailed("the PTX has no entry")
    return tuple(re.findall(r"\.param \.(\w+)", entry[1]))


def tensor_cores(ptx: str) -> str:
    """The kind of tensor core instruction, the widest if several."""
    for kind, instruction in (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma", "mma.sync")):
        if instruction in ptx: return kind
    return ""
