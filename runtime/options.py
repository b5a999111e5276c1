"""What a caller may ask of a generation, each value checked before anything runs."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from .errors import RuntimeFault

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a conversation."""


_MAX_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest float32, which is what a kernel gets."""


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
        return Sampling(min(temperature, _MAX_FLOAT), min(top_k, 2**31 - 1), top_p)


def max_tokens(value: Any) -> int:
    """At least one."""
    number = _integer("max_tokens", value)
    if number < 1:
        raise RuntimeFault(f"max_tokens is {number}; it must be >= 1")
    return number


def seeds(value: Any, count: int) -> list[int | None]:
    """One seed a prompt: None draws one, an int is every prompt's, a sequence or an array gives each its own."""
    if value is None:
        return [None] * count
    if is_list(value):
        value = value.tolist() if hasattr(value, "tolist") else value
        if len(value) != count:
            raise RuntimeFault(f"seed has {len(value)} values for {count} prompts; give one seed, or one for each")
        return [_seed(v) for v in value]
    return [_seed(value)] * count


def _seed(value: Any) -> int:
    number = _integer("seed", value)
    if number < 0:                                        # random.Random takes -1 for 1
        raise RuntimeFault(f"seed is {number}; it must be >= 0")
    return number


def stops(value: Any, vocab: int) -> tuple[tuple[str, ...], frozenset[int]]:
    """Stop strings and stop token ids out of one collection, or out of a single string or id. None: no stop."""
    if value is None:
        value = ()
    items = tuple(value) if is_list(value) or isinstance(value, (Set, Iterator)) else (value,)
    strings = tuple(unicode("stop", s) for s in items if isinstance(s, str))
    if "" in strings:
        raise RuntimeFault("stop holds an empty string, which every text contains; give at least one character")
    return strings, frozenset(_stop_id(s, vocab) for s in items if not isinstance(s, str))


def _stop_id(value: Any, vocab: int) -> int:
    number = _integer("stop", value, "text or a token id")
    if not 0 <= number < vocab:
        raise RuntimeFault(f"stop is {number}; the vocabulary has ids 0..{vocab - 1}")
    return number


def unicode(what: str, text: str) -> str:
    """The text itself. Raises RuntimeFault where it holds a lone surrogate, as bytes of a command line that are no UTF-8 do."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        raise RuntimeFault(f"{what} is not valid Unicode: character {at} is U+{ord(text[at]):04X}, half of a pair; "
                           "give UTF-8 text") from error
    return text


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that is taken for one of them: 'no' is true."""
    if not isinstance(value, bool):
        raise RuntimeFault(f"{name} is {value!r}; give True or False")
    return value


def is_list(value: Any) -> bool:
    """Whether a value has items to be read one by one: a list or an array, not text and not a number of any kind."""
    if isinstance(value, (str, bytes, bytearray)):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "tolist") and getattr(value, "ndim", 1) > 0)


def token_ids(value: Any, vocab: int, what: str) -> list[int]:
    """A list of token ids of the vocabulary, not empty. `value`: any sequence of integers, an array as well."""
    if not is_list(value):
        raise RuntimeFault(f"{what} is {kind(value)}; give a list of token ids")
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
            f"prompts is {kind(value)}; give a string, a list of token ids, a list of messages, or a list of those"
        )
    if not value:
        raise RuntimeFault("prompts is empty; give at least one prompt")
    if all(isinstance(v, Mapping) for v in value) or not any(isinstance(v, (str, bytes, bytearray)) or is_list(v) for v in value):
        return [value]
    return list(value)


def kind(value: Any) -> str:
    """The type of a value, with its article: an int, a str."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        return float(value)
    except OverflowError:                                 # an int, and no float is as large
        return -math.inf if operator.lt(value, 0) else math.inf
    except (TypeError, ValueError) as error:
        raise RuntimeFault(f"{name} is {value!r}; it must be a number") from error


def _integer(name: str, value: Any, expected: str = "an integer") -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise RuntimeFault(f"{name} is {value!r}; it must be {expected}") from error
