"""Algorithms: each is three pure functions on stacked state, one per file, the paper on top.

`algorithms` holds every algorithm by name; `trilemma.learning.protocol` says what an algorithm is.
"""

from trilemma.learning.protocol import Algorithm, ClientStep, Messages, ServerStep, Start
from trilemma.learning.settings import AlgorithmSettings, Setup, algorithms
from trilemma.registry import discover

discover(__name__)

__all__ = [
    "Algorithm",
    "AlgorithmSettings",
    "ClientStep",
    "Messages",
    "ServerStep",
    "Setup",
    "Start",
    "algorithms",
]
