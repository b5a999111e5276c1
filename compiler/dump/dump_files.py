"""Files of a dump: written aside and renamed, and one file per distinct tensor."""
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from .. import files
from ..errors import UserError
from ..ir import DTYPE_NAMES, tensor_hash
from .stage import TENSOR, file_name


def refuse_filled(folder: Path | None) -> None:
    """Raise UserError when a dump would mix with what is in its folder, or a file stands where that is to be."""
    if folder is None: return
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        what = "a file" if there.exists() else "a link to nothing"
        raise UserError(f"the dump folder {folder} cannot be made: {there} is {what}; name a new folder")
    if there == folder and any(folder.iterdir()):
        raise UserError(f"the dump folder {folder} is not empty: name a new one")


def refuse_within(folder: Path | None, artifact: Path) -> None:
    """Raise UserError when a dump would stand where the artifact is to be, or in it."""
    if folder is not None and artifact.absolute() in (folder.absolute(), *folder.absolute().parents):
        raise UserError(f"the dump folder {folder} is where the artifact {artifact} is to be: name another")


def write_whole(path: Path, data: str | bytes) -> None:
    """`files.write_whole` of a part of a dump."""
    files.write_whole(path, data, what="the dump", instead="name another folder with --dump", parents=True)


def write_json(path: Path, value: Any) -> None:
    """`write_whole` of a JSON document."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


@dataclass
class Tensors:
    """A folder of tensors, one file per content."""

    folder: Path
    known: dict[str, int] = field(default_factory=dict)           # sha256 -> bytes

    def add(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Write what is new; name -> {"dtype", "shape", "sha256"}."""
        with ThreadPoolExecutor() as pool:                        # hashlib releases the GIL
            hashes = dict(zip(tensors, pool.map(tensor_hash, tensors.values()), strict=True))
        for name, sha256 in hashes.items():
            if sha256 not in self.known:
                data = save({TENSOR: tensors[name].detach().contiguous()})
                write_whole(self.folder / file_name(sha256), data)
                self.known[sha256] = len(data)
        return {name: {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape), "sha256": hashes[name]} for name, t in tensors.items()}
