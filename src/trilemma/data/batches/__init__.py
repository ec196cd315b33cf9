"""Stacked batches of k clients, and what is drawn for them."""
