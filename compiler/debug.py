"""The five INFC_* switches; the only file that reads the environment for them. A sixth must replace one of these.

INFC_DEBUG  what a compile says on stderr, each level all of the lower ones:
            1 each pass's refusals and nearest misses, as they come
            2 the time, GB/s and share of the machine's read rate of each step, one token at a time
            3 what each pass changed in the graph's text
            4 the generated source
INFC_CHECK  1 verify the graph after each pass | 2 also rerun each pass's contract
INFC_STOP   apply only the first N rewrites
INFC_EAGER  1: verify with reference operators in place of every kernel. What fails then is a pass or the memory plan; what only
            fails without it is a kernel. The artifact is the usual one, its kernels unchecked
INFC_DUMP   folder for 00-captured.txt, 01-canonicalize.txt, ...
"""
import os
from pathlib import Path

from .errors import UserError

SWITCHES = ("DEBUG", "CHECK", "STOP", "EAGER", "DUMP")


def _number(name: str, top: int | None = None) -> int | None:
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    if not value.isdecimal() or (top is not None and int(value) > top):
        expected = "a whole number" if top is None else "0 or 1" if top == 1 else f"a whole number from 0 to {top}"
        raise UserError(f"{name}={value!r}: expected {expected}")
    return int(value)


def level() -> int:
    """INFC_DEBUG: how much a compile says, 0 to 4."""
    return _number("INFC_DEBUG", 4) or 0


def check() -> int | None:
    """INFC_CHECK: 0 off, 1 verify, 2 contracts too; None where the caller's own choice stands."""
    return _number("INFC_CHECK", 2)


def stop() -> int | None:
    """INFC_STOP: how many rewrites may be applied in all; None for no limit."""
    return _number("INFC_STOP")


def eager() -> bool:
    """INFC_EAGER: reference operators in place of kernels while the program is verified."""
    return bool(_number("INFC_EAGER", 1))


def dump() -> Path | None:
    """INFC_DUMP: the folder that gets one text file per pass that changed something."""
    folder = os.environ.get("INFC_DUMP", "").strip()
    return Path(folder) if folder else None


def check_all() -> None:
    """Raise UserError for a switch that is set to what it cannot be."""
    for read in (level, check, stop, eager): read()


def any_set() -> bool:
    """True when a switch asks for something a finished compile cannot show."""
    return any(os.environ.get(f"INFC_{name}", "").strip() for name in SWITCHES)
