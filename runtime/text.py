"""The tokenizer, read when text is first used, or on a thread of its own while the weights are copied."""
from threading import Thread
from typing import TYPE_CHECKING

from .artifact import Artifact
from .detokenize import TextStream
from .errors import RuntimeFault

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class LazyTokenizer:
    """Reading a tokenizer of 49,152 entries takes 0.1 s, and a service that sends token ids never needs it."""

    def __init__(self, artifact: Artifact) -> None:
        self.present = bool(artifact.manifest.tokenizer)
        self._artifact = artifact
        self._thread: Thread | None = None
        self._tokenizer: Tokenizer | None = None

    def start(self) -> None:
        """Read it in the background. A fault in it is raised by `get`."""
        if self.present:
            self._thread = Thread(target=self._try_read, daemon=True)
            self._thread.start()

    def get(self) -> "Tokenizer":
        """The tokenizer. Raises RuntimeFault where the artifact has none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._tokenizer is None:
            self._tokenizer = self._read()
        return self._tokenizer

    def stream(self, stops: tuple[str, ...]) -> TextStream:
        """The text of a new answer."""
        return TextStream(self.get().decode, stops)

    def _read(self) -> "Tokenizer":
        if not self.present:
            raise RuntimeFault(f"{self._artifact.path}: has no tokenizer: from Python, generate takes token ids in place of text")
        from .tokenizer import Tokenizer

        return Tokenizer(self._artifact.tokenizer(), self._artifact.manifest.model)

    def _try_read(self) -> None:
        try:
            self._tokenizer = self._read()
        except RuntimeFault:
            return                                        # `get` reads it again and raises
