"""Kernels with a known fault, or a known property, for the tests of the build. A module of its own: workers import it by name."""
import triton
import triton.language as tl
from triton_planted_helper import STEP, shift

FACTOR = tl.constexpr(3)


@triton.jit
def scale(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, shift(tl.load(x_ptr + at, at < n) * by) * FACTOR + STEP, at < n)


@triton.jit
def spill(x_ptr, y_ptr, N: tl.constexpr):
    """Holds far more than 255 registers a thread until the end."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    y = tl.load(x_ptr + N + at)
    total = tl.sum(x * y, 0)
    tl.store(y_ptr + at, x * total)
    tl.store(y_ptr + N + at, y * total)


@triton.jit
def wrong_name(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), no_such_thing)  # noqa: F821


@triton.jit
def wrong_size(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK % 16 == 0, "BLOCK is no multiple of 16")
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


@triton.jit
def greedy_of_shared(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr, K: tl.constexpr):
    """A pipeline too deep for the shared memory."""
    m = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, 4096, K):
        acc = tl.dot(tl.load(a_ptr + m[:, None] * 4096 + start + k[None, :]), tl.load(b_ptr + m[None, :] * 4096 + start + k[:, None]), acc)
    tl.store(y_ptr + m[:, None] * BLOCK + m[None, :], acc)


@triton.jit
def apply(x_ptr, y_ptr, F: tl.constexpr, TYPE: tl.constexpr, WHAT: tl.constexpr, BLOCK: tl.constexpr = 64):
    at = tl.arange(0, BLOCK)
    if WHAT is None: tl.store(y_ptr + at, F(tl.load(x_ptr + at)).to(TYPE))
