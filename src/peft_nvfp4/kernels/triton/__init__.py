"""Triton kernels for any CUDA GPU of compute capability 8.0 or later."""
