"""The artifact: a folder of data that says what it needs, every file hashed, nothing in it pickled.

    NAME.infc/
      manifest.json         what it is, what it needs, and the sha256 of every other file (and of itself)
      programs/*.json       one Program per bucket
      code/<sha256>.so      every kernel of every program; for a GPU a .cubin each. It is native code: load only artifacts you trust
      weights.safetensors   tensors packed as kernels read them, 64-byte aligned
      golden.safetensors    prompts and the logits they must give
      tokenizer.json        report.json

`read` hashes everything but the weights (a millisecond or two); weights are checked by crc32c chunk by chunk while they are
copied to where they are used, and by sha256 in `verify_files`.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .errors import RuntimeFault
from .manifest import MANIFEST, FileInfo, Manifest, decode
from .program import Program
from .storage import Folder, Span, Zip, open_storage, read_span
from .structure import fault
from .tensors import Place, Tensor, header_bytes, parse_header

WEIGHTS = "weights.safetensors"
GOLDEN = "golden.safetensors"
TOKENIZER = "tokenizer.json"
REPORT = "report.json"


class Parts(NamedTuple):
    """What a compiler hands to `write`. `manifest` carries the compiler's half; write fills in the rest."""

    manifest: Manifest
    programs: Sequence[Program]
    code: bytes  # the shared library; b"" where no step needs one
    weights: Mapping[str, Tensor]
    golden: Mapping[str, Tensor]  # see golden.py; may be empty
    tokenizer: bytes  # tokenizer.json; b"" where the model has none
    report: Mapping[str, Any]
    cubins: Mapping[str, bytes] = {}  # GPU code by file name: "code/<sha256>.cubin"


class Artifact:
    """An artifact opened and checked. Nothing of it has run."""

    def __init__(self, path: Path, storage: Folder | Zip) -> None:
        self.path = path
        self._storage = storage
        self._kept: dict[str, bytes] = {}
        self.manifest = decode(self._whole(MANIFEST), str(path))
        for name, info in self.manifest.files.items():
            if name == WEIGHTS:
                self._check_size(name, info)
                continue
            data = self._checked(name)
            if name.startswith("programs/") or name == TOKENIZER:
                self._kept[name] = data
        self.places: dict[str, Place] = self._weight_places()

    def __enter__(self) -> "Artifact":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replaced(self) -> bool:
        """Whether the path names another artifact by now."""
        return self._storage.replaced()

    def close(self) -> None:
        """Let go of the folder."""
        self._storage.close()

    def program(self, bucket: str) -> Program:
        """The program of the bucket of that name."""
        found = next((b for b in self.manifest.buckets if b.name == bucket), None)
        if found is None: raise RuntimeFault(f"{self.path}: has no bucket {bucket}; compile it again")
        try:
            program = msgspec.json.decode(self._kept[found.file], type=Program)
        except (msgspec.DecodeError, KeyError) as error:
            raise self._fault(found.file, f"is no program of this schema ({error})") from error
        if why := fault(program, found, self.manifest): raise self._fault(found.file, why)
        return program

    def tokenizer(self) -> bytes:
        """The bytes of tokenizer.json."""
        return self._kept[TOKENIZER]

    def golden(self) -> bytes:
        """The bytes of golden.safetensors, hashed again."""
        return self._checked(GOLDEN)

    def report(self, *needed: str) -> dict[str, Any]:
        """What the compiler reported. Raises RuntimeFault where it cannot be read or lacks one of the `needed` entries."""
        try:
            found = msgspec.json.decode(self._checked(REPORT))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._fault(REPORT, f"is no JSON ({error})") from error
        missing = "form" if not isinstance(found, dict) else next((name for name in needed if name not in found), None)
        if missing: raise self._fault(REPORT, f"has no {missing} that this infc reads")
        return found

    def weights(self) -> Span:
        """The open file of the weights. Close its descriptor."""
        return self._open(WEIGHTS)

    def code(self) -> bytes:
        """The shared library, hashed again."""
        return self._checked(self.manifest.code)

    def cubin(self, file: str) -> bytes:
        """The GPU code of a kernel, hashed again."""
        code = self._checked(file)
        if not code.startswith(b"\x7fELF"): raise self._fault(file, "is no cubin")
        return code

    def hash_weights(self) -> None:
        """Hash all weights: about half a second per GB. Raises RuntimeFault where a byte differs."""
        if WEIGHTS not in self.manifest.files:
            return
        digest = hashlib.sha256()
        with self._open(WEIGHTS) as span:
            for offset in range(0, span.size, 1 << 22):
                digest.update(os.pread(span.fd, min(1 << 22, span.size - offset), span.offset + offset))
        if digest.hexdigest() != self.manifest.files[WEIGHTS].sha256:
            raise self._altered(WEIGHTS)

    def weight_fault(self, chunk: int) -> RuntimeFault:
        """What to say when the crc32c of a chunk differs."""
        info = self.manifest.weights
        assert info is not None
        at = info.data_offset + chunk * info.chunk
        return self._fault(WEIGHTS, f"was altered between bytes {at} and {at + info.chunk}")

    def _weight_places(self) -> dict[str, Place]:
        info = self.manifest.weights
        if info is None:
            return {}
        with self._open(WEIGHTS) as span:
            head = os.pread(span.fd, 8, span.offset)
            start = header_bytes(head, span.size, str(self.path / WEIGHTS))
            text = os.pread(span.fd, start - 8, span.offset + 8)
        if start != info.data_offset or hashlib.sha256(head + text).hexdigest() != info.header_sha256:
            raise self._altered(WEIGHTS)
        return parse_header(text, info.data_bytes, str(self.path / WEIGHTS))

    def _open(self, name: str) -> Span:
        try:
            return self._storage.open(name)
        except FileNotFoundError as error:
            what = "no infc artifact: it has no" if name == MANIFEST else "is missing"
            if name == MANIFEST:
                raise RuntimeFault(
                    f"{self.path}: {what} {MANIFEST}; make one with: infc compile MODEL -o {self.path}"
                ) from error
            raise self._fault(name, what) from error

    def _whole(self, name: str) -> bytes:
        with self._open(name) as span:
            return read_span(span)

    def _check_size(self, name: str, info: FileInfo) -> None:
        with self._open(name) as span:
            if span.size != info.bytes:
                raise self._fault(name, f"has {span.size} bytes, its manifest says {info.bytes}")

    def _checked(self, name: str) -> bytes:
        info = self.manifest.files.get(name)
        if info is None:
            raise self._fault(name, "is not listed in the manifest")
        self._check_size(name, info)
        data = self._whole(name)
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise self._altered(name)
        return data

    def _altered(self, name: str) -> RuntimeFault:
        return self._fault(name, "was altered: its sha256 differs from the manifest's")

    def _fault(self, name: str, what: str) -> RuntimeFault:
        return RuntimeFault(f"{self.path}: {name} {what}; copy the artifact again, or compile it again")


def read(path: str | os.PathLike[str]) -> Artifact:
    """Open the artifact at `path` and check it, weights by size only. Raises RuntimeFault, which names the file and what to do."""
    where = Path(path)
    for attempt in range(3):
        storage = open_storage(where)
        try:
            return Artifact(where, storage)
        except RuntimeFault:
            replaced = storage.replaced()                 # by `write(force=True)` while we read: read the new one
            storage.close()
            if not replaced or attempt == 2:
                raise
        except OSError as error:
            storage.close()
            raise RuntimeFault(f"{where}: cannot be read ({error.strerror})") from error
    raise AssertionError("unreachable")


def verify_files(path: str | os.PathLike[str], full: bool = True) -> Artifact:
    """`read`, and with full=True the sha256 of the weights as well."""
    for attempt in range(3):
        artifact = read(path)
        try:
            if full: artifact.hash_weights()
            return artifact
        except RuntimeFault:
            replaced = artifact.replaced()                # as in `read`
            artifact.close()
            if not replaced or attempt == 2: raise
    raise AssertionError("unreachable")


def write(
    path: str | os.PathLike[str], parts: Parts, force: bool = False, check: Callable[[Path], object] | None = None
) -> Manifest:
    """Write an artifact in one step: it is there whole, or not at all. Returns the manifest as written. See writer.py.

    `check` sees the finished artifact before it gets its name; what it raises, leaves nothing behind.
    """
    from .writer import write_artifact  # only the compiler writes

    return write_artifact(Path(path), parts, force, check)


def copy(
    source: str | os.PathLike[str], path: str | os.PathLike[str], force: bool = False, check: Callable[[Path], object] | None = None,
) -> None:
    """Copy an artifact's folder to `path`, in one step like `write`."""
    from .writer import copy_artifact

    copy_artifact(Path(source), Path(path), force, check)


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove from a folder what dead writers left of any artifact; what a live one has stays."""
    from .writer import sweep as swept

    swept(Path(folder))


def refuse_place(path: str | os.PathLike[str], force: bool) -> None:
    """Raise RuntimeFault where `write` would for the place alone: something is there that it must not replace, or nothing can be."""
    from .writer import refuse_place as refuse

    refuse(Path(path), force)
