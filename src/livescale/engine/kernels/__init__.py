"""Kernels for CPUs, compiled by Numba: they take addresses, hold no interpreter lock and allocate
nothing."""
