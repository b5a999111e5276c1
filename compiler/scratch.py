"""Folders in TMPDIR to work in: each is locked as long as its process lives, so a compile knows what killed ones left, and removes it."""
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .reuse import remove

_PREFIX = "infc-locked-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def scratch(what: str) -> Iterator[Path]:
    """A new folder, locked and removed at the end. The lock goes with the process, however that ends; what it starts does not inherit it.

    what: a word for its name, as "code".
    """
    while True:
        made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{what}-"))
        try:
            held = os.open(made, _FLAGS)
        except FileNotFoundError: continue                   # another compile took it for a dead one's, just now
        try:
            with contextlib.suppress(OSError): fcntl.flock(held, fcntl.LOCK_EX)      # no locks there: nobody takes it for a dead one's
            if not made.exists(): continue
            try:
                yield made
            finally:
                remove(made)
            return
        finally:
            os.close(held)


def sweep() -> None:
    """Remove the folders whose process was killed: nobody holds their lock."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):                   # gone meanwhile, another user's, no folder, or its lock cannot be had
            held = os.open(left, _FLAGS)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(left)
            finally:
                os.close(held)
