"""Tensors that live in files: mapped into memory, rows of several files as one."""
