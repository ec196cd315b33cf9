"""Tensors that live in files: mapped into memory."""
