"""Where a round leads once its model has gone on, on examples in which liars have no say.

`Ahead` tells liars how many examples the model mistakes that a round leads to. Where clients, or the server,
go on from there on their own examples (`trilemma.learning.tuning`), what counts is what is mistaken after
that. For a model θ whoever goes on ends at T(θ), and the way there is smooth but for two choices, how far to
trust the clients and how hard to be pulled back:

    errors(θ) = mean over owners of the mean over the honest examples of 1 − p at T(θ)
    slope(θ)  = mean over owners of scale · pull · (H + pull)⁻¹ ∇(1 − p) at T(θ)

H is the second derivative of the owner's loss at T(θ) (`tuning.unseen`). In a climb each owner takes, of the
choices that it was seen to make after the lies so far, the one by which it errs least: it has examples to
choose by, and a lie that is harmful by the choice of before is no lie where it is seen through. Whether a lie
is worth it is told by what owners really choose after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trilemma.learning.tuning import Tuned, going_on, origin_of, unseen
from trilemma.simulate.ahead import Ahead
from trilemma.simulate.experiment import SimulatedClients


@dataclass(frozen=True)
class _Choice:
    """How an owner goes on, and by which multiple of its move p is counted: the one with the least loss."""

    scale: float
    pull: float
    multiple: float


@dataclass(frozen=True)
class AheadGoingOn(Ahead):
    """As `Ahead`, with errors counted after the `owners` went on from the model the round leads to."""

    owners: Sequence[SimulatedClients] = ()
    choices: Sequence[Sequence[_Choice]] = ()
    """Of which choices each owner takes the best in a climb; none: it chooses among all."""
    known: dict[bytes, Sequence[Tuned]] = field(default_factory=dict)
    """Where owners went from models that were asked about."""

    @classmethod
    def of(cls, ahead: Ahead) -> AheadGoingOn | None:
        """Return the same look ahead with those who go on after this round; None where nobody does."""
        owners = ahead.shown()
        seen = (ahead.experiment, ahead.progress, ahead.sent, ahead.heard)
        return cls(*seen, owners) if owners else None

    def errors(self, far: float, lie: tuple[Tensor, Tensor] | None = None, sharper: float = 1.0) -> Tensor:
        """Return where to push the aggregate so `far` (d,) that most examples are mistaken afterwards.

        As `Ahead.errors`, which sets out from a `lie` or from none.
        """
        landed = self.after if lie is None else self._rehearsed(replace(self.sent, vectors=lie[1]))
        self._gone_on(landed)
        seen = [
            {(one.scale or 1.0, one.pull) for one in every}
            for every in zip(*self.known.values(), strict=True)
        ]
        choices = []
        for owner, made in zip(self.owners, seen, strict=True):
            gone = [self._by(owner, landed, *one) for one in sorted(made)]
            choices.append(
                [_Choice(one.scale, one.pull, self._best_multiple(one.params - self.start)) for one in gone]
            )
        return Ahead.errors(replace(self, choices=choices), far, lie, sharper)

    def mistaken(self, vectors: Tensor, sharper: float = 1.0) -> float:
        """Return the mean of 1 − p after the owners went on from where the messages `vectors` (k, d) lead."""
        gone = self._gone_on(self._rehearsed(replace(self.sent, vectors=vectors)))
        return sum(
            self._counted(one, sharper * self._best_multiple(one.params - self.start))[1] for one in gone
        ) / len(gone)

    def _gone_on(self, params: Tensor) -> Sequence[Tuned]:
        """Return where every owner goes from a model (d,), by its own choice among all."""
        asked = params.detach().cpu().numpy().tobytes()
        if asked not in self.known:
            self.known[asked] = [self.experiment.tuned(owner, params) for owner in self.owners]
        return self.known[asked]

    def _by(self, owner: SimulatedClients, params: Tensor, scale: float, pull: float) -> Tuned:
        """Return where an owner goes from a model (d,) by this choice."""
        origin = origin_of(self.experiment.resolved.algorithm, self.honest.model, self.experiment.key)
        return going_on(owner, origin.to(params), params, scale, pull)

    def _counted(self, one: Tuned, multiple: float) -> tuple[Tensor, float]:
        """Return p, times every example's share, and the mean of 1 − p, of a multiple of an owner's move."""
        return self._likely(self.start + multiple * (one.params - self.start))

    def _slope(self, move: Tensor, sharper: float) -> tuple[float, Tensor]:
        """Return the mean of 1 − p after the owners went on, and its gradient by the model's move (d,)."""
        mistaken, slope = [], []
        for owner, choices in zip(self.owners, self.choices, strict=True):
            gone = [self._by(owner, self.start + move, by.scale, by.pull) for by in choices]
            found = [self._counted(one, sharper * by.multiple) for one, by in zip(gone, choices, strict=True)]
            best = min(range(len(found)), key=lambda which: found[which][1])
            (likely, errors), one, multiple = found[best], gone[best], sharper * choices[best].multiple
            rises = multiple * self.steepest(self.start + multiple * (one.params - self.start), likely)
            mistaken.append(errors)
            slope.append(one.scale * unseen(owner, one, rises))
        return sum(mistaken) / len(mistaken), torch.stack(slope).mean(0)
