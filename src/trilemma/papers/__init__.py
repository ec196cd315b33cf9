"""The papers' experiments: each one's grid, the numbers it printed, and how ours compare.

A module per paper; nothing here computes anything that `trilemma.simulate` does not.
"""
