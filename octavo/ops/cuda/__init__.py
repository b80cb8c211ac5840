"""Kernels in CUDA C++, for what Triton cannot express. NVRTC compiles them when they are needed."""
