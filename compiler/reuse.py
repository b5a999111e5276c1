"""Finished compiles, kept: the same model, options, sources and toolchain give the same artifact, so it is copied and verified.

An entry is a whole artifact under $XDG_CACHE_HOME/infc/artifacts/<key>.infc, written like any other: aside, then renamed. What
is copied out is hashed whole and its golden outputs are replayed, as after a compile; an entry that fails is removed and the
compile runs. The oldest entries go when all together pass the budget.
"""
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..runtime.artifact import copy, verify_files
from ..runtime.errors import RuntimeFault

BUDGET_BYTES = 4 << 30


def cache_folder() -> Path:
    """Where compiled code and finished artifacts are kept between compiles: $XDG_CACHE_HOME/infc, else ~/.cache/infc."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infc"


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

        Raises RuntimeFault where `output` cannot be written, and whatever `check` raises.
        """
        if not self.path.is_dir():
            return False
        try:
            verify_files(self.path, full=True).close()
        except RuntimeFault as fault:
            self.note(f"the kept artifact is of no use, compiling again: {fault}")
            shutil.rmtree(self.path, ignore_errors=True)
            return False
        copy(self.path, output, force, check)
        os.utime(self.path)
        return True

    def keep(self, artifact: Path) -> None:
        """Keep a copy of `artifact`; where that fails (a full disk) the compile is no worse for it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            copy(artifact, self.path, force=True)
            self._evict()
        except (RuntimeFault, OSError) as error:
            self.note(f"not kept for the next compile: {error}")

    def _evict(self) -> None:
        entries = sorted(self.path.parent.glob("*.infc"), key=lambda e: e.stat().st_mtime, reverse=True)
        total = 0
        for entry in entries:
            total += sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            if total > BUDGET_BYTES and entry != self.path:
                shutil.rmtree(entry, ignore_errors=True)
