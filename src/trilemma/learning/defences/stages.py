"""The stage that a rule may begin with, which is the server's work: `evidence` or one of the `screens`."""

from __future__ import annotations

from collections.abc import Callable

from trilemma.aggregation.evidence import Evidence
from trilemma.learning.defences.evidence import guarded
from trilemma.learning.defences.screens import screened
from trilemma.learning.defences.screens.screen import stage_of
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup


def staged(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm, its server extended by the stage that the rule begins with, if there is one."""
    stage = stage_of(setup.rule)
    if stage is None:
        return build(setup)
    return guarded(build, setup) if isinstance(stage, Evidence) else screened(build, setup)
