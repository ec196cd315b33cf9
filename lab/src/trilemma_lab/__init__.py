"""Trilemma's laboratory: the papers' experiments, the arena, and liars who know the defence.

It uses the core by its public names and enters it as any installed package does, by entry points.
"""
