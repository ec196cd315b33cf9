"""Algorithms: each is three pure functions on stacked state, one per file, the paper on top.

`algorithms` holds every algorithm by name; `trilemma.learning.protocol` says what an algorithm is and
`trilemma.learning.messages` what it says about its messages.
"""

from trilemma.base.registry import discover
from trilemma.learning.messages import MessageLayout, Messages, Part
from trilemma.learning.protocol import Algorithm, ClientStep, Inquiry, ServerStep, Start
from trilemma.learning.settings import AlgorithmSettings, Setup, algorithms

discover(__name__)

__all__ = [
    "Algorithm",
    "AlgorithmSettings",
    "ClientStep",
    "Inquiry",
    "MessageLayout",
    "Messages",
    "Part",
    "ServerStep",
    "Setup",
    "Start",
    "algorithms",
]
