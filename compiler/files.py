"""Files that are there whole, or as they were."""
import contextlib
import errno
import os
from pathlib import Path

from .errors import UserError


def named_artifact(path: Path) -> Path:
    """NAME -> NAME.infc. UserError where it is no name, names a device or the like, or lies inside another artifact."""
    if "\0" in str(path): raise UserError(f"{str(path)!r} holds a zero byte, which no file's name does: name another place")
    if path.name in ("", ".."): raise UserError(f"{path} is a folder: name the artifact in it, as {path / 'model.infc'}")
    inside = path.absolute().parent
    if inside.suffix == ".infc" and (inside / "manifest.json").is_file():
        raise UserError(f"{path} would lie inside the artifact {path.parent}: name a place beside it")
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise UserError(f"{path} is no regular file and no folder: name another place for the artifact")
    return path if path.suffix == ".infc" else path.with_name(path.name + ".infc")


def refuse_existing(path: Path, force: bool, what: str = "file") -> None:
    """UserError where a file cannot be written to `path`, or would replace another that is not to be."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the {what}, with -o")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it, or name another place with -o")
    if os.path.lexists(path) and not path.is_file():
        raise UserError(f"{path} is no regular file: name another with -o")
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists: add --force to replace it, or name another with -o")


def write_whole(path: Path, data: str | bytes, *, what: str = "", instead: str = "name another place", parents: bool = False) -> None:
    """Write a file so that nobody sees half of it; parents: make its folder. Raises UserError, which names the file, where there is
    no room or no permission."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if parents: path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(aside, path)
    except OSError as error:
        why = "no space left on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise UserError(f"{path}: {f'{what} ' if what else ''}cannot be written ({why}); {instead}") from error
    finally:
        with contextlib.suppress(OSError): aside.unlink()
