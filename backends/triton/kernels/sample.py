"""infc::sample: the largest logit by many programs; a draw by one program a row, which bisects the logits instead of sorting them.

A prefix of the descending order is all logits from some value on, and of equal ones the first few by index. So top-k, top-p and the draw
are one search, three times: the value at which a count or a mass is passed. Each step of a search reads the row, and only the few
that are left once no more than a block of them are. Masses are fp32 sums: where a border between two tokens lies is right to about 1e-6
of the row's mass, and a uniform number that close to one may give the neighbour.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import sample
from ....compiler.ops.sample import GREEDY_BELOW
from ..registry import Emit, kernel
from ..rows import power_of_2, refuse_dtypes

SPLIT = 4096                             # logits of one program that looks for the largest
ROOM = 1024                              # of one step of a search; also the most that are kept aside
MAX_SPLITS = 4096                        # programs' results the next launch reads at once
MAX_VOCAB = SPLIT * MAX_SPLITS           # counts are exact in fp32 to 2**24

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)


def refuse(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> str | None:
    """None where the kernels take the call, else why not."""
    shape = tuple(logits.shape)
    if logits.dim() != 2 or not 0 < shape[1] <= MAX_VOCAB: return f"logits are {shape}: rows of 1 to {MAX_VOCAB} are known"
    for name, tensor, dtype in (("temperature", temperature, torch.float32), ("top_k", top_k, torch.int32),
                                ("top_p", top_p, torch.float32), ("uniform", uniform, torch.float32)):
        if tensor.dtype != dtype or not tensor.is_contiguous(): return f"{name} is {tensor.dtype}, or not contiguous: {dtype} is known"
    return refuse_dtypes(logits=logits)


@triton.jit
def known(x):
    """A logit as it counts: NaN is -inf, and -0 is 0."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.where(x == 0.0, 0.0, x), -float("inf"))


@triton.jit
def order(x):
    """i32 in the order of fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number(key):
    """The fp32 number of an i64 key of `order`."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def weight(x, top, heat):
    """Mass of a logit, the largest having 1."""
    return tl.exp((x - top) / heat)


@triton.jit
def _largest(logits_ptr, value_ptr, index_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = known(tl.load(logits_ptr + row * V + at, at < V, other=-float("inf")))
    best = tl.max(x, 0)
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(value_ptr + to, best)
    tl.store(index_ptr + to, tl.min(tl.where((x == best) & (at < V), at, V), 0))


@triton.jit
def from_key(x_ptr, count, key, top, heat, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Of the logits x[:count], at most MOST, whose key is at least `key`: their mass, their number, the least key of them."""
    mass = tl.zeros((BLOCK,), tl.float32)
    number_of = tl.zeros((BLOCK,), tl.int32)
    least = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for start in tl.range(0, MOST, BLOCK, num_stages=8):     # loads of the next blocks are under way: a step waits for memory
        at = start + tl.arange(0, BLOCK)
        x = known(tl.load(x_ptr + at, at < count, other=-float("inf")))
        place = order(x)
        there = (place >= key) & (at < count)
        mass += tl.where(there, weight(x, top, heat), 0.0)
        number_of += there.to(tl.int32)
        least = tl.minimum(least, tl.where(there, place, 2**31 - 1))
    return tl.sum(mass, 0), tl.sum(number_of, 0), tl.min(least, 0).to(tl.int64)


@triton.jit
def keep(x_ptr, key, value_ptr, index_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Put the logits of a row whose key is at least `key` aside, and their indices, in their order."""
    kept = 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = known(tl.load(x_ptr + at, at < V, other=-float("inf")))
        there = (order(x) >= key) & (at < V)
        to = kept + tl.cumsum(there.to(tl.int32), 0) - 1
        tl.store(value_ptr + to, x, there)
        tl.store(index_ptr + to, at, there)
        kept += tl.sum(there.to(tl.int32), 0)
    tl.debug_barrier()                                    # all threads of the program read what others wrote
    return kept


@triton.jit
def nth(x_ptr, index_ptr, count, key, n, INDEXED: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """The index of the n-th of the logits x[:count], from 1, whose key is `key`."""
    seen = 0
    found = 0
    for start in range(0, MOST, BLOCK):
        at = start + tl.arange(0, BLOCK)
        equal = (order(known(tl.load(x_ptr + at, at < count, other=-float("inf")))) == key) & (at < count)
        hit = equal & (seen + tl.cumsum(equal.to(tl.int32), 0) == n)
        index = tl.load(index_ptr + at, hit, other=0) if INDEXED else at
        found = tl.maximum(found, tl.max(tl.where(hit, index, 0), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def _draw(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, uniform_ptr, best_ptr, best_index_ptr, value_ptr, index_ptr, token_ptr,
          V: tl.constexpr, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_BLOCK)
    best = tl.load(best_ptr + row * SPLITS + split, split < SPLITS, other=-float("inf"))
    top = tl.max(best, 0)
    index = tl.load(best_index_ptr + row * SPLITS + split, split < SPLITS, other=V)
    likeliest = tl.min(tl.where(best == top, index, V), 0)
    heat = tl.load(temperature_ptr + row)
    token = likeliest
    if (heat >= _GREEDY_BELOW) & (tl.abs(top) < float("inf")):
        x_ptr, value_ptr, index_ptr = logits_ptr + row * V, value_ptr + row * BLOCK, index_ptr + row * BLOCK
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        # What lies 20 temperatures down rarely matters: a first guess at where a search ends.
        guess = order(tl.maximum(top - 20 * heat, -3e38)).to(tl.int64)
        guess_mass, guess_count, guess = from_key(x_ptr, V, guess, top, heat, V, BLOCK)
        # Of the logits equal to `cut` the first `cut_n` stay, and all that are larger: everything so far.
        mass, cut_count, cut = from_key(x_ptr, V, -(2**31), top, heat, V, BLOCK)
        cut_n = cut_count
        aside = 0                                         # how many logits are put aside; 0: none, the row is read
        for phase in tl.static_range(3):                  # top-k, top-p, the draw
            if phase == 0: wanted, on = top_k.to(tl.float32), (top_k > 0) & (top_k < V)
            elif phase == 1: wanted, on = top_p * mass, top_p < 1
            else: wanted, on = tl.load(uniform_ptr + row) * mass, top_p == top_p
            if on | (phase == 2):
                # Invariant: from `low`, a logit's key, the wanted is reached; from `high` it is not.
                start_reached = (guess_count if phase == 0 else guess_mass) >= wanted if phase < 2 else guess_mass > wanted
                use_guess = start_reached & (guess > cut)
                low, low_count = tl.where(use_guess, guess, cut), tl.where(use_guess, guess_count, cut_count)
                high, high_mass, high_count = order(top).to(tl.int64) + 1, 0.0, 0
                step = 0
                while high - low > 1:
                    middle = (low + high) >> 1
                    between = order(0.5 * (number(low) + number(high - 1))).to(tl.int64)
                    # halves of the numbers near the right size first, then halves of the keys, which end it
                    middle = tl.where((step < 12) & (between > low) & (between < high), between, middle)
                    if aside > 0: here_mass, here_count, here = from_key(value_ptr, aside, middle, top, heat, BLOCK, BLOCK)
                    else: here_mass, here_count, here = from_key(x_ptr, V, middle, top, heat, V, BLOCK)
                    if phase == 0: reached = here_count >= wanted
                    elif phase == 1: reached = here_mass >= wanted
                    else: reached = here_mass > wanted
                    low, low_count = tl.where(reached, here, low), tl.where(reached, here_count, low_count)
                    high, high_mass = tl.where(reached, high, middle), tl.where(reached, high_mass, here_mass)
                    high_count = tl.where(reached, high_count, here_count)
                    if (aside == 0) & (low_count <= BLOCK): aside = keep(x_ptr, low, value_ptr, index_ptr, V, BLOCK)
                    step += 1
                each = weight(number(low), top, heat)
                if phase == 0: n = wanted - high_count
                elif phase == 1: n = tl.ceil((wanted - high_mass) / each)
                else: n = tl.floor((wanted - high_mass) / each) + 1
                equals = low_count - high_count
                n = tl.where(n >= 1, tl.where(n < equals, n.to(tl.int32), equals), 1)
                cut_n = tl.where(low == cut, tl.minimum(n, cut_n), n)
                cut, cut_count = low, low_count
                mass = high_mass + cut_n * each
        if aside > 0: token = nth(value_ptr, index_ptr, aside, cut, cut_n, True, BLOCK, BLOCK)
        else: token = nth(x_ptr, index_ptr, V, cut, cut_n, False, V, BLOCK)
    tl.store(token_ptr + row, token)


@kernel(sample, refuse=refuse)
def lower(emit: Emit, token: Tensor, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> None:
    """logits [R, V]; temperature, top_k, top_p, uniform [R] -> token i32 [R]."""
    rows, vocab = logits.shape
    splits = -(-vocab // SPLIT)
    block = min(ROOM, power_of_2(vocab))
    best, value = emit.empty(rows, splits, dtype=torch.float32, like=logits), emit.empty(rows, block, dtype=torch.float32, like=logits)
    best_index, index = emit.empty(rows, splits, dtype=torch.int32, like=logits), emit.empty(rows, block, dtype=torch.int32, like=logits)
    emit(_largest, grid=(rows, splits), args=(logits, best, best_index), V=vocab, BLOCK=min(SPLIT, power_of_2(vocab)), warps=8)
    emit(_draw, grid=(rows,), args=(logits, temperature, top_k, top_p, uniform, best, best_index, value, index, token),
         warps=16 if vocab > ROOM else max(1, block // 128), V=vocab, SPLITS=splits, SPLITS_BLOCK=power_of_2(splits), BLOCK=block)
