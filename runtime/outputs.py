"""What callers get back: plain structs that `msgspec.json.encode` writes as they are."""
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["eos", "stop", "length"]


class Output(msgspec.Struct, frozen=True):
    """One answer. `token_ids` is all that was sampled; `text` leaves out the token or the string that ended it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int


class Piece(msgspec.Struct, frozen=True):
    """One token of a stream. `text` may be shown now: "" while a character or a possible stop string is incomplete."""

    text: str
    token_id: int
    finish_reason: FinishReason | None

    def __str__(self) -> str:
        return self.text


class Timing(msgspec.Struct):
    """Seconds: to load; from the last call to its first token; per further token of an answer (0: there was none)."""

    load_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0


class StepResult(msgspec.Struct, frozen=True):
    """What a step gave, copied, so that later steps do not change it, unless it was asked not to be: see `Model.step`.

    logits: one float32 array [rows, vocab] a sequence. tokens: the likeliest next token of each sequence.
    """

    logits: "list[np.ndarray]"
    tokens: list[int]
