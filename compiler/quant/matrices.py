"""Which weights can be quantized: fp32 matrices that products and lookups alone read."""
from torch import fx

from ..ir import Graph
from ..ops import aten, infc

PRODUCTS = {infc.linear.default, infc.linear_swiglu.default}


def matrices(graph: Graph) -> dict[fx.Node, str]:
    """Weights that some product or lookup reads -> why they must stay wide; empty where they need not."""
    found = {}
    for node in graph.module.graph.find_nodes(op="placeholder"):
        weight = graph.weight(node)
        if weight is None or not weight.is_floating_point() or weight.dim() != 2: continue
        if not any(reads_as_matrix(user, node) for user in node.users): continue
        other = next((user for user in node.users if not reads_as_matrix(user, node)), None)
        found[node] = "" if other is None else f"also used by {'the output' if other.op == 'output' else f'%{other.name}'}"
    return found


def reads_as_matrix(user: fx.Node, weight: fx.Node) -> bool:
    """Is `weight` the matrix of this product, or the table of this lookup, and nothing else in it?"""
    if user.target in PRODUCTS:
        return user.args[1] is weight and user.args.count(weight) == 1
    return user.target is aten.embedding.default and user.args[0] is weight


def products(weight: fx.Node) -> list[fx.Node]:
    """The products whose matrix it is."""
    return [user for user in weight.users if user.target in PRODUCTS and user.args[1] is weight]
