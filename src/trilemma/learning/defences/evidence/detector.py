"""How a defended server judges its clients: pure functions on the history that it keeps.

The tests use Gram matrices only: that of the sums S over all rounds, when a look is due (`schedule`), and in
every round that of the messages x, which cover about 1/(1 − β) rounds if clients average with momentum β.
Sums alone would let liars jump: after pushing one way as far as hides in all rounds, they could push twice as
far back in a single round.

**Undo.** The part of expelled clients in the model's move is q = Σ_{i out} w_i S_i. It contains noise that
cancels noise of the remaining clients and must stay: about x² = −d Σ_{i out} w_i² Σ_{j in} K_ij of ‖q‖², with
K the covariance of the noise in S. Subtracting the share 1 − x²/‖q‖² of q leaves the least mean square error.
Along directions that stood out of the sums, where there is little noise, q is subtracted entirely, together
with the corrections of its rounds, so that the move becomes that of the remaining clients. Gross lies are
thus undone entirely, subtle ones hardly: those are left to the correction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation import Chain
from trilemma.aggregation.mean import Mean
from trilemma.learning.defences.evidence.conviction import Expulsion, clients_of, convict, proved
from trilemma.learning.defences.evidence.correction import UNUSED, Correction, correct, worth_correcting
from trilemma.learning.defences.evidence.directions import Directions, visible
from trilemma.learning.defences.evidence.history import ClientHistory, added
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.defences.evidence.schedule import looks
from trilemma.learning.defences.evidence.spare import Spare
from trilemma.learning.defences.stage import lessened
from trilemma.learning.settings import Setup
from trilemma.learning.steps.trace import Array, Law, Places, Trace

if TYPE_CHECKING:
    from trilemma.learning.defences.evidence.guard import Evidence


@dataclass(frozen=True)
class Look:
    """One test of the vectors, sums or messages, of the clients in `rows` (m,).

    `gram` (m, m) is their Gram matrix, and `law` is their law if the clients are honest.
    """

    rows: Places
    gram: Array
    law: Law
    _directions: dict[int, Directions] = field(default_factory=dict, repr=False, compare=False)
    _convicted: dict[tuple[int, float], list[Expulsion]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def directions(self, liars: int) -> Directions:
        """Return the directions that stand out, among clients that sent something; computed once."""
        if liars not in self._directions:
            heard = self.law.participating
            gram = torch.from_numpy(self.gram[np.ix_(heard, heard)])[None, None]
            look = LookLimits.of(self.law.select(heard), liars, UNUSED) if len(heard) else None
            self._directions[liars] = Directions.none(1, 0) if look is None else visible(gram, [look])[0]
        return self._directions[liars]

    def convicted(self, liars: int, alarm: float) -> list[Expulsion]:
        """Return the expulsions, by place in `rows`, if at most `liars` of them lie; computed once."""
        if (liars, alarm) not in self._convicted:
            self._convicted[liars, alarm] = convict(
                self.gram, self.law, liars, alarm, partial(self.directions, liars)
            )
        return self._convicted[liars, alarm]

    def without(self, clients: Places) -> Look:
        """Return the look at all but these clients."""
        if not len(clients):
            return self
        kept = np.flatnonzero(~np.isin(self.rows, clients))
        return Look(self.rows[kept], self.gram[np.ix_(kept, kept)], self.law.select(kept))


@dataclass(frozen=True)
class Detector:
    """The evidence stage of one federation: pure functions on its history."""

    settings: Evidence
    setup: Setup
    trace: Trace
    spare: tuple[Spare, Spare, Spare] = field(
        default_factory=lambda: (Spare(), Spare(), Spare()), repr=False, compare=False
    )

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """The rounds in which the sums are looked at."""
        return looks(self.setup.rounds, self.settings.pace, self.settings.wait)

    def due(self, history: ClientHistory, round_: int) -> bool:
        """Tell whether the sums are looked at in a round: if a look fell due since the last round held."""
        last = history.last_before(round_)
        return any(last < look <= round_ for look in self.schedule)

    def liars(self, history: ClientHistory) -> int:
        """Return how many members may still lie: f less the liars that expulsions have proved."""
        return max(0, self.setup.byzantine - history.liars_proved)

    def expected(self, count: int, history: ClientHistory) -> int:
        """Return how many liars the rule is told to expect among `count` messages."""
        return min(self.liars(history), (count - 1) // 2)

    def updated(
        self, history: ClientHistory, x: Tensor, senders: Places, round_: int, sharing: Places | None = None
    ) -> ClientHistory:
        """Return the history with a round's messages x (k, d) of `senders` added; all numbers are finite.

        `sharing` are the clients that share secrets in the round; None: all members.
        """
        assert self.setup.release is not None
        law, step, so_far = self.setup.release.law, self.trace.step(round_), slice(round_ + 1)
        everybody = len(senders) == len(history.members) and bool((np.diff(senders) == 1).all())
        rows = slice(None) if everybody else torch.from_numpy(senders)
        sums = added(history.sums, x, rows, step, self.spare[0])
        # numpy, because torch would start all its threads, which takes longer than adding so few numbers.
        carried, coefficients = (
            _copied(one, spare)
            for spare, one in zip(self.spare[1:], (history.carried, history.coefficients), strict=True)
        )
        mine = slice(None) if everybody else senders
        held = self.trace.keeps(round_) * carried[mine, so_far]
        held[:, round_] = self.trace.adds(round_)
        carried[mine, so_far] = held
        coefficients[mine, so_far] += step * held
        own, shared, clips = history.own.clone(), history.shared.clone(), history.clips.clone()
        own[round_], shared[round_] = law.sigma_ind**2, law.sigma_cor**2
        among = history.sharing.clone()
        among[history.staying if sharing is None else sharing, round_] = True
        length = float(torch.linalg.vector_norm(history.origin + history.moved)) if self.trace.decay else 0.0
        clips[round_] = self.setup.release.clip + self.trace.decay * length
        return replace(
            history,
            sums=sums,
            carried=torch.from_numpy(carried),
            coefficients=torch.from_numpy(coefficients),
            own=own,
            shared=shared,
            sharing=among,
            clips=clips,
        )

    def law(self, history: ClientHistory) -> Law:
        """Return the law of all clients' sums."""
        return history.law(history.coefficients, np.arange(len(history.members)), self.setup.neighbours)

    def law_of_messages(self, history: ClientHistory, senders: Places) -> Law:
        """Return the law of the last messages of `senders`."""
        return history.law(history.carried, senders, self.setup.neighbours)

    def sums(self, history: ClientHistory, gram: Array, law: Law | None = None) -> Look:
        """Return the look at the members' sums; `gram` (n, n) is the Gram matrix of all n rows of sums."""
        rows = history.staying
        kept = gram if len(rows) == len(gram) else gram[np.ix_(rows, rows)]
        return Look(rows, kept, law or self.law(history).select(rows))

    def messages(self, history: ClientHistory, gram: Array, senders: Places, law: Law | None = None) -> Look:
        """Return the look at the round's messages of `senders`, all members; `gram` (k, k) is theirs."""
        return Look(senders, gram, law or self.law_of_messages(history, senders))

    @property
    def alarms(self) -> tuple[float, float]:
        """The largest probability that one look at sums, and one at messages, expels an honest client."""
        half = self.settings.alarm / 2
        return half / len(self.schedule), half / self.setup.rounds

    def convict(self, sums: Look | None, messages: Look, history: ClientHistory) -> list[Expulsion]:
        """Return the expulsions, each client once: first by the sums (None: not looked at), then by messages.

        Clients convicted by the sums are left out of the look at messages: they explain every failing pair
        that they are in.
        """
        found = list[Expulsion]()
        for look, alarm in zip((sums, messages), self.alarms, strict=True):
            if look is None:
                continue
            left = look.without(clients_of(found))
            liars = max(0, self.liars(history) - int(proved(found)))
            for one in left.convicted(liars, alarm):
                client, others = left.rows[one.client], (int(left.rows[j]) for j in one.others)
                found.append(replace(one, client=int(client), others=tuple(others)))
        return sorted(found, key=lambda one: one.client)

    def undone(
        self, before: ClientHistory, found: Sequence[Expulsion], sums: Look, history: ClientHistory
    ) -> Tensor:
        """Return what to subtract from the model's move (d,) for the expulsions `found` (see the module).

        `before` is the history before the round: what the expelled sent in it has not moved the model.
        `sums` is the look at the sums in `history` of all members, including those expelled now.
        """
        total = float(before.weights.sum())
        if not self.settings.undo or not found or total == 0:
            return torch.zeros_like(before.moved)
        shares, expelled = before.weights.cpu().numpy() / total, clients_of(found)
        weights = np.zeros(len(before.sums))
        weights[expelled] = shares[expelled]
        common, rest = self.law(before).covariance, np.setdiff1d(before.staying, expelled)
        noise = -before.sums.shape[1] * float(weights**2 @ common[:, rest].sum(axis=1))  # x²
        q, undone = combined(before.sums, weights), torch.zeros_like(before.moved)
        # All of the move but the part of the members who stay: q, and what corrections added.
        excess = before.moved - combined(before.sums, np.where(before.members.numpy(), shares - weights, 0.0))
        for direction in sums.directions(self.liars(history)).mix[0].numpy():
            mix = np.zeros(len(history.sums))
            mix[sums.rows[sums.law.participating]] = direction
            v = combined(history.sums, mix)  # of length 1
            undone, q = undone + (v @ excess) * v, q - (v @ q) * v
        square = float(q @ q)
        return undone + q * (max(0.0, 1 - noise / square) if square > 0 else 0.0)

    @cached_property
    def robust(self) -> bool:
        """Whether the rule after this stage is robust by itself: whether it is not the mean."""
        return not self.setup.rule.name.endswith("mean")

    def rule(self, count: int, history: ClientHistory) -> Chain | None:
        """Return the rule as it is applied to `count` messages; None if it is their mean."""
        rule = lessened(self.setup.rule, self.expected(count, history))
        assert isinstance(rule, Chain)
        plain = isinstance(rule.last, Mean) and all(step.passes for step in rule.steps)
        return None if plain else rule

    def able(self, members: int, history: ClientHistory) -> bool:
        """Tell whether moves of so many members are set right."""
        return bool(self.settings.correct) and worth_correcting(members, self.liars(history), self.robust)

    def shares(self, rows: Places, weights: Tensor) -> Array:
        """Return the factors (m,) that scale up the vectors of clients who were not heard in every round.

        `weights` (n, T) are as in `corrected`.
        """
        weight = np.abs(weights.cpu().numpy()[rows].sum(axis=1))
        found: Array = weight.max(initial=0.0) / np.maximum(weight, 1e-300)
        return found

    def corrected(
        self,
        look: Look,
        moved: Callable[[], Array],
        weights: Tensor,
        history: ClientHistory,
        parts: Callable[[], Array] | None = None,
    ) -> Correction:
        """Return how a move is set right by a look.

        `moved` and `parts` return what `correct` takes under these names; they are called only if a direction
        stands out, since nothing is set right otherwise. `weights` (n, T) are the coefficients of every
        round's release in the vectors looked at; by them, clients not heard in every round are scaled up.
        """
        liars = self.liars(history)
        seen = look.directions(liars) if self.able(len(look.law.participating), history) else None
        if not seen:
            return Correction(1.0, np.zeros(len(look.gram)))
        known = None if parts is None else parts()
        return correct(look.gram, moved(), look.law, liars, self.shares(look.rows, weights), known, seen)

    def parts(self, history: ClientHistory) -> Array:
        """Return the members' shares in the model's move (m,)."""
        taken = history.weights.cpu().numpy()
        found: Array = taken[history.staying] / max(float(taken[history.staying].sum()), 1e-300)
        return found


def _copied(part: Tensor, spare: Spare) -> Array:
    """Return a copy of a tensor on the host, in spare memory."""
    found: Array = spare.like(part).numpy()
    np.copyto(found, part.numpy())
    return found


def combined(sums: Tensor, coefficients: Array) -> Tensor:
    """Return coefficients @ sums (d,), on the device of the sums."""
    return torch.from_numpy(coefficients).to(sums.device, sums.dtype) @ sums
