"""Finished compiles, kept: the same model, options, sources and toolchain give the same artifact, so it is copied and verified.

An entry is a whole artifact under $XDG_CACHE_HOME/infc/artifacts/<key>.infc, written like any other: aside, then renamed. What
is copied out is hashed whole and its golden outputs are replayed, as after a compile; an entry that fails is removed and the
compile runs. The oldest entries go when all together pass the budget, and what killed compiles left half kept. A cache that cannot be
written costs a note, no more.
"""
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..runtime.artifact import copy, sweep, verify_files
from ..runtime.errors import RuntimeFault
from .errors import InfcError

BUDGET_BYTES = 4 << 30

STRAY_S = 3600
"""Seconds after which a half-written file is nobody's: writing one takes less than one."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_folder() -> Path:
    """Where compiled code and finished artifacts are kept between compiles: $XDG_CACHE_HOME/infc, else ~/.cache/infc."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infc"


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, as far as it goes."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def evict(folder: Path, pattern: str, budget: int, but: Path) -> None:
    """Remove the oldest entries of a cache that together pass a budget of bytes; never `but`."""
    found = list[tuple[float, int, Path]]()
    for entry in folder.glob(pattern):
        with contextlib.suppress(OSError):                # gone by now: another compile evicts as well
            size = sum(file.stat().st_size for file in (entry, *entry.rglob("*")) if file.is_file())
            found.append((entry.stat().st_mtime, size, entry))
    total = 0
    for _, size, entry in sorted(found, reverse=True):
        total += size
        if total > budget and entry != but: remove(entry)


def sweep_halves(folder: Path) -> None:
    """Remove the files of a cache that killed compiles left half written."""
    for half in folder.glob(".*"):
        with contextlib.suppress(OSError):                # another compile sweeps as well
            if half.stat().st_mtime < time.time() - STRAY_S: half.unlink()


class _Useless(Exception):
    """The entry, not the output, is at fault."""


@dataclass(frozen=True)
class Entry:
    """The place of one finished compile. `note` gets a line whenever something is not as it should be."""

    key: str
    note: Callable[[str], None]

    @property
    def path(self) -> Path:
        return cache_folder() / "artifacts" / f"{self.key}.infc"

    def take(self, output: Path, force: bool, check: Callable[[Path], object]) -> bool:
        """Copy the entry to `output`, whole and checked; False where there is none to use.

        An entry that was altered, vanishes or fails `check` is removed. Raises RuntimeFault where `output` cannot be written.
        """
        sweep(self.path.parent)
        if not os.path.lexists(self.path):
            return False
        try:
            self._copy(output, force, check)
        except _Useless as useless:
            self.note(f"the kept artifact is of no use, compiling again: {useless}")
            remove(self.path)
            return False
        with contextlib.suppress(OSError):                # a cache may be read-only
            os.utime(self.path)
        return True

    def _copy(self, output: Path, force: bool, check: Callable[[Path], object]) -> None:
        """Raises _Useless for all that the entry is to blame for; what else fails is about `output`."""
        def checked(folder: Path) -> None:                # the copy, not the entry: another process may be replacing that one
            try:
                verify_files(folder, full=True).close()
                check(folder)
            except (RuntimeFault, InfcError, OSError) as error:
                raise _Useless(str(error).replace(str(folder), str(self.path))) from error

        if not os.path.isdir(self.path):
            raise _Useless(f"{self.path} is no folder")
        try:
            copy(self.path, output, force, checked)
        except (RuntimeFault, OSError) as fault:
            error = fault.__cause__ if isinstance(fault, RuntimeFault) else fault
            if isinstance(error, OSError) and self._reading(error):
                raise _Useless(f"{error.filename} cannot be read ({error.strerror})") from error
            raise

    def _reading(self, error: OSError) -> bool:
        """Whether a file of the entry is at fault. A full disk is never: shutil names the source of the copy then as well."""
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else ""
        return error.errno not in _FULL and bool(name) and Path(name).is_relative_to(self.path)

    def keep(self, artifact: Path) -> None:
        """Keep a copy of `artifact`; where that fails (a full disk) the compile is no worse for it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            copy(artifact, self.path, force=True)
            evict(self.path.parent, "*.infc", BUDGET_BYTES, self.path)
        except (RuntimeFault, OSError) as error:
            self.note(f"not kept for the next compile: {error}")
