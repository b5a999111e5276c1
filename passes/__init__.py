"""The pipeline: every pass, in order, and why it stands where it stands."""
from importlib import import_module

from ..compiler.rewrite import AnyPass

PIPELINE = (
    "canonicalize",          # one spelling per idea, so that every later pattern is short
    "fold_constants",        # what depends on weights alone is a weight
    "merge_common",          # layers share their cos/sin and masks: later passes look at each once
    "fuse_layer_norm",       # before RMSNorm, whose chain it contains
    "fuse_rms_norm",
    "fuse_rope",             # before attention: it reads q and k as the projections left them
    "rewrite_attention",     # unexpands kv heads, names the mask
    "drop_dead",             # the masks, and the shapes they were made of
    "merge_projections",     # q, k, v read x once; gate and up too
    "fuse_swiglu",           # needs gate and up merged
    "page_kv_cache",         # the step graph: from here on the inputs are tokens, slots and block tables
    "sample_tokens",         # only the sampled rows reach the head
    "fuse_linear_epilogue",  # bias and residual ride on the product
    "fuse_add_rms_norm",     # the residual adds that follow no product
    "fuse_rope_kv_write",    # needs the merged product and the cache
    "merge_common",
    "drop_dead",
    "smooth_channels",       # while norms and weights are still side by side
    "quantize_weights",      # merged weights, so that what is read together has one format
    "quantize_activations",  # what those products read
    "fuse_quantized_linear",
    "quantize_kv",           # caches in fp32 still: what narrow_dtype finds wide becomes bf16
    "narrow_dtype",          # every earlier pass is judged in fp32
    "fuse_norm_quantized",   # last: no other pass need know that a norm may give codes
)

NEEDED = ("page_kv_cache", "sample_tokens")
"""What a decoder cannot be compiled without: the runtime feeds steps over a paged cache, and reads sampled tokens."""


def load(name: str) -> AnyPass:
    """The pass in passes/<name>.py."""
    return import_module(f".{name}", __package__).PASS


QUANTIZATION = ("smooth_channels", "quantize_weights", "quantize_activations", "fuse_quantized_linear", "fuse_norm_quantized")


def pipeline(dtype: str, quantized: bool = False, kv: bool = False) -> list[AnyPass]:
    """The passes of a compile, in order. fp32 needs no narrowing; without a quantization (of weights, of the KV cache) its passes
    have nothing to do."""
    left_out = ({"narrow_dtype"} if dtype == "fp32" else set()) | (set() if quantized else set(QUANTIZATION))
    if not kv: left_out.add("quantize_kv")
    return [load(name) for name in PIPELINE if name not in left_out]
