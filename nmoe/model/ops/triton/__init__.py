"""Triton kernels for CUDA. They are imported at first use: a CPU run needs no triton."""
