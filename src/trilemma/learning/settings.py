"""How an algorithm is named, configured and built.

An algorithm is one file with one `AlgorithmSettings` class, entered in `algorithms`. The class lists what the
`[algorithm]` table of a configuration may say, and `build` turns it into the three pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trilemma.aggregation import Rule
from trilemma.errors import ConfigError
from trilemma.learning.protocol import Algorithm
from trilemma.options import Options
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.registry import Registry


@dataclass(frozen=True)
class Setup:
    """The facts of a federation that an algorithm is built for.

    `release` says how one client's message is clipped and noised; None: not at all.
    """

    clients: int
    byzantine: int
    rounds: int
    rule: Rule
    release: Release | None = None


class AlgorithmSettings(Options):
    """The `[algorithm]` table of one algorithm. Subclasses add their parameters."""

    @property
    def least_examples(self) -> int:
        """How many examples every client must hold: more than one where batches have a fixed size."""
        return 1

    def exposure(self, clip: float, examples: int) -> Release:
        """Say what one client lets out in one round when its contribution is clipped at `clip`.

        `examples` is the smallest number of training examples any honest client holds. The noise of the
        returned release is zero: calibration fills it in.
        """
        raise NotImplementedError

    def paper_noise(self, release: Release, epsilon: float, delta: float, rounds: int) -> NoiseLaw:
        """Return the noise the algorithm's paper sets for (ε, δ), where it is not a calibrated one."""
        raise ConfigError(
            f"[privacy] noise = 'paper': {type(self).__name__} has no formula of its own; "
            "allowed: noise = 'certified'"
        )

    def build(self, setup: Setup) -> Algorithm:
        """Return the algorithm as three pure functions."""
        raise NotImplementedError


algorithms: Registry[type[AlgorithmSettings]] = Registry("algorithm")
"""Every algorithm by the name configurations use."""


def rule_report(outcome: Any) -> dict[str, Any]:
    """Say what a rule did, for the record: every client's weight and how suspect it looked."""
    return {"weights": outcome.weights, "scores": outcome.scores, "info": outcome.info}
