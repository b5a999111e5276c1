"""The rows of the table of claims for weights held as codes: products, and lookups in the same packed weight."""
import math

import torch
from torch import fx

from ...compiler.ops.codes import ROW_LIMIT
from ...compiler.ops.linear_quantized import BF16_MAX_K
from ..launch import Arg, Context, Launch, Out, Weight
from .pack import CODED, Coded
from .spelling import ACT, CTYPE, MAX_K, Named, ctypes_of, floats, plain, short, value

ACT_GROUPS = (0, 32)


def _layout(a: Named, swiglu: bool = False) -> Coded:
    return Coded(a["bits"], a["group"], a["offset"] is not None, swiglu)


def _refuse_codes(a: Named) -> str | None:
    layout = _layout(a)
    if value(a["codes"]).dtype != torch.uint8: return f"codes are {value(a['codes']).dtype}: a product here is of whole numbers"
    if layout not in CODED: return f"no layout for codes of {layout.bits} bits in groups of {layout.group}"
    for name in ("codes", "scale", "offset"):
        if a[name] is not None and a[name].op != "placeholder": return f"{name} is computed, not a weight: it cannot be packed"
    return None


def _refuse_product(a: Named) -> str | None:
    if reason := floats(x=a["x"]) or _refuse_codes(a): return reason
    if not a["act_bits"]: return "the kernel multiplies codes, and act_bits 0 leaves x as it is: w8, w4 or a8 have a kernel"
    if a["act_bits"] not in ROW_LIMIT or a["act_group"] not in ACT_GROUPS:
        return f"x in codes of {a['act_bits']} bits in groups of {a['act_group']}: the kernel knows 8 and 16, groups of 32 and whole rows"
    k, most = value(a["x"]).shape[-1], BF16_MAX_K if a["bf16_rows"] else MAX_K
    return f"K = {k} > {most}: rows of x do not fit the scratch" if k > most else None


def _refuse_linear(node: fx.Node, a: Named) -> str | None:
    return _refuse_product(a) or floats(bias=a["bias"], residual=a["residual"], y=node)


def _refuse_linear_swiglu(node: fx.Node, a: Named) -> str | None:
    if reason := _refuse_product(a) or floats(y=node): return reason
    return None if a["act"] in ACT else f"activation {a['act']!r} is none of {', '.join(ACT)}"


def _weight(a: Named, swiglu: bool = False) -> Weight:
    return Weight(a["codes"], _layout(a, swiglu).name, tuple(part for part in (a["scale"], a["offset"]) if part is not None))


def _format(a: Named, x: str) -> str:
    """The C++ type of a format: what quantized.h knows of it while it compiles."""
    offset = str(a["offset"] is not None).lower()
    return f"infc::Coded<{x}, {a['bits']}, {a['group']}, {offset}, {a['act_bits']}, {a['act_group']}>"


def _name(a: Named, op: str, k: int, n: int) -> str:
    per_row = "" if a["act_group"] else "_row"
    return f"{op}_{_layout(a).name.replace('_n32', '')}_a{a['act_bits']}{per_row}_{short(a['x'])}_{k}x{n}"


def _bf16_rows(a: Named, context: Context) -> int:
    """Live rows from which the product is one of bf16; 0 where this bucket never has so many."""
    most = math.prod(context.maximum(size) for size in value(a["x"]).shape[:-1])
    return a["bf16_rows"] if a["bf16_rows"] and most >= a["bf16_rows"] else 0


def _body(a: Named, context: Context, function: str, types: str, rest: str) -> tuple[str, str]:
    """The call, and what it adds to the kernel's name: products of few rows and of many are two formats in one kernel."""
    x, rows, many = ctypes_of(a["x"]), context.rows(a["x"]), _bf16_rows(a, context)
    call = f"infc::{function}<{_format(a, x)}, {types}>(r, {rows}, {rest});"
    if not many: return call, ""
    offset = str(a["offset"] is not None).lower()
    wide = f"infc::CodedBf16<{x}, {a['bits']}, {a['group']}, {offset}>"
    if many == 1: return f"infc::{function}<{wide}, {types}>(r, {rows}, {rest});", "_bf16"
    return f"if ({rows} < {many}) {call}\nelse infc::{function}<{wide}, {types}>(r, {rows}, {rest});", f"_bf16_from_{many}"


def _lower_linear(node: fx.Node, a: Named, context: Context) -> Launch:
    x, n, k = a["x"], value(a["codes"]).shape[0], value(a["x"]).shape[-1]
    args: list[Arg] = [x, _weight(a)]
    types, pointers = [ctypes_of(node)], ["b[0]", "b[1]"]
    for kind in ("bias", "residual"):
        extra = a[kind]
        if extra is not None: args.append(plain(extra) if kind == "bias" else extra)
        pointers.append("nullptr" if extra is None else f"b[{len(args) - 1}]")
        types.append("float" if extra is None else ctypes_of(extra))
    suffix = "".join(f"_{kind}" for kind in ("bias", "residual") if a[kind] is not None)
    body, many = _body(a, context, "linear_of", ", ".join(types), f"{k}, {n}, {', '.join(pointers)}, b[{len(args)}]")
    return Launch(_name(a, "linear", k, n) + suffix + many, body, (*args, Out(0)), ("quantized.h", "quantized_bf16.h"))


def _lower_linear_swiglu(node: fx.Node, a: Named, context: Context) -> Launch:
    x, f, k = a["x"], value(a["codes"]).shape[0] // 2, value(a["x"]).shape[-1]
    body, many = _body(a, context, "linear_swiglu_of", f"{ctypes_of(node)}, {ACT[a['act']]}", f"{k}, {f}, b[0], b[1], b[2]")
    return Launch(_name(a, "linear_swiglu", k, f) + many, body, (x, _weight(a, swiglu=True), Out(0)),
                  ("quantized.h", "quantized_bf16.h", "swiglu.h"))


def _refuse_embedding(node: fx.Node, a: Named) -> str | None:
    if reason := _refuse_codes(a) or floats(y=node): return reason
    return None if value(a["indices"]).dtype in (torch.int32, torch.int64) else f"indices are {value(a['indices']).dtype}"


def _lower_embedding(node: fx.Node, a: Named, context: Context) -> Launch:
    """Out of the layout that products read: a table tied to the head is stored once."""
    ids, vocab, k = a["indices"], value(a["codes"]).shape[0], a["k"]
    count = " * ".join(str(context.dim(size)) for size in value(ids).shape) or "1"
    body = (f"infc::embedding_coded<infc::Packed<{a['bits']}, {a['group']}, {str(a['offset'] is not None).lower()}>, "
            f"{CTYPE[value(ids).dtype]}, {ctypes_of(node)}>(r, {count}, {vocab}, {k}, b[0], b[1], b[2]);")
    name = f"embedding_{_layout(a).name}_{short(node)}_{vocab}x{k}"
    return Launch(name, body, (_weight(a), ids, Out(0)), ("quantized.h",))


TABLE = {
    "infc.linear_quantized": (_refuse_linear, _lower_linear),
    "infc.linear_swiglu_quantized": (_refuse_linear_swiglu, _lower_linear_swiglu),
    "infc.embedding_quantized": (_refuse_embedding, _lower_embedding),
}
"""Operator -> (refuse, lower), as in claims."""
