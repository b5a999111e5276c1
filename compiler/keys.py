"""Keys, complete by construction: what is hashed is what was read, and a path or a clock never is."""
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

from .ir import Graph, content_key

PACKAGE = __name__.split(".")[0]              # "infc"
FOLDERS = (
    "compiler", "frontends", "ops", "costs", "quality", "quant", "passes", "backends", "cpu", "triton", "kernels", "runtime",
    "models", "text",
)  # fmt: skip
_UNKEYED = {"cache", "dump", "dump_asm", "expect", "force", "reuse", "target"}
"""Options that change where things go, not what is made; the target's instruction set is keyed instead of its alias."""


def digest(parts: Iterable[object]) -> str:
    """sha256 over the text of `parts`, each closed by a length so that no two lists give one text."""
    hasher = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        hasher.update(len(raw).to_bytes(8, "little") + raw)
    return hasher.hexdigest()


@cache
def sources() -> str:
    """sha256 over every source of the package: passes, kernels, printers, and whatever they import from us."""
    found: list[tuple[str, bytes]] = []

    def walk(folder: Any, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name in FOLDERS:
                walk(entry, f"{path}{entry.name}/")
            elif entry.name.endswith((".py", ".h", ".toml", ".txt")):
                found.append((path + entry.name, entry.read_bytes()))

    walk(resources.files(PACKAGE), "")
    return digest(part for pair in sorted(found) for part in pair)


def infc_version() -> str:
    return metadata.version(PACKAGE)


def request(model: str, options: Any, isa: str, toolchain: str) -> str:
    """The key of a compile before it runs: the model's content, our sources, every library that takes part, the options."""
    return digest([model, sources(), isa, toolchain, *libraries(), *_chosen(options)])


def libraries() -> list[str]:
    """Every library that takes part in reading and compiling a model, with its version."""
    return [f"{name} {_installed(name)}" for name in ("torch", "numpy", "transformers", "gguf", "tokenizers", "safetensors")]


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _chosen(options: Any) -> list[str]:
    return [part for f in fields(options) if f.name not in _UNKEYED for part in (f.name, _value(getattr(options, f.name)))]


def _value(option: Any) -> str:
    """A file that is read counts by its content, not by its path."""
    return hashlib.sha256(option.read_bytes()).hexdigest() if isinstance(option, Path) else str(option)


def version(graph: Graph, programs: Sequence[msgspec.Struct], options: Any, isa: str, toolchain: str) -> str:
    """The artifact's key: final graph and weights, programs, our sources, the toolchain, torch, the target, the options."""
    return digest([
        content_key(graph), *(msgspec.json.encode(program) for program in programs), sources(), isa, toolchain,
        metadata.version("torch"), *_chosen(options),
    ])
