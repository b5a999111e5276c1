"""The whole pipeline on small decoders: after it a layer is eight operators, and every pass fired as often as it should."""
import pytest
import torch
from decoders import VOCABULARY, captured, llama
from golden import filecheck
from infc import passes
from infc.compiler.pipeline import run_pipeline
from torch import nn

ATTENTION = r"""
CHECK-NEXT: [[N:%\w+]]: {t}[T,32] = infc.rms_norm([[X]],
CHECK-NEXT: [[Y:%\w+]]: f32[T,64] = infc.linear([[N]], {{{{.*qkv}}}}
CHECK-NEXT: [[Q:%\w+]]: {t}[T,4,8] = infc.rope_kv_write([[Y]], [[C]], [[S]], %k_cache_{i}, %v_cache_{i}, %slots, 4, 2, False
CHECK-NEXT: [[A:%\w+]]: {t}[T,32] = infc.paged_attention([[Q]], %k_cache_{i}, %v_cache_{i}, %query_start, %context_len, %block_table,
"""
REST = r"""
CHECK-NEXT: [[H:%\w+]]: f32[{rows},32] = infc.linear([[{a}]], {{{{.*o_proj.*}}}}, None, [[{x}]]
CHECK-NEXT: [[M:%\w+]]: {t}[{rows},32] = infc.rms_norm([[H]],
CHECK-NEXT: [[G:%\w+]]: {t}[{rows},48] = infc.linear_swiglu([[M]], {{{{.*gate_up.*}}}}, 'silu'
CHECK-NEXT: [[X:%\w+]]: f32[{rows},32] = infc.linear([[G]], {{{{.*down_proj.*}}}}, None, [[H]]
"""
PICK = r"""
CHECK-NEXT: [[P:%\w+]]: {t}[R,32] = aten.index_select([[A]], 0, %sample_rows)
CHECK-NEXT: [[U:%\w+]]: f32[R,32] = aten.index_select([[X]], 0, %sample_rows)
"""
HEAD = r"""
CHECK-NEXT: [[N:%\w+]]: {t}[R,32] = infc.rms_norm([[X]],
CHECK-NEXT: [[L:%\w+]]: f32[R,48] = infc.linear([[N]],
CHECK-NEXT: [[T:%\w+]]: i32[R] = infc.sample([[L]], %temperature, %top_k, %top_p, %uniform)
CHECK-NEXT: return [[T]], [[L]]
"""


class HuggingFace(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64))

    def forward(self, input_ids, position_ids):
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [llama, HuggingFace], ids=["plain", "transformers"])
def test_a_layer_is_eight_operators(model, dtype):
    graph = captured(model())
    report = run_pipeline(graph, passes.pipeline(dtype), allow="approximate", check="strict", options={"dtype": dtype})
    fired = {name: report.fired(name) for name in passes.PIPELINE}
    assert fired["fuse_rms_norm"] == 5
    for name in ("fuse_rope", "rewrite_attention", "fuse_swiglu", "page_kv_cache", "fuse_rope_kv_write"):
        assert fired[name] == 2, name
    assert fired["merge_projections"] == 4                                        # q k v, and gate up
    assert fired["fuse_linear_epilogue"] == 7                                     # qkv, o, down of 2 layers, and the head
    assert sum(n.name.startswith("linear") and len(n.args) == 4 for n in graph.nodes) == 4, "residual adds absorbed"
    assert not any(one.refused for one in report.passes)
    t = "f32" if dtype == "fp32" else "bf16"
    start = rf"CHECK:      [[X:%\w+]]: f32[T,32] = aten.{'embedding' if dtype == 'fp32' else '_to_copy'}"
    angles = "\nCHECK:      [[C:%\\w+]]: f32[T,4] = aten.cos\nCHECK-NEXT: [[S:%\\w+]]: f32[T,4] = aten.sin"
    parts = (ATTENTION.format(t=t, i=0), REST.format(t=t, rows="T", a="A", x="X"), ATTENTION.format(t=t, i=1), PICK.format(t=t),
             REST.format(t=t, rows="R", a="P", x="U"), HEAD.format(t=t))
    filecheck(graph, start + angles + "".join(parts))
