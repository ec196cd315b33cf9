"""The vocabulary of the privacy room: what is released, and with which noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trilemma.base.errors import PrivacyError, UserError, nearest
from trilemma.privacy.noise.drawing import EXACT, Drawing

if TYPE_CHECKING:  # whoever reads a ledger waits for no torch
    import torch
    from torch import Tensor

Unit = Literal["user", "example"]
Adjacency = Literal["replace", "add-remove", "published"]
Scheme = Literal["none", "poisson", "without-replacement"]
Assumption = Literal["guaranteed", "published"]
"""Whether a figure holds however many of the f liars exist, or is the papers', which counts on them."""
Arithmetic = Literal["float", "grid"]
"""Where contribution and noise meet: among floating-point numbers, or on a grid (`privacy.noise.grid`)."""


class AccountingFailure(PrivacyError):
    """A figure that could not be computed, though it is defined: a grid too large, a package missing."""


def choice(what: str, value: str, allowed: object) -> None:
    """Refuse `value` unless the Literal `allowed` lists it, saying what was probably meant.

    >>> choice("unit", "exampel", Unit)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: unknown unit 'exampel': did you mean 'example'? Allowed: example, user
    """
    names: tuple[str, ...] = get_args(allowed)
    if value not in names:
        raise UserError(f"unknown {what} {value!r}: {nearest(value, names)}")


SMALLEST = 1e-100
"""The least standard deviation, and the inverse of the largest: squares of others are no numbers."""


@dataclass(frozen=True)
class NoiseLaw:
    """Gaussian noise of the honest clients: N(0, σ_ind² I) each, and ±N(0, σ_cor² I) per pair.

    >>> NoiseLaw(sigma_cor=0.6).silent, NoiseLaw().silent
    (False, True)
    """

    sigma_ind: float = 0.0
    sigma_cor: float = 0.0

    def __post_init__(self) -> None:
        for name, sigma in (("sigma_ind", self.sigma_ind), ("sigma_cor", self.sigma_cor)):
            if not (math.isfinite(sigma) and sigma >= 0):
                raise PrivacyError(f"{name} is a standard deviation: finite and not negative, got {sigma}")
            if sigma and not SMALLEST <= sigma <= 1 / SMALLEST:
                raise PrivacyError(f"{name} = {sigma:g}: allowed are 0 and {SMALLEST:g} to {1 / SMALLEST:g}")

    @property
    def silent(self) -> bool:
        """Whether there is no noise at all."""
        return self.sigma_ind == 0 and self.sigma_cor == 0


class NoiseSource(Protocol):
    """Where clients' noise comes from: a simulation's keys, or the secrets of a real federation."""

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) that clients `ids` add in round `round_`, float32."""

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the same in whole steps of a grid (`privacy.noise.grid`), int64."""


@runtime_checkable
class PiecewiseNoise(NoiseSource, Protocol):
    """A source that also gives one client's noise in pieces, for messages of which memory holds one copy."""

    def pieces(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int
    ) -> Iterator[NDArray[np.float64]]:
        """Return what `steps` gives, one piece after the other: whole numbers, as doubles."""


@dataclass(frozen=True)
class Sampling:
    """How a batch is drawn from a client's m examples: not at all, Poisson, or without replacement.

    `rate` is the chance that a given example is in the batch, b/m.

    >>> Sampling("poisson", 100 / 6000).amplifies, Sampling().amplifies
    (True, False)
    """

    scheme: Scheme = "none"
    rate: float = 1.0

    def __post_init__(self) -> None:
        choice("sampling scheme", self.scheme, Scheme)
        if not 0 < self.rate <= 1:
            raise UserError(f"the sampling rate b/m lies in (0, 1], got {self.rate}")
        if self.scheme == "none" and self.rate != 1:
            raise UserError(f"without sampling every example is used: the rate is 1, got {self.rate}")

    @property
    def amplifies(self) -> bool:
        """Whether an example is left out of some batches."""
        return self.scheme != "none" and self.rate < 1


def check_sampling(sampling: Sampling, adjacency: Adjacency) -> None:
    """Refuse an adjacency that no guarantee exists for under `sampling`.

    >>> check_sampling(Sampling("without-replacement", 0.1), "add-remove")
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: sampling without replacement keeps the batch size fixed, ...
    """
    if adjacency == "add-remove" and sampling.scheme == "without-replacement":
        raise PrivacyError(
            "sampling without replacement keeps the batch size fixed, so its guarantee is for replacing "
            "an example: use adjacency 'replace', or Poisson sampling"
        )


@dataclass(frozen=True)
class Release:
    """What one client lets out in one round, as far as privacy is concerned.

    `clip` bounds a unit's contribution to the message; for unit "example" the contribution is averaged over
    `batch` examples, a public constant, so replacing the unit moves the message by 2·clip (user) or
    2·clip/batch (example). `drawing` says how far the noise that is really drawn in a round is from the
    Gaussian of the law (`trilemma.privacy.noise.grid_price` for a grid's): accountants pay for it.

    `adjacency` says which two data sets the guarantee makes indistinguishable:

    * "replace": the unit is replaced by any other. Both units have it; the default.
    * "add-remove": an example is there or not, which moves the message by clip/batch only.
    * "published": the convention behind the printed budgets of the SAFE-DSHB and CafCor papers. The noise is
      measured against the replacement's move 2·clip/batch, then put into the add/remove formula for Poisson
      sampling, however batches are drawn. Use it to reproduce figures; the others are the certificates.

    >>> Release(clip=1.0, law=NoiseLaw(0.5), unit="example", batch=25).sensitivity
    0.08
    """

    clip: float
    law: NoiseLaw
    unit: Unit = "user"
    batch: int = 1
    sampling: Sampling = Sampling()
    adjacency: Adjacency = "replace"
    drawing: Drawing = EXACT

    def __post_init__(self) -> None:
        choice("privacy unit", self.unit, Unit)
        choice("adjacency", self.adjacency, Adjacency)
        if not self.clip > 0:
            raise PrivacyError(f"clip bounds what a unit contributes: positive, got {self.clip}")
        if self.batch < 1:
            raise UserError(f"batch is the number of examples averaged: at least 1, got {self.batch}")
        if self.unit == "user" and self.adjacency == "add-remove":
            raise PrivacyError(
                "a user-level guarantee replaces a user: the number of clients is public. "
                "Adjacency 'add-remove' needs unit 'example'"
            )
        check_sampling(self.sampling, self.adjacency)

    @property
    def sensitivity(self) -> float:
        """Largest move of the message when the unit is replaced."""
        return 2.0 * self.clip / (self.batch if self.unit == "example" else 1)
