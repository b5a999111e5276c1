"""Families of operators: what shares a colour in the graph, the roofline and the memory map."""

FAMILIES = ("linear", "attention", "norm", "rope", "swiglu", "sample", "loop", "aten")
"""In the order of the legend. "loop" is a fused pointwise region, "aten" every operator that no pass fused."""

_WORDS = (                                            # the first word found in an operator's name decides
    ("attention", "attention"), ("swiglu", "swiglu"), ("rope", "rope"), ("kv_write", "rope"), ("norm", "norm"),
    ("linear", "linear"), ("sample", "sample"),
)


def family(op: str) -> int:
    """The index in FAMILIES of an operator as graphs and steps name it: "infc.rms_norm", "loop.mul.cos", "aten.mul.Tensor"."""
    if op.startswith("loop."):
        return FAMILIES.index("loop")
    if not op.startswith("infc."):
        return FAMILIES.index("aten")
    return FAMILIES.index(next((name for word, name in _WORDS if word in op), "aten"))
