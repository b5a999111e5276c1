"""Quantization: schemes as data, the ways to choose codes and scales, and what a scheme costs in quality."""
