"""Where the files of an artifact lie: a folder, or one stored zip. Every name stays inside, no link is followed."""

import os
import stat
import struct
import weakref
from pathlib import Path, PurePosixPath

from .errors import RuntimeFault


class Span:
    """`size` bytes of an open file from `offset` on; closes the file at the end of a `with`."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self.fd, self.offset, self.size = fd, offset, size

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def contained(name: str) -> bool:
    """Whether a name from a manifest stays inside the artifact: relative, plain parts, no `..`, no backslash, no NUL."""
    parts = PurePosixPath(name).parts
    plain = name and not name.startswith("/") and "\\" not in name and "\0" not in name and "//" not in name
    return bool(plain) and ".." not in parts and "/".join(parts) == name


class Folder:
    """An artifact as a folder. Held open: a folder renamed away while it is read is still the one that is read."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._close = _closer(self, self._root)

    def open(self, name: str) -> Span:
        """Open a file. FileNotFoundError where it is missing; RuntimeFault where it is no plain file of this folder."""
        if not contained(name):
            raise RuntimeFault(f"{self.where}: the name {name!r} leads outside the artifact; do not use this artifact")
        parts = name.split("/")
        folder = os.dup(self._root)
        try:
            for part in parts[:-1]:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:  # ELOOP: a link; ENOTDIR: a file where a folder should be
            raise RuntimeFault(f"{self.where}: cannot open {name} ({error.strerror}); links are not followed") from error
        finally:
            os.close(folder)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise RuntimeFault(f"{self.where}: {name} is not a plain file; copy the artifact again")
        return Span(fd, 0, status.st_size)

    def replaced(self) -> bool:
        """Whether the path names another folder by now."""
        return _replaced(self._root, self.where)

    def close(self) -> None:
        """Let go of it."""
        self._root = -1
        self._close()


class Zip:
    """An artifact as one zip whose members are stored, not compressed: every file is a span of the zip itself."""

    def __init__(self, path: Path) -> None:
        import zipfile

        self.where = str(path)
        self._fd = os.open(path, os.O_RDONLY)
        self._close = _closer(self, self._fd)
        self._members: dict[str, tuple[int, int]] = {}
        try:
            with os.fdopen(os.dup(self._fd), "rb") as file, zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                        what = "encrypted" if info.flag_bits & 1 else "compressed"
                        raise RuntimeFault(f"{path}: {info.filename} is {what}; pack with `zip -0 -r`")
                    if not info.filename or info.is_dir():
                        continue
                    head = os.pread(self._fd, 30, info.header_offset)
                    if len(head) < 30:
                        raise RuntimeFault(f"{path}: not a whole zip; copy it again")
                    name_bytes, extra_bytes = struct.unpack("<HH", head[26:30])
                    self._members[info.filename] = (info.header_offset + 30 + name_bytes + extra_bytes, info.file_size)
        except (zipfile.BadZipFile, NotImplementedError, OSError, OverflowError, ValueError, struct.error) as error:
            self.close()
            raise RuntimeFault(f"{path}: not an infc artifact: neither a folder nor a whole zip ({error})") from error
        except RuntimeFault:
            self.close()
            raise

    def open(self, name: str) -> Span:
        """Open a member. FileNotFoundError where there is none."""
        if not contained(name):
            raise RuntimeFault(f"{self.where}: the name {name!r} leads outside the artifact; do not use this artifact")
        if name not in self._members:
            raise FileNotFoundError(name)
        offset, size = self._members[name]
        if offset + size > os.fstat(self._fd).st_size:
            raise RuntimeFault(f"{self.where}: {name} reaches past the end of the zip; copy it again")
        return Span(os.dup(self._fd), offset, size)

    def replaced(self) -> bool:
        """Whether the path names another file by now."""
        return _replaced(self._fd, self.where)

    def close(self) -> None:
        """Let go of it."""
        self._fd = -1
        self._close()


def open_storage(path: Path) -> Folder | Zip:
    """The storage of an artifact at `path`."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode): return Folder(path)
        if stat.S_ISREG(mode): return Zip(path)           # anything else may block where it is opened
    except FileNotFoundError as error:
        raise RuntimeFault(f"{path}: no such artifact; make one with: infc compile MODEL -o {path}") from error
    except OSError as error:
        raise RuntimeFault(f"{path}: cannot be opened ({error.strerror})") from error
    except ValueError as error:                           # a NUL, or half of a surrogate pair
        raise RuntimeFault(f"the artifact's path is {str(path)!r}, which no file can have; give another") from error
    raise RuntimeFault(f"{path}: not an infc artifact: neither a folder nor a file")


def _closer(owner: object, fd: int) -> "weakref.finalize[[int], object]":
    """Closes `fd` once: when it is called, or when its owner was dropped."""
    closer = weakref.finalize(owner, os.close, fd)
    closer.atexit = False                                 # the process closes it
    return closer


def _replaced(fd: int, path: str) -> bool:
    """Whether the path names another file by now than the one that is open."""
    try:
        return os.stat(path).st_ino != os.fstat(fd).st_ino
    except OSError:
        return False


def read_span(span: Span) -> bytes:
    """All bytes of a span."""
    pieces = []
    offset, left = span.offset, span.size
    while left and (piece := os.pread(span.fd, min(left, 1 << 30), offset)):
        pieces.append(piece)
        offset, left = offset + len(piece), left - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
