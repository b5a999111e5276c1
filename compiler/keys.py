"""Keys, complete by construction: what is hashed is what was read, and a path or a clock never is."""
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from importlib import metadata, resources
from typing import Any

import msgspec

from .ir import Graph, content_key

PACKAGE = __package__.rpartition(".")[0]              # "infc"
_UNKEYED = {"dump", "force", "target"}
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
            if entry.is_dir() and entry.name in ("compiler", "passes", "backends", "runtime", "models", "frontends", "ops", "cpu", "kernels"):
                walk(entry, f"{path}{entry.name}/")
            elif entry.name.endswith((".py", ".h", ".toml")):
                found.append((path + entry.name, entry.read_bytes()))

    walk(resources.files(PACKAGE), "")
    return digest(part for pair in sorted(found) for part in pair)


def infc_version() -> str:
    return metadata.version(PACKAGE)


def version(graph: Graph, programs: Sequence[msgspec.Struct], options: Any, isa: str, toolchain: str) -> str:
    """The artifact's key: final graph and weights, programs, our sources, the toolchain, torch, the target, the options."""
    chosen = [(f.name, str(getattr(options, f.name))) for f in fields(options) if f.name not in _UNKEYED]
    return digest([
        content_key(graph), *(msgspec.json.encode(program) for program in programs), sources(), isa, toolchain,
        metadata.version("torch"), *(part for pair in chosen for part in pair),
    ])
