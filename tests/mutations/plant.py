"""Plant a fault: a few characters of our own source are replaced while a `with` lasts, in kernels as well as in Python."""
import ast
import contextlib
import importlib
import shutil
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import infc
from infc.backends.cpu import backend

ROOT = Path(str(infc.__file__)).resolve().parent
toolchain: Any = importlib.import_module("infc.backends.cpu.toolchain")      # the package has a function of that name


class Edit(NamedTuple):
    """`old`, which stands exactly once in `file` (relative to the package), becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The text with the fault. ValueError where the source has changed, and the fault must be written anew."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands there {text.count(self.old)} times, not once: the source has changed")
        return text.replace(self.old, self.new)


@contextlib.contextmanager
def planted(edits: Sequence[Edit], folder: Path) -> Iterator[None]:
    """The package with the edits. folder: an empty one, for the kernels' copy."""
    with contextlib.ExitStack() as stack:
        for file in dict.fromkeys(edit.file for edit in edits):
            mine = [edit for edit in edits if edit.file == file]
            if file.endswith(".h"): stack.enter_context(_kernels(mine, folder / "kernels"))
            elif file.startswith("passes/"): stack.enter_context(_pass(_text(mine), file))
            else: stack.enter_context(_functions(_text(mine), file))
        yield


def _text(edits: Sequence[Edit]) -> str:
    text = (ROOT / edits[0].file).read_text()
    for edit in edits: text = edit.apply(text)
    return text


@contextlib.contextmanager
def _kernels(edits: Sequence[Edit], folder: Path) -> Iterator[None]:
    """Both modules that read the headers read a copy; the headers are part of every key, so no kept library is used."""
    if not folder.exists(): shutil.copytree(ROOT / "backends/cpu/kernels", folder)
    (folder / Path(edits[0].file).name).write_text(_text(edits))
    kept = toolchain.KERNELS
    toolchain.KERNELS = backend.KERNELS = folder
    try:
        yield
    finally:
        toolchain.KERNELS = backend.KERNELS = kept


def _module(text: str, file: str) -> types.ModuleType:
    """A second copy of the module, from the edited text; nobody imports it by accident."""
    old = importlib.import_module("infc." + file.removesuffix(".py").replace("/", "."))
    module = types.ModuleType(old.__name__)
    module.__package__, module.__file__ = old.__package__, old.__file__
    exec(compile(ast.parse(text), str(old.__file__), "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def _pass(text: str, file: str) -> Iterator[None]:
    """A pass is looked up by its module's name when a pipeline is made: the whole module is another one."""
    module = _module(text, file)
    kept = sys.modules[module.__name__]
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.modules[module.__name__] = kept


@contextlib.contextmanager
def _functions(text: str, file: str) -> Iterator[None]:
    """Others hold the module's functions by reference: the functions stay, their code is another one."""
    name = "infc." + file.removesuffix(".py").replace("/", ".")
    loaded = importlib.import_module(name)
    sys.modules[name] = module = types.ModuleType(name)      # dataclasses look their module up
    module.__package__, module.__file__ = loaded.__package__, loaded.__file__
    try:
        exec(compile(ast.parse(text), str(loaded.__file__), "exec"), module.__dict__)
    finally:
        sys.modules[name] = loaded
    now, kept = dict(_walk(module.__dict__, name)), list[tuple[types.FunctionType, types.CodeType]]()
    for path, function in _walk(loaded.__dict__, name):
        code = now[path].__code__
        if _differs(code, function.__code__): kept.append((function, function.__code__))
    if not kept: raise ValueError(f"{file}: the edit changes no function, so it cannot be planted")
    try:
        for function, _ in kept: function.__code__ = now[name, function.__qualname__].__code__
        yield
    finally:
        for function, code in kept: function.__code__ = code


def _differs(a: types.CodeType, b: types.CodeType) -> bool:
    """Same instructions and constants? Line numbers do not count."""
    if a.co_code != b.co_code or a.co_names != b.co_names or len(a.co_consts) != len(b.co_consts): return True
    return any(_differs(x, y) if isinstance(x, types.CodeType) and isinstance(y, types.CodeType) else x != y
               for x, y in zip(a.co_consts, b.co_consts, strict=True))


def _walk(space: dict[str, object], module: str) -> Iterator[tuple[tuple[str, str], types.FunctionType]]:
    """((module, qualified name), function) of every function and method that the module itself defines."""
    for value in list(space.values()):
        found = value.fget if isinstance(value, property) else getattr(value, "__wrapped__", value)
        if isinstance(found, types.FunctionType) and found.__module__ in (module, None):
            yield (module, found.__qualname__), found
        elif isinstance(value, type) and value.__module__ == module:
            yield from _walk(dict(vars(value)), module)
