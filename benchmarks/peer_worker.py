"""One engine in one process: reads token ids, answers with tokens and times. Runs in the environment of its engine.

    python peer_worker.py ENGINE PATH THREADS        then one JSON object a line on stdin: {"ids": [...], "new": 64}

Every answer is {"tokens": [...], "first_s": prompt to first token, "total_s": prompt to last token}. All engines decode
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


class Engine(Protocol):
    """Loads in __init__(path, threads); generate() returns the new tokens and the seconds until the first of them."""

    def generate(self, ids: list[int], new: int) -> tuple[list[int], float]: ...


class LlamaCpp:
    """llama.cpp by its C interface; logits come back, argmax is numpy's."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp as cpp

        self.cpp = cpp
        cpp.llama_backend_init()
        loading, running = cpp.llama_model_default_params(), cpp.llama_context_default_params()
        running.n_ctx = running.n_batch = CONTEXT
        running.n_threads = running.n_threads_batch = threads
        self.model = cpp.llama_model_load_from_file(path.encode(), loading)
        self.context = cpp.llama_init_from_model(self.model, running)
        self.vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self.model))

    def generate(self, ids: list[int], new: int) -> tuple[list[int], float]:
        self.cpp.llama_memory_clear(self.cpp.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        tokens = [self._step(ids)]
        first = time.perf_counter() - begin
        while len(tokens) < new:
            tokens.append(self._step(tokens[-1:]))
        return tokens, first

    def _step(self, ids: list[int]) -> int:
        import numpy as np

        given = (self.cpp.llama_token * len(ids))(*ids)
        code = self.cpp.llama_decode(self.context, self.cpp.llama_batch_get_one(given, len(ids)))
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = self.cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


class OpenVINO:
    """OpenVINO GenAI's LLMPipeline; time to first token is its own metric."""

    def __init__(self, path: str, threads: int) -> None:
        import openvino_genai as genai

        self.genai = genai
        self.pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, ids: list[int], new: int) -> tuple[list[int], float]:
        import numpy as np
        import openvino

        given = np.array([ids], np.int64)
        inputs = self.genai.TokenizedInputs(openvino.Tensor(given), openvino.Tensor(np.ones_like(given)))
        config = self.genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        result = self.pipeline.generate(inputs, config)
        return list(result.tokens[0]), result.perf_metrics.get_ttft().mean / 1000


class OnnxRuntime:
    """ONNX Runtime GenAI; its thread count lies in the model's own configuration."""

    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime_genai as genai

        self.genai = genai
        config = genai.Config(path)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = genai.Model(config)

    def generate(self, ids: list[int], new: int) -> tuple[list[int], float]:
        options = self.genai.GeneratorParams(self.model)
        options.set_search_options(max_length=CONTEXT, min_length=len(ids) + new, do_sample=False)
        begin = time.perf_counter()
        generator = self.genai.Generator(self.model, options)
        generator.append_tokens([ids])
        generator.generate_next_token()
        first = time.perf_counter() - begin
        for _ in range(new - 1):
            generator.generate_next_token()
        return [int(t) for t in generator.get_sequence(0)[len(ids) :]], first


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

    def generate(self, ids: list[int], new: int) -> tuple[list[int], float]:
        torch, cache = self.torch, self.cache()
        with torch.no_grad():
            begin = time.perf_counter()
            token = self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax()
            tokens, first = [int(token)], time.perf_counter() - begin
            while len(tokens) < new:
                position = torch.tensor([[len(ids) + len(tokens) - 1]])
                token = self.step(token.view(1, 1), position_ids=position, past_key_values=cache).logits[0, -1].argmax()
                tokens.append(int(token))
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

    def generate(self, ids: list[int], new: int) -> tuple[list[int], float]:
        output = self.model.generate([ids], max_tokens=new, ignore_eos=True)[0]
        return output.token_ids, self.model.timing.ttft_s


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
        tokens, first = loaded.generate(request["ids"], request["new"])
        total = time.perf_counter() - begin
        print(json.dumps({"tokens": tokens, "first_s": first, "total_s": total}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
