"""Decoding on a CPU: kernels in C++ (AVX-512), compiled at first use, with torch's operations as their reference."""
