"""Layers that act on all clients at once."""
