"""What a launch asks of the compiler, spelled so that equal requests are one build: types, constants, alignment, and the key of it all.

Ints are i32, or i64 past 2**31; floats are fp32, never fp64. Every pointer is taken to be a multiple of 16 bytes when the offset of its
tensor is (buffers start at multiples of 16), and an int when its value is: both follow from the launch, so nothing is guessed later.
No argument is folded into the code because it is 1. Ints of a generated kernel are live sizes, which change after the build: of them
nothing is taken to be known.
"""
import ast
import inspect
import textwrap
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...compiler.errors import CheckFailed, UserError, nearest
from ...compiler.keys import PACKAGE, digest
from .registry import Launch
from .worker import ALIGNED, ARCHS, Constant, Dtype, Function, Generated, Request

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}


def request(launch: Launch, arch: str) -> Request:
    """UserError for an arch that is not known, CheckFailed for arguments that do not fit the kernel's own."""
    if arch not in ARCHS: raise UserError(f"unknown architecture {arch!r}: {nearest(arch, ARCHS)}")
    python = launch.function.fn
    loader = python.__globals__.get("__loader__")
    text = loader.text if isinstance(loader, Generated) else ""
    parameters = inspect.signature(python).parameters
    unknown = sorted(launch.constants.keys() - parameters.keys())
    if unknown: raise CheckFailed(f"kernel {python.__name__} has no constant {unknown[0]!r}; it takes {', '.join(parameters)}")
    signature, constants, aligned = dict[str, str](), dict[str, Constant](), []
    given = list(launch.args)
    for position, (name, parameter) in enumerate(parameters.items()):
        if name in launch.constants: value, constant = launch.constants[name], True
        elif given: value, constant = given.pop(0), False
        elif parameter.default is not inspect.Parameter.empty: value, constant = parameter.default, True
        else: raise CheckFailed(f"kernel {python.__name__} is launched without its argument {name!r}")
        if constant or value is None:
            signature[name], constants[name] = "constexpr", _constant(python.__name__, name, value)
            continue
        signature[name] = _type(python.__name__, name, value)
        if _is_aligned(value) and not (text and isinstance(value, int)): aligned.append(position)
    if given: raise CheckFailed(f"kernel {python.__name__} is launched with {len(given)} arguments too many")
    return Request(python.__module__, python.__name__, signature, constants, tuple(aligned), launch.warps, launch.stages, arch, text)


def _constant(kernel: str, name: str, value: Any) -> Constant:
    from triton import language as tl

    if isinstance(value, tl.constexpr): value = value.value
    if isinstance(value, bool | int | float | str | None): return value
    if isinstance(value, tl.dtype): return Dtype(str(value.name))
    inner = getattr(value, "fn", None)
    if isinstance(inner, FunctionType): return Function(inner.__module__, inner.__name__)
    raise CheckFailed(f"constant {name} of kernel {kernel} is a {type(value).__name__}: bool, int, float, str, None, a dtype of Triton or "
                      "a @triton.jit function are known")


def _type(kernel: str, name: str, value: Any) -> str:
    if isinstance(value, Tensor) and value.dtype in _POINTERS: return _POINTERS[value.dtype]
    if isinstance(value, bool): return "i1"
    if isinstance(value, int): return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float): return "fp32"
    raise CheckFailed(f"argument {name} of kernel {kernel} is a {value.dtype if isinstance(value, Tensor) else type(value).__name__}, "
                      "which no kernel takes")


def _is_aligned(value: Tensor | int | float) -> bool:
    if isinstance(value, Tensor): return value.storage_offset() * value.element_size() % ALIGNED == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % ALIGNED == 0


def key(launch: Launch, asked: Request, ptxas: str) -> str:
    """sha256 of all that decides the code: the request, the text of what it runs, the compilers, and how we call them."""
    import triton

    sources = source(launch.function, *(c for c in launch.constants.values() if hasattr(c, "fn")))
    return digest([msgspec.msgpack.encode(asked, order="deterministic"), *sources, triton.__version__, ptxas, *_how()])


@cache
def _how() -> list[bytes]:
    """How we call the compilers."""
    return [Path(__file__).with_name(name).read_bytes() for name in ("request.py", "build.py", "worker.py")]


def source(*functions: Any) -> tuple[str, ...]:
    """The text of kernels and of every function of ours they call, with the values of the globals they read, in a fixed order.

    CheckFailed for a global whose value a key cannot hold.
    """
    found: dict[str, tuple[str, ...]] = {}
    waiting = [f.fn for f in functions]
    while waiting:
        python = waiting.pop()
        name = f"{python.__module__}.{python.__qualname__}"
        if name in found: continue
        text, values, called = _read(python)
        found[name] = (name, text, *values)
        waiting += called
    return tuple(part for _, parts in sorted(found.items()) for part in parts)


@cache
def _read(python: FunctionType) -> tuple[str, tuple[str, ...], tuple[FunctionType, ...]]:
    """Text of one function, the globals it reads as "name = value", and the functions of ours it calls."""
    text = textwrap.dedent(inspect.getsource(python))
    values, called = dict[str, str](), dict[FunctionType, None]()

    def note(name: str, value: Any) -> None:
        if name == "INTERPRETED":                                         # False where code is built, whatever this process does
            values[name] = ""
            return
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        inner = getattr(value, "fn", value)
        home = (inner.__name__ if isinstance(inner, ModuleType) else getattr(inner, "__module__", None) or "").split(".")[0]
        if type(value).__name__ == "dtype": values[name] = f"{name} = {value}"
        elif home in ("triton", "builtins"): return                       # of a version the key names
        elif isinstance(inner, FunctionType): called[inner] = None
        elif isinstance(value, bool | int | float | str | None): values[name] = f"{name} = {value!r}"
        elif not isinstance(value, ModuleType):
            raise CheckFailed(f"kernel {python.__name__} reads the global {name}, a {type(value).__name__}: it may read numbers, strings "
                              "and @triton.jit functions")

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in python.__globals__:
            note(node.id, python.__globals__[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = python.__globals__.get(node.value.id)
            if isinstance(module, ModuleType) and module.__name__.split(".")[0] == PACKAGE and hasattr(module, node.attr):
                note(f"{node.value.id}.{node.attr}", getattr(module, node.attr))
    return text, tuple(values[name] for name in sorted(values)), tuple(called)
