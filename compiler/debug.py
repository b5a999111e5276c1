"""The INFC_* switches; the only file that reads the environment for them. There are four; at most one more may be added.

INFC_DEBUG  1: each pass's refusals and nearest misses, as they come
INFC_CHECK  1 verify the graph after each pass | 2 also rerun each pass's contract
INFC_STOP   apply only the first N rewrites
INFC_DUMP   folder for 00-captured.txt, 01-canonicalize.txt, ...
"""
import os
from pathlib import Path

from .errors import UserError


def _number(name: str, top: int | None = None) -> int | None:
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    if not value.isdigit() or (top is not None and int(value) > top):
        expected = "a whole number" if top is None else f"a whole number from 0 to {top}"
        raise UserError(f"{name}={value!r}: expected {expected}")
    return int(value)


def verbose() -> bool:
    """INFC_DEBUG: say why passes did not fire."""
    return bool(_number("INFC_DEBUG", 1))


def check() -> int | None:
    """INFC_CHECK: 0 off, 1 verify, 2 contracts too; None where the caller's own choice stands."""
    return _number("INFC_CHECK", 2)


def stop() -> int | None:
    """INFC_STOP: how many rewrites may be applied in all; None for no limit."""
    return _number("INFC_STOP")


def dump() -> Path | None:
    """INFC_DUMP: the folder that gets one text file per pass that changed something."""
    folder = os.environ.get("INFC_DUMP", "").strip()
    return Path(folder) if folder else None


def any_set() -> bool:
    """True when a switch asks for something a finished compile cannot show."""
    return any(os.environ.get(f"INFC_{name}", "").strip() for name in ("DEBUG", "CHECK", "STOP", "DUMP"))
