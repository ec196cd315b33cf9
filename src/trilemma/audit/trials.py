"""Many runs at once, through the algorithm's own functions: a trial is a client of one stacked step.

An algorithm steps k clients together; here each of them is a run of its own. Noise is independent from one
coordinate to the next, so the noise of k runs of d coordinates is drawn as that of one run of k·d, by the
very source that a simulation or a node draws from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trilemma.audit.canaries import WholeBatch
from trilemma.base.keys import Key
from trilemma.learning import Algorithm, Messages
from trilemma.learning.messages import STEPS
from trilemma.learning.protocol import Clients, State
from trilemma.learning.steps.gridded import GridCodec
from trilemma.privacy import Noiseless
from trilemma.privacy.types import NoiseLaw, NoiseSource


@dataclass(frozen=True)
class TrialNoise:
    """Noise of k trials, in each of which `members` clients share secrets; the audited one is the first.

    `others` keeps what the other members' noise adds up to, by round: their data are the adversary's choice,
    so that is what it can work out from their messages.
    """

    source: NoiseSource
    members: int
    others: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) of the audited client in every trial."""
        rows = self.source.draw(law, self._everyone, len(ids) * dim, round_, device)
        return self._first(rows, len(ids), round_, 1.0)

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the same in whole steps of a grid."""
        rows = self.source.steps(law, step, self._everyone, len(ids) * dim, round_, device)
        return self._first(rows, len(ids), round_, step)

    @property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.members))

    def _first(self, rows: Tensor, trials: int, round_: int, unit: float) -> Tensor:
        rows = rows.view(self.members, trials, -1)
        self.others[round_] = rows[1:].sum(0).double() * unit
        return rows[0]


@dataclass(frozen=True)
class Impulse:
    """Noise that is `size` in every coordinate, for client s in round s alone: what a round's noise does."""

    size: float

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the impulse of the client whose round it is."""
        return torch.tensor([[self.size if i == round_ else 0.0] for i in ids]).expand(-1, dim)

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the same in whole steps."""
        return self.draw(law, ids, dim, round_, device).div(step).round().to(torch.int64)


def play(algorithm: Algorithm, clients: Clients, broadcasts: Sequence[State], key: Key) -> list[Messages]:
    """Return what k clients send over all rounds, all of them started alike, to these broadcasts."""
    first = algorithm.init(clients.model, (0,), key.fold("init")).clients
    state = {name: part.expand(len(clients.ids), *part.shape[1:]).clone() for name, part in first.items()}
    sent = []
    for round_, broadcast in enumerate(broadcasts):
        step = algorithm.client(broadcast, state, clients, round_, key.fold("round", round_))
        state = dict(step.state)
        sent.append(step.messages)
    return sent


@dataclass(frozen=True)
class CanaryReading:
    """How an observer reads releases out of messages.

    Integers on a grid are the releases. Other messages are put through the inverse of what they do to noise
    (`response` (d, T, T): how noise of round s shows in round t, by coordinate), which undoes momentum and
    the like.
    """

    step: float | None
    response: Tensor

    @classmethod
    def of(
        cls, algorithm: Algorithm, probes: WholeBatch, law: NoiseLaw, sent: Sequence[State], key: Key
    ) -> CanaryReading:
        """Find out with `probes`, one client per round, all alike: each gets an impulse in its own round."""
        codec = algorithm.message(probes.model).codec
        if isinstance(codec, GridCodec):
            return cls(codec.grid.step, torch.empty(0))
        size = math.hypot(law.sigma_ind, law.sigma_cor)
        loud, quiet = (
            _vectors(play(algorithm, replace(probes, noise=noise), sent, key))
            for noise in (Impulse(size), Noiseless())
        )
        response = (loud - quiet).movedim(2, 0) / size
        own = response.diagonal(dim1=1, dim2=2)
        readable = bool(torch.isfinite(response).all()) and float(own.abs().min()) > 1e-9
        return cls(None, response if readable else torch.eye(own.shape[1]).to(response).expand_as(response))

    def releases(self, sent: Sequence[Messages]) -> Tensor:
        """Return the releases (T, k, d), float64, up to what all runs have in common."""
        if self.step is not None:
            return torch.stack([one.beside[STEPS] for one in sent]).double() * self.step
        vectors = _vectors(sent)
        undone: Tensor = torch.linalg.solve(self.response, vectors.movedim(2, 0))
        return undone.movedim(0, 2)


def _vectors(sent: Sequence[Messages]) -> Tensor:
    return torch.stack([one.vectors for one in sent]).double()
