"""Text: characters split over tokens, stop strings split over tokens, chat templates as transformers renders them."""
import pytest
from hypothesis import given
from hypothesis import strategies as st
from infc.runtime.detokenize import TextStream
from infc.runtime.errors import RuntimeFault
from infc.runtime.manifest import ModelInfo
from infc.runtime.session import load
from infc.runtime.tokenizer import Tokenizer


def decode(ids) -> str:
    """One token a byte."""
    return bytes(ids).decode("utf-8", "replace")


def show(data: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream, shown = TextStream(decode, stops), []
    for byte in data:
        shown.append(stream.push(byte))
        if stream.stopped: break
    return [*shown, stream.finish()], stream


def test_half_characters_are_never_shown():
    shown, stream = show("aé€🙂b".encode())
    assert [s for s in shown if s] == ["a", "é", "€", "🙂", "b"] and stream.text == "aé€🙂b"


def test_an_unfinished_character_ends_as_a_replacement():
    shown, stream = show("a🙂".encode()[:-1])
    assert stream.text == "a\ufffd" == "".join(shown)


@pytest.mark.parametrize(("data", "text"), [
    (b"a" + b"\0" * 500 + "b🙂".encode(), "ab🙂"),
    (b"a" + b"\xff" * 500 + "🙂b".encode(), "a" + "\ufffd" * 500 + "🙂b"),
    (b"a" + "🙂".encode()[:3] * 200 + "é".encode(), "a" + "\ufffd" * 200 + "é"),
])
def test_runs_of_tokens_that_show_nothing_or_no_character_take_linear_time(data, text):
    decoded = 0

    def skipping(ids) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode([i for i in ids if i])                            # 0: a special token

    stream = TextStream(skipping)
    shown = [stream.push(byte) for byte in data] + [stream.finish()]
    assert "".join(shown) == stream.text == text and decoded < 50 * len(data)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_what_is_shown_is_the_text_up_to_the_first_stop(text, stops):
    shown, stream = show(text.encode(), tuple(stops))
    ends = [text.index(s) for s in stops if s in text]
    assert "".join(shown) == stream.text
    assert stream.stopped == bool(ends)
    if not ends:
        assert stream.text == text
    else:                                                 # the stop that is complete first, then the one that starts first
        first = min(text.index(s) + len(s) for s in stops if s in text)
        assert stream.text == text[:min(text.index(s) for s in stops if s in text and text.index(s) + len(s) == first)]


def test_a_possible_stop_is_held_back_and_then_shown():
    shown, stream = show(b"ab--c--", ("---",))
    assert shown == ["a", "b", "", "", "--c", "", "", "--"] and stream.text == "ab--c--"


def test_the_space_before_a_word_survives_streaming(fake):
    with load(fake.write()) as model:
        [output] = model.generate(list(b"x y"), max_tokens=30, ignore_eos=True)
        assert output.text == model.tokenizer.decode(output.token_ids)


TEMPLATE = ("{% for message in messages %}{{ '<|' + message['role'] + '|>' }}\n  {{ message['content'] | trim }}{{ eos_token }}\n"
            "    {% if loop.last and add_generation_prompt %}\n<|assistant|>{% endif %}\n{% endfor %}")


def tokenizer(fake, template: str) -> Tokenizer:
    return Tokenizer(fake.tokenizer(), ModelInfo("m", 512, 256, chat_template=template, special_tokens={"eos_token": "</s>"}))


def test_chat_template(fake):
    messages = [{"role": "system", "content": " be kind "}, {"role": "user", "content": "hi"}]
    assert tokenizer(fake, TEMPLATE).render(messages) == "<|system|>\n  be kind</s>\n<|user|>\n  hi</s>\n<|assistant|>"


def test_chat_is_a_conversation(fake):
    with load(fake.write(template=TEMPLATE)) as model:
        options = {"max_tokens": 5, "ignore_eos": True}
        by_text = model.generate("hi", chat=True, system="be kind", **options)
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        assert by_text == model.generate(messages, **options) == model.generate([messages], **options)
        assert by_text == model.generate(model.tokenizer.chat(messages), **options)


def test_what_a_template_marks_as_generated_is_text(fake):
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% set n = 1 %}.{{ n }}{% endgeneration %};{% endfor %}"
    assert tokenizer(fake, template).render([{"role": "user", "content": "hi"}]) == "hi.1;"


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('system is not supported') }}", "refuses this conversation: system is not supported"),
    ("{{ messages.__class__.__mro__ }}", "refuses this conversation"),
    ("{% for %}", "refuses this conversation"),
    ("", "has no chat template"),
])
def test_a_template_that_refuses(fake, template, message):
    with pytest.raises(RuntimeFault, match=message):
        tokenizer(fake, template).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("template", "error"), [
    ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{{ messages[0]['content'] + 1 }}", "TypeError: can only concatenate str"),
    ("{{ strftime_now(3) }}", "TypeError: "),
    ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
    ("{{ 'x' * 2**62 }}", "MemoryError: "),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: "),
    ("{{ '%d' | format('x') }}", "TypeError: "),
    ("{{ 'a'.index('b') }}", "ValueError: "),
    ("{{ '{x}'.format() }}", "KeyError: 'x'"),
    ("".join(f"{{% for i{n} in messages %}}" for n in range(30)) + "{% endfor %}" * 30, "SyntaxError: too many statically nested blocks"),
])
def test_a_template_that_fails(fake, template, error):
    with pytest.raises(RuntimeFault, match=rf"^the artifact's chat template fails on this conversation \({error}.*; give a plain prompt"):
        tokenizer(fake, template).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("bad", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": 5}])
def test_a_message_without_role_or_content(fake, bad):
    with pytest.raises(RuntimeFault, match="needs a role and a content"):
        tokenizer(fake, TEMPLATE).render([bad])


def test_a_broken_tokenizer_is_one_line():
    with pytest.raises(RuntimeFault, match=r"tokenizer\.json cannot be read"):
        Tokenizer(b"{}", ModelInfo("m", 512, 256))


def test_text_is_read_while_loading(fake):
    with load(fake.write(), text=True) as model:
        assert model.generate("hello", max_tokens=3)[0].prompt_tokens == 5
    with load(fake.write("none.infc", with_tokenizer=False), text=True) as model, pytest.raises(RuntimeFault, match="has no tokenizer"):
        model.generate("hello")
