"""What attacks on a final model found, each beside what the certificate allows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trilemma.base.errors import UserError
from trilemma.federation.identity import signed_files
from trilemma.federation.identity.signed_files import Strict

ATTACKS = "attacks.json"
LARGEST = 1 << 20
CONFIDENCE = 0.99
"""With which a measurement of one attack is surely at least `low`."""


class Tried(Strict):
    """One attack.

    Attributes:
        attack: Its name.
        how: What the attacker has and does.
        measure: What `found` is.
        found: What was measured.
        low: What it is at least, with confidence: chance counts for the promise.
        chance: What blind guessing gives.
        allowed: The most that the certificate allows; None: it says nothing about this, for `why`.
        why: Where `allowed` comes from, or why there is none.
    """

    attack: str
    how: str
    measure: str
    found: float
    low: float
    chance: float | None = None
    allowed: float | None = None
    why: str

    @property
    def exceeds(self) -> bool:
        """Whether the measurement refutes the certificate."""
        return self.allowed is not None and self.low > self.allowed

    @property
    def sentence(self) -> str:
        """The outcome in a sentence."""
        limit = (
            "the certificate says nothing of it" if self.allowed is None else f"allowed: {self.allowed:.3f}"
        )
        blind = "" if self.chance is None else f", blind guessing {self.chance:.3f}"
        return f"{self.attack}: {self.measure} {self.found:.3f}{blind}, {limit}"


class Attacks(Strict):
    """All attacks on one model; `skipped` says of those that were not tried why."""

    version: Literal[1] = 1
    model_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    promise: str
    certified: float | None
    delta: float
    cover: Literal["not covered"] = "not covered"
    tried: tuple[Tried, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, path: Path) -> Attacks:
        """Read a file that anybody may have written."""
        try:
            return signed_files.read(signed_files.text_in(path, LARGEST), cls)
        except UserError as error:
            raise UserError(f"{path} does not say what attacks found: {error}") from None

    @property
    def text(self) -> str:
        """The file as it is written."""
        return signed_files.text_of(self)


def advantage_allowed(epsilon: float, delta: float) -> float:
    """Return the most by which true and false positives of any attack may differ: (e^ε − 1 + 2δ)/(e^ε + 1).

    It is the largest total variation between two neighbours' outputs (Kairouz, Oh, Viswanath, ICML 2015).

    >>> advantage_allowed(0.0, 0.0), round(advantage_allowed(1.0, 0.0), 3)
    (0.0, 0.462)
    """
    if epsilon > 500:
        return 1.0
    return min(1.0, (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1))
