"""Results as JSON on stdout or for people, and in a file."""
from collections.abc import Callable
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Structs, dataclasses and paths as JSON's own types."""
    import msgspec

    return msgspec.to_builtins(value, enc_hook=str)


def as_text(value: Any) -> str:
    """Structs, paths and all; NaN becomes null."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1).decode()


def print_json(value: Any) -> None:
    print(as_text(value))


def give(report: Any, show: Callable[[Any], None], *, as_json: bool, quiet: bool = False, output: Path | None = None) -> None:
    """A report where it was asked for: in a file, as JSON, or as `show` shows it to people."""
    from .. import files

    if output: files.write_whole(output, as_text(report) + "\n")
    if as_json: print_json(report)
    elif not quiet: show(report)
