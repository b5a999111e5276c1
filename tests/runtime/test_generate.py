"""Generation: alone, batched, chunked, queued, sampled and stopped, always the tokens the model's own function says."""
import random
from collections.abc import Iterator

import pytest
from infc.runtime.session import Model, load


@pytest.fixture
def model(fake) -> Iterator[Model]:
    with load(fake.write(), threads=2) as loaded:
        yield loaded


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(256) for _ in range(n)] for n in lengths]


def test_one_prompt(fake, model):
    [prompt] = prompts(5)
    [output] = model.generate(prompt, max_tokens=20, ignore_eos=True)
    assert output.token_ids == fake.answer(prompt, 20)
    assert (output.finish_reason, output.prompt_tokens) == ("length", 5)


def test_a_prompt_longer_than_the_largest_bucket_is_chunked(fake, model):
    [prompt] = prompts(150)
    assert model.generate(prompt, max_tokens=40, ignore_eos=True)[0].token_ids == fake.answer(prompt, 40)
    assert model.steps == 3 + 39


def test_a_mixed_batch_answers_as_each_alone(fake, model):
    batch = prompts(3, 70, 1, 130, 33, 32, 9)                   # more than the four sequences of a step
    outputs = model.generate(batch, max_tokens=25, ignore_eos=True)
    assert [o.token_ids for o in outputs] == [fake.answer(p, 25) for p in batch]
    assert model.pool.free == model.pool.count


def test_blocks_are_reused_and_clean(fake):
    with load(fake.write(), threads=1, kv_tokens=128) as model:     # four blocks
        for length in (40, 60, 90, 5, 33):
            [prompt] = prompts(length)
            assert model.generate(prompt, max_tokens=30, ignore_eos=True)[0].token_ids == fake.answer(prompt, 30)
        batch = prompts(40, 50, 60, 3)                          # not all fit at once
        assert [o.token_ids for o in model.generate(batch, max_tokens=9, ignore_eos=True)] == [fake.answer(p, 9) for p in batch]
        assert model.pool.peak == 4


def test_eos_ends_an_answer_and_ignore_eos_does_not(fake, model):
    prompt = next(p for p in ([i, j] for i in range(256) for j in range(256)) if fake.eos in fake.answer(p, 12)[1:])
    whole = fake.answer(prompt, 12)
    [output] = model.generate(prompt, max_tokens=12)
    assert output.token_ids == whole[:whole.index(fake.eos) + 1]
    assert output.finish_reason == "eos" and "<end>" not in output.text
    assert model.generate(prompt, max_tokens=12, ignore_eos=True)[0].token_ids == whole


def test_sampling_depends_on_the_seed_and_not_on_the_batch(fake, model):
    batch = prompts(4, 60, 11)
    options = {"max_tokens": 15, "temperature": 0.7, "top_k": 5, "top_p": 0.5, "ignore_eos": True}
    together = [o.token_ids for o in model.generate(batch, seed=[1, 2, 3], **options)]
    assert together == [model.generate(p, seed=s, **options)[0].token_ids for p, s in zip(batch, (1, 2, 3), strict=True)]
    for prompt, seed, ids in zip(batch, (1, 2, 3), together, strict=True):
        numbers = random.Random(seed)
        assert ids == fake.answer(prompt, 15, lambda n=numbers: int(float32(n.random()) * 100003) + 5 + 32)
    assert together[0] != model.generate(batch[0], seed=9, **options)[0].token_ids
    assert model.generate(batch[0], seed=None, **options) != model.generate(batch[0], seed=None, **options)


def float32(x: float) -> float:
    import numpy as np

    return float(np.float32(min(x, 1 - 2**-24)))


def test_stream_gives_what_generate_gives(model):
    [prompt] = prompts(20)
    [output] = model.generate(prompt, max_tokens=50, ignore_eos=True)
    pieces = list(model.stream(prompt, max_tokens=50, ignore_eos=True))
    assert [p.token_id for p in pieces] == output.token_ids
    assert "".join(map(str, pieces)) == output.text
    assert [p.finish_reason for p in pieces] == [None] * 49 + ["length"]


def test_a_stream_left_early_gives_its_blocks_back(fake, model):
    stream = model.stream([1, 2, 3], max_tokens=50)
    next(stream)
    assert model.pool.free < model.pool.count
    stream.close()
    assert model.pool.free == model.pool.count
    assert model.generate([1, 2, 3], max_tokens=5)[0].token_ids == fake.answer([1, 2, 3], 5)


def test_two_streams_at_once(fake, model):
    a, b = model.stream([1, 2], max_tokens=9, ignore_eos=True), model.stream([3], max_tokens=9, ignore_eos=True)
    pairs = list(zip(a, b, strict=True))
    assert [x.token_id for x, _ in pairs] == fake.answer([1, 2], 9)
    assert [y.token_id for _, y in pairs] == fake.answer([3], 9)


def test_on_token_sees_every_token(model):
    seen: dict[int, list[int]] = {0: [], 1: []}
    outputs = model.generate(["ab", "c"], max_tokens=6, on_token=lambda i, piece: seen[i].append(piece.token_id))
    assert [seen[0], seen[1]] == [o.token_ids for o in outputs]


def test_a_stop_token_ends_an_answer(fake, model):
    ids = fake.answer([1, 2, 3], 10)
    [output] = model.generate([1, 2, 3], max_tokens=10, stop=[ids[4]])
    assert output.token_ids == ids[:ids.index(ids[4]) + 1] and output.finish_reason == "stop"


def test_a_stop_string_is_never_shown(fake, model):
    [whole] = model.generate("hello", max_tokens=40, ignore_eos=True)
    stop = whole.text[10:14]
    at = whole.text.index(stop)
    [output] = model.generate("hello", max_tokens=40, stop=stop, ignore_eos=True)
    assert output.text == whole.text[:at] and output.finish_reason == "stop"
    assert len(output.token_ids) < 40
    assert "".join(map(str, model.stream("hello", max_tokens=40, stop=stop, ignore_eos=True))) == output.text


def test_an_answer_ends_at_the_last_position(fake, model):
    [prompt] = prompts(fake.positions - 3)
    [output] = model.generate(prompt, max_tokens=50, ignore_eos=True)
    assert output.token_ids == fake.answer(prompt, 4) and output.finish_reason == "length"
    [prompt] = prompts(fake.positions)
    assert len(model.generate(prompt, max_tokens=50)[0].token_ids) == 1


def test_ctrl_c_leaves_the_model_usable(fake, model):
    def interrupt(index: int, piece: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate([[1, 2, 3], [4] * 100], max_tokens=30, on_token=interrupt)
    assert model.pool.free == model.pool.count
    assert model.generate([1, 2, 3], max_tokens=30, ignore_eos=True)[0].token_ids == fake.answer([1, 2, 3], 30)


def test_timing_and_counters(model):
    model.generate([[1, 2, 3], [4, 5]], max_tokens=8, ignore_eos=True)
    assert model.timing.load_s > 0 and model.timing.ttft_s > 0 and model.timing.tpot_s > 0
    counters = model.counters
    assert counters["steps"] == 8
    assert counters["misses"] == 1 and counters["hits"] == 7        # five tokens and two tokens: both bucket T8
    assert counters["padded_tokens"] == 3 + 7 * 6
