"""The graph after the first N rewrites, for any N, and the search for the first N at which a check fails.

The pipeline runs once and a copy of the graph is kept before each pass (copies share weights); the graph after N rewrites then
costs one pass. It is the graph that INFC_STOP=N gives.
"""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .errors import InfcError
from .ir import Graph, node_text, verify
from .rewrite import AnyPass, Report


@dataclass
class _Counting(Report):
    """A report that knows how often a pass was let: a pass that asks once and counts many is one rewrite, all or nothing."""

    granted: int = 0

    def may_fire(self) -> bool:
        may = super().may_fire()
        self.granted += may
        return may


@dataclass(frozen=True)
class Ran:
    """One pass of the whole run: the graph before it, and the rewrites (counted from 1 over all passes) that are its own."""

    one: AnyPass
    before: Graph
    first: int
    fired: int
    whole: bool                                        # it cannot stop half-way
    needed: bool                                       # it always runs, and does not count

    @property
    def last(self) -> int:
        """Its last rewrite; one less than `first` where it made none."""
        return self.first + self.fired - 1


class Prefixes:
    """Graphs after the first N rewrites of `passes`. `needed(i)`: the i-th pass is not counted, and runs whatever N is.

    A pass that fails outright ends them: `failed` is its error, and the rewrites before it may be why.
    """

    def __init__(self, captured: Graph, passes: Sequence[AnyPass], options: dict[str, Any],
                 needed: Callable[[int], bool] = lambda index: False) -> None:
        self.options, self.passes = options, list[Ran]()
        self.failed: InfcError | None = None
        graph, count = captured.copy(), 0
        for index, one in enumerate(passes):
            before, notes = graph.copy(), _Counting(one.name, options=options)
            try:
                fired = one.apply(graph, notes)
                verify(graph)
            except InfcError as error:
                self.failed, graph = type(error)(f"pass {one.name}: {error.message}"), before
                break
            counted = 0 if needed(index) else fired
            self.passes.append(Ran(one, before, count + 1, counted, notes.granted == 1 < fired, needed(index)))
            count += counted
        self.final, self.total = graph, count

    @property
    def cuts(self) -> list[int]:
        """Every N at which the pipeline can stop, 0 included."""
        found = [0]
        for ran in self.passes:
            found += [ran.last] if ran.whole and ran.fired else range(ran.first, ran.last + 1)
        return found

    def of(self, count: int) -> Ran:
        """The pass that made rewrite `count`."""
        return next(ran for ran in self.passes if ran.first <= count <= ran.last)

    def at(self, count: int) -> Graph:
        """A graph of one's own after the first `count` rewrites, and what is needed after them."""
        if count >= self.total: return self.final.copy()
        index = next(i for i, ran in enumerate(self.passes) if ran.fired and ran.last > count)
        ran = self.passes[index]
        graph, budget = ran.before.copy(), count - ran.first + 1
        if budget: ran.one.apply(graph, Report(ran.one.name, options=self.options, budget=budget))
        for later in self.passes[index + 1 :]:
            if later.needed: later.one.apply(graph, Report(later.one.name, options=self.options))
        return graph

    def site(self, cut: int) -> str:
        """Module path and source line of what the rewrite that ends at `cut` changed."""
        before = self.at(self.cuts[self.cuts.index(cut) - 1])
        return site_of(before, self.at(cut))


def site_of(before: Graph, after: Graph) -> str:
    """Module path and source line of the first node that is new, else of one that went or changed; a node's name without either."""
    old, now = ({node.name: node for node in graph.nodes if node.op != "output"} for graph in (before, after))
    new = [node for name, node in now.items() if name not in old]
    gone = [node for name, node in old.items() if name not in now]
    changed = [node for name, node in now.items() if name in old and _text(node, after) != _text(old[name], before)]
    known = [place for node in (*new, *gone, *changed) if (place := place_of(node))]
    names = [f"%{node.name}" for node in (*new, *changed, *gone)]
    return (known or names or ["no node"])[0]


def place_of(node: fx.Node) -> str:
    """`model.layers.7.self_attn [modeling_llama.py:134]`; empty for a node that has neither."""
    line = (node.meta.get("line") or "").partition(" ")[0]       # the source text follows
    return " ".join([*(node.meta.get("origin") or ())[:1], *([f"[{line}]"] if line else [])])


def _text(node: fx.Node, graph: Graph) -> str:
    return node_text(node, graph, {n: n.name for n in (node, *node.all_input_nodes)})


def first_bad(cuts: Sequence[int], good: Callable[[int, int], bool | None]) -> tuple[int, int]:
    """(a cut that is good, the next testable one, which is bad) between the first cut, known good, and the last, known bad.

    `good(cut, how many are left)` says None where it cannot tell; then the two may have untestable cuts between them. About
    log2(len(cuts)) calls.
    """
    low, high, skipped = 0, len(cuts) - 1, set[int]()
    while (open_cuts := [i for i in range(low + 1, high) if i not in skipped]):
        middle = min(open_cuts, key=lambda i: (abs(2 * i - low - high), i))
        found = good(cuts[middle], len(open_cuts))
        if found is None: skipped.add(middle)
        elif found: low = middle
        else: high = middle
    return cuts[low], cuts[high]


def needed_for(name: str, passes: Iterable[AnyPass]) -> set[str]:
    """`name` and every pass it requires, and what those require."""
    by_name, found, todo = {one.name: one for one in passes}, set[str](), [name]
    while todo:
        at = todo.pop()
        if at in by_name and at not in found:
            found.add(at)
            todo += by_name[at].requires
    return found
