"""Kernels for CPUs, written in Python and compiled by numba when they are first needed."""
