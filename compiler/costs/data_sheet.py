"""The peaks of a GPU as its data sheet gives them, for an artifact that is explained where there is no such GPU.

Times from these are the least the card allows, not what kernels reach: nothing is taken for a launch, and what lies in the L2 cache is
read at the memory's rate, as no data sheet gives the cache's.
"""
from ..targets import Target
from .peaks import Peaks


def data_sheet(target: Target) -> Peaks:
    """The figures of compiler.targets as peaks. The target must be a GPU."""
    gpu = target.gpu
    assert gpu is not None, f"{target.name} is no GPU"
    rate, wide = gpu.bandwidth_gb_s, gpu.bf16_tflops * 1e3
    cache = {"bf16": rate}                             # by dtype: of any other as of bf16, for bytes are bytes
    products = {"bf16": wide, "f16": wide, "f32": gpu.fp32_tflops * 1e3, "w8a8": gpu.int8_tops * 1e3, "w4a8": gpu.int8_tops * 1e3}
    if gpu.fp8_tflops is not None: products["fp8a8"] = gpu.fp8_tflops * 1e3
    return Peaks(
        cpu=f"{target.name}, as its data sheet has it", isa=target.isa, threads=1, read_gb_s=rate, kv_read_gb_s=cache, cache_gb_s=rate,
        thread_cache_gb_s=rate, weight_cache_gb_s=rate, key_cache_gb_s=cache, scan_gb_s=rate, product_gflop_s=products,
        attention_gflop_s={"bf16": wide, "f16": wide, "f32": gpu.fp32_tflops * 1e3, "i8": wide, "f8e4m3": wide}, exposed=0.0, barrier_s=0.0,
        aten_call_s=0.0, llc_bytes=gpu.l2_bytes, kv_write_gb_s=rate)
