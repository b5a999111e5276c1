"""What a planted kernel calls: a part of its text that lies in another file."""
import triton
import triton.language as tl

STEP = tl.constexpr(2)


@triton.jit
def shift(x):
    return x + 1
