"""infc:: operators: importing this registers them all; `aten` is the other half of the vocabulary."""
import torch

from .add_rms_norm import add_rms_norm
from .attention import attention
from .dequantize import dequantize, dequantize_rows, quantize_rows
from .kv_quantized import kv_write_quantized, paged_attention_quantized, rope_kv_write_quantized
from .kv_write import BLOCK, kv_write
from .layer_norm import layer_norm
from .linear import linear
from .linear_quantized import embedding_quantized, linear_quantized, linear_swiglu_quantized
from .linear_swiglu import linear_swiglu
from .norm_quantized import add_rms_norm_quantized, layer_norm_quantized, rms_norm_quantized
from .paged_attention import paged_attention
from .registry import Cost, Operator, arguments, by_name, cost_of, names, nbytes, operator, operator_of
from .rms_norm import rms_norm
from .rope import rope
from .rope_kv_write import rope_kv_write
from .sample import sample
from .swiglu import swiglu

aten = torch.ops.aten
infc = torch.ops.infc

__all__ = [
    "BLOCK", "Cost", "Operator", "add_rms_norm", "add_rms_norm_quantized", "arguments", "aten", "attention", "by_name", "cost_of",
    "dequantize", "dequantize_rows", "embedding_quantized", "infc", "kv_write", "kv_write_quantized", "layer_norm",
    "layer_norm_quantized", "linear", "linear_quantized", "linear_swiglu", "linear_swiglu_quantized", "names", "nbytes", "operator",
    "operator_of", "paged_attention", "paged_attention_quantized", "quantize_rows", "rms_norm", "rms_norm_quantized", "rope",
    "rope_kv_write", "rope_kv_write_quantized", "sample", "swiglu",
]
