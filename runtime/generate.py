"""Continuous batching: every step decodes the sequences that run and fills the rest of the bucket with prompts.

A prompt longer than the largest bucket is fed in chunks; prompts beyond the number of sequences wait for a place. A sequence is
admitted only when the pool can hold it to its end, so none ever has to be stopped halfway.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from .batch import SequenceState, Work
from .blocks import blocks_for
from .detokenize import TextStream
from .errors import RuntimeFault
from .options import Sampling
from .outputs import FinishReason
from .stepper import Limits, Stepper


class Request:
    """One prompt and the answer as it grows."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        *,
        max_tokens: int,
        sampling: Sampling,
        seed: int | None,
        eos: frozenset[int],
        stop_ids: frozenset[int],
        text: Callable[[], TextStream] | None,
        live: bool,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.first = self.last = 0.0  # times of the first and the last token
        self.sequence = SequenceState()
        self._pending = prompt  # not yet in the KV pool
        self._limit = max_tokens
        self._sampling = sampling
        self._random = random.Random(seed).random if sampling.temperature > 0 else None
        self._eos, self._stop_ids = eos, stop_ids
        self._make_text, self._live = text, live
        self._text: TextStream | None = None

    @property
    def decoding(self) -> bool:
        """Whether only its newest token is to be fed."""
        return bool(self.ids)

    def tokens_needed(self) -> int:
        """KV tokens to the end: the last token is never fed."""
        return len(self.prompt) + self._limit - 1

    def work(self, room: int) -> Work:
        """Its part of the next step, at most `room` tokens."""
        if len(self._pending) > room:
            return Work(self.sequence, self._pending[:room], 0)
        return Work(self.sequence, self._pending, 1, self._sampling, self._random() if self._random else 0.0)

    def fed(self, count: int) -> None:
        """So many pending tokens are in the KV pool now."""
        self._pending = self._pending[count:]

    def accept(self, token: int) -> str:
        """Take a sampled token. Returns what may be shown; sets finish_reason at the end."""
        self.last = perf_counter()
        self.first = self.first or self.last
        self.ids.append(token)
        self._pending = [token]
        shown = ""
        if token in self._eos:
            self.finish_reason = "eos"
        elif token in self._stop_ids:
            self.finish_reason = "stop"
        else:
            if self._live and self._make_text:
                shown = self._stream().push(token)
                if self._stream().stopped:
                    self.finish_reason = "stop"
            if not self.finish_reason and len(self.ids) >= self._limit:
                self.finish_reason = "length"
        if self.finish_reason and self._live and self._make_text:
            shown += self._stream().finish()
        return shown

    def text(self) -> str:
        """The answer: without the token or the string that ended it."""
        if not self._make_text:
            return ""
        if not self._live:
            self._live = True
            ended = self.finish_reason == "eos" or (self.finish_reason == "stop")
            for token in self.ids[:-1] if ended else self.ids:
                self._stream().push(token)
            self._stream().finish()
        return self._stream().text

    def _stream(self) -> TextStream:
        if self._text is None:
            assert self._make_text is not None
            self._text = self._make_text()
        return self._text


def run_requests(stepper: Stepper, requests: Sequence[Request]) -> Iterator[tuple[Request, int, str]]:
    """Run all requests to their end; yields (request, token, text to show) for each token as it comes.

    However it ends (a stop, an error, Ctrl-C, a consumer that goes away), every block is given back.
    """
    waiting, running = deque(requests), list[Request]()
    try:
        while waiting or running:
            _admit(stepper, waiting, running)
            works = _plan(stepper.limits, running)
            tokens = iter(stepper.run([work for _, work in works]))
            for request, work in works:
                request.fed(len(work.tokens))
                if work.rows:
                    token = next(tokens)
                    shown = request.accept(token)
                    if request.finish_reason:
                        stepper.pool.shrink(request.sequence, 0)
                    yield request, token, shown
            running = [r for r in running if not r.finish_reason]
    finally:
        for request in requests:
            stepper.pool.shrink(request.sequence, 0)


def _admit(stepper: Stepper, waiting: "deque[Request]", running: list[Request]) -> None:
    while waiting and len(running) < stepper.limits.sequences:
        request = waiting[0]
        need = blocks_for(request.tokens_needed())
        if not stepper.pool.reserve(request.sequence, need):
            if not running:
                raise RuntimeFault(
                    f"the KV pool is full: prompt {request.index} needs {need} blocks, {stepper.pool.free} of {stepper.pool.count} "
                    "are free; close sequences that are open, or load with a larger kv_tokens="
                )
            return
        running.append(waiting.popleft())


def _plan(limits: Limits, running: Sequence[Request]) -> list[tuple[Request, Work]]:
    """Who does what in the next step: first those that decode, then prompts, oldest first, while there is room."""
    works: list[tuple[Request, Work]] = []
    room = limits.tokens
    for request in sorted(running, key=lambda r: not r.decoding):
        if not room:
            break
        works.append((request, request.work(room)))
        room -= len(works[-1][1].tokens)
    return works
