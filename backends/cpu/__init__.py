"""The CPU backend as the driver sees it: who claims what, how weights are packed, and one shared library per model."""
from .backend import Toolchain, backends, headers_digest, pack, source, tensors, toolchain
from .race import race

__all__ = ["Toolchain", "backends", "headers_digest", "pack", "race", "source", "tensors", "toolchain"]
