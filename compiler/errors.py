"""Every failure a user can meet: one clear message and the exit code of the command line."""
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class InfcError(Exception):
    """A failure with a message for a person: what was found, where, what was expected, what to try next. document: what a command found
    all the same; --json shows it beside the error."""

    exit_code = 2

    def __init__(self, message: str, exit_code: int | None = None, *, document: dict[str, Any] | None = None):
        super().__init__(message)
        self.message = message
        self.document = document or {}
        if exit_code is not None:
            self.exit_code = exit_code


class UserError(InfcError):
    """The request cannot be met as it was made: unknown name, bad file, bad option."""

    exit_code = 2


class CheckFailed(InfcError):
    """A check of ours failed: a pass broke its contract, a program differs from its graph."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str:
    """` did you mean 'x'?` when a known name is close, else the list of known names: the tail of an unknown-name error."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def not_finite(values: "Tensor") -> str:
    """Of values some of which are NaN or infinite: how many are, and where the first is, for a message."""
    values = values.detach()
    bad = ~values.isfinite()
    at = tuple(int(i) for i in bad.nonzero()[0])
    count = int(bad.sum())
    return f"{count} value{'s are' if count > 1 else ' is'} not finite, the first at [{', '.join(map(str, at))}]: {float(values[at])}"
