"""What passes are judged on must be able to show a fault: the first sample is the only one the default level looks at."""
import pytest
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.errors import CheckFailed
from infc.compiler.frontends import capture
from infc.compiler.ops import infc
from infc.compiler.ops.registry import arguments
from infc.passes import load


@pytest.mark.parametrize("fault", ["mask", "rope"])
def test_the_first_sample_shows_a_wrong_mask_and_a_wrong_rotation(fault: str):
    graph = capture("random:tiny?layers=1")
    for name in ("canonicalize", "fuse_rope", "rewrite_attention"):
        assert load(name).apply(graph)
    good = graph.copy()
    first = graph.sample_inputs()[0]
    if fault == "mask":
        node = next(n for n in graph.nodes if n.target is infc.attention.default)
        node.args = tuple("none" if a == "causal" else a for a in arguments(node).values())
    else:
        node = next(n for n in graph.nodes if n.target is infc.rope.default)
        node.args = (*node.args[:4], True)                    # pairs instead of halves
    with pytest.raises(CheckFailed, match="another function"):
        check_exact(Reference(good, [first]), good, graph)
