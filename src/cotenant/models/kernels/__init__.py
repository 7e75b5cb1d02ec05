"""Kernels for NVIDIA GPUs, written in Triton. Imported only where Triton is there."""
