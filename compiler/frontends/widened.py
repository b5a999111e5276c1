"""A module in half precision as one in fp32, the form every checkpoint is read in: its values are the same, and its rounding is gone.

What a graph is judged against is then fp32 arithmetic on the model's own weights, whatever type they came in.
"""
import copy
from collections.abc import Callable

import torch
from torch import nn

HALF = (torch.float16, torch.bfloat16)


def widened(module: nn.Module, progress: Callable[[str], None]) -> nn.Module:
    """The module itself where no weight or buffer is in 16 bits; else a copy that shares the others. The module given stays as it is."""
    held = [*module.parameters(), *module.buffers()]
    half = [tensor for tensor in held if tensor.dtype in HALF]
    if not half: return module
    kinds = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in half}))
    progress(f"{type(module).__name__} holds {kinds}: its weights are widened to fp32, as a checkpoint's are when it is read")
    memo = {id(tensor): tensor for tensor in held}                # a copy takes what stands here for a tensor, tied ones once
    for tensor in half:
        wide = tensor.detach().float()
        memo[id(tensor)] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
    return copy.deepcopy(module, memo)
