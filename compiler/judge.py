"""After a pass: is the graph well formed, is every value what its operator returns, does the pass keep its contract?

off: the dialect alone. fast: and every node inferred again, and the contract on a few samples, each kind of input among
them. strict: the contract on all samples, extreme values included.

That a contract holds follows from the graphs, the samples and our sources: what an earlier compile measured of the very same is taken.
"""
from typing import Any, Literal

from . import kept
from .contracts import PROMISE, SAME_FUNCTION, Reference, check_exact
from .errors import CheckFailed
from .inference import Inference
from .ir import Graph, fake_propagate, verify
from .rewrite import AnyPass, Measured
from .step_batch import StepSamples

CheckLevel = Literal["off", "fast", "strict"]


class Verdict(kept.Entry, frozen=True):
    """A contract that was found to hold, and what was measured."""

    measured: Measured | None


class Judge:
    """Judges passes against the captured graph; a pass with a check of its own sets a new point of reference."""

    def __init__(self, graph: Graph, level: CheckLevel, cache: kept.Kept | None = None):
        self.level: CheckLevel = level
        self.cache = cache
        self.kept_from = ""                                            # when the last contract was checked, if an earlier compile did it
        self.inference = Inference()
        self.reference: Reference | None = None
        self.captured: Graph | None = graph.copy() if level != "off" else None

    def judge(self, one: AnyPass, before: Graph, after: Graph) -> Measured | None:
        """What was measured, None where nothing was. CheckFailed when the pass broke the graph or its contract."""
        self.structure(after)
        measured = self._known(one, before, after)
        if self.level != "off" and one.check is not None:
            self.captured, self.reference = after.copy(), None
        return measured

    def structure(self, after: Graph) -> None:
        """CheckFailed unless the graph is of its dialect and, unless the level is off, every value is what is inferred."""
        verify(after)
        if self.level != "off":
            fake_propagate(after, how=self.inference)

    def _known(self, one: AnyPass, before: Graph, after: Graph) -> Measured | None:
        """`contract` on all samples of the level, or what was measured when it held before."""
        self.kept_from = ""
        if self.cache is None or self.level == "off": return self.contract(one, before, after)
        key = self._key(one, before, after)
        if found := self.cache.take(key, Verdict, "what was measured of passes"):
            self.kept_from = found.made
            return found.measured
        measured = self.contract(one, before, after)
        self.cache.keep(key, Verdict(measured=measured), "what is measured of passes")
        return measured

    def _key(self, one: AnyPass, before: Graph, after: Graph) -> str:
        """Of all that `contract` reads: which check, what it is held against, the graph, and every sample of either."""
        assert self.captured is not None
        graphs = [self.captured] if one.check is None else [before, after]
        inputs = [kept.content_of(every) for graph in graphs for every in _all_samples(graph, self.level)]
        return kept.key("contract", one.name, one.contract.label, one.check is None, self.level,
                        *map(kept.content, [*graphs[:1], after]), inputs)

    def contract(self, one: AnyPass, before: Graph, after: Graph, only: int | None = None) -> Measured | None:
        """The pass's contract, on all samples of the level or on one. Broken, or another CheckFailed, when it does not hold."""
        if self.level == "off":
            return None
        if one.check is not None:
            found = one.check(before, after)
            return Measured(found, SAME_FUNCTION, PROMISE) if isinstance(found, int | float) else found
        return Measured(check_exact(self._reference(), before, after, only), SAME_FUNCTION, PROMISE)

    def _reference(self) -> Reference:
        if self.reference is None:
            assert self.captured is not None
            self.reference = Reference(self.captured, samples(self.captured, self.level))
        return self.reference


def samples(graph: Graph, level: CheckLevel) -> list[Any]:
    """The samples that passes are judged on at this level. CheckFailed where the graph has none."""
    if graph.sample_inputs is None:
        raise CheckFailed("the graph has no sample inputs to judge passes on: set Graph.sample_inputs, or check=\"off\"")
    thorough = getattr(graph.sample_inputs, "thorough", None)
    return list(thorough() if level == "strict" and thorough is not None else graph.sample_inputs())


def _all_samples(graph: Graph, level: CheckLevel) -> list[Any]:
    """What any check may ask a graph's samples for."""
    if graph.sample_inputs is None: return []
    prompts = [graph.sample_inputs.prompts()] if isinstance(graph.sample_inputs, StepSamples) else []
    return [samples(graph, "fast"), *prompts, *([samples(graph, "strict")] if level == "strict" else [])]
