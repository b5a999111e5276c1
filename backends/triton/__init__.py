"""Kernels for NVIDIA GPUs, written in Triton: compiled ahead of time to cubins, run on a CPU by Triton's interpreter to judge them."""
