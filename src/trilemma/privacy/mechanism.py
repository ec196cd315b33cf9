"""One round's release, reduced to what an accountant needs, and the history of many."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trilemma.base.errors import PrivacyError
from trilemma.privacy.noise.drawing import EXACT, Drawing
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.types import SMALLEST, Adjacency, Release, Sampling, check_sampling

WHOLE = Sampling()
"""No sampling: every example is used in every round."""


@dataclass(frozen=True)
class Mechanism:
    """A Gaussian mechanism, perhaps on a sample of the examples.

    `z` is the noise multiplier: standard deviation over the move when a unit is replaced. `drawing` says
    how far the noise is from a Gaussian.

    >>> Mechanism(z=0.5, sampling=Sampling("poisson", 100 / 6000), adjacency="published").gaussian
    False
    """

    z: float
    sampling: Sampling = WHOLE
    adjacency: Adjacency = "replace"
    drawing: Drawing = EXACT

    def __post_init__(self) -> None:
        if not self.z >= 0:
            raise PrivacyError(f"a noise multiplier is not negative, got {self.z}")
        if self.z and not SMALLEST <= self.z <= 1 / SMALLEST:
            raise PrivacyError(
                f"the noise multiplier {self.z:g}, noise over what a unit moves, is out of all proportion: "
                f"allowed are 0 and {SMALLEST:g} to {1 / SMALLEST:g}"
            )
        check_sampling(self.sampling, self.adjacency)

    @property
    def gaussian(self) -> bool:
        """Whether this is a plain Gaussian mechanism, so that composition is exact."""
        return not self.sampling.amplifies

    @property
    def effective_z(self) -> float:
        """Noise over the move between two adjacent data sets: half a replacement when one adds or removes."""
        return 2 * self.z if self.adjacency == "add-remove" else self.z


History = tuple[tuple[Mechanism, int], ...]
"""Mechanisms and how many rounds each ran, in a fixed order."""


def multiplier(release: Release, threat: Threat) -> float:
    """Return the noise multiplier z of the worst honest client in one round, against a replaced unit.

    Under "cdp" it is that of the mean of the messages; under the others that of the client's own message
    given everyone else's, by Lemma A.4 (see `trilemma.privacy.threats.covariance` for the general form): in
    the worst case over the number of liars, or with the liars that `threat` counts on as published.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> release = Release(clip=2.25, law=NoiseLaw(sigma_cor=0.6))
    >>> round(multiplier(release, Threat("secldp", clients=100, byzantine=10, assume="published")), 4)
    1.2713
    >>> multiplier(release, Threat("secldp", clients=100, byzantine=10))
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: no guarantee: with sigma_ind = 0 the pairwise noise cancels ...
    """
    law, move = release.law, release.sensitivity
    if law.silent:
        return 0.0
    z = threat.model.multiplier(law, move, threat)
    if z == 0 and math.isfinite(move):
        raise PrivacyError(
            f"no guarantee under {threat.name}: only pairwise noise is added (sigma_ind = 0), and it "
            + ("cancels in the mean" if threat.model.central else "is known to the adversary")
        )
    return z


def mechanism(release: Release, threat: Threat) -> Mechanism:
    """Return what an accountant sees of one round.

    Sampling examples does not amplify a user-level guarantee: the user takes part in every round.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> sampling = Sampling("poisson", 0.01)
    >>> release = Release(clip=1.0, law=NoiseLaw(0.08), unit="example", batch=25, sampling=sampling)
    >>> mechanism(release, Threat("ldp", clients=7, byzantine=3))
    Mechanism(z=1.0, sampling=Sampling(scheme='poisson', rate=0.01), adjacency='replace', drawing=...)
    """
    sampling = release.sampling if release.unit == "example" else Sampling()
    return Mechanism(multiplier(release, threat), sampling, release.adjacency, release.drawing)


def leans_on_liars(release: Release, threat: Threat) -> bool:
    """Tell whether the figure of `release` under `threat` is wrong if nobody lies, or every liar colludes.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> published = Threat("secldp", clients=100, byzantine=10, assume="published")
    >>> leans_on_liars(Release(1.0, NoiseLaw(1.0, 0.6)), published), leans_on_liars(
    ...     Release(1.0, NoiseLaw(1.0)), Threat("ldp", clients=100, byzantine=10, assume="published")
    ... )
    (True, False)
    """
    return threat.hidden > 0 and release.law.sigma_cor > 0
