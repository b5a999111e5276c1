"""Logits of token ids, whoever computes them: the captured model, a step graph in eager PyTorch, a loaded artifact."""
import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..ir import Graph, evaluate, needed
from ..verification import step_sample

Call = Callable[[fx.Node, tuple, dict], Any]


class Evaluator(Protocol):
    """What metrics and tasks ask of a model."""

    def logits(self, ids: Sequence[int], *, first: int = 0) -> Tensor:
        """f32 [len(ids) - first, vocab]: what comes after each token from `first` on, all tokens before it seen."""
        ...


@contextmanager
def every_cpu() -> Iterator[None]:
    """PyTorch on every CPU this process may use. It takes one a core by itself: 1.80 s for 512 tokens of SmolLM2-135M in fp32, 1.12 s on
    both threads of the core (2 vCPUs of a Zen 4)."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CapturedEvaluator:
    """The model as captured, in eager PyTorch in its own dtype (fp32): the reference."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def logits(self, ids: Sequence[int], *, first: int = 0) -> Tensor:
        tokens = torch.tensor([[*ids]])
        return self.graph.run(tokens, torch.arange(len(ids))[None])[self.graph.outputs.index("logits")][0, first:].float()


class StepEvaluator:
    """A step graph, of any stage of the pipeline from sample_tokens on, in eager PyTorch; the sampler is left out."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._logits = graph.outputs.index("logits")
        self._needed = needed([graph.output.args[0][self._logits]])      # type: ignore[index]

    def logits(
        self, ids: Sequence[int], weights: Mapping[str, Tensor] | None = None, *, first: int = 0, call: Call | None = None,
    ) -> Tensor:
        """f32 [len(ids) - first, vocab], the prompt in one step over a fresh cache.

        weights: by placeholder name, in place of the graph's own. call(node, args, kwargs) runs each node that the logits need, in
        place of the plain call: to look at values on their way.
        """
        def run(node: fx.Node, args: tuple, kwargs: dict) -> Any:
            if node not in self._needed: return None
            return call(node, args, kwargs) if call else node.target(*args, **kwargs)      # type: ignore[operator]

        sample = step_sample(self.graph, torch.tensor([*ids]), range(first, len(ids)))
        return evaluate(self.graph, sample, ChainMap(dict(weights or {}), self.graph.weights), run)[self._logits].float()


class Sequence_(Protocol):
    """An open sequence of a loaded artifact."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


class Runnable(Protocol):
    """What is asked of a loaded artifact; runtime.session.Model is one."""

    def sequence(self) -> Sequence_: ...
    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]], *, logits: Any = ...) -> Any: ...
    def generate(self, prompts: Any, *, max_tokens: int = ..., ignore_eos: bool = ...) -> Any: ...


class ArtifactEvaluator:
    """A loaded artifact: what is not scored runs through the largest bucket, what is scored as many rows a step as it samples."""

    def __init__(self, model: Runnable):
        self.model = model

    def logits(self, ids: Sequence[int], *, first: int = 0) -> Tensor:
        with self.model.sequence() as sequence:
            if first:
                self.model.step([sequence], [ids[:first]], logits="none")
            return torch.from_numpy(self.model.step([sequence], [ids[first:]], logits="all").logits[0])

    def generate(self, ids: Sequence[int], count: int) -> list[int]:
        """The greedy continuation of ids, `count` tokens."""
        return self.model.generate([[*ids]], max_tokens=count, ignore_eos=True)[0].token_ids
