"""The rows of the table of claims for a KV cache held as codes: the writes into it, and attention over it."""
import torch
from torch import fx

from ...compiler.placement import Limit
from ..launch import Arg, Context, Launch, Out
from .pack import BLOCK
from .spelling import FLOATS, Named, ctypes_of, float_text, floats, plain, short, value

CACHED = ("k_cache", "k_scale", "v_cache", "v_scale")
MAX_HEAD = 256                 # as of the wide cache: what scratch was laid out for


def _refuse_cache(a: Named) -> str | None:
    for name in "kv":
        cache, scale = value(a[f"{name}_cache"]), value(a[f"{name}_scale"])
        if cache.dtype != torch.int8: return Limit(f"a KV cache in {cache.dtype} has no kernel on this target: use --kv-quant int8")
        if scale.dtype != torch.float32: return f"the scales of {name} are {scale.dtype}, the kernel reads f32"
        if cache.shape[2] != BLOCK: return f"the cache has blocks of {cache.shape[2]} tokens, the kernel's are {BLOCK}"
        if cache.shape[3] % 16 or cache.shape[3] > MAX_HEAD:
            return Limit(f"head size {cache.shape[3]} is not supported with --kv-quant on this target: multiples of 16 up to {MAX_HEAD}")
    k, v = value(a["k_cache"]), value(a["v_cache"])
    return None if k.shape[3] == v.shape[3] else f"k has heads of {k.shape[3]}, v of {v.shape[3]}"


def _refuse_slots(a: Named) -> str | None:
    return None if value(a["slots"]).dtype == torch.int32 else f"slots are {value(a['slots']).dtype}, not i32"


def _refuse_kv_write(node: fx.Node, a: Named) -> str | None:
    if reason := floats(k=a["k"], v=a["v"]) or _refuse_cache(a) or _refuse_slots(a): return reason
    return None if value(a["k"]).dtype == value(a["v"]).dtype else f"k is {value(a['k']).dtype}, v is {value(a['v']).dtype}"


def _lower_kv_write(node: fx.Node, a: Named, context: Context) -> Launch:
    k = a["k"]
    tokens, heads, d = value(k).shape
    body = f"infc::kv_write_codes<{ctypes_of(k)}>(r, {context.dim(tokens)}, {heads}, {d}, b[0], b[1], b[2], b[3], b[4], b[5], b[6]);"
    args = (k, a["v"], a["k_cache"], a["k_scale"], a["v_cache"], a["v_scale"], a["slots"])
    return Launch(f"kv_write_{short(k)}_i8_{heads}x{d}", body, args, ("rope.h",))


def _refuse_rope_kv_write(node: fx.Node, a: Named) -> str | None:
    if reason := floats(qkv=a["qkv"], q=node) or _refuse_cache(a) or _refuse_slots(a): return reason
    cos, sin = value(a["cos"]), value(a["sin"])
    if cos.dtype != torch.float32 or sin.dtype != torch.float32: return f"cos is {cos.dtype}, sin is {sin.dtype}; the kernel reads f32"
    if cos.shape != sin.shape: return f"cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}"
    head = value(a["k_cache"]).shape[3]
    return f"rotary width {2 * cos.shape[-1]} > head size {head}" if 2 * cos.shape[-1] > head else None


def _lower_rope_kv_write(node: fx.Node, a: Named, context: Context) -> Launch:
    qkv, cos = a["qkv"], a["cos"]
    hq, hkv, d, half = a["q_heads"], a["kv_heads"], value(a["k_cache"]).shape[3], value(cos).shape[-1]
    body = (f"infc::rope_kv_write_codes<{ctypes_of(qkv, node)}, {str(a['interleaved']).lower()}>(r, {context.rows(qkv)}, {hq}, {hkv}, {d}, "
            f"{half}, b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8]);")
    args = (qkv, cos, a["sin"], a["k_cache"], a["k_scale"], a["v_cache"], a["v_scale"], a["slots"], Out(0))
    return Launch(f"rope_kv_write_{short(qkv)}_i8_{hq}x{hkv}x{d}", body, args, ("rope.h",))


def _refuse_paged_attention(node: fx.Node, a: Named) -> str | None:
    if reason := floats(q=a["q"], y=node) or _refuse_cache(a): return reason
    if not a["scale"] > 0: return f"scale {a['scale']} is not positive"
    if a["softcap"] < 0: return f"soft-cap {a['softcap']} is negative"
    for name in ("query_start", "context_len", "block_table"):
        if value(a[name]).dtype != torch.int32: return f"{name} is {value(a[name]).dtype}, not i32"
    return floats(sinks=a["sinks"])


def _lower_paged_attention(node: fx.Node, a: Named, context: Context) -> Launch:
    """Queries in fp32 meet codes widened to fp32; those in bf16 the codes as they are, where the machine multiplies bytes."""
    q, table, sinks = a["q"], value(a["block_table"]), a["sinks"]
    tokens, hq, d = value(q).shape
    hkv = value(a["k_cache"]).shape[1]
    codes = "infc::code8" if value(q).dtype == FLOATS[0] else "infc::digits8"
    args: list[Arg] = [q, *(a[name] for name in CACHED), a["query_start"], a["context_len"], a["block_table"]]
    kind, pointers = "", "b[8], b[2], b[4]"
    if sinks is not None:
        args.append(plain(sinks))
        kind, pointers = f", {ctypes_of(sinks)}", "b[9], b[2], b[4], b[8]"
    body = (f"infc::paged_attention<{ctypes_of(q)}, {codes}, {ctypes_of(node)}, {d}{kind}>(r, {context.dim(tokens)}, "
            f"{context.dim(table.shape[0])}, {context.dim(table.shape[1])}, {hkv}, {hq // hkv}, {float_text(a['scale'])}, {a['window']}, "
            f"{float_text(a['softcap'])}, b[0], b[1], b[3], b[5], b[6], b[7], {pointers});")
    return Launch(f"paged_attention_i8_{short(q)}_{hq}x{hkv}x{d}{'_sinks' * bool(kind)}", body, (*args, Out(0)), ("attention.h",))


TABLE = {
    "infc.kv_write_quantized": (_refuse_kv_write, _lower_kv_write),
    "infc.rope_kv_write_quantized": (_refuse_rope_kv_write, _lower_rope_kv_write),
    "infc.paged_attention_quantized": (_refuse_paged_attention, _lower_paged_attention),
}
