"""What PyTorch logs and prints while it exports stays off stderr: what is wrong is said by its exception, in our one line."""
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, cast


@dataclass
class _Others:
    """A stream as it is to all threads but one, whose text is dropped: a progress bar goes on."""

    stream: TextIO
    silent: int

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.silent else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def hushed() -> Iterator[None]:
    """Nothing of this thread reaches stderr or a handler of PyTorch's loggers; all is as it was afterwards."""
    silent, stream = threading.get_ident(), sys.stderr
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}

    def others(record: logging.LogRecord) -> bool: return record.thread != silent

    for handler in handlers: handler.addFilter(others)
    sys.stderr = cast(TextIO, _Others(stream, silent))
    try:
        yield
    finally:
        sys.stderr = stream
        for handler in handlers: handler.removeFilter(others)
