"""Results as JSON on stdout."""
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
