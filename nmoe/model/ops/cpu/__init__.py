"""C++ kernels for decoding and for exact numerics on a CPU, compiled at first use."""
