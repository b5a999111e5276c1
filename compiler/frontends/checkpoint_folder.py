"""The files of a Hugging Face checkpoint folder, checked before anything reads them: JSON is JSON, tensors lie in their file."""
import json
import math
import struct
from pathlib import Path
from typing import Any

from ..errors import UserError

MAX_HEADER = 100_000_000                                          # the format's own limit
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
              "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip


def read_json(folder: Path, name: str, *, needed: bool = True) -> dict[str, Any]:
    """A JSON object from the folder; {} when it is absent and not needed."""
    path = folder / name
    if not path.is_file():
        if needed:
            raise UserError(f"{folder} has no {name}: it is not a Hugging Face checkpoint folder")
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:                 # no JSON, no UTF-8, or brackets without end
        raise UserError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, an object is expected")
    return data


def read_text(path: Path) -> str:
    """A file of the folder as text."""
    try: return path.read_text("utf-8")
    except UnicodeDecodeError as error: raise UserError(f"{path} is no UTF-8 text: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, all shards of the index present. A pickle is never read: it can run code."""
    index = read_json(folder, "model.safetensors.index.json", needed=False)
    if index:
        named = index.get("weight_map")
        names = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise UserError(f"{folder.name}: model.safetensors.index.json names files outside the folder, or none")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder.name} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickle = next(folder.glob("*.bin"), None)
    hint = f": {pickle.name} is a pickle, which can run code; convert it to safetensors" if pickle else ""
    raise UserError(f"{folder.name} has no model.safetensors{hint}")


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """dtype (in the format's own name) and shape of each tensor; the header is whole and every tensor lies inside the file
    (github.com/huggingface/safetensors, README: Format)."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise UserError(f"{path.name} is truncated or altered: it has {size} bytes, its header should have {length}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path.name} is altered: its header is no JSON ({error})") from error
    tensors: dict[str, tuple[str, list[int]]] = {}
    entries = header.items() if isinstance(header, dict) else [("its header", header)]
    for name, entry in entries:
        if name == "__metadata__":
            continue
        fault = _fault(entry)
        if fault:
            raise UserError(f"{path.name} is altered: {name} {fault}")
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise UserError(f"{path.name} is truncated: {name} should end at byte {end}, the file has {size}")
        tensors[name] = entry["dtype"], entry["shape"]
    return tensors


def _fault(entry: Any) -> str | None:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            if not all(type(extent) is int and extent >= 0 for extent in shape) or not 0 <= start <= stop:
                return f"has shape {shape} at bytes {start}..{stop}"
            if dtype in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
                return f"is {dtype} {shape} in {stop - start} bytes"
            return None
        case _:
            return "is not described as a tensor"
