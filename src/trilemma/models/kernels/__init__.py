"""Triton kernels for layers, and how they are found."""
