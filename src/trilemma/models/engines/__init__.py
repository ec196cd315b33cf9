"""Gradients of k clients at once, and the one place that clips them."""
