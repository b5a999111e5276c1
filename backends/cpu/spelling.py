"""How the claims read a node and spell it in C++: dtypes, sizes, the reasons that many kernels share."""
import math
from typing import Any

import torch
from torch import fx

from ..launch import Arg, Weight

CTYPE = {torch.float32: "float", torch.bfloat16: "infc::bf16", torch.int32: "int32_t", torch.int64: "int64_t"}
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
FLOATS = (torch.float32, torch.bfloat16)
PANEL = {torch.float32: "f32_n32", torch.bfloat16: "bf16_n32k2"}
ACT = {"silu": "infc::SILU", "gelu": "infc::GELU", "gelu_tanh": "infc::GELU_TANH"}
MAX_K = 32768                  # 14 rows of x of this length in fp32, or 32 in bf16, fit half of a thread's 4 MiB of scratch

Named = dict[str, Any]


def value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def width(node: fx.Node) -> int | None:
    """The last dim, if it is a number."""
    size = value(node).shape[-1]
    return size if isinstance(size, int) else None


def floats(**nodes: fx.Node | None) -> str | None:
    """The reason why one of these is not a contiguous f32 or bf16 tensor with a fixed last dim."""
    for name, node in nodes.items():
        if node is None: continue
        if value(node).dtype not in FLOATS: return f"{name} is {value(node).dtype}, the kernel reads f32 and bf16"
        if width(node) is None: return f"the last dim of {name} is not fixed"
    return None


def plain(node: fx.Node) -> Arg:
    """A small weight as it is; a computed one is read from where it was computed."""
    return Weight(node, "plain") if node.op == "placeholder" else node


def ctypes_of(*values: fx.Node | torch.Tensor) -> str:
    return ", ".join(CTYPE[value(v).dtype if isinstance(v, fx.Node) else v.dtype] for v in values)


def short(node: fx.Node) -> str:
    return SHORT[value(node).dtype]


def float_text(value: float) -> str:
    """A literal of type float."""
    if math.isnan(value): return '__builtin_nanf("")'
    if math.isinf(value): return "__builtin_inff()" if value > 0 else "-__builtin_inff()"
    return f"{float(value)!r}f"
