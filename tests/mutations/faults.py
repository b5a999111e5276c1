"""The faults: each is a slip somebody could make, small, in one place, and changes what its model computes."""
from dataclasses import dataclass

from mutations.gates import CHECK, CONTRACT, PLAN, REPLAY, RUNTIME, VERIFY, first
from mutations.plant import Edit


@dataclass(frozen=True)
class Fault:
    """A fault: where it is planted, in which model it shows, and the gate that must stop it."""

    name: str
    kind: str                                            # "pass", "kernel", "lowering", "memory", "runtime"
    model: str
    gate: str
    edits: tuple[Edit, ...]
    dtype: str = "fp32"
    at: str = ""                                         # the pass to start from, where the edit is not in a pass

    @property
    def where(self) -> str:
        return self.edits[0].file

    @property
    def index(self) -> int:
        """The number of the first pass that the fault can change."""
        return first(self.at or self.where.removeprefix("passes/").removesuffix(".py"), self.dtype)


def _pass(name: str, model: str, gate: str, file: str, old: str, new: str, *more: str, dtype: str = "fp32", at: str = "") -> Fault:
    pairs = [(old, new), *zip(more[0::2], more[1::2], strict=True)]
    path = file if "/" in file else f"passes/{file}.py"
    return Fault(name, "pass", model, gate, tuple(Edit(path, *pair) for pair in pairs), dtype, at)


PASSES = (
    # norms
    _pass("norm: wrong eps", "llama", CONTRACT, "fuse_rms_norm", "def fused(x, w, eps):\n    return rms_norm(x, w, eps)",
          "def fused(x, w, eps):\n    return rms_norm(x, w, eps * 1.01)"),
    _pass("norm: eps outside the root", "llama", CONTRACT, "fuse_rms_norm", "def fused(x, w, eps):\n    return rms_norm(x, w, eps)",
          "def fused(x, w, eps):\n    root = aten.sqrt.default(aten.mean.dim(aten.mul.Tensor(x, x), [-1], True))\n"
          "    return aten.mul.Tensor(aten.div.Tensor(x, aten.add.Tensor(root, eps)), w)"),
    _pass("norm: upcast dropped", "norm in fp16", CONTRACT, "fuse_rms_norm",
          "return rms_norm(x, aten._to_copy.default(w, dtype=torch.float32), eps, out_dtype=dtype)",
          "return rms_norm(aten._to_copy.default(x, dtype=dtype), w, eps, out_dtype=dtype)"),
    _pass("norm: mean over the wrong axis", "mean of rows", CONTRACT, "canonicalize", "wanted = [-1] if dims == [rank - 1] else dims",
          "wanted = [-1] if dims == [rank - 2] else dims"),
    _pass("layer norm: bias dropped", "gptj", CONTRACT, "fuse_layer_norm", "    return layer_norm(x, w, b, eps)\n\n\ndef refuse_aten_op",
          "    return layer_norm(x, w, None, eps)\n\n\ndef refuse_aten_op"),
    _pass("layer norm: variance of a sample taken for that of all", "sample variance", CONTRACT, "fuse_layer_norm",
          "correction=0, keepdim=True", "correction=1, keepdim=True"),
    _pass("add and norm: the sum without the residual", "gemma", CONTRACT, "fuse_add_rms_norm", "return add_rms_norm(x, residual,",
          "return add_rms_norm(x, x,"),
    # spellings and constants
    _pass("canonicalize: a cube taken for a square", "cube", CONTRACT, "canonicalize", "    if exponent == 2:",
          "    if exponent in (2, 3):"),
    _pass("canonicalize: other constants taken for GELU's", "near gelu", CONTRACT, "canonicalize",
          "if cubic != 0.044715 or abs(root", "if abs(root"),
    _pass("canonicalize: beta of addmm ignored", "scaled addmm", CONTRACT, "canonicalize", "if beta != 1 or alpha != 1 or", "if"),
    _pass("constants: folded from another weight of that shape", "llama", CONTRACT, "fold_constants",
          'tensor = graph.weights[str(node.target)]\n',
          'tensor = next(t for t in graph.weights.values() if t.shape == graph.weights[str(node.target)].shape)\n'),
    _pass("merge_common: numbers in arguments do not count", "llama", VERIFY, "merge_common", "else (type(arg), repr(arg))",
          "else type(arg)"),
    # attention
    _pass("attention: tiled heads taken for repeated ones", "tiled heads", CONTRACT, "compiler/heads.py",
          "if not torch.equal(evaluate(node, sizes, {base: numbered}), plain.repeat_interleave(group, 1)): return False",
          "if evaluate(node, sizes, {base: numbered}).shape != plain.repeat_interleave(group, 1).shape: return False",
          at="rewrite_attention"),
    _pass("attention: one key too many in the window", "gemma", CONTRACT, "rewrite_attention", "call.kind.mask, call.kind.window,",
          "call.kind.mask, call.kind.window and call.kind.window + 1,"),
    _pass("attention: window ignored", "gemma", CONTRACT, "rewrite_attention", "call.kind.mask, call.kind.window,", "call.kind.mask, 0,"),
    _pass("attention: mask named after a probe too short for its window", "gemma", CONTRACT, "compiler/masks.py",
          "beyond = max(constants(node), default=0) + 3", "beyond = 9", at="rewrite_attention"),
    _pass("attention: top-left taken for bottom-right", "more keys than queries", CONTRACT, "rewrite_attention",
          'MaskKind("causal" if square else "causal_top_left")', 'MaskKind("causal")'),
    _pass("attention: scale dropped", "gemma", CONTRACT, "rewrite_attention", "call.scale * factor, call.kind.mask",
          "factor, call.kind.mask"),
    _pass("attention: scale applied twice", "llama", CONTRACT, "rewrite_attention", "call.scale * factor, call.kind.mask",
          "call.scale * call.scale * factor, call.kind.mask"),
    _pass("attention: soft-cap dropped", "gemma", CONTRACT, "rewrite_attention", "call.kind.window, call.softcap)", "call.kind.window)"),
    _pass("attention: sinks dropped", "gptoss", CONTRACT, "rewrite_attention", "sinks = {} if call.sinks is None else",
          "sinks = {} if call else"),
    _pass("attention: the first column cut for the last", "another column", CONTRACT, "compiler/sinks.py",
          "or start not in (None, 0) or", "or", at="rewrite_attention"),
    _pass("attention: mask and soft-cap in the other order", "cap after mask", CONTRACT, "rewrite_attention",
          'if inner and _holds_product(node): raise Declined(f"%{node.name} masks before the {inner}")', "pass"),
    # rotary positions
    _pass("rope: interleaved for half-split", "llama", CONTRACT, "fuse_rope", "q.interleaved), like=place)",
          "not q.interleaved), like=place)"),
    _pass("rope: half-split for interleaved", "gptj", CONTRACT, "fuse_rope", "q.interleaved), like=place)", "False), like=place)"),
    _pass("rope: sin negated", "llama", CONTRACT, "fuse_rope", "angles.half(q.sin, q), q.interleaved",
          "emit(graph, aten.neg.default, (angles.half(q.sin, q),), like=place), q.interleaved"),
    _pass("rope: cos and sin exchanged", "llama", CONTRACT, "fuse_rope", "angles.half(q.cos, q), angles.half(q.sin, q)",
          "angles.half(q.sin, q), angles.half(q.cos, q)"),
    _pass("rope: the last pair is not turned", "llama", CONTRACT, "fuse_rope", "rotation.width // 2)", "rotation.width // 2 - 1)"),
    _pass("rope: k turned where q is", "llama", VERIFY, "fuse_rope", "for index, rotation in enumerate((q, k))",
          "for index, rotation in enumerate((k, q))"),
    _pass("rope and write: half-split for interleaved", "gptj", CONTRACT, "fuse_rope_kv_write", "q_heads, kv_heads, site.rope.args[4])",
          "q_heads, kv_heads, False)"),
    _pass("rope and write: columns in another order", "llama", CONTRACT, "fuse_rope_kv_write", 'for name in ("q\'", "k\'", "v")], 1)',
          'for name in ("q\'", "v", "k\'")], 1)'),
    # products
    _pass("merged q, k, v: k and v exchanged", "llama", CONTRACT, "merge_projections",
          "_concatenated(graph, kind, [arguments(n)[1] for n in members])]",
          "_concatenated(graph, kind, [arguments(n)[1] for n in (members[0], *members[:0:-1])])]"),
    _pass("merged q, k, v: biases exchanged", "gptj", CONTRACT, "merge_projections",
          "_concatenated(graph, kind, [arguments(n)[2] for n in members])",
          "_concatenated(graph, kind, [arguments(n)[2] for n in (members[0], *members[:0:-1])])"),
    _pass("swiglu: gate and up exchanged", "llama", CONTRACT, "fuse_swiglu", "for n in (gated.gate, gated.up)]",
          "for n in (gated.up, gated.gate)]"),
    _pass("swiglu: GELU for SiLU", "llama", CONTRACT, "fuse_swiglu", 'return "silu"', 'return "gelu"'),
    _pass("swiglu: tanh GELU for the exact one", "mistral", CONTRACT, "fuse_swiglu", '{"none": "gelu",', '{"none": "gelu_tanh",'),
    _pass("linear: residual dropped", "llama", CONTRACT, "fuse_linear_epilogue", "    return add, other\n", "    return add, None\n"),
    _pass("linear: residual of another layer", "deep", CONTRACT, "fuse_linear_epilogue", "    return add, other\n",
          "    return add, next((n for n in node.graph.nodes if n is not other and n < node and n.op == 'call_function'"
          " and same_type(n.meta['val'], other.meta['val'])), other)\n"),
    _pass("linear: bias dropped", "gptj", CONTRACT, "fuse_linear_epilogue", "else (bias,) if bias else ()", "else ()"),
    _pass("linear: a returned product swallowed", "returned product", CONTRACT, "fuse_linear_epilogue", "    if len(node.users) > 1:\n",
          "    if False:\n", "        graph.module.graph.erase_node(node)\n",
          "        node.replace_all_uses_with(new)\n        graph.module.graph.erase_node(node)\n"),
    # the step graph
    _pass("cache: slot off by one", "llama", CHECK, "page_kv_cache", '*caches, state["slots"])',
          '*caches, emit(graph, aten.add.Tensor, (state["slots"], -1), like=node))'),
    _pass("cache: k and v exchanged", "llama", CHECK, "page_kv_cache", "(k, v, *caches,", "(v, k, *caches,"),
    _pass("cache: another layer's is read", "deep", CHECK, "page_kv_cache", "(q, *caches, *table,",
          "(q, *(graph.placeholders[name] for name in graph.kv[:2]), *table,"),
    _pass("cache: window lost", "gemma", CHECK, "page_kv_cache", '(given["scale"], given["window"],', '(given["scale"], 0,'),
    _pass("cache: sinks lost", "gptoss", CHECK, "page_kv_cache", 'sinks = {} if given["sinks"] is None else', "sinks = {} if given else"),
    _pass("cache: soft-cap lost", "gemma", CHECK, "page_kv_cache", 'given["softcap"])', "0.0)"),
    _pass("cache: scale lost", "llama", CHECK, "page_kv_cache", '(given["scale"], given["window"],', '(1.0, given["window"],'),
    _pass("sampling: rows off by one", "llama", CHECK, "sample_tokens", "(source, 0, rows), like=node)", "(source, 0, emit(graph, "
          "aten.clamp_min.default, (emit(graph, aten.sub.Tensor, (rows, 1), like=node), 0), like=node)), like=node)"),
    _pass("sampling: temperature and top-p exchanged", "llama", CHECK, "sample_tokens", "*settings), like",
          "settings[2], settings[1], settings[0], settings[3]), like"),
    _pass("sampling: top-k off by one", "llama", CHECK, "sample_tokens", "*settings), like",
          "settings[0], emit(graph, aten.add.Tensor, (settings[1], 1), like=graph.output), *settings[2:]), like"),
    # precision
    _pass("narrow: weights rounded twice, through 8 bits", "llama", CHECK, "narrow_dtype",
          "graph.weights[str(weight.target)].to(casts.dtype)",
          "graph.weights[str(weight.target)].to(torch.float8_e4m3fn).to(casts.dtype)", dtype="bf16"),
    # codes
    _pass("codes: the scales of one weight doubled", "llama", CHECK, "quantize_weights", '"scale": found.scale,',
          '"scale": found.scale * 2 if name.endswith("down_weight") else found.scale,', dtype="w8"),
    _pass("codes: a group's scale is its neighbour's", "llama", CHECK, "quantize_weights", '"scale": found.scale,',
          '"scale": found.scale.roll(1, 1),', dtype="w4:asym"),
    _pass("codes: offsets forgotten in the product", "llama", CONTRACT, "fuse_quantized_linear", "(x, codes, scale, offset, bias,",
          "(x, codes, scale, None, bias,", dtype="w4:asym"),
    _pass("codes: the residual forgotten", "llama", CONTRACT, "fuse_quantized_linear", "offset, bias, residual, *how,",
          "offset, bias, None, *how,", dtype="w8a8"),
    _pass("codes: rows read as they were before they were rounded", "llama", CONTRACT, "fuse_quantized_linear",
          "how = (bits, group, act_bits, act_group)", "how = (bits, group, 0, 0)", dtype="w8a8"),
    _pass("codes: another group size in the lookup", "llama", CONTRACT, "fuse_quantized_linear", "node.args[1], bits, group, k, out_dtype)",
          "node.args[1], bits, 2 * group, k, out_dtype)", dtype="w8"),
    _pass("codes: rows rounded to 8 bits where 16 were asked for", "llama", CHECK, "quantize_activations",
          "infc.quantize_rows.default, (x, bits, group)", "infc.quantize_rows.default, (x, 8, group)", dtype="w8"),
    _pass("codes: rows of whole numbers where e4m3 was asked for", "llama", CHECK, "quantize_activations",
          '{"e4m3": True} if e4m3 else {}', "{}", dtype="fp8a8"),
    _pass("codes: a norm gives whole numbers where its product reads e4m3", "llama", CONTRACT, "fuse_norm_quantized",
          'given["codes"].meta["val"].dtype == E4M3', "False", dtype="gpu fp8a8"),
    _pass("cache: attention takes the scales of k for those of v", "llama", CHECK, "quantize_kv",
          "args = [*node.args[:at], *held, *node.args[at + 2:]]",
          "args = [*node.args[:at], *(held if node is write else [*held[:3], held[1]]), *node.args[at + 2:]]", dtype="kv int8"),
    _pass("narrow: norms sum squares of 8-bit values", "llama", CHECK, "narrow_dtype",
          "        casts.absorb()\n",
          "        for n in [n for n in graph.nodes if n.target is infc.rms_norm.default]:\n"
          "            low = emit(graph, aten._to_copy.default, (n.args[0],), {'dtype': torch.float8_e4m3fn}, like=n)\n"
          "            n.update_arg(0, emit(graph, aten._to_copy.default, (low,), {'dtype': WIDE}, like=n))\n"
          "        casts.absorb()\n", dtype="bf16"),
)



def _built(kind: str, name: str, model: str, gate: str, file: str, old: str, new: str, *more: str, dtype: str = "fp32") -> Fault:
    pairs = [(old, new), *zip(more[0::2], more[1::2], strict=True)]
    return Fault(name, kind, model, gate, tuple(Edit(file, *pair) for pair in pairs), dtype)


def _kernel(name: str, model: str, header: str, old: str, new: str, dtype: str = "fp32", gate: str = REPLAY) -> Fault:
    return _built("kernel", name, model, gate, f"backends/cpu/kernels/{header}.h", old, new, dtype=dtype)


KERNELS = (
    _kernel("linear: tail columns skipped", "llama", "linear", "for (int64_t v = 0; c + v < n; v += 16) {",
            "for (int64_t v = 0; c + v + 16 <= n; v += 16) {"),
    _kernel("linear: last row of a tile skipped", "llama", "linear", "for (int64_t i = 0, at = row * n + c; i < count; i++,",
            "for (int64_t i = 0, at = row * n + c; i + (count > 1) < count; i++,"),
    _kernel("linear: an odd K loses its last value", "llama", "product", "int64_t n = k - at < CHUNK ? k - at : CHUNK;",
            "int64_t n = k - at < CHUNK ? (k - at) / 2 * 2 : CHUNK;", "bf16"),
    _kernel("linear: only the first chunk of K counts", "llama", "product", "first ? tile.total(r, v) : load16(sum) + tile.total(r, v)",
            "first ? tile.total(r, v) : load16(sum)"),
    _kernel("linear: bias missing in the tail", "gptj", "linear", "if (plus) sum = sum + load_some(plus + c + v, n - c - v);", ""),
    _kernel("attention: one key too many", "llama", "attention", "limit(s[i], c, scale, lo, pos + 1, top[i])",
            "limit(s[i], c, scale, lo, pos + 2, top[i])"),
    _kernel("attention: one key too few", "llama", "attention", "limit(s[i], c, scale, lo, pos + 1, top[i])",
            "limit(s[i], c, scale, lo, pos, top[i])"),
    _kernel("attention: window one key too wide", "gemma", "attention", "? pos - mask.window + 1 : 0;", "? pos - mask.window : 0;"),
    _kernel("attention: sum not rescaled to the new maximum", "llama", "attention", "f32x16 sum = l[i] * splat(alpha[i]), zero",
            "f32x16 sum = l[i], zero"),
    _kernel("attention: values not rescaled to the new maximum", "llama", "attention",
            "fma(load16(at), splat(FINE && done ? 1.0f : alpha[r]), scaled(tile.total(r, i)))", "load16(at) + scaled(tile.total(r, i))"),
    _kernel("attention: all kv heads read the first one's pages", "llama", "attention", "block(item, p), item.head, PAGE_BYTES",
            "block(item, p), 0, PAGE_BYTES"),
    _kernel("attention: the last key's value is left out", "llama", "attention", "? last_pos + 1 - c.first_token : c.pages * PAGE;",
            "? last_pos - c.first_token : c.pages * PAGE;"),
    _kernel("attention: a part done by another thread is not added", "llama", "attention", "st.l[i] = st.l[i] * a + part.l[i] * b;",
            "st.l[i] = st.l[i] * a;"),
    _kernel("attention: each part of the keys adds the sink", "gptoss", "attention", "if (from == 0) sink(", "sink("),
    _kernel("attention: all kv heads have the first one's sinks", "gptoss", "attention", "sinks[item.head * group + (", "sinks[("),
    _kernel("attention: sinks are scaled as scores are", "gptoss", "attention", "/ (scale.cap != 0 ? 1.0f : scale.scale);", ";"),
    _kernel("attention: soft-cap forgotten", "gemma", "attention", "return cap == 0 ? x :", "return cap != 1e9f ? x :"),
    _kernel("cache: v written without its place in the pair", "llama", "paged", "dims * K + slot % K;", "dims * K;", "bf16"),
    _kernel("norm: the row's tail is not summed", "llama", "norm", "if (c < n) {                ",
            "if (c < n && n < 16) {                "),
    _kernel("layer norm: bias forgotten", "gptj", "norm", "from_f32<Y>(float(b ? v + double(to_f32(plus[c])) : v));",
            "from_f32<Y>(float(v));"),
    _kernel("rope: heads narrower than two vectors are not turned", "llama", "rope",
            "    for (int64_t i = 0; i < half; i += 16) {\n        int64_t n",
            "    for (int64_t i = 0; i + 16 <= half; i += 16) {\n        int64_t n"),
    _kernel("rope: the sign of the second half", "llama", "rope", "store_some(x + half + i, b * c + a * s, n);",
            "store_some(x + half + i, b * c - a * s, n);"),
    _kernel("rope: values are turned as well", "llama", "rope",
            "slots, dims * int64_t(sizeof(C)), dims);\n    for (int64_t u = mine.begin; u < mine.end; u++) {\n"
            "        int64_t t = u / heads, h = u % heads, slot = static_cast<const int32_t*>(slots)[t];\n"
            "        load_row(row, static_cast<const X*>(qkv) + u * dims, dims);\n        if (h < q_heads + kv_heads)",
            "slots, dims * int64_t(sizeof(C)), dims);\n    for (int64_t u = mine.begin; u < mine.end; u++) {\n"
            "        int64_t t = u / heads, h = u % heads, slot = static_cast<const int32_t*>(slots)[t];\n"
            "        load_row(row, static_cast<const X*>(qkv) + u * dims, dims);\n        if (h < heads)"),
    _kernel("codes: their middle is not taken off", "llama", "quantized", "row->start = -W::MIDDLE * codes;", "row->start = 0;",
            "w8a8"),
    _kernel("codes: nothing but zeros comes out", "llama", "quantized", "AG == 0 ? sum * splat(row[i / V - R].scale) : sum);",
            "AG == 0 ? sum * splat(0.0f) : sum);", "w8"),
    _kernel("codes: the low nibble is read twice", "llama", "quantized", "(part ? bytes[v] >> 4 : bytes[v])", "bytes[v]", "w4"),
    _kernel("codes: of many rows, the even and the odd k change places", "llama", "quantized_bf16",
            "_mm512_cvtne2ps_pbh(value(bytes, low + 8), value(bytes, low))",
            "_mm512_cvtne2ps_pbh(value(bytes, low), value(bytes, low + 8))",
            "many w8:asym"),
    _kernel("codes: of many rows, what tiles left of a panel is not made", "llama", "quantized_bf16", "beside.finish();", "", "many w8"),
    _kernel("amx: both halves of a panel are the first", "llama", "amx", "_tile_loadd(7, w + 64, 128);", "_tile_loadd(7, w, 128);", "bf16"),
    _kernel("amx: an odd K loses its last value", "llama", "amx", "(k - step * STEP_K + 1) / 2 * 128;", "(k - step * STEP_K) / 2 * 128;",
            "bf16"),
    _kernel("amx: the second tile of rows is the first", "llama", "amx", "_tile_loadd(5, x + TILE_ROWS * row, row);",
            "_tile_loadd(5, x, row);", "bf16"),
    _kernel("codes: a token's embedding is its neighbour's", "llama", "quantized", "* W::CODES + column * 4;",
            "* W::CODES + (column ^ 1) * 4;", "w8"),
    _kernel("cache: scales of k by the first sixteen tokens", "llama", "attention", "load16(c.k_scale[j] + (v0 + v) * 16)",
            "load16(c.k_scale[j])", "kv int8"),
    _kernel("swiglu: tanh GELU for the exact one", "mistral", "swiglu", "if (A == GELU_TANH) ", "if (A != SILU) "),
    _kernel("sample: the highest index wins a tie", "twins", "sample", "(value == than.value && index < than.index)",
            "(value == than.value && index > than.index)"),
    _kernel("sample: multiplied by the temperature", "llama", "sample", "double(known(v) - top) / double(temperature)",
            "double(known(v) - top) * double(temperature)"),
    _kernel("sample: top-k keeps one more", "llama", "sample", "top_k > 0 && top_k < n ? top_k : n;",
            "top_k > 0 && top_k < n ? top_k + 1 : n;"),
    _kernel("sample: top-p ignored", "llama", "sample", "    if (top_p < 1) {", "    if (top_p < 0) {"),
    _kernel("threads: the split leaves out the rest", "llama", "common", "total * (part + 1) / parts};",
            "total * part / parts + total / parts};"),
)


def _lowering(name: str, model: str, old: str, new: str, file: str = "backends/cpu/claims.py", dtype: str = "fp32") -> Fault:
    return _built("lowering", name, model, REPLAY, file, old, new, dtype=dtype)


LOWERING = (
    _lowering("a size: N for T", "llama", 'live = f"r->dims[{DIMS.index(base)}]"',
              'live = f"r->dims[{DIMS.index(chr(78) if base == chr(84) else base)}]"', "backends/launch.py"),
    _lowering("constants lose their digits", "llama", 'return f"{float(value)!r}f"', 'return f"{float(value):.1f}f"',
              "backends/cpu/spelling.py"),
    _lowering("swiglu: weights packed as for a plain product", "llama", 'PANEL[_value(w).dtype] + "_swiglu"', "PANEL[_value(w).dtype]"),
    _lowering("swiglu: always SiLU", "gemma", "linear_swiglu<{_t(x, node)}, {ACT[a['act']]}>", "linear_swiglu<{_t(x, node)}, infc::SILU>"),
    _lowering("linear: its own input as the residual", "llama", '_plain(extra) if kind == "bias" else extra)',
              '_plain(extra) if kind == "bias" else x)'),
    _lowering("attention: k and v caches exchanged", "llama",
              'list[Arg] = [q, cache, a["v_cache"],', 'list[Arg] = [q, a["v_cache"], cache,'),
    _lowering("attention: window not passed on", "gemma", "{a['window']}, ", "0, "),
    _lowering("rope: interleaved not passed on", "gptj", "infc::rope_kv_write<{_t(qkv, node, cache)}, {str(a['interleaved']).lower()}>",
              "infc::rope_kv_write<{_t(qkv, node, cache)}, false>"),
    _lowering("rope: cos and sin exchanged", "llama", 'args = (qkv, cos, a["sin"], cache', 'args = (qkv, a["sin"], cos, cache'),
    _lowering("loops: operands of a division exchanged", "gemma", 'return f"({kind})({args[0]} {INFIX[s.op]} {args[1]})"',
              'return f"({kind})({args[1]} {INFIX[s.op]} {args[0]})"', "backends/cpu/printer.py"),
    _lowering("one layer's weight in all layers", "deep", "    if (name, layout) in packed:\n        return packed[name, layout]\n",
              "    if (same := next((s for (n, l), s in packed.items() if l == layout and "
              "graph.weights[n].shape == graph.weights[name].shape), None))"
              " is not None:\n        return same\n", "backends/program.py"),
)


def _memory(name: str, model: str, old: str, new: str, gate: str = PLAN) -> Fault:
    return _built("memory", name, model, gate, "backends/program.py", old, new)


MEMORY = (
    _memory("buffers that meet in one step overlap", "llama", "d.first <= spot.last and spot.first <= d.last",
            "d.first < spot.last and spot.first < d.last"),
    _memory("a buffer freed one step early", "llama", "places[spot].last = last\n", "places[spot].last = last - 1\n"),
    _memory("a value that lives long is forgotten", "skip", "places[spot].last = last\n",
            "places[spot].last = min(last, places[spot].first + 4)\n"),
    _memory("alignment broken", "llama", "return (size + ALIGN - 1) // ALIGN * ALIGN", "return size"),
    _memory("the arena is too small", "llama", "return max((_align(spot.offset + spot.bytes) for spot in spots), default=0)",
            "return max((_align(spot.offset) for spot in spots), default=0)"),
)


def _runtime(name: str, file: str, old: str, new: str, gate: str = REPLAY) -> Fault:
    return _built("runtime", name, "llama", gate, f"runtime/{file}.py", old, new)


RUNTIME_FAULTS = (
    _runtime("position off by one after a chunk", "batch", "= _ints(range(begin, end))",
             "= _ints(range(begin + (begin > 0), end + (begin > 0)))"),
    _runtime("position off by one in a decode step", "batch", "tokens[0], begin, blocks", "tokens[0], begin + 1, blocks"),
    _runtime("block table of another sequence", "batch", "_ints(blocks[:used])",
             "_ints((works[0].sequence.blocks * used)[:used])"),
    _runtime("sampled rows off by one", "batch", "in range(stop - sampled, stop)",
             "in range(stop - sampled - 1, stop - 1)"),
    _runtime("the newest token is not in its own context", "batch", "at = stop, end, stop", "at = stop, max(1, end - 1), stop"),
    _runtime("a chunk's tokens go to the first block", "batch", "blocks[p // BLOCK] * BLOCK + p % BLOCK", "blocks[0] * BLOCK + p % BLOCK"),
    _runtime("temperature of a row lost", "batch", "sample, sampling.temperature,", "sample, 0.0,"),
    _runtime("top-k off by one", "batch", "sampling.top_k, sampling.top_p", "sampling.top_k and sampling.top_k + 1, sampling.top_p"),
    _runtime("a free block handed out twice", "blocks", "self._fresh += len(fresh)", "self._fresh += 0"),
    _runtime("a freed block reused while it is owned", "blocks", "again = [self._used.pop() for _ in range(min(count, len(self._used)))]",
             "again = [self._used[-1] for _ in range(min(count, len(self._used)))]"),
    _runtime("logits of an older step", "cpu", "if copy: return found.copy()",
             "if copy: return self.__dict__.setdefault('old', {}).setdefault(rows, found.copy())"),
    _runtime("logits that the next step writes over", "cpu", "if copy: return found.copy()", "if copy: return found"),
    _runtime("a chunk counted as one token", "stepper", "work.sequence.length += len(work.tokens)", "work.sequence.length += 1",
             RUNTIME),
    _runtime("another bucket's program", "stepper", "Key(manifest.version, manifest.dtype, bucket.name)",
             'Key(manifest.version, manifest.dtype, "")'),
    _runtime("stale padding tokens run", "stepper", "        self.cache.padded_tokens +=",
             '        dims["T"] = bucket.bucket["T"]\n        self.cache.padded_tokens +='),
    _runtime("arena taken for smaller than it is", "cpu", "max((b.arena_bytes for b in", "min((b.arena_bytes for b in", RUNTIME),
)

FAULTS = PASSES + KERNELS + LOWERING + MEMORY + RUNTIME_FAULTS
