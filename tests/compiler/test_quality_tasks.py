"""Tasks: what they ask, what they count, and that a draft never changes what the reference says."""
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from infc.compiler.quality import tasks
from infc.compiler.quality.gate import Model, _codec
from infc.models.byte_tokenizer import byte_tokenizer

CODEC = _codec(byte_tokenizer(), Model("tiny", 320, 512), (1,))
assert CODEC is not None
VOCAB = 320


class Scripted:
    """A model whose likeliest next token is a function of the ids so far."""

    def __init__(self, next_token):
        self.next_token, self.runs = next_token, 0

    def logits(self, ids, *, first=0):
        self.runs += 1
        found = torch.zeros(len(ids) - first, VOCAB)
        for row in range(first, len(ids)):
            found[row - first, self.next_token([*ids[: row + 1]])] = 3.0
        return found

    def generate(self, ids, count):
        done = [*ids]
        for _ in range(count): done.append(self.next_token(done))
        return done[len(ids):]


def saying(answer: str):
    """A model that, whatever it is asked, says `answer` and newlines after it. It knows where the prompt ends by its last byte."""
    text = CODEC.encode(answer)

    def next_token(ids):
        for said in range(min(len(text), len(ids) - 1), 0, -1):
            if ids[-said:] == text[:said]: return text[said] if said < len(text) else CODEC.encode("\n")[0]
        return text[0]

    return Scripted(next_token)


@given(length=st.integers(200, 400), depth=st.floats(0, 1))
def test_a_probe_is_as_long_as_asked_and_holds_its_fact_where_asked(length: int, depth: float):
    filler = CODEC.encode("lorem ipsum " * 60)
    (probe,) = tasks.probes(CODEC, filler, lengths=(length,), depths=(depth,))
    assert len(probe.prompt) + len(probe.answer) == length and probe.prompt[0] == 1
    shown, answer = CODEC.decode(probe.prompt), CODEC.decode(probe.answer)
    assert answer[0] == " " and answer[1:].isdigit() and f"is{answer}." in shown and shown.endswith(" is")
    begin, end = shown.index(" The secret number"), shown.index(f"{answer}.") + len(f"{answer}.")
    asked = len(shown) - shown.index("\n\nRemember: the secret number")
    assert begin == round(depth * (length - 1 - (end - begin) - asked - len(answer)))                 # one token a byte, and BOS
    assert tasks.probes(CODEC, filler, lengths=(length,), depths=(depth,)) == [probe]                # the same every time


def test_retrieval_counts_what_the_reference_can_do():
    filler = CODEC.encode("lorem ipsum " * 60)
    asked = tasks.probes(CODEC, filler, lengths=(200, 300), depths=(0.0, 0.5))
    answers = {tuple(probe.prompt): probe.answer for probe in asked}

    def knows(known):
        def next_token(ids):
            for prompt, answer in known.items():
                said = len(ids) - len(prompt)
                if said >= 0 and tuple(ids[: len(prompt)]) == prompt and [*ids[len(prompt):]] == answer[:said] and said < len(answer):
                    return answer[said]
            return 0
        return Scripted(next_token)

    pairs = [*answers.items()]
    score, each = tasks.retrieval(knows(dict(pairs[1:4])), knows(dict(pairs[:3])), asked)
    assert (score.asked, score.right, score.reference_right, score.kept) == (4, 3, 3, 2) and score.share == pytest.approx(2 / 3)
    assert [one["right"] for one in each] == [False, True, True, True]
    assert each[1]["logp"] > each[0]["logp"] and each[0]["reference_logp"] > each[3]["reference_logp"]
    assert tasks.Score(4, 1, 0, 0).share is None


@given(ours=st.lists(st.integers(0, 3), min_size=1, max_size=6), theirs=st.lists(st.integers(0, 3), min_size=1, max_size=6),
       count=st.integers(1, 12))
def test_a_draft_never_changes_what_the_model_says(ours: list[int], theirs: list[int], count: int):
    draft, model = (Scripted(lambda ids, cycle=cycle: (cycle[len(ids) % len(cycle)] + ids[-1]) % 5) for cycle in (ours, theirs))
    found = tasks.greedy_by_draft(draft.generate, model, [2, 1], count)
    assert found == model.generate([2, 1], count)
    assert model.runs <= count
    if ours == theirs: assert model.runs == 1


@pytest.mark.parametrize(("line", "is_json"), [
    ('{"name": "A", "age": 3}', True), ('{"name": "A", "age": 3}\nand more', True), ("{}", True), ('["a"]', False), ('{"a": 1', False),
    ("", False), ("\n{}", False), ('{"a": 1} x', False),
])
def test_a_line_is_json_or_not(line: str, is_json: bool):
    assert tasks.parses(line) is is_json


def test_structured_output_counts_what_the_reference_can_do():
    prompts = tasks.json_prompts(CODEC, 3)
    assert len(prompts) == 3 and all(prompt[0] == 1 and len(prompt) > 100 for prompt in prompts)
    shown = CODEC.decode(prompts[0]).split("\n\n")
    assert len(shown) == tasks.SHOTS + 1 and all(json.loads(block.split("\n")[1]) for block in shown[:-1]) and shown[-1].endswith(".\n")
    good, bad = saying('{"ok": 1}'), saying('{"ok" 1}')
    for ours, theirs, expected in ((good, good, (3, 3, 3, 3)), (bad, good, (3, 0, 3, 0)), (good, bad, (3, 3, 0, 0))):
        score = tasks.structured(ours.generate, theirs, CODEC, prompts)
        assert (score.asked, score.right, score.reference_right, score.kept) == expected


def test_a_line_ends_with_the_token_that_ends_it():
    ids = CODEC.encode("ab\ncd")
    assert CODEC.decode(tasks.first_line(CODEC, ids)) == "ab\n" and tasks.first_line(CODEC, ids[:2]) == ids[:2]
