"""Text as it grows: a character split over tokens waits for its last byte, and a stop string is never shown."""

from collections.abc import Callable, Sequence

_HALF = "\ufffd"

_PENDING = 16
"""Tokens that may wait. They are decoded again with every new one, so a long run of special tokens, or of bytes that make no
character, would take quadratic time. A character has at most four bytes: one that is still incomplete began in the last three tokens."""


class TextStream:
    """The text of one answer. What `push` and `finish` return, joined, is `text`."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._before = 0  # ids before this one are settled; the next ones are decoded again as context
        self._read = 0  # ids before this one are in the text, or held back
        self._held = ""  # might be the start of a stop string

    def push(self, token: int) -> str:
        """Add a token; returns what may be shown now, often "". Sets `stopped` when a stop string is complete."""
        self._ids.append(token)
        piece, settled = self._new(len(self._ids)), len(self._ids)
        if not piece or piece.endswith(_HALF):
            if len(self._ids) - self._read < _PENDING:
                return ""
            if not piece:  # they show nothing
                del self._ids[self._read :]
                return ""
            settled -= 3
            piece = self._new(settled)
        self._before, self._read = self._read, settled
        return self._show(piece)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped:
            return ""
        shown = self._show(self._new(len(self._ids)))
        held, self._held = self._held, ""
        self.text += held
        return shown + held

    def _new(self, end: int) -> str:
        # decoders may treat the first token of a text differently, so a piece is the difference of two texts
        known = self._decode(self._ids[self._before : self._read])
        return self._decode(self._ids[self._before : end])[len(known) :]

    def _show(self, piece: str) -> str:
        text = self._held + piece
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            shown = text[: min(ends)]
        else:
            keep = max((_overlap(text, stop) for stop in self._stops), default=0)
            shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
