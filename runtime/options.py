"""What a caller may ask of a generation, each value checked before anything runs."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import RuntimeFault

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a conversation."""


class Sampling(NamedTuple):
    """How one token is drawn: temperature 0 takes the likeliest; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def checked(self) -> "Sampling":
        """Itself with plain numbers. Raises RuntimeFault, which names the value and its limit."""
        temperature = _number("temperature", self.temperature)
        top_k = _integer("top_k", self.top_k)
        top_p = _number("top_p", self.top_p)
        if not temperature >= 0 or math.isinf(temperature):
            raise RuntimeFault(f"temperature is {temperature}; it must be a finite number >= 0 (0 takes the likeliest token)")
        if top_k < 0:
            raise RuntimeFault(f"top_k is {top_k}; it must be >= 0 (0 turns it off)")
        if not 0 < top_p <= 1:
            raise RuntimeFault(f"top_p is {top_p}; it must lie in (0, 1] (1 turns it off)")
        return Sampling(temperature, min(top_k, 2**31 - 1), top_p)


def max_tokens(value: Any) -> int:
    """At least one."""
    number = _integer("max_tokens", value)
    if number < 1:
        raise RuntimeFault(f"max_tokens is {number}; it must be >= 1")
    return number


def seeds(value: Any, count: int) -> list[int | None]:
    """One seed a prompt: None draws one, an int is every prompt's, a sequence gives each its own."""
    if value is None:
        return [None] * count
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise RuntimeFault(f"seed has {len(value)} values for {count} prompts; give one seed, or one for each")
        return [_integer("seed", v) for v in value]
    return [_integer("seed", value)] * count


def stops(value: Any) -> tuple[tuple[str, ...], frozenset[int]]:
    """Stop strings and stop token ids out of one collection, or out of a single string or id."""
    items = (value,) if isinstance(value, (str, int)) else tuple(value)
    strings = tuple(s for s in items if isinstance(s, str))
    if "" in strings:
        raise RuntimeFault("stop holds an empty string, which every text contains; give at least one character")
    return strings, frozenset(_integer("stop", s) for s in items if not isinstance(s, str))


def token_ids(value: Any, vocab: int, what: str) -> list[int]:
    """A list of token ids of the vocabulary, not empty. `value`: any sequence of integers, an array as well."""
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if not items:
        raise RuntimeFault(f"{what} is empty; give at least one token")
    plain = all(type(i) is int for i in items)            # the usual case, checked at C speed
    ids = items if plain else [_integer(f"{what}: token {i}", item) for i, item in enumerate(items)]
    if min(ids) < 0 or max(ids) >= vocab:
        at, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab)
        raise RuntimeFault(f"{what}: token {at} is {bad}; the vocabulary has ids 0..{vocab - 1}")
    return ids


def split_prompts(value: Any) -> list[Prompt]:
    """The prompts in what generate was given: one prompt of any kind, or a list of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise RuntimeFault(
            f"prompts is a {type(value).__name__}; give a string, a list of token ids, a list of messages, or a list of those"
        )
    if not value:
        raise RuntimeFault("prompts is empty; give at least one prompt")
    if all(isinstance(v, Mapping) for v in value) or not any(
        isinstance(v, (str, Sequence)) or hasattr(v, "tolist") for v in value
    ):
        return [value]
    return list(value)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise RuntimeFault(f"{name} is {value!r}; it must be a number") from error


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise RuntimeFault(f"{name} is {value!r}; it must be an integer") from error
