"""Compiling kernels with nvcc, ahead of time or on first use, into a cache, and loading them; without torch."""
