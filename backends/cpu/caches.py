"""The KV caches of a CPU's executor as operators mean them: [P, Hkv, 32, D], out of the runs and layouts that kernels read."""
import ctypes
from typing import Any

import torch
from torch import Tensor

from ...runtime.kv_runs import RUN, KvRuns
from .pack import in_runs, out_of_runs, pack_k, pack_v, unpack_k, unpack_v


class Caches:
    """Reads copies of whole caches, and writes them back. Scales lie as they are, token by token."""

    def __init__(self, executor: Any) -> None:
        """executor: a runtime.cpu.Executor."""
        self._runs: KvRuns = executor.kv_runs
        self._blocks = int(executor.kv_blocks)
        memory = (ctypes.c_uint8 * self._runs.bytes).from_address(executor.kv_pool.address)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8) if self._runs.bytes else torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, like: Tensor) -> Tensor:
        """A copy of a cache. like: of its shape and dtype."""
        held = self._held(name, like).contiguous().view(like.dtype).unflatten(-1, like.shape[2:])
        if "_scale" in name: return out_of_runs(held, self._blocks)
        return (unpack_k if name.startswith("k") else unpack_v)(held, self._blocks)

    def write(self, name: str, cache: Tensor) -> None:
        """Put a cache back."""
        pack = in_runs if "_scale" in name else pack_k if name.startswith("k") else pack_v
        self._held(name, cache).copy_(pack(cache).flatten(3).view(torch.uint8))

    def _held(self, name: str, like: Tensor) -> Tensor:
        """The bytes of a cache where they lie: [runs, Hkv, RUN, bytes of a block of a head]."""
        heads, size = like.shape[1], like[0, 0].numel() * like.element_size()
        return self._memory.as_strided((self._runs.bytes // self._runs.run_bytes, heads, RUN, size),
                                       (self._runs.run_bytes, RUN * size, size, 1), self._runs.offsets[name])
