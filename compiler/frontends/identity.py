"""What a model is, before it is read: a hash over every byte that decides the capture, so that a finished compile can be found."""
import hashlib
import json
from pathlib import Path


def identity(spec: str | Path) -> str | None:
    """A key of the model's content; None where there is nothing to hash (no such file: capture will say so).

    A known model is its table entry with the hash its file must have, a GGUF its bytes, a checkpoint folder the bytes of the files in it
    (none of its subfolders is read).
    """
    from ...models import Model, ModelError, find

    path = Path(spec)
    try:
        found = find(str(spec))
    except ModelError:
        found = None
    if isinstance(found, Model):
        assert found.source is not None
        return _digest(["known", found.name, found.license, found.source.member_sha256, json.dumps(found.config, sort_keys=True)])
    if found is not None:
        return _digest(["random", found.name, found.seed, found.layers, json.dumps(found.model.config, sort_keys=True)])
    if path.is_file():
        return _digest(["file", path.name, _sha256(path)])
    if (path / "config.json").is_file():
        return _digest(["folder", path.resolve().name, *(f"{f.name} {_sha256(f)}" for f in sorted(path.iterdir()) if f.is_file())])
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
