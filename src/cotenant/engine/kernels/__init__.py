"""Triton kernels of the engine; imported only where there is a CUDA device and Triton."""
