"""Does a graph still say what another one said? The logits of a few prompts, whichever kind of graph each of the two is.

The EXACT contract (compiler/contracts.py) over whole prompts: captured graphs take [B, S], step graphs take tokens and caches,
and both give one row of logits a token.
"""
from typing import Any

import torch
from torch import Tensor

from .contracts import SAME_FUNCTION, row_error, run_fp64, run_plain
from .errors import CheckFailed
from .ir import Graph, verify
from .verification import COMPUTABLE, SHORT, step_sample


class GraphCheck:
    """Logits of a graph against those of `truth`: the same function in fp64, and no precision lost in its own dtypes."""

    def __init__(self, truth: Graph, captured: Graph) -> None:
        """captured: gives the prompts. Raises CheckFailed where the model itself has no answer in its own dtype."""
        assert captured.sample_inputs is not None
        lengths = sorted({min(length, int(captured.meta["max_positions"])) for length in SHORT})
        self.prompts: list[Tensor] = [captured.sample_inputs(1, length, seed)[0] for seed, length in enumerate(lengths)]
        self.truth = [_logits(truth, prompt, run_fp64)[0] for prompt in self.prompts]
        own = [_logits(truth, prompt, run_plain)[0] for prompt in self.prompts]
        error = max(row_error(o, t) for o, t in zip(own, self.truth, strict=True))
        if not error <= COMPUTABLE:
            raise CheckFailed(f"the model as captured is {error:.3g} off its own fp64 logits: there is no answer to hold a rewrite to")
        self.bound = 2 * error + torch.finfo(own[0].dtype).eps      # one token's error is a single draw: the worst row of all counts

    def fault(self, graph: Graph) -> str | None:
        """What is wrong with a graph; None when nothing is."""
        try:
            verify(graph)
            for prompt, truth in zip(self.prompts, self.truth, strict=True):
                for run, bound, what in ((run_fp64, SAME_FUNCTION, "another function"), (run_plain, self.bound, "precision lost")):
                    logits, token = _logits(graph, prompt, run)
                    error = row_error(logits, truth)
                    if not error <= bound: return f"{what}: logits are off by {error:.3g} of a row's largest, the bound is {bound:.3g}"
                    if token is not None and not torch.equal(token.long(), logits.argmax(-1)):
                        return "at temperature 0 the token is not the likeliest one"
        except CheckFailed as error:
            return error.message
        except (RuntimeError, TypeError, ValueError, IndexError) as error:           # what an operator says of arguments that do not fit
            return f"the graph does not run: {str(error).splitlines()[0]}"
        return None


def _logits(graph: Graph, prompt: Tensor, run: Any) -> tuple[Tensor, Tensor | None]:
    """Logits [tokens, vocab] of one prompt i64 [1, S], and the drawn tokens where the graph draws any."""
    if not graph.kv:
        return run(graph, (prompt, torch.arange(prompt.shape[1])[None]))[0][0], None
    found = run(graph, step_sample(graph, prompt[0], range(prompt.shape[1])))
    token = found[graph.outputs.index("token")] if "token" in graph.outputs else None
    return found[graph.outputs.index("logits")], token
