"""Correct behaviour, and the behaviour of the authors' code, as two frozen sets of switches.

The published tables were made with code that departs from its paper in places. Every departure that lies in
an algorithm and changes numbers is a switch here, so that one line, `preset = "reference"`, reproduces them
all. The default is what the papers of the methods describe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Preset = Literal["correct", "reference"]


@dataclass(frozen=True)
class Switches:
    """Where the reference code departs from the methods it implements.

    Attributes:
        decay_in_l1: Whether weight decay acts in the steps of lp-proj-1. The reference code computes it and
            drops the result.
        tuning_steps: How many gradient steps Per-FedAvg takes before it is scored: one with the inner rate,
            as in its paper; the reference code adds a second with the outer rate.

    >>> switches("correct").tuning_steps, switches("reference").tuning_steps
    (1, 2)
    """

    decay_in_l1: bool = True
    tuning_steps: Literal[1, 2] = 1


CORRECT = Switches()
REFERENCE = Switches(decay_in_l1=False, tuning_steps=2)


def switches(preset: Preset) -> Switches:
    """Return the switches a preset stands for."""
    return REFERENCE if preset == "reference" else CORRECT
