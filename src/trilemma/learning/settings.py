"""How an algorithm is named, configured and built.

An algorithm is one file with one `AlgorithmSettings` class, entered in `algorithms`. The class lists what the
`[algorithm]` table of a configuration may say, and `build` turns it into the three pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trilemma.aggregation import Rule
from trilemma.errors import ConfigError, PrivacyError
from trilemma.learning.protocol import Algorithm, Clients
from trilemma.options import Options
from trilemma.privacy.grid import Grid
from trilemma.privacy.types import Arithmetic, NoiseLaw, Release
from trilemma.registry import Registry


@dataclass(frozen=True)
class Setup:
    """The facts of a federation that an algorithm is built for.

    Attributes:
        clients: How many clients there are, n.
        byzantine: How many of them may lie or fail, f.
        rounds: How many rounds the run has, T.
        rule: What the server combines messages with.
        release: How one client's message is clipped and noised; None: not at all.
        arithmetic: Where contribution and noise meet: among floating-point numbers, or on a public grid of
            integers, which is what a certificate needs (`trilemma.privacy.grid`).
        root: Public examples at the server, as one more client who adds no noise; None: it has none.
    """

    clients: int
    byzantine: int
    rounds: int
    rule: Rule
    release: Release | None = None
    arithmetic: Arithmetic = "float"
    root: Clients | None = None

    def grid(self, dim: int) -> Grid | None:
        """Return the grid that releases of `dim` numbers lie on; None: they are not noised, or float."""
        if self.arithmetic == "float" or self.release is None or self.release.law.silent:
            return None
        return Grid.of(self.release, dim, self.clients)


class AlgorithmSettings(Options):
    """The `[algorithm]` table of one algorithm. Subclasses add their parameters."""

    smooth: ClassVar[Mapping[str, Any]] = {}
    """Options under which messages are a continuous function of the data, where by default they are not: a
    sign jumps at 0, where rounding decides, and two ways to compute it can be compared only without."""

    @property
    def least_examples(self) -> int:
        """How many examples every client must hold: more than one where batches have a fixed size."""
        return 1

    @property
    def fresh_noise(self) -> bool:
        """Whether a message carries the noise of its own round only; unless an algorithm says so, it may not.

        Where old noise is in a message again, who compares the means of rounds with different senders can
        take it out.
        """
        return False

    def exposure(self, clip: float, examples: int) -> Release:
        """Say what one client lets out in one round when its contribution is clipped at `clip`.

        `examples` is the public number of training examples that every client holds at least. The noise of
        the returned release is zero: calibration fills it in. An algorithm that does not say has no
        mechanism.
        """
        raise PrivacyError(
            f"[privacy] {self.without_release(type(self).__name__)}: leave [privacy] out, or choose an "
            f"algorithm that clips and adds noise: {', '.join(private_algorithms())}"
        )

    def without_release(self, name: str) -> str:
        """Say why this algorithm, called `name`, has no privacy mechanism, where it has none."""
        return f"{name} has no privacy mechanism: it neither clips nor adds noise"

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


def private_algorithms() -> list[str]:
    """Return the algorithms that may be used with `[privacy]`: those that say what a round releases."""
    return sorted(
        name for name, kind in algorithms.items() if kind.exposure is not AlgorithmSettings.exposure
    )


class WholeClientSettings(AlgorithmSettings):
    """Methods whose clients send one vector a round; privacy protects the whole client."""

    @property
    def fresh_noise(self) -> bool:
        """The move from the broadcast is clipped and noised anew in every round."""
        return True

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`. A client's whole move is clipped, whatever data made it."""
        return Release(clip, NoiseLaw())
