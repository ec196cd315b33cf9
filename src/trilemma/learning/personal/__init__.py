"""Personalised learning: every client ends with a model of its own.

lp-proj and the methods it is compared with. Shared parts: `projection` (P from a seed), `bilevel` (penalised
personal models).
"""

from trilemma.base.registry import discover

discover(__name__)
