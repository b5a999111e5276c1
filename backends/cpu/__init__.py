"""The CPU backend as the driver sees it: who claims what, how weights are packed, and one shared library per model."""
from .backend import SOURCE, Toolchain, backends, code, headers_digest, pack, source, tensors, toolchain
from .race import race

__all__ = ["SOURCE", "Toolchain", "backends", "code", "headers_digest", "pack", "race", "source", "tensors", "toolchain"]
