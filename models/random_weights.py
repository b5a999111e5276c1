"""Seeded random weights for a Llama of any size: one pass over memory, no file, the same on every machine."""
import torch
from torch import nn

from .llama import Llama, LlamaConfig, inverse_frequencies


def random_llama(config: LlamaConfig, seed: int = 0) -> Llama:
    """A Llama with uniform weights of standard deviation 1/sqrt(fan in) and norm weights around 1, in eval mode."""
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    model.tie()                                                   # to_empty gives the head its own memory
    model.model.rotary.inv_freq = inverse_frequencies(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for weight in module.parameters(recurse=False):
                if weight.dim() == 1:
                    weight.uniform_(0.9, 1.1, generator=generator)
                elif isinstance(module, nn.Embedding) or weight is not model.model.embed_tokens.weight:
                    bound = (3 / weight.shape[1]) ** 0.5          # uniform on ±a has standard deviation a/sqrt(3)
                    weight.uniform_(-bound, bound, generator=generator)
    return model.eval().requires_grad_(False)
