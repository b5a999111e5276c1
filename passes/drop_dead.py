"""Drop what nothing reads: nodes without users that only return a value, then weights without users."""
from ..compiler.ir import Graph, drop_dead_nodes
from ..compiler.rewrite import EXACT, Pass, Report


def run(graph: Graph, report: Report) -> int:
    """Writes to a cache and live random draws stay, and so do unused inputs: they are the graph's signature."""
    if not report.may_fire():
        return 0
    count = drop_dead_nodes(graph)
    for node in [n for n in graph.placeholders.values() if n.target in graph.weights and not n.users]:
        graph.drop_weight(node)
        count += 1
    return count


PASS = Pass("drop_dead", run, EXACT)
