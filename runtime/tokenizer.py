"""Text to token ids and back: tokenizer.json and the chat template. Imported, and its packages with it, when text is used."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from .errors import RuntimeFault
from .manifest import ModelInfo
from .options import Message

_BROKEN = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError, ValueError)
"""What a faulty template may raise beside a TemplateError: it is a program, from a file of the model's."""


class Tokenizer:
    """The model's own tokenizer."""

    def __init__(self, data: bytes, model: ModelInfo) -> None:
        try:
            self._tokenizer = _Tokenizer.from_buffer(data)
        except ValueError as error:
            raise RuntimeFault(f"tokenizer.json cannot be read ({error}); compile the artifact again") from error
        self._model = model
        self._template: Any = None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around one (a BOS token)."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out; bytes that are no whole character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer."""
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, in the model's chat template."""
        from jinja2 import TemplateError

        if not self._model.chat_template:
            raise RuntimeFault("the model has no chat template; give a plain prompt (no chat)")
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise RuntimeFault(f"a chat message needs a role and a content, both text; got {dict(message)!r}")
        try:
            if self._template is None:
                self._template = _environment().from_string(self._model.chat_template)
            return self._template.render(messages=messages, add_generation_prompt=True, **self._model.special_tokens)
        except TemplateError as error:
            raise RuntimeFault(f"the chat template refuses this conversation: {error}") from error
        except _BROKEN as error:
            raise RuntimeFault(f"the artifact's chat template fails on this conversation ({type(error).__name__}: {error}); give a plain "
                               "prompt (no chat), or compile again with a template that is right") from error


def _environment() -> Any:
    """The sandbox chat templates are written for, the same settings as transformers uses."""
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        import json

        return json.dumps(value, ensure_ascii=False, indent=indent)

    class Generation(Extension):
        """{% generation %}: marks for training what the assistant says, as in SmolLM3's template; here its text is text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
