"""Which of several cuts of a call is likely the fastest: a model of a launch, from the compiler's report and the card's data sheet alone.

A launch runs in waves: as many programs as all multiprocessors hold at once, the last wave with what is left. A wave takes as long as
the slowest of these, and until its first bytes are there:

    memory      cold bytes / bandwidth, and longer where less is on its way than bandwidth x latency (Little's law)
    L2          all bytes that the busiest multiprocessor's programs load and store / its share of what the L2 gives
    arithmetic  its products, padding included, / its share of the peak
    spills      the bytes they move each round / what its shared memory and L1 give

The times of a call's launches add up, with a gap before each. It ranks cuts of one call; it is no promise of microseconds.
"""
from collections.abc import Mapping

import msgspec

from ...compiler.targets import Gpu
from ...runtime.program import Candidate, Kernel
from .build import LIMITS, occupancy
from .registry import Work

IN_FLIGHT = {"sm_80": 16 << 10, "sm_89": 16 << 10, "sm_90a": 48 << 10, "sm_100a": 64 << 10}
"""Bytes on their way that fill the bandwidth, a multiprocessor: NVIDIA CCCL, cub/device/dispatch/tuning/tuning_transform.cuh,
arch_to_min_bytes_in_flight (A100 and later, H200, B200)."""

LATENCY = {"sm_80": 466.3, "sm_89": 541.5, "sm_90a": 478.8, "sm_100a": 478.8}
"""Clocks until a load from memory is there: arXiv 2402.13499, table of memory latencies (A100, RTX 4090, H100); B200 as H100."""

MMA = {"sm_90a": 0.629, "sm_100a": 0.629}
"""Share of the peak that mma.sync reaches where the tensor cores' own instruction is another: arXiv 2402.13499, mma on an H100."""

LANES = {"sm_80": 64, "sm_89": 128, "sm_90a": 128, "sm_100a": 128}
"""fp32 results a clock and multiprocessor: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"."""

L2_CLOCK = 5120
"""Bytes the L2 gives a clock, in all: NVIDIA A100 whitepaper, "A100 L2 cache"; of the later ones no document says more."""

L1_CLOCK = 128
"""Bytes a multiprocessor's shared memory and L1 give a clock, 32 banks of 4: CUDA C++ Programming Guide, "Shared Memory"."""

GAP_US = 0.5
"""Between two kernels of a graph, beside their own time: "Getting Started with CUDA Graphs", developer.nvidia.com, 3.4 less 2.9 us."""


class Estimate(msgspec.Struct, frozen=True):
    """Of one launch."""

    us: float
    programs_per_sm: int
    waves: float                         # with a fraction: 1.1 leaves most multiprocessors idle in the second


def candidate_of(candidate: Candidate, kernels: Mapping[str, Kernel], works: Mapping[str, Work], unique: int, gpu: Gpu) -> Candidate:
    """A candidate with its figures. works: by kernel; unique: bytes that the call has to move at least."""
    found = [launch(kernels[step.kernel], works[step.kernel], step.grid, unique, gpu) for step in candidate.steps]
    longest = max(found, key=lambda one: one.us)
    return msgspec.structs.replace(candidate, programs_per_sm=longest.programs_per_sm, waves=round(longest.waves, 3),
                                   predicted_us=round(sum(one.us for one in found), 3))


def launch(kernel: Kernel, work: Work, grid: tuple[int, ...], unique: int, gpu: Gpu) -> Estimate:
    """Of one launch of a kernel that fits its architecture."""
    programs = 1
    for axis in grid: programs *= axis
    per_sm = occupancy(kernel.registers or 0, kernel.shared_bytes or 0, kernel.threads, LIMITS[kernel.arch])
    at_once = per_sm * gpu.sms
    waves, rest = divmod(programs, at_once)
    cold = min(work.cold, unique / programs)                 # what several programs read comes from memory once
    us = waves * _wave(at_once, kernel, work, cold, gpu) + (_wave(rest, kernel, work, cold, gpu) if rest else 0.0)
    return Estimate(us + GAP_US, per_sm, programs / at_once)


def _wave(active: int, kernel: Kernel, work: Work, cold: float, gpu: Gpu) -> float:
    """Microseconds of so many programs that run at once. cold: bytes that each reads from memory."""
    clock = gpu.fp32_tflops * 1e12 / (2 * LANES[kernel.arch] * gpu.sms)
    busiest = -(-active // gpu.sms)
    ahead = active * max(1, min(work.ahead, work.cold + work.warm))
    memory = active * cold / (gpu.bandwidth_gb_s * 1e9) * max(1.0, IN_FLIGHT[kernel.arch] * gpu.sms / ahead)
    l2 = busiest * (work.cold + work.warm + work.stores) / (L2_CLOCK * clock / gpu.sms)
    arithmetic = busiest * work.flops / (_peak(kernel, gpu) / gpu.sms)
    spills = busiest * (kernel.spill_bytes or 0) * kernel.threads * work.rounds / (L1_CLOCK * clock)
    return 1e6 * (max(memory, l2, arithmetic, spills) + LATENCY[kernel.arch] / clock)


def _peak(kernel: Kernel, gpu: Gpu) -> float:
    """flop/s of what its products run on."""
    if not kernel.tensor_cores: return gpu.fp32_tflops * 1e12
    return gpu.bf16_tflops * 1e12 * (MMA.get(kernel.arch, 1.0) if kernel.tensor_cores == "mma" else 1.0)
