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


def paths(weight: fx.Node) -> list[str]:
    """The module paths that name a weight: of all parts where it was merged, of all its users where several share it."""
    own = list(weight.meta.get("origin") or ())
    if len(weight.users) > 1 or not own:
        users = [path for user in weight.users for path in user.meta.get("origin") or ()]
        own += [path for path in users if not any(f"{name}.".startswith(f"{path}.") for name in own)]    # not a parent of one
    return list(dict.fromkeys(own)) or [str(weight.target)]


def named(weight: fx.Node) -> str:
    """A weight in a message: its name, and those that a recipe knows it by."""
    known = [path for path in paths(weight) if path != weight.target]
    return f"{weight.target} ({', '.join(known)})" if known else str(weight.target)
