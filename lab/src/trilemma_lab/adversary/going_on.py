"""Where a round leads after tuning, on examples that liars cannot influence.

`Ahead` computes how many examples the model after a round mistakes. If clients or the server then tune the
model on their own examples (`trilemma.learning.steps.tuning`), mistakes count after tuning. An owner tunes a
model θ to T(θ). That map is smooth, except for the owner's choice of scale and pull:

    errors(θ) = mean over owners of the mean over the honest examples of 1 − p at T(θ)
    slope(θ)  = mean over owners of scale · pull · (H + pull)⁻¹ ∇(1 − p) at T(θ)

H is the second derivative of the owner's loss at T(θ) (`tuning.unseen`). In a climb, each owner is assumed to
take the choice with fewest errors among those it made after the lies so far: it has examples to choose by, so
a lie that harms only under another choice does not work. Whether a lie is worth sending is decided by what
owners really choose after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trilemma.learning.steps.tuning import Tuned, going_on, origin_of, unseen
from trilemma.simulate.experiment import SimulatedClients
from trilemma_lab.adversary.ahead import Ahead


@dataclass(frozen=True)
class _Choice:
    """An owner's scale and pull, and the multiple of the tuned model's move (with the least loss) for p."""

    scale: float
    pull: float
    multiple: float


@dataclass(frozen=True)
class AheadGoingOn(Ahead):
    """As `Ahead`, with errors counted after the `owners` have tuned the model to which the round leads."""

    owners: Sequence[SimulatedClients] = ()
    choices: Sequence[Sequence[_Choice]] = ()
    """The choices of which each owner takes the best in a climb."""
    known: dict[bytes, Sequence[Tuned]] = field(default_factory=dict)
    """Tuned models of all owners, by the bytes of the model before tuning."""

    @classmethod
    def of(cls, ahead: Ahead) -> AheadGoingOn | None:
        """Return the same with the owners that tune the model after this round; None if there are none."""
        owners = ahead.shown()
        seen = (ahead.experiment, ahead.progress, ahead.sent, ahead.participating, ahead.lookahead)
        return cls(*seen, owners) if owners else None

    def errors(self, far: float, lie: tuple[Tensor, Tensor] | None = None, sharper: float = 1.0) -> Tensor:
        """Return the direction (d,) in which to push so that most examples are mistaken after tuning.

        The arguments are those of `Ahead.errors`.
        """
        landed = self.after if lie is None else self._rehearsed(replace(self.sent, vectors=lie[1]))
        self._tuned(landed)
        seen = [
            {(one.scale or 1.0, one.pull) for one in every}
            for every in zip(*self.known.values(), strict=True)
        ]
        choices = []
        for owner, made in zip(self.owners, seen, strict=True):
            gone = [self._tuned_by(owner, landed, *one) for one in sorted(made)]
            choices.append(
                [_Choice(one.scale, one.pull, self._best_multiple(one.params - self.start)) for one in gone]
            )
        return Ahead.errors(replace(self, choices=choices), far, lie, sharper)

    def mistaken(self, vectors: Tensor, sharper: float = 1.0) -> float:
        """Return the mean of 1 − p after tuning the model to which the messages `vectors` (k, d) lead."""
        gone = self._tuned(self._rehearsed(replace(self.sent, vectors=vectors)))
        return sum(
            self._errors_of(one, sharper * self._best_multiple(one.params - self.start))[1] for one in gone
        ) / len(gone)

    def _tuned(self, params: Tensor) -> Sequence[Tuned]:
        """Return every owner's tuned model for a model (d,), with the owner's own choice."""
        asked = params.detach().cpu().numpy().tobytes()
        if asked not in self.known:
            self.known[asked] = [self.experiment.tuned(owner, params) for owner in self.owners]
        return self.known[asked]

    def _tuned_by(self, owner: SimulatedClients, params: Tensor, scale: float, pull: float) -> Tuned:
        """Return an owner's tuned model for a model (d,), with this scale and pull."""
        origin = origin_of(self.experiment.resolved.algorithm, self.honest.model, self.experiment.key)
        return going_on(owner, origin.to(params), params, scale, pull)

    def _errors_of(self, one: Tuned, multiple: float) -> tuple[Tensor, float]:
        """Return p times every example's share, and the mean of 1 − p, for a multiple of a tuned move."""
        return self._errors_at(self.start + multiple * (one.params - self.start))

    def _slope(self, move: Tensor, sharper: float) -> tuple[float, Tensor]:
        """Return the mean of 1 − p after tuning, and its gradient with respect to the model's move (d,)."""
        mistaken, slope = [], []
        for owner, choices in zip(self.owners, self.choices, strict=True):
            gone = [self._tuned_by(owner, self.start + move, by.scale, by.pull) for by in choices]
            found = [
                self._errors_of(one, sharper * by.multiple) for one, by in zip(gone, choices, strict=True)
            ]
            best = min(range(len(found)), key=lambda which: found[which][1])
            (likely, errors), one, multiple = found[best], gone[best], sharper * choices[best].multiple
            rises = multiple * self.steepest(self.start + multiple * (one.params - self.start), likely)
            mistaken.append(errors)
            slope.append(one.scale * unseen(owner, one, rises))
        return sum(mistaken) / len(mistaken), torch.stack(slope).mean(0)
