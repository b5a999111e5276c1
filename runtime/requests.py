"""From what a caller asked to requests that can run: every prompt encoded, every value checked, before anything runs."""
from collections.abc import Mapping, Sequence
from typing import Any

from . import options
from .blocks import blocks_for
from .errors import RuntimeFault
from .generate import Request
from .manifest import BLOCK
from .options import Message, Prompt, Sampling
from .stepper import Stepper
from .text import LazyTokenizer


def make_requests(
    stepper: Stepper, tokenizer: LazyTokenizer, prompts: Sequence[Prompt], *, max_tokens: Any, sampling: Sampling, seed: Any,
    stop: Any, ignore_eos: Any, chat: Any, system: str | None, live: bool,
) -> list[Request]:
    """One request a prompt. live: text is wanted as tokens come. Raises RuntimeFault, naming the value and its limit."""
    sampling, chat = sampling.checked(), options.flag("chat", chat)
    limit = options.max_tokens(max_tokens)
    seeds = options.seeds(seed, len(prompts))
    model = stepper.artifact.manifest.model
    strings, stop_ids = options.stops(stop, model.vocab)
    if strings:
        tokenizer.get()                                   # a model without one says so now
    eos = frozenset[int]() if options.flag("ignore_eos", ignore_eos) else frozenset(model.eos_ids)
    lists = [
        options.token_ids(_encode(tokenizer, f"prompt {i}", prompt, chat, system), model.vocab, f"prompt {i}")
        for i, prompt in enumerate(prompts)
    ]
    text = (lambda: tokenizer.stream(strings)) if tokenizer.present else None
    return [
        Request(i, ids, max_tokens=_token_limit(stepper, f"prompt {i}", len(ids), limit), sampling=sampling, seed=seeds[i],
                eos=eos, stop_ids=stop_ids, text=text, live=live or bool(strings))
        for i, ids in enumerate(lists)
    ]


def _encode(tokenizer: LazyTokenizer, what: str, prompt: Any, chat: bool, system: str | None) -> Any:
    """Token ids of a prompt of any kind; ids are handed through."""
    chat = chat or system is not None
    if isinstance(prompt, str):
        if not prompt:
            raise RuntimeFault(f"{what} is empty; give at least one character")
        options.unicode(what, prompt)
        if not chat:
            return tokenizer.get().encode(prompt)
        return _converse(tokenizer, system, [{"role": "user", "content": prompt}])
    if isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        for i, message in enumerate(prompt):
            for key, value in message.items():
                if isinstance(value, str):
                    options.unicode(f"{what}: message {i}: {key}", value)
        return _converse(tokenizer, system, prompt)       # type: ignore[arg-type]
    if not options.is_list(prompt):
        raise RuntimeFault(f"{what} is {options.kind(prompt)}; give a string, token ids, or messages")
    if chat:
        raise RuntimeFault(f"{what} is token ids; chat and system need text or messages")
    return prompt


def _converse(tokenizer: LazyTokenizer, system: str | None, messages: Sequence[Message]) -> list[int]:
    if isinstance(system, str):
        options.unicode("system", system)
    first = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.get().chat([*first, *messages])


def _token_limit(stepper: Stepper, what: str, length: int, limit: int) -> int:
    """New tokens a prompt may get: to the model's last position at most. The last one is never fed back."""
    stepper.check_length(what, length)
    limit = min(limit, stepper.limits.positions - length + 1)
    if blocks_for(length + limit - 1) > stepper.pool.count:
        raise RuntimeFault(f"{what} has {length} tokens and max_tokens is {limit}; the KV pool holds "
                           f"{stepper.pool.count * BLOCK} tokens (load with a larger kv_tokens=, or ask for fewer)")
    return limit
