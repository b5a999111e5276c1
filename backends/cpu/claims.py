"""Which nodes the hand-written CPU kernels take, why not the others, and the call each becomes.

One table: operator -> (refuse, lower). Kernels see contiguous row-major tensors; sizes other than the dims are numbers in
the text of the call.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...compiler.ir import target_name
from ...compiler.ops.registry import arguments
from ...compiler.placement import Limit
from ..launch import Arg, Context, Launch, Out, Weight
from . import claims_kv, claims_quantized
from .pack import BLOCK
from .spelling import ACT, FLOATS, MAX_K, PANEL, SHORT, Named
from .spelling import ctypes_of as _t
from .spelling import float_text as _float
from .spelling import floats as _floats
from .spelling import plain as _plain
from .spelling import short as _s
from .spelling import value as _value
from .spelling import width as _width

MAX_VOCAB = 500_000            # a row's ids in half of the same 4 MiB
MAX_HEAD_ROPE = 1024           # rope.h: MAX_HEAD, one head on the stack
MAX_HEAD_ATTENTION = 256       # three blocks of 48 rows in scratch; wider heads were never tried


# ---- products ----------------------------------------------------------------------------------------------------------
def _refuse_product(a: Named) -> str | None:
    x, w = a["x"], a["w"]
    if reason := _floats(x=x, w=w): return reason
    if w.op != "placeholder": return "w is computed, not a weight: it cannot be packed ahead of time"
    if _value(x).dtype != _value(w).dtype: return f"x is {_value(x).dtype}, w is {_value(w).dtype}"
    if _value(w).shape[1] > MAX_K: return f"K = {_value(w).shape[1]} > {MAX_K}: rows of x do not fit the scratch"
    return None


def _refuse_linear(node: fx.Node, a: Named) -> str | None:
    if reason := _refuse_product(a) or _floats(bias=a["bias"], residual=a["residual"], y=node): return reason
    return None


def _lower_linear(node: fx.Node, a: Named, context: Context) -> Launch:
    x, w, bias, residual = a["x"], a["w"], a["bias"], a["residual"]
    n, k = _value(w).shape
    args: list[Arg] = [x, Weight(w, PANEL[_value(w).dtype])]
    pointers = ["b[0]", "b[1]"]
    types = [_t(x), _t(node)]
    for extra, kind in ((bias, "bias"), (residual, "residual")):
        if extra is not None: args.append(_plain(extra) if kind == "bias" else extra)
        pointers.append("nullptr" if extra is None else f"b[{len(args) - 1}]")
        types.append("float" if extra is None else _t(extra))
    pointers.append(f"b[{len(args)}]")
    suffix = ("_bias" if bias is not None else "") + ("_residual" if residual is not None else "")
    body = f"infc::linear<{', '.join(types)}>(r, {context.rows(x)}, {k}, {n}, {', '.join(pointers)});"
    return Launch(f"linear_{_s(w)}_{k}x{n}{suffix}", body, (*args, Out(0)), ("linear.h",))


def _refuse_linear_swiglu(node: fx.Node, a: Named) -> str | None:
    if reason := _refuse_product(a) or _floats(y=node): return reason
    return None if a["act"] in ACT else f"activation {a['act']!r} is none of {', '.join(ACT)}"


def _lower_linear_swiglu(node: fx.Node, a: Named, context: Context) -> Launch:
    x, w = a["x"], a["w"]
    n, k = _value(w).shape
    body = f"infc::linear_swiglu<{_t(x, node)}, {ACT[a['act']]}>(r, {context.rows(x)}, {k}, {n // 2}, b[0], b[1], b[2]);"
    layout = PANEL[_value(w).dtype] + "_swiglu"
    return Launch(f"linear_swiglu_{_s(w)}_{k}x{n // 2}", body, (x, Weight(w, layout), Out(0)), ("swiglu.h",))


def _refuse_swiglu(node: fx.Node, a: Named) -> str | None:
    if reason := _floats(gate_up=a["gate_up"], y=node): return reason
    return None if a["act"] in ACT else f"activation {a['act']!r} is none of {', '.join(ACT)}"


def _lower_swiglu(node: fx.Node, a: Named, context: Context) -> Launch:
    x, width = a["gate_up"], _width(node)
    body = f"infc::swiglu<{_t(x, node)}, {ACT[a['act']]}>(r, {context.rows(x)}, {width}, b[0], b[1]);"
    return Launch(f"swiglu_{_s(x)}_{width}", body, (x, Out(0)), ("swiglu.h",))


# ---- norms -------------------------------------------------------------------------------------------------------------
def _refuse_norm(node: fx.Node, a: Named) -> str | None:
    if reason := _floats(x=a["x"], w=a["w"], y=node): return reason
    if _value(a["w"]).shape != _value(a["x"]).shape[-1:]: return f"weight {tuple(_value(a['w']).shape)} is not one row of x"
    return None


def _lower_rms_norm(node: fx.Node, a: Named, context: Context) -> Launch:
    x, w, n = a["x"], a["w"], _width(a["x"])
    body = f"infc::rms_norm<{_t(x, w, node)}>(r, {context.rows(x)}, {n}, {_float(a['eps'])}, b[0], b[1], b[2]);"
    return Launch(f"rms_norm_{_s(x)}_{_s(node)}_{n}", body, (x, _plain(w), Out(0)), ("norm.h",))


def _refuse_add_rms_norm(node: fx.Node, a: Named) -> str | None:
    x, residual, w = a["x"], a["residual"], a["w"]
    y = _value(node)[0]
    if reason := _floats(x=x, residual=residual, w=w): return reason
    if y.dtype not in FLOATS: return f"y is {y.dtype}, the kernel writes f32 and bf16"
    if _value(x).shape != _value(residual).shape: return f"x is {tuple(_value(x).shape)}, residual {tuple(_value(residual).shape)}"
    if _value(x).dtype != _value(residual).dtype: return f"x is {_value(x).dtype}, residual is {_value(residual).dtype}"
    if _value(w).shape != _value(x).shape[-1:]: return f"weight {tuple(_value(w).shape)} is not one row of x"
    return None


def _lower_add_rms_norm(node: fx.Node, a: Named, context: Context) -> Launch:
    x, w, n = a["x"], a["w"], _width(a["x"])
    body = (f"infc::add_rms_norm<{_t(x, w, _value(node)[0])}>(r, {context.rows(x)}, {n}, {_float(a['eps'])}, "
            "b[0], b[1], b[2], b[3], b[4]);")
    args = (x, a["residual"], _plain(w), Out(0), Out(1))
    return Launch(f"add_rms_norm_{_s(x)}_{SHORT[_value(node)[0].dtype]}_{n}", body, args, ("norm.h",))


def _refuse_layer_norm(node: fx.Node, a: Named) -> str | None:
    if reason := _refuse_norm(node, a): return reason
    b = a["b"]
    if b is not None and _value(b).dtype != _value(a["w"]).dtype: return f"w is {_value(a['w']).dtype}, b is {_value(b).dtype}"
    return None


def _lower_layer_norm(node: fx.Node, a: Named, context: Context) -> Launch:
    x, w, b, n = a["x"], a["w"], a["b"], _width(a["x"])
    args: list[Arg] = [x, _plain(w), *([] if b is None else [_plain(b)])]
    bias = "nullptr" if b is None else "b[2]"
    body = (f"infc::layer_norm<{_t(x, w, node)}>(r, {context.rows(x)}, {n}, {_float(a['eps'])}, b[0], b[1], {bias}, "
            f"b[{len(args)}]);")
    return Launch(f"layer_norm_{_s(x)}_{_s(node)}_{n}", body, (*args, Out(0)), ("norm.h",))


# ---- positions and the cache -------------------------------------------------------------------------------------------
def _refuse_cache(k_cache: fx.Node, v_cache: fx.Node) -> str | None:
    k, v = _value(k_cache), _value(v_cache)
    if k.dtype not in FLOATS or k.dtype != v.dtype: return f"the cache is {k.dtype} and {v.dtype}; both f32 or both bf16 is known"
    if k.shape[2] != BLOCK: return f"the cache has blocks of {k.shape[2]} tokens, the kernel's are {BLOCK}"
    if k.shape[3] != v.shape[3]: return f"k has heads of {k.shape[3]}, v of {v.shape[3]}"
    if k.shape[3] % 16 or k.shape[3] > MAX_HEAD_ATTENTION:
        return Limit(f"head size {k.shape[3]} is not supported on this target: multiples of 16 up to {MAX_HEAD_ATTENTION}")
    return None


def _refuse_cos(cos: fx.Node, sin: fx.Node, head: int) -> str | None:
    for name, node in (("cos", cos), ("sin", sin)):
        if _value(node).dtype != torch.float32: return f"{name} is {_value(node).dtype}, the kernel reads f32"
    if _value(cos).shape != _value(sin).shape: return f"cos is {tuple(_value(cos).shape)}, sin {tuple(_value(sin).shape)}"
    if 2 * _value(cos).shape[-1] > head: return f"rotary width {2 * _value(cos).shape[-1]} > head size {head}"
    return None


def _refuse_rope_kv_write(node: fx.Node, a: Named) -> str | None:
    if reason := _floats(qkv=a["qkv"], q=node) or _refuse_cache(a["k_cache"], a["v_cache"]): return reason
    if _value(a["slots"]).dtype != torch.int32: return f"slots are {_value(a['slots']).dtype}, not i32"
    return _refuse_cos(a["cos"], a["sin"], _value(a["k_cache"]).shape[3])


def _lower_rope_kv_write(node: fx.Node, a: Named, context: Context) -> Launch:
    qkv, cache, cos = a["qkv"], a["k_cache"], a["cos"]
    hq, hkv, d, half = a["q_heads"], a["kv_heads"], _value(cache).shape[3], _value(cos).shape[-1]
    body = (f"infc::rope_kv_write<{_t(qkv, node, cache)}, {str(a['interleaved']).lower()}>(r, {context.rows(qkv)}, {hq}, {hkv}, {d}, "
            f"{half}, b[0], b[1], b[2], b[3], b[4], b[5], b[6]);")
    args = (qkv, cos, a["sin"], cache, a["v_cache"], a["slots"], Out(0))
    return Launch(f"rope_kv_write_{_s(qkv)}_{_s(cache)}_{hq}x{hkv}x{d}", body, args, ("rope.h",))


def _refuse_kv_write(node: fx.Node, a: Named) -> str | None:
    if reason := _floats(k=a["k"], v=a["v"]) or _refuse_cache(a["k_cache"], a["v_cache"]): return reason
    if _value(a["k"]).dtype != _value(a["v"]).dtype: return f"k is {_value(a['k']).dtype}, v is {_value(a['v']).dtype}"
    if _value(a["slots"]).dtype != torch.int32: return f"slots are {_value(a['slots']).dtype}, not i32"
    return None


def _lower_kv_write(node: fx.Node, a: Named, context: Context) -> Launch:
    k, cache = a["k"], a["k_cache"]
    heads, d = _value(k).shape[1:]
    body = f"infc::kv_write<{_t(k, cache)}>(r, {context.dim(_value(k).shape[0])}, {heads}, {d}, b[0], b[1], b[2], b[3], b[4]);"
    return Launch(f"kv_write_{_s(k)}_{_s(cache)}_{heads}x{d}", body, (k, a["v"], cache, a["v_cache"], a["slots"]), ("rope.h",))


def _rope_shape(x: fx.Node) -> tuple[Any, ...]:
    """[B,H,S,D]; tokens in a row, [T,H,D], are T batches of length 1."""
    shape = tuple(_value(x).shape)
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def _refuse_rope(node: fx.Node, a: Named) -> str | None:
    q, k, cos = a["q"], a["k"], a["cos"]
    if reason := _floats(q=q, k=k, cos=cos): return reason
    shapes = [_rope_shape(x) for x in (q, k, cos)]
    if any(len(s) != 4 for s in shapes) or len({_value(x).dim() for x in (q, k, cos)}) > 1:
        return "the kernel knows q, k [B,H,S,D] with cos, sin [B or 1,1,S,R/2], and q, k [T,H,D] with cos, sin [T or 1,1,R/2]"
    (b, _, s, d), (bk, _, sk, dk), (bc, hc, sc, _) = shapes
    if (b, s, d) != (bk, sk, dk): return f"q is {tuple(shapes[0])}, k is {tuple(shapes[1])}"
    if hc != 1 or sc != s or bc not in (1, b): return f"cos is {tuple(shapes[2])} for q {tuple(shapes[0])}"
    if _value(q).dtype != _value(k).dtype: return f"q is {_value(q).dtype}, k is {_value(k).dtype}"
    if d > MAX_HEAD_ROPE: return f"head size {d} > {MAX_HEAD_ROPE}"
    return _refuse_cos(cos, a["sin"], d)


def _lower_rope(node: fx.Node, a: Named, context: Context) -> Launch:
    q, k, cos = a["q"], a["k"], a["cos"]
    b, _, s, d = _rope_shape(q)
    rows = _value(cos).shape[0]                       # a SymInt is never "one": its live value may be
    one = str(isinstance(rows, int) and rows == 1 and b != 1).lower()
    calls = [
        f"infc::rope_rows<{_t(x)}, {str(a['interleaved']).lower()}>(r, {context.dim(b)}, {context.dim(_value(x).shape[1])}, "
        f"{context.dim(s)}, {d}, {_value(cos).shape[-1]}, {one}, b[{i}], b[2], b[3], b[{4 + i}]);"
        for i, x in enumerate((q, k))]
    return Launch(f"rope_{_s(q)}_{d}", "\n".join(calls), (q, k, cos, a["sin"], Out(0), Out(1)), ("rope.h",))


# ---- attention ---------------------------------------------------------------------------------------------------------
def _refuse_paged_attention(node: fx.Node, a: Named) -> str | None:
    if reason := _floats(q=a["q"], y=node) or _refuse_cache(a["k_cache"], a["v_cache"]): return reason
    q, cache = _value(a["q"]), _value(a["k_cache"])
    if q.dtype != cache.dtype: return f"q is {q.dtype}, the cache is {cache.dtype}"
    if not a["scale"] > 0: return f"scale {a['scale']} is not positive"
    if a["softcap"] < 0: return f"soft-cap {a['softcap']} is negative"
    for name in ("query_start", "context_len", "block_table"):
        if _value(a[name]).dtype != torch.int32: return f"{name} is {_value(a[name]).dtype}, not i32"
    return _floats(sinks=a["sinks"])


def _lower_paged_attention(node: fx.Node, a: Named, context: Context) -> Launch:
    q, cache, table, sinks = a["q"], a["k_cache"], a["block_table"], a["sinks"]
    tokens, hq, d = _value(q).shape
    hkv = _value(cache).shape[1]
    args: list[Arg] = [q, cache, a["v_cache"], a["query_start"], a["context_len"], table]
    kind, pointers = "", "b[6]"
    if sinks is not None:
        args.append(_plain(sinks))
        kind, pointers = f", {_t(sinks)}", "b[7], nullptr, nullptr, b[6]"
    body = (f"infc::paged_attention<{_t(q, cache, node)}, {d}{kind}>(r, {context.dim(tokens)}, {context.dim(_value(table).shape[0])}, "
            f"{context.dim(_value(table).shape[1])}, {hkv}, {hq // hkv}, {_float(a['scale'])}, {a['window']}, {_float(a['softcap'])}, "
            f"b[0], b[1], b[2], b[3], b[4], b[5], {pointers});")
    return Launch(f"paged_attention_{_s(cache)}_{hq}x{hkv}x{d}{'_sinks' * bool(kind)}", body, (*args, Out(0)), ("attention.h",))


# ---- rows, casts, tokens -----------------------------------------------------------------------------------------------
def _packed_by_a_product(weight: fx.Node) -> bool:
    """True if a linear reads the same weight: then the embedding reads its packed form, and it is stored once."""
    return any(target_name(user.target) == "infc.linear" and arguments(user)["w"] is weight for user in weight.users)


def _refuse_embedding(node: fx.Node, a: Named) -> str | None:
    weight, ids = a["weight"], a["indices"]
    if reason := _floats(weight=weight): return reason
    if weight.op != "placeholder": return "the table is computed, not a weight"
    if _value(ids).dtype not in (torch.int32, torch.int64): return f"indices are {_value(ids).dtype}"
    return None


def _count(node: fx.Node, context: Context) -> str:
    """The C++ expression of the number of elements."""
    return " * ".join(str(context.dim(size)) for size in _value(node).shape) or "1"


def _lower_embedding(node: fx.Node, a: Named, context: Context) -> Launch:
    weight, ids = a["weight"], a["indices"]
    vocab, k = _value(weight).shape
    name = f"embedding_{_s(weight)}_{vocab}x{k}"
    if _packed_by_a_product(weight):
        body = f"infc::embedding_packed<{_t(weight, ids, node)}>(r, {_count(ids, context)}, {vocab}, {k}, b[0], b[1], b[2]);"
        return Launch(name + "_packed", body, (Weight(weight, PANEL[_value(weight).dtype]), ids, Out(0)), ("embedding.h",))
    row = k * _value(weight).element_size()
    body = f"infc::gather_rows<{_t(ids)}>(r, {_count(ids, context)}, {vocab}, {row}, b[0], b[1], b[2]);"
    return Launch(name, body, (Weight(weight, "plain"), ids, Out(0)), ("embedding.h",))


def _refuse_index_select(node: fx.Node, a: Named) -> str | None:
    x, ids = a["self"], a["index"]
    if a["dim"] not in (0, -_value(x).dim()): return f"dim {a['dim']}: the kernel picks rows, dim 0"
    if _value(ids).dtype not in (torch.int32, torch.int64): return f"index is {_value(ids).dtype}"
    if not all(isinstance(size, int) for size in _value(x).shape[1:]): return "rows have no fixed size"
    return None


def _lower_index_select(node: fx.Node, a: Named, context: Context) -> Launch:
    x, ids = a["self"], a["index"]
    row = _value(x).element_size()
    for size in _value(x).shape[1:]: row *= size
    body = (f"infc::gather_rows<{_t(ids)}>(r, {context.dim(_value(ids).shape[0])}, {context.dim(_value(x).shape[0])}, {row}, "
            "b[0], b[1], b[2]);")
    return Launch(f"select_rows_{row}", body, (_plain(x) if x.op == "placeholder" and _is_fixed(x) else x, ids, Out(0)), ("embedding.h",))


def _is_fixed(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in _value(node).shape)


def _refuse_cast(node: fx.Node, a: Named) -> str | None:
    pair = (_value(a["self"]).dtype, _value(node).dtype)
    if pair not in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        return f"a cast from {pair[0]} to {pair[1]}; the kernel knows f32 and bf16"
    return None


def _lower_cast(node: fx.Node, a: Named, context: Context) -> Launch:
    x = a["self"]
    body = f"infc::convert<{_t(x, node)}>(r, {_count(x, context)}, b[0], b[1]);"
    return Launch(f"cast_{_s(x)}_{_s(node)}", body, (x, Out(0)), ("embedding.h",))


def _refuse_sample(node: fx.Node, a: Named) -> str | None:
    wanted = {"logits": torch.float32, "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32,
              "uniform": torch.float32}
    for name, dtype in wanted.items():
        if _value(a[name]).dtype != dtype: return f"{name} is {_value(a[name]).dtype}, not {dtype}"
    vocab = _value(a["logits"]).shape[1]
    if not isinstance(vocab, int) or vocab > MAX_VOCAB: return f"{vocab} tokens in the vocabulary, the scratch holds {MAX_VOCAB}"
    return None


def _lower_sample(node: fx.Node, a: Named, context: Context) -> Launch:
    logits = a["logits"]
    rows, vocab = _value(logits).shape
    body = f"infc::sample(r, {context.dim(rows)}, {vocab}, b[0], b[1], b[2], b[3], b[4], b[5]);"
    return Launch(f"sample_{vocab}", body, (logits, a["temperature"], a["top_k"], a["top_p"], a["uniform"], Out(0)), ("sample.h",))


def _refuse_attention(node: fx.Node, a: Named) -> str | None:
    return "no CPU kernel for attention over a dense cache yet, only infc::paged_attention"


_TABLE: dict[str, tuple[Callable[[fx.Node, Named], str | None], Callable[[fx.Node, Named, Context], Launch] | None]] = {
    "infc.linear": (_refuse_linear, _lower_linear),
    "infc.linear_swiglu": (_refuse_linear_swiglu, _lower_linear_swiglu),
    "infc.swiglu": (_refuse_swiglu, _lower_swiglu),
    "infc.rms_norm": (_refuse_norm, _lower_rms_norm),
    "infc.add_rms_norm": (_refuse_add_rms_norm, _lower_add_rms_norm),
    "infc.layer_norm": (_refuse_layer_norm, _lower_layer_norm),
    "infc.rope": (_refuse_rope, _lower_rope),
    "infc.rope_kv_write": (_refuse_rope_kv_write, _lower_rope_kv_write),
    "infc.kv_write": (_refuse_kv_write, _lower_kv_write),
    "infc.paged_attention": (_refuse_paged_attention, _lower_paged_attention),
    "infc.attention": (_refuse_attention, None),
    "infc.sample": (_refuse_sample, _lower_sample),
    **claims_quantized.TABLE,
    **claims_kv.TABLE,
    "aten.embedding": (_refuse_embedding, _lower_embedding),
    "aten.index_select": (_refuse_index_select, _lower_index_select),
    "aten._to_copy": (_refuse_cast, _lower_cast),
}


def refuse(node: fx.Node, context: Context) -> str | None:
    """Why the CPU kernels do not take this node; None if they do."""
    entry = _TABLE.get(target_name(node.target))
    if entry is None: return f"no CPU kernel for {target_name(node.target)}"
    return entry[0](node, arguments(node))


def lower(node: fx.Node, context: Context) -> Launch:
    """The call of a node that was not refused; b[i] is args[i], results come last."""
    _, make = _TABLE[target_name(node.target)]
    if make is None: raise ValueError(f"{node.name} was refused")
    return make(node, arguments(node), context)
