"""What other people's exceptions say, in one line, and which line of the model they are about."""
import re
import traceback
from pathlib import Path

import torch


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def of_torch(file: str) -> bool:
    """True for a source file of torch itself."""
    return Path(file).is_relative_to(Path(torch.__file__).parent)


def user_line(error: BaseException) -> str:
    """Where in the model it happened, from the message or the traceback: "(model.py:13: if x.sum() > 0: ...)"."""
    written = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', str(error))
    if written:
        path, line, code = written[-1]
        return f"({Path(path).name}:{line} {code.strip()})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not of_torch(f.filename) and not _of_frontends(f.filename)]
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line})" if frames else ""


def _of_frontends(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent
