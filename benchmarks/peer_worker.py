"""One engine in one process: reads token ids, answers with tokens and times. Runs in the environment of its engine.

    python peer_worker.py ENGINE PATH THREADS        then one JSON object a line on stdin: {"prompts": [[...], ...], "new": 64}

Prompts of one request are equally long and run side by side. Every answer is {"tokens": [of the first prompt], "first_s": until
every prompt has its first token, "total_s": until all have their last}. All engines decode
greedily, go on after the end token, and get the same ids, so nobody's tokenizer or sampler is measured.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CONTEXT = 2048  # tokens every engine makes room for
MOST = 8  # sequences at once


class Engine(Protocol):
    """Loads in __init__(path, threads); generate() returns the first prompt's new tokens, and the seconds until every prompt has one."""

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[int], float]: ...


class LlamaCpp:
    """llama.cpp by its C interface; logits come back, argmax is numpy's. One context for single prompts as it comes by default, one
    for several: keeping sequences apart costs a single one 5 %."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp as cpp

        self.cpp = cpp
        cpp.llama_backend_init()
        self.model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
        self.contexts = {most: self._context(most, threads) for most in (1, MOST)}
        self.vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self.model))
        self.batch = cpp.llama_batch_init(CONTEXT, 0, 1)

    def _context(self, most: int, threads: int) -> Any:
        running = self.cpp.llama_context_default_params()
        running.n_ctx = running.n_batch = CONTEXT
        running.n_threads = running.n_threads_batch = threads
        if most > 1:
            running.n_seq_max, running.kv_unified = most, True
        return self.cpp.llama_init_from_model(self.model, running)

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[int], float]:
        self.context = self.contexts[1 if len(prompts) == 1 else MOST]
        self.cpp.llama_memory_clear(self.cpp.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        last = self._step(prompts, 0)
        first, tokens = time.perf_counter() - begin, [last[0]]
        while len(tokens) < new:
            last = self._step([[token] for token in last], len(prompts[0]) + len(tokens) - 1)
            tokens.append(last[0])
        return tokens, first

    def _step(self, added: list[list[int]], position: int) -> list[int]:
        """The next tokens of each sequence, from its own at `position` and on; the likeliest one after them."""
        import numpy as np

        batch, at, ends = self.batch, 0, []
        for sequence, ids in enumerate(added):
            for offset, token in enumerate(ids):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + offset, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, offset == len(ids) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        code = self.cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        rows = (self.cpp.llama_get_logits_ith(self.context, end) for end in ends)
        return [int(np.ctypeslib.as_array(row, (self.vocabulary,)).argmax()) for row in rows]


class OpenVINO:
    """OpenVINO GenAI's LLMPipeline; time to first token is its own metric."""

    def __init__(self, path: str, threads: int) -> None:
        import openvino_genai as genai

        self.genai = genai
        self.pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[int], float]:
        import numpy as np
        import openvino

        given = np.array(prompts, np.int64)
        inputs = self.genai.TokenizedInputs(openvino.Tensor(given), openvino.Tensor(np.ones_like(given)))
        config = self.genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        result = self.pipeline.generate(inputs, config)
        return list(result.tokens[0]), max(result.perf_metrics.raw_metrics.m_times_to_first_token) / 1e6  # microseconds


class OnnxRuntime:
    """ONNX Runtime GenAI; its thread count lies in the model's own configuration."""

    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime_genai as genai

        self.genai = genai
        config = genai.Config(path)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = genai.Model(config)

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[int], float]:
        options, length = self.genai.GeneratorParams(self.model), len(prompts[0])
        options.set_search_options(max_length=CONTEXT, min_length=length + new, do_sample=False, batch_size=len(prompts))
        begin = time.perf_counter()
        generator = self.genai.Generator(self.model, options)
        generator.append_tokens(prompts)
        generator.generate_next_token()
        first = time.perf_counter() - begin
        for _ in range(new - 1):
            generator.generate_next_token()
        return [int(t) for t in generator.get_sequence(0)[length:]], first


class HuggingFace:
    """transformers in eager mode with a growing cache, by the shortest loop: no generate() between the steps."""

    dtype = "float32"

    def __init__(self, path: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, self.dtype)).eval()
        self.step: Callable[..., Any] = self.model

    def cache(self) -> Any:
        return self.transformers.DynamicCache(config=self.model.config)

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[int], float]:
        torch, cache = self.torch, self.cache()
        with torch.no_grad():
            begin = time.perf_counter()
            token = self.model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
            tokens, first = [int(token[0])], time.perf_counter() - begin
            while len(tokens) < new:
                position = torch.full_like(token, len(prompts[0]) + len(tokens) - 1)
                token = self.step(token, position_ids=position, past_key_values=cache).logits[:, -1:].argmax(-1)
                tokens.append(int(token[0]))
        return tokens, first


class HuggingFaceBF16(HuggingFace):
    dtype = "bfloat16"


class TorchCompile(HuggingFaceBF16):
    """transformers with a static cache and a compiled decode step; the prompt runs in eager mode."""

    def __init__(self, path: str, threads: int) -> None:
        super().__init__(path, threads)
        self.step = self.torch.compile(self.model, dynamic=False)
        self.static = self.transformers.StaticCache(config=self.model.config, max_cache_len=CONTEXT)

    def cache(self) -> Any:
        self.static.reset()
        return self.static


class Infc:
    """An infc artifact."""

    def __init__(self, path: str, threads: int) -> None:
        import infc

        self.model = infc.load(path, threads=threads)

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[int], float]:
        if len(prompts) == 1:
            output = self.model.generate(prompts, max_tokens=new, ignore_eos=True)[0]
            return output.token_ids, self.model.timing.ttft_s
        from infc.runtime.bench import run_greedy

        begin = time.perf_counter()
        firsts: dict[int, float] = {}
        for _, sequence, at in run_greedy(self.model, prompts, new):
            firsts.setdefault(sequence, at - begin)
        return [], max(firsts.values())


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "llama.cpp": LlamaCpp,
    "openvino-genai": OpenVINO,
    "onnxruntime-genai": OnnxRuntime,
    "transformers": HuggingFace,
    "transformers-bf16": HuggingFaceBF16,
    "torch.compile": TorchCompile,
    "infc": Infc,
}


def main(engine: str, path: str, threads: str) -> None:
    """Answer requests until stdin ends. Engines may print what they like: it goes to stderr, answers have their own pipe."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped engine would outlive an interrupted benchmark
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = threads
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent.resolve()]
    begin = time.perf_counter()
    loaded = ENGINES[engine](path, int(threads))
    print(json.dumps({"load_s": time.perf_counter() - begin}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        tokens, first = loaded.generate(request["prompts"], request["new"])
        total = time.perf_counter() - begin
        print(json.dumps({"tokens": tokens, "first_s": first, "total_s": total}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
