"""What is audited: an algorithm as a configuration builds it, what it declares, and what is certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trilemma.base.errors import PrivacyError
from trilemma.base.keys import Key
from trilemma.experiment import Config, auto
from trilemma.experiment.resolve import Resolved, resolve
from trilemma.learning import Algorithm
from trilemma.learning.protocol import State
from trilemma.models.types import Model
from trilemma.privacy import Guarantee, Threat, Verdict
from trilemma.privacy.mechanism import WHOLE, Mechanism, mechanism
from trilemma.privacy.types import Arithmetic, Release


@dataclass(frozen=True)
class Subject:
    """A private algorithm under audit.

    `release` and `threat` are what it declares and what the verdict is about; `examples` is the public
    number that every client holds at least, `bound` the largest number in a broadcast that is answered.
    """

    name: str
    algorithm: Algorithm
    release: Release
    threat: Threat
    rounds: int
    delta: float
    verdict: Verdict
    examples: int
    bound: float

    @classmethod
    def of(
        cls, config: Config, examples: int, arithmetic: Arithmetic, rounds: int | None = None
    ) -> Subject | None:
        """Return what `config` means for clients of at least `examples` examples; None: nothing is noised."""
        config = auto.settled(config, examples, dim=1)  # of what is chosen, the server's step alone needs d
        resolved = resolve(config, examples, arithmetic=arithmetic)
        return cls.resolved(config, resolved, examples, rounds)

    @classmethod
    def resolved(
        cls, config: Config, resolved: Resolved, examples: int, rounds: int | None = None
    ) -> Subject | None:
        """Return the same for a configuration that is resolved already."""
        release, threat = resolved.release, resolved.threat
        if release is None or threat is None or release.law.silent:
            return None
        if threat.neighbours is not None:
            raise PrivacyError(
                f"[privacy] neighbours = {threat.neighbours}: the attacks here know the noise of clients who "
                "share secrets with all others; audit the configuration without it"
            )
        if threat.scales:
            raise PrivacyError(
                "[federation] weights: the attacks here know the noise of clients who are all alike; audit "
                "the configuration without them"
            )
        asked = config.run.rounds if rounds is None else min(rounds, config.run.rounds)
        return cls(
            name=config.algorithm.name,
            algorithm=resolved.algorithm,
            release=release,
            threat=threat,
            rounds=asked,
            delta=config.privacy.delta,
            verdict=resolved.verdict(asked, config.privacy.delta),
            examples=examples,
            bound=config.privacy.broadcast_bound,
        )

    @property
    def certified(self) -> float | None:
        """The certified ε; None: there is none."""
        return self.verdict.epsilon if isinstance(self.verdict, Guarantee) else None

    @property
    def amplified(self) -> bool:
        """Whether an example is left out of some batches, and the certificate counts on that."""
        return self.release.unit == "example" and self.release.sampling.amplifies

    @property
    def absent(self) -> bool:
        """Whether neighbours differ by an example that is there or not."""
        return self.release.adjacency == "add-remove"

    @property
    def mechanism(self) -> Mechanism:
        """One round as accountants see it; where they refuse it, one of the client's own noise."""
        try:
            return mechanism(self.release, self.threat)
        except PrivacyError:
            return Mechanism(1.0, self.release.sampling if self.amplified else WHOLE, self.release.adjacency)

    @property
    def declared(self) -> float:
        """How far the data may move a release: half a replacement's move where an example comes or goes."""
        return self.release.sensitivity / (2 if self.absent else 1)

    def first_broadcast(self, model: Model, key: Key) -> dict[str, Tensor]:
        """Return what the algorithm itself broadcasts first."""
        return dict(self.algorithm.init(model, (0,), key.fold("init")).broadcast)

    def always(self, broadcast: State) -> Sequence[State]:
        """Return the same broadcast for every round."""
        return [broadcast] * self.rounds
