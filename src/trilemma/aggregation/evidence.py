"""Evidence: the stage of a server that remembers, named before a rule as in `"evidence+mean"`.

What it does over rounds is in `trilemma.learning.defences.evidence`: clients whose messages cannot be honest
contributions plus the noise that was agreed on are expelled, and the model is set right along directions that
stand out of the noise. Of one round's messages alone it knows nothing, and leaves them as they are.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trilemma.aggregation.steps.registry import mixings
from trilemma.aggregation.steps.stage import Stage

PACE = 1.25
"""How many times as many rounds there are at the next look at sums, unless a rule says otherwise."""


@mixings.register("evidence")
class Evidence(Stage):
    """Expel clients whose messages, over rounds, are not clipped contributions plus the agreed noise.

    Needs an algorithm that clips and adds noise; without noise it does nothing. In a single round messages
    pass through unchanged.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("evidence(1e-4, wait=5)+caf", f=1).name
    'evidence(alarm=0.0001,wait=5)+caf'
    """

    alarm: float = Field(
        default=1e-6, gt=0, lt=1, description="probability that a run expels an honest client"
    )
    wait: int = Field(default=0, ge=0, description="rounds in which the model stays where it is")
    undo: Literal[0, 1] = Field(default=1, description="1: take back what expelled clients did")
    correct: Literal[0, 1] = Field(default=1, description="1: set the model right along visible directions")
    pace: float = Field(
        default=PACE,
        ge=1,
        description="sums are looked at in 8 rounds, then in each that is so many times later; 1: in all",
    )
