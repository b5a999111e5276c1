"""transformers' own modules of the same sizes on the same card: eager, and by torch.compile with CUDA graphs and a static cache."""
import statistics
from collections.abc import Callable, Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any

from gpu_models import MODELS

ROUNDS = 11
WARM = 4
"""Calls before those that are timed: a compiled step is compiled in the first, recorded in the second and third."""

SLACK = 16
"""Room of the static cache for the tokens of all calls; a multiple of 8 keeps the mask's rows aligned."""

_held: dict[tuple[str, int], Any] = {}
"""The last module that was made; one process measures a model in all ways, one after the other."""


def measure(request: Mapping[str, Any], begin: Callable[[str], None], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell a row of each step. request: model, layers, engine ("eager" or "compile"), steps [[what, batch, context]], dry."""
    import torch

    cpu = request["dry"]
    device, sizes = "cpu" if cpu else "cuda", MODELS[request["model"]]
    if (key := (request["model"], request["layers"])) not in _held:
        _held.clear()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device): _held[key] = sizes.transformers(request["layers"])
        torch.set_default_dtype(torch.float32)
    module = _held[key]
    for what, batch, context in request["steps"]:
        begin(f"{request['model']} {request['layers']} layers, {request['engine']} {what} {batch} at {context}")
        start = perf_counter()
        torch._dynamo.reset()                                             # another shape is another compile, not one for both
        with torch.no_grad():
            samples = _samples(module, sizes, what, batch, context, request["engine"], device)
        tell({"model": request["model"], "layers": request["layers"], "quant": "none", "engine": request["engine"], "what": what,
              "batch": batch, "context": context, "ms": statistics.median(samples), "samples": samples,
              "seconds": round(perf_counter() - start, 1)})


def _samples(module: Any, sizes: Any, what: str, batch: int, context: int, engine: str, device: str) -> list[float]:
    """Milliseconds of each call, sent one behind the other so that the device waits for no host that is fast enough."""
    import torch
    from transformers import StaticCache

    new = 1 if what == "decode" else context
    cache = StaticCache(config=module.config, max_cache_len=context + (SLACK if new == 1 else 0))
    cache.early_initialization(batch, sizes.kv_heads, sizes.head, torch.bfloat16, torch.device(device))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    ids = torch.randint(0, sizes.vocab, (batch, new), device=device)

    def step(ids: Any) -> Any:
        logits = module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1)

    if engine == "compile":
        how = {"backend": "eager"} if device == "cpu" else {"mode": "max-autotune"}
        step = torch.compile(step, fullgraph=True, dynamic=False, **how)    # type: ignore[call-overload]
    ends, times = [], []
    for call in range(WARM + ROUNDS):
        if call == 0 or new > 1:                                          # decode goes on from token to token, a prompt begins anew
            for layer in cache.layers: layer.cumulative_length.fill_(context - new)
        if engine == "compile" and device != "cpu": torch.compiler.cudagraph_mark_step_begin()
        step(ids)
        if device == "cpu": times.append(perf_counter())
        else:
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
    if ends:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(ends[WARM - 1:])]
    return [1e3 * (b - a) for a, b in pairwise(times[WARM - 1:])]
