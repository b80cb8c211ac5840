"""Kernels in CUDA C++, for what Triton cannot say. Compiled when first needed, by the compiler that torch brings along."""
