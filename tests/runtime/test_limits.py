"""Every value out of its limits is one line that names the value and the limit, before anything runs."""
import math

import numpy as np
import pytest
from infc.runtime.errors import RuntimeFault
from infc.runtime.session import load


@pytest.fixture
def model(fake):
    with load(fake.write(), kv_tokens=128) as loaded:
        yield loaded


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ("", {}, "prompt 0 is empty"),
    ([], {}, "prompts is empty"),
    ([[]], {}, "prompt 0 is empty"),
    (["a", []], {}, "prompt 1 is empty"),
    (["a", ""], {}, "prompt 1 is empty"),
    ([0, 512], {}, r"prompt 0: token 1 is 512; the vocabulary has ids 0\.\.511"),
    ([0, -1], {}, "token 1 is -1"),
    ([0, 1.5], {}, "token 1 is 1.5; it must be an integer"),
    ([0, True], {}, "token 1 is True"),
    (5, {}, "prompts is an int"),
    ([1, [2]], {}, "prompt 0 is an int; give a string, token ids, or messages"),
    (b"abc", {}, "prompts is a bytes"),
    ([["a", "b"]], {}, "token 0 is 'a'"),
    ([0] * 257, {}, "prompt 0 has 257 tokens; the model's limit is 256"),
    ([0] * 129, {}, r"the KV pool holds 128 \(load with a larger kv_tokens=\)"),
    ([0] * 100, {"max_tokens": 100}, "prompt 0 has 100 tokens and max_tokens is 100; the KV pool holds 128"),
    ("a", {"max_tokens": 0}, "max_tokens is 0; it must be >= 1"),
    ("a", {"max_tokens": 2.5}, "max_tokens is 2.5; it must be an integer"),
    ("a", {"temperature": -1}, "temperature is -1.0; it must be a finite number >= 0"),
    ("a", {"temperature": math.nan}, "temperature is nan"),
    ("a", {"temperature": math.inf}, "temperature is inf"),
    ("a", {"temperature": 10**400}, "temperature is inf; it must be a finite number >= 0"),
    ("a", {"temperature": -10**400}, "temperature is -inf"),
    ("a", {"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ("a", {"top_k": -1}, "top_k is -1; it must be >= 0"),
    ("a", {"top_k": 1.5}, "top_k is 1.5"),
    ("a", {"top_p": 0}, r"top_p is 0.0; it must lie in \(0, 1\]"),
    ("a", {"top_p": 1.01}, "top_p is 1.01"),
    ("a", {"top_p": 10**400}, r"top_p is inf; it must lie in \(0, 1\]"),
    ("a", {"top_p": math.nan}, "top_p is nan"),
    ("a", {"seed": 1.5}, "seed is 1.5"),
    ("a", {"seed": -1}, "seed is -1; it must be >= 0"),
    (["a", "b"], {"seed": [1, -2]}, "seed is -2"),
    ("a", {"ignore_eos": "no"}, "ignore_eos is 'no'; give True or False"),
    ("a", {"ignore_eos": 1}, "ignore_eos is 1; give True or False"),
    ("a", {"chat": "no"}, "chat is 'no'; give True or False"),
    ("a", {"on_token": 5}, "on_token is 5; give a function"),
    (["a", "b"], {"seed": [1]}, "seed has 1 values for 2 prompts"),
    ("a", {"stop": ""}, "stop holds an empty string"),
    ("a", {"stop": ["x", 1.5]}, "stop is 1.5; it must be text or a token id"),
    ("a", {"stop": 1.5}, "stop is 1.5"),
    ("a", {"stop": True}, "stop is True"),
    ("a", {"stop": b"a"}, "stop is b'a'; it must be text or a token id"),
    ("a", {"stop": [b"a"]}, "stop is b'a'"),
    ("a", {"stop": {"a": 1}}, "stop is {'a': 1}"),
    ("a", {"stop": [-4]}, r"stop is -4; the vocabulary has ids 0\.\.511"),
    ("a", {"stop": 512}, "stop is 512"),
    ("a", {"stop": "b\ud800"}, "stop is not valid Unicode: character 1"),
    ("a", {"seed": b"a"}, "seed is b'a'"),
    (["a", "b"], {"seed": np.array([1])}, "seed has 1 values for 2 prompts"),
    ("a", {"seed": np.array([1.5])}, "seed is 1.5"),
    (["a", "b\udcff"], {}, r"prompt 1 is not valid Unicode: character 1 is U\+DCFF"),
    ("\ud800", {"chat": True}, r"prompt 0 is not valid Unicode: character 0 is U\+D800"),
    ("a", {"system": "be \ud800"}, "system is not valid Unicode: character 3"),
    ([{"role": "user", "content": "a\ud800"}], {}, "prompt 0: message 0: content is not valid Unicode: character 1"),
    ([np.float32(1)], {}, "token 0 is .*1.0.*; it must be an integer"),
    ([[1], np.int32(1)], {}, "prompt 1 is an int32; give a string, token ids"),
    ([b"ab"], {}, "prompt 0 is a bytes"),
    ("a", {"chat": True}, "no chat template"),
    ([1, 2], {"chat": True}, "prompt 0 is token ids; chat and system need text"),
])
def test_bad_requests(model, prompt, options, message):
    with pytest.raises(RuntimeFault, match=message) as caught:
        model.generate(prompt, **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert model.steps == 0 and model.pool.free == model.pool.count


@pytest.mark.parametrize(("options", "message"), [
    ({"threads": 0}, "threads is 0"),
    ({"text": "no"}, "text is 'no'; give True or False"),
    ({"max_sequences": 5}, r"max_sequences is 5; the buckets of .* hold 1\.\.4"),
    ({"max_sequences": 0}, "max_sequences is 0"),
    ({"kv_tokens": 0}, "kv_tokens is 0"),
    ({"kv_tokens": 10**18}, "cannot reserve .* MiB for the KV pool"),
])
def test_bad_load_options(fake, options, message):
    with pytest.raises(RuntimeFault, match=message):
        load(fake.write(), **options)


def test_arrays_are_prompts(fake, model):
    expected = fake.answer([1, 2, 3], 4)
    assert model.generate(np.array([1, 2, 3]), max_tokens=4)[0].token_ids == expected
    assert model.generate([np.array([1, 2, 3]), (1, 2, 3)], max_tokens=4)[1].token_ids == expected
    assert model.generate([np.int32(1), np.array(2), 3], max_tokens=4)[0].token_ids == expected        # one prompt


@pytest.mark.parametrize("kind", [np.int64, lambda i: [np.int32(i)], lambda i: {i}, lambda i: np.array([i]), lambda i: iter([i])])
def test_a_stop_of_any_kind(fake, model, kind):
    expected = fake.answer([1, 2, 3], 8)
    output = model.generate([1, 2, 3], max_tokens=8, ignore_eos=True, stop=kind(expected[2]))[0]
    assert (output.finish_reason, output.token_ids) == ("stop", expected[:3])
    assert model.generate([1, 2, 3], max_tokens=8, ignore_eos=True, stop=None)[0].token_ids == expected


def test_an_array_of_seeds_is_a_list_of_seeds(model):
    def ask(seed):
        return model.generate([[1, 2], [1, 2]], max_tokens=8, temperature=1, ignore_eos=True, seed=seed)

    assert ask(np.array([4, 5])) == ask([4, 5]) != ask(np.array(4)) == ask(4)


def test_text_needs_a_tokenizer(fake):
    with load(fake.write(with_tokenizer=False)) as model:
        with pytest.raises(RuntimeFault, match="has no tokenizer: from Python, generate takes token ids"):
            model.generate("hello")
        with pytest.raises(RuntimeFault, match="has no tokenizer"):
            model.generate([1], stop="x")
        assert model.generate([1, 2, 3], max_tokens=3)[0].text == ""


def test_max_sequences_limits_a_step(fake):
    with load(fake.write(), max_sequences=1) as model:
        outputs = model.generate([[1, 2], [3, 4]], max_tokens=3, ignore_eos=True)
        assert [o.token_ids for o in outputs] == [fake.answer([1, 2], 3), fake.answer([3, 4], 3)]
        assert model.steps == 6


def test_a_closed_model_says_so(fake):
    model = load(fake.write())
    model.close()
    model.close()
    with pytest.raises(RuntimeFault, match="closed"):
        model.generate([1, 2])
