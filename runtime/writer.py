"""Write an artifact so that nobody ever sees half of one: aside, synced, then renamed in a single step.

A writer that dies leaves `.NAME.partial-PID-XXXX` behind. It holds a lock on that folder while it lives, so the next writer of
the same name, and whoever sweeps the folder, knows which leftovers are dead, in other containers too, and removes them.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from .artifact import GOLDEN, REPORT, TOKENIZER, WEIGHTS, Parts
from .checksum import crc32c_chunks
from .errors import RuntimeFault
from .manifest import MANIFEST, BucketInfo, FileInfo, Manifest, QualityInfo, TunedInfo, WeightsInfo, decode, encode
from .program import Program
from .table import ATEN
from .tensors import write_tensors

CHUNK = 1 << 20
"""Bytes of weights under one crc32c: small enough that every thread has chunks to copy, 4 bytes of manifest each."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h


def write_artifact(path: Path, parts: Parts, force: bool, check: Callable[[Path], object] | None = None) -> Manifest:
    """Write `parts` to `path`. With `force` an artifact that is there is replaced in one step.

    `check` sees the finished artifact before it gets its name: what it raises, leaves nothing behind.
    Raises RuntimeFault: something is there (and not `force`, or it is no artifact), the disk is full, no permission.
    """
    size = sum(memoryview(t.data).nbytes for t in parts.weights.values())
    with _publishing(path, force, size) as folder:
        manifest = _fill(folder, parts)
        if check is not None:
            check(folder)
            manifest = decode((folder / MANIFEST).read_bytes(), str(path))  # it may have been amended
    return manifest


def amend(folder: Path, report: Mapping[str, object], quality: QualityInfo | None = None) -> None:
    """What was found out about a written artifact, put into it before it gets its name: for the `check` of `write_artifact`."""
    manifest = decode((folder / MANIFEST).read_bytes(), str(folder))
    told = _write(folder / REPORT, lambda file: file.write(msgspec.json.encode(dict(report))))
    raw = encode(msgspec.structs.replace(manifest, files={**manifest.files, REPORT: told}, quality=quality or manifest.quality))
    _write(folder / MANIFEST, lambda file: file.write(raw))
    _sync_folder(folder)


def retune(folder: Path, programs: Sequence[Program], report: Mapping[str, object], tuned: TunedInfo) -> None:
    """Programs with other choices, put into a copy of their artifact before it gets its name: for the `check` of `copy_artifact`."""
    manifest = decode((folder / MANIFEST).read_bytes(), str(folder))
    files, version = dict(manifest.files), hashlib.sha256(manifest.version.encode())
    for program in programs:
        raw = msgspec.json.encode(program)
        version.update(raw)
        name = f"programs/{program.name}.json"
        files[name] = _write(folder / name, lambda file, raw=raw: file.write(raw))
    files[REPORT] = _write(folder / REPORT, lambda file: file.write(msgspec.json.encode(dict(report))))
    aten = {k.hash for k in manifest.kernels if k.symbol.startswith(ATEN)}
    raw = encode(msgspec.structs.replace(
        manifest, version=version.hexdigest(), files=files, tuned=tuned, buckets=tuple(_bucket_info(p, aten) for p in programs)))
    _write(folder / MANIFEST, lambda file: file.write(raw))
    for inner in (folder / "programs", folder): _sync_folder(inner)


def copy_artifact(source: Path, path: Path, force: bool, check: Callable[[Path], object] | None = None) -> None:
    """Copy the artifact folder `source` to `path`; the rest as `write_artifact`."""
    files = [file for file in source.rglob("*") if file.is_file()]
    with _publishing(path, force, sum(file.stat().st_size for file in files)) as folder:
        for file in files:
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
            with target.open("rb") as copied:
                os.fsync(copied.fileno())
        for inner in {folder, *(folder / file.relative_to(source).parent for file in files)}:
            _sync_folder(inner)
        if check is not None:
            check(folder)


@contextlib.contextmanager
def _publishing(path: Path, force: bool, size: int) -> Iterator[Path]:
    """A folder to fill, which gets the name `path` at the end; nothing is left of it after an exception."""
    _refuse_existing(path, force)
    sweep(path.absolute().parent, _escape(path.name))
    try:
        with _partial(path) as folder:
            yield folder
            _publish(folder, path, force)
    except OSError as error:
        if error.errno in _FULL:
            raise RuntimeFault(f"{path}: no space left on the device (about {_rough(size)} are needed); nothing was written") from error
        raise RuntimeFault(f"{path}: cannot be written ({error.strerror}); nothing was written") from error


def _rough(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{-(-size // 1000)} kB"


def refuse_place(path: Path, force: bool) -> None:
    """Raise RuntimeFault where `write_artifact` would for the place alone: its folder is tried."""
    _refuse_existing(path, force)
    try:
        with _partial(path):
            pass
    except OSError as error:
        raise RuntimeFault(f"{path}: cannot be written ({error.strerror}); nothing was written") from error


def _refuse_existing(path: Path, force: bool) -> None:
    """Something is there that must not be replaced, or the folder is not."""
    parent = path.absolute().parent
    if not parent.is_dir():
        why = f"{parent} is a file, not a folder" if parent.is_file() else f"the folder {parent} does not exist"
        raise RuntimeFault(f"{path}: {why}")
    if not os.path.lexists(path):
        return
    if not force:
        raise RuntimeFault(f"{path}: exists already; add --force to replace it, or -o for another place")
    if path.is_symlink() or not (path / MANIFEST).is_file():
        raise RuntimeFault(
            f"{path}: is no infc artifact, so --force does not replace it; remove it yourself or choose another place"
        )


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A locked sibling folder; whatever is in it at the end is removed."""
    folder = path.absolute().parent / f".{path.name}.partial-{os.getpid()}-{os.urandom(4).hex()}"
    lock = _locked_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(folder: Path) -> int:
    while True:
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # taken for a leftover between mkdir and open: once more
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # taken for a leftover between mkdir and flock: once more


def sweep(folder: Path, name: str = "*") -> None:
    """Remove from `folder` what dead writers left of the artifacts of that name, a glob; what a live one has stays."""
    for left in folder.glob(f".{name}.partial-*"):
        with contextlib.suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _fill(folder: Path, parts: Parts) -> Manifest:
    files: dict[str, FileInfo] = {}

    def put(name: str, data: bytes) -> None:
        files[name] = _write(folder / name, lambda file: file.write(data))

    (folder / "programs").mkdir()
    (folder / "code").mkdir()
    for program in parts.programs:
        put(f"programs/{program.name}.json", msgspec.json.encode(program))
    code = ""
    if parts.code:
        code = f"code/{hashlib.sha256(parts.code).hexdigest()}.so"
        put(code, parts.code)
    for name, cubin in parts.cubins.items():
        put(name, cubin)
    weights = None
    if parts.weights:
        region: list[int] = []
        files[WEIGHTS] = _write(folder / WEIGHTS, lambda file: region.extend(write_tensors(file, parts.weights)))
        weights = _weights_info(folder / WEIGHTS, *region)
    if parts.golden:
        files[GOLDEN] = _write(folder / GOLDEN, lambda file: write_tensors(file, parts.golden))
    if parts.tokenizer:
        put(TOKENIZER, parts.tokenizer)
    put(REPORT, msgspec.json.encode(dict(parts.report)))
    aten = {k.hash for k in parts.manifest.kernels if k.symbol.startswith(ATEN)}
    manifest = msgspec.structs.replace(
        parts.manifest,
        buckets=tuple(_bucket_info(p, aten) for p in parts.programs),
        code=code,
        weights=weights,
        files=files,
        tokenizer=TOKENIZER if parts.tokenizer else "",
    )
    raw = encode(manifest)
    _write(folder / MANIFEST, lambda file: file.write(raw))
    for inner in (folder / "programs", folder / "code", folder):
        _sync_folder(inner)
    return msgspec.json.decode(raw, type=Manifest)


def _bucket_info(program: Program, aten: set[str]) -> BucketInfo:
    return BucketInfo(
        program.name,
        f"programs/{program.name}.json",
        program.bucket,
        program.arena_bytes,
        len(program.steps),
        sum(step.kernel in aten for step in program.steps),
    )


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> FileInfo:
    """Write and sync a file, and hash what the system says is in it now."""
    with open(path, "w+b") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
        file.seek(0)
        return FileInfo(hashlib.file_digest(file, "sha256").hexdigest(), size)


def _weights_info(path: Path, offset: int, size: int) -> WeightsInfo:
    with open(path, "rb") as file:
        header = hashlib.sha256(file.read(offset)).hexdigest()
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
            view[offset : offset + size] as data,
        ):
            return WeightsInfo(WEIGHTS, offset, size, CHUNK, tuple(crc32c_chunks(data, CHUNK)), header)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(folder: Path, path: Path, force: bool) -> None:
    """Give the finished folder its name; an artifact that had it moves to the partial's name and is removed with it."""
    try:
        os.rename(folder, path)  # onto nothing, or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        _refuse_existing(path, force)  # another process was faster
        _exchange(folder, path)
    _sync_folder(path.absolute().parent)


def _exchange(folder: Path, path: Path) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)  # glibc 2.28
    if rename is not None and rename(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
        return
    aside = folder.with_name(folder.name + "-old")  # a file system without exchange: two renames, a moment apart
    os.rename(path, aside)
    os.rename(folder, path)
    shutil.rmtree(aside, ignore_errors=True)
