"""Kernels of the passes, for processors and for GPUs."""
