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

    try:
        text = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:                            # a path has bytes that are no UTF-8
        text = msgspec.json.encode(_spelled(plain(value)))
    return msgspec.json.format(text, indent=1).decode()


def _spelled(value: Any) -> Any:
    """The value with what no UTF-8 can hold as escapes in its strings, as stderr shows it."""
    if isinstance(value, str): return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict): return {_spelled(key): _spelled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple): return [_spelled(inner) for inner in value]
    return value


def print_json(value: Any) -> None:
    print(as_text(value))


def give(report: Any, show: Callable[[Any], None], *, as_json: bool, quiet: bool = False, output: Path | None = None) -> None:
    """A report where it was asked for: in a file, as JSON, or as `show` shows it to people."""
    from .. import files

    if output: files.write_whole(output, as_text(report) + "\n")
    if as_json: print_json(report)
    elif not quiet: show(report)
