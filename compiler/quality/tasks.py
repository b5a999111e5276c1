"""Two tasks that perplexity does not see: a fact far back in a long prompt, and text that must parse.

What counts is what the compiled model keeps of what the captured one can do: a small model fails at both now and then.
"""
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from torch import Tensor

from .evaluate import Evaluator

SEED = 4


@dataclass(frozen=True)
class Codec:
    """Text to ids (no special tokens) and back, and what the tokenizer puts before a text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: tuple[int, ...] = ()


@dataclass(frozen=True)
class Probe:
    """A prompt and the answer that is looked for."""

    prompt: list[int]
    answer: list[int]
    depth: float                   # where in the prompt the fact stands: 0 is its beginning


@dataclass(frozen=True)
class Score:
    """Of `asked` prompts, how many each model got right, and of the captured model's right ones how many ours has right too."""

    asked: int
    right: int
    reference_right: int
    kept: int

    @property
    def share(self) -> float | None:
        """Of what the captured model can do, what ours keeps; None where it can do nothing."""
        return self.kept / self.reference_right if self.reference_right else None

    def json(self) -> dict[str, float | None]:
        """Plain data."""
        return asdict(self) | {"share": self.share}


# ----------------------------------------------------------------------------------------------------------- retrieval

NAMES = ("Ellery Voss", "Mirela Quist", "Osric Bannock", "Tamsin Rourke", "Ivo Lindgren", "Petra Halloway")
FACT = " The secret number of {name} is {number}."
QUESTION = "\n\nRemember: the secret number of {name} is"


def probes(codec: Codec, filler: Sequence[int], *, lengths: Sequence[int], depths: Sequence[float]) -> list[Probe]:
    """One prompt for each length and depth: text, the fact among it, more text, the question. filler: ids of a long text."""
    chance = random.Random(SEED)
    found = []
    for length in lengths:
        for depth in depths:
            name, number = chance.choice(NAMES), " " + str(chance.randrange(10_000, 100_000))
            fact = codec.encode(FACT.format(name=name, number=number.strip()))
            question = codec.encode(QUESTION.format(name=name))
            answer = codec.encode(QUESTION.format(name=name) + number)[len(question):]
            room = length - len(codec.start) - len(fact) - len(question) - len(answer)
            at = chance.randrange(max(1, len(filler) - room))
            before = round(depth * room)
            text = [*codec.start, *filler[at : at + before], *fact, *filler[at + before : at + room], *question]
            found.append(Probe(text, answer, depth))
    return found


def retrieval(ours: Evaluator, reference: Evaluator, asked: Sequence[Probe]) -> tuple[Score, list[dict[str, float]]]:
    """Does greedy decoding give the answer? And each prompt: mean log-probability of the answer's tokens in both."""
    each = []
    for probe in asked:
        (right, logp), (reference_right, reference_logp) = (_answers(model, probe) for model in (ours, reference))
        each.append({"tokens": len(probe.prompt), "depth": probe.depth, "right": right, "reference_right": reference_right,
                     "logp": logp, "reference_logp": reference_logp})
    return _score([(one["right"], one["reference_right"]) for one in each]), each


def _answers(model: Evaluator, probe: Probe) -> tuple[bool, float]:
    """Greedy decoding gives the answer exactly if each of its tokens is the likeliest after those before it."""
    logits = model.logits([*probe.prompt, *probe.answer[:-1]], first=len(probe.prompt) - 1)
    likely = logits.double().log_softmax(-1)
    logp = sum(float(row[token]) for row, token in zip(likely, probe.answer, strict=True))
    return _greedy(logits) == probe.answer, logp / len(probe.answer)


def _greedy(logits: Tensor) -> list[int]:
    return logits.argmax(-1).tolist()


# --------------------------------------------------------------------------------------------------- structured output

RECORDS = (
    ("Anna Berg", 34, "Oslo"), ("Tom Reyes", 51, "Lima"), ("Lucy Chan", 27, "Perth"), ("Omar Said", 45, "Cairo"),
    ("Eva Novak", 62, "Brno"), ("John Ward", 19, "Leeds"), ("Mina Park", 38, "Busan"), ("Paul Roux", 70, "Lyon"),
)
SHOTS = 3
LINE = "{name} is {age} years old and lives in {city}.\n"
NEW_TOKENS = 32
"""The record that is wanted has 22 tokens with SmolLM2's tokenizer."""


def json_prompts(codec: Codec, count: int) -> list[list[int]]:
    """Prompts that show SHOTS people as sentences and as JSON, and then one more sentence."""
    chance = random.Random(SEED)
    found = []
    for _ in range(count):
        people = chance.sample(RECORDS, SHOTS + 1)
        shown = "".join(_sentence(one) + json.dumps(_record(one)) + "\n\n" for one in people[:-1])
        found.append([*codec.start, *codec.encode(shown + _sentence(people[-1]))])
    return found


def _record(person: tuple[str, int, str]) -> dict[str, object]:
    return dict(zip(("name", "age", "city"), person, strict=True))


def _sentence(person: tuple[str, int, str]) -> str:
    name, age, city = person
    return LINE.format(name=name, age=age, city=city)


def structured(
    generate: Callable[[Sequence[int], int], list[int]], reference: Evaluator, codec: Codec, prompts: Sequence[Sequence[int]],
) -> Score:
    """Does the first line of the greedy continuation parse as a JSON object? generate(ids, count): our continuation."""
    @lru_cache(maxsize=1)                                  # the first draft is our own answer
    def made(ids: tuple[int, ...], count: int) -> list[int]:
        return first_line(codec, generate(ids, count))

    def line(ids: Sequence[int], count: int) -> list[int]:
        return made((*ids,), count)

    pairs = []
    for prompt in prompts:
        ours = parses(codec.decode(line(prompt, NEW_TOKENS)))
        theirs = greedy_by_draft(line, reference, prompt, NEW_TOKENS, lambda ids: "\n" in codec.decode(ids))
        pairs.append((ours, parses(codec.decode(theirs))))
    return _score(pairs)


def first_line(codec: Codec, ids: Sequence[int]) -> list[int]:
    """The ids up to the one that ends the first line."""
    end = next((i for i in range(1, len(ids) + 1) if "\n" in codec.decode(ids[:i])), len(ids))
    return [*ids[:end]]


def parses(continuation: str) -> bool:
    """Is its first line a JSON object?"""
    try:
        return isinstance(json.loads(continuation.split("\n")[0]), dict)
    except json.JSONDecodeError:
        return False


def greedy_by_draft(
    draft: Callable[[Sequence[int], int], list[int]], model: Evaluator, prompt: Sequence[int], count: int,
    ended: Callable[[Sequence[int]], bool] = lambda ids: False,
) -> list[int]:
    """The model's own greedy continuation, exactly, of `count` tokens or until it `ended`; `draft` mostly agrees and is cheap to decode.

    One run of the model checks a whole draft: its tokens hold up to the first that is not the likeliest, which is then replaced.
    """
    done = list[int]()
    while len(done) < count and not ended(done):
        guess = draft([*prompt, *done], count - len(done))
        likeliest = _greedy(model.logits([*prompt, *done, *guess[:-1]], first=len(prompt) + len(done) - 1))
        agreed = next((i for i, (a, b) in enumerate(zip(guess, likeliest, strict=True)) if a != b), len(guess))
        done += likeliest[: agreed + 1]
    return done


def _score(pairs: Sequence[tuple[object, object]]) -> Score:
    ours, theirs = (sum(map(bool, side)) for side in zip(*pairs, strict=True))
    return Score(len(pairs), ours, theirs, sum(bool(a and b) for a, b in pairs))
