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
        clears_gradients: Whether QSGD and DGC clients start every round from a zero gradient. In the
            reference code a client's gradient accumulates over all rounds it took part in.
        clears_sketch: Whether a count sketch holds one round's vector only. The reference code never clears
            the table, so it holds the sum over all earlier rounds.
        look_back_power: LBGM's multiplier is ⟨G, L⟩/‖L‖^power. 2 projects onto L; the reference code has 1.
        tuning_steps: How many gradient steps Per-FedAvg takes before it is scored: one with the inner rate,
            as in its paper; the reference code adds a second with the outer rate.

    >>> switches("correct").look_back_power, switches("reference").look_back_power
    (2, 1)
    """

    decay_in_l1: bool = True
    clears_gradients: bool = True
    clears_sketch: bool = True
    look_back_power: Literal[1, 2] = 2
    tuning_steps: Literal[1, 2] = 1


CORRECT = Switches()
REFERENCE = Switches(
    decay_in_l1=False, clears_gradients=False, clears_sketch=False, look_back_power=1, tuning_steps=2
)


def switches(preset: Preset) -> Switches:
    """Return the switches a preset stands for."""
    return REFERENCE if preset == "reference" else CORRECT
