"""infc::kv_write: this step's keys and values go to their slots of the paged cache."""
from torch import Tensor

from .registry import Cost, nbytes, operator

BLOCK = 32
"""Tokens per cache block: one block of one kv head is what a CPU kernel reads in one go."""


def cost(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Cost:
    written = k.numel() * k_cache.element_size() + v.numel() * v_cache.element_size()
    return Cost(flops=0, bytes=nbytes(k) + nbytes(v) + nbytes(slots) + written, kv=written)


def write(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    """cache[slot // block, :, slot % block] = x for every slot >= 0; -1 is padding and writes nowhere."""
    block = cache.shape[2]
    real = slots >= 0
    at = slots[real].long()
    cache[at // block, :, at % block] = x[real].to(cache.dtype)


@operator("infc::kv_write", cost=cost, mutates=("k_cache", "v_cache"))
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k, v [T,Hkv,D] into k_cache, v_cache [P,Hkv,block,D] at slots i32[T] (block index * block + offset)."""
    write(k, k_cache, slots)
    write(v, v_cache, slots)


@kv_write.register_fake
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    return None
