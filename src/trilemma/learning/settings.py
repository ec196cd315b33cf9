"""How an algorithm is named, configured and built.

An algorithm is one file with one `AlgorithmSettings` class, registered in `algorithms`. The fields of the
class are the options of the `[algorithm]` table, and `build` turns them into the three pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trilemma.aggregation import Rule
from trilemma.base.errors import ConfigError, PrivacyError
from trilemma.base.options import Options
from trilemma.base.registry import Registry
from trilemma.learning.protocol import Algorithm, Clients
from trilemma.privacy.noise.grid import Grid
from trilemma.privacy.types import Arithmetic, NoiseLaw, Release


@dataclass(frozen=True)
class Setup:
    """The facts of a federation that an algorithm is built for.

    Attributes:
        clients: How many clients there are, n.
        byzantine: How many of them may lie or fail, f.
        rounds: How many rounds the run has, T.
        rule: The rule by which the server aggregates messages.
        release: How one client's message is clipped and noised; None: neither clipped nor noised.
        arithmetic: Whether noise is added in floating point ("float"), or in integers on a public grid
            ("grid"), which a certificate requires (`trilemma.privacy.noise.grid`).
        root: Public examples that the server holds, as one more client without noise; None: it holds none.
        neighbours: With how many others each client shares secrets; None: with all.
        scales: Each client's public weight times n; (): all are alike.
    """

    clients: int
    byzantine: int
    rounds: int
    rule: Rule
    release: Release | None = None
    arithmetic: Arithmetic = "float"
    root: Clients | None = None
    neighbours: int | None = None
    scales: tuple[float, ...] = ()

    def grid(self, dim: int) -> Grid | None:
        """Return the grid for releases of `dim` numbers; None without noise or with float arithmetic."""
        if self.arithmetic == "float" or self.release is None or self.release.law.silent:
            return None
        return Grid.of(self.release, dim, self.clients, self.scales)


class AlgorithmSettings(Options):
    """The `[algorithm]` table of one algorithm. Subclasses add their parameters."""

    smooth: ClassVar[Mapping[str, Any]] = {}
    """Options that make messages a continuous function of the data, for methods whose defaults do not.

    A sign, for example, jumps at 0, where the rounding error decides. Two implementations can be compared
    number for number only without such jumps."""

    rounds: ClassVar[int | None] = None
    """How many rounds it has, where that is no choice."""

    @property
    def called(self) -> str:
        """The name configurations use for this algorithm; of one that is not registered, its class's."""
        return next((name for name, kind in algorithms.items() if kind is type(self)), type(self).__name__)

    @property
    def least_examples(self) -> int:
        """The least number of examples every client must hold: the batch size if that is fixed, else 1."""
        return 1

    @property
    def fresh_noise(self) -> bool:
        """Whether a message contains noise of its own round only. Algorithms for which this is true say so.

        If messages repeat noise of earlier rounds, as momentum does, an observer can remove some of it by
        comparing the means of rounds with different senders.
        """
        return False

    def exposure(self, clip: float, examples: int) -> Release:
        """Return what one client releases in one round when its contribution is clipped at `clip`.

        `examples` is a public lower bound on the number of training examples of every client. The noise of
        the returned release is zero: calibration fills it in. An algorithm that does not override this
        method has no privacy mechanism.
        """
        raise PrivacyError(
            f"[privacy] {self.without_release(self.called)}: leave [privacy] out, or choose an "
            f"algorithm that clips and adds noise: {', '.join(private_algorithms())}"
        )

    def without_release(self, name: str) -> str:
        """Return the reason why this algorithm, called `name`, has no privacy mechanism."""
        return f"{name} has no privacy mechanism: it neither clips nor adds noise"

    def paper_noise(self, release: Release, epsilon: float, delta: float, rounds: int) -> NoiseLaw:
        """Return the noise that the paper's own formula gives for (ε, δ), instead of calibrated noise."""
        raise ConfigError(
            f"[privacy] noise = 'paper': {self.called} has no formula of its own; "
            "allowed: noise = 'certified'"
        )

    def build(self, setup: Setup) -> Algorithm:
        """Return the algorithm as three pure functions."""
        raise NotImplementedError


algorithms: Registry[type[AlgorithmSettings]] = Registry("algorithm")
"""Every algorithm by the name configurations use."""


def private_algorithms() -> list[str]:
    """Return the names of the algorithms that allow `[privacy]`: those that override `exposure`."""
    return sorted(
        name for name, kind in algorithms.items() if kind.exposure is not AlgorithmSettings.exposure
    )


class WholeClientSettings(AlgorithmSettings):
    """Methods whose clients send one vector a round; privacy protects the whole client."""

    @property
    def fresh_noise(self) -> bool:
        """True: each round clips the move away from the broadcast and adds fresh noise."""
        return True

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`. The whole move is clipped, whichever of its data caused it."""
        return Release(clip, NoiseLaw())
