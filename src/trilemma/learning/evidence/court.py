"""What a defended server judges by: pure functions on the file that it keeps.

The tests look at Gram matrices alone: of S, all rounds, when a look is due (`schedule`), and of x, this
round's messages, which are windows of about 1/(1 − β) rounds where clients average with momentum β. Sums
alone would let liars jump: who has pushed one way as far as hides in all rounds may push as far the other way
in a single one.

**Undo.** An expelled client's part in the move, q = Σ_{i out} w_i S_i, is taken back as far as it is not the
noise that cancels other clients': of ‖q‖² about x² = dσ_cor² Σ_s c²·(pairs of one out and one in) is, so that
1 − x²/‖q‖² of q leaves the least error in mean square. Along directions that stood out of the sums with them,
where noise is short, the move becomes that of those who stay: q goes whole, and whatever set its rounds right
goes with it. Gross lies so go whole, subtle ones hardly: those are the correction's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation import Chain
from trilemma.aggregation.evidence import Evidence
from trilemma.aggregation.mean import Mean
from trilemma.learning.evidence.conviction import Expulsion, clients_of, convict, proved
from trilemma.learning.evidence.correction import Correction, Direction, correct, visible, worth_correcting
from trilemma.learning.evidence.file import File, added
from trilemma.learning.evidence.schedule import looks
from trilemma.learning.evidence.spare import Spare
from trilemma.learning.screens.screen import lessened
from trilemma.learning.settings import Setup
from trilemma.learning.trace import Array, Law, Places, Trace


@dataclass(frozen=True)
class Look:
    """One vector of every client in `rows`: their Gram matrix, and what it is like if they are honest."""

    rows: Places
    gram: Array
    law: Law
    _seen: dict[int, list[Direction]] = field(default_factory=dict, repr=False, compare=False)
    _convicted: dict[tuple[int, float], list[Expulsion]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def seen(self, liars: int) -> list[Direction]:
        """Return the directions that stand out among those who sent something; worked out once."""
        if liars not in self._seen:
            heard = self.law.heard
            gram = self.gram if len(heard) == len(self.gram) else self.gram[np.ix_(heard, heard)]
            self._seen[liars] = visible(gram, self.law.select(heard), liars + 1) if len(heard) else []
        return self._seen[liars]

    def convicted(self, liars: int, alarm: float) -> list[Expulsion]:
        """Return who of them is proved to lie, of whom `liars` may, by place in `rows`; worked out once."""
        if (liars, alarm) not in self._convicted:
            self._convicted[liars, alarm] = convict(
                self.gram, self.law, liars, alarm, partial(self.seen, liars)
            )
        return self._convicted[liars, alarm]

    def without(self, clients: Places) -> Look:
        """Return the look at the others."""
        if not len(clients):
            return self
        kept = np.flatnonzero(~np.isin(self.rows, clients))
        return Look(self.rows[kept], self.gram[np.ix_(kept, kept)], self.law.select(kept))


@dataclass(frozen=True)
class Court:
    """The stage for one federation: pure functions on its file."""

    settings: Evidence
    setup: Setup
    trace: Trace
    spare: tuple[Spare, Spare, Spare] = field(
        default_factory=lambda: (Spare(), Spare(), Spare()), repr=False, compare=False
    )

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """The rounds in which sums are looked at."""
        return looks(self.setup.rounds, self.settings.pace, self.settings.wait)

    def due(self, file: File, round_: int) -> bool:
        """Tell whether sums are looked at in a round: since the last one that was held, a look is due."""
        last = file.last_before(round_)
        return any(last < look <= round_ for look in self.schedule)

    def liars(self, file: File) -> int:
        """How many of the members may still lie: of two that were set aside only one did for certain."""
        return max(0, self.setup.byzantine - file.liars_proved)

    def expected(self, count: int, file: File) -> int:
        """Return how many liars the rule is told to expect among so many messages."""
        return min(self.liars(file), (count - 1) // 2)

    def heard(self, file: File, x: Tensor, senders: Places, round_: int, sharing: int | None = None) -> File:
        """Add a round's messages x (k, d), all finite, of `senders` to the file.

        `sharing` is how many clients share secrets in the round; None: all who are in.
        """
        assert self.setup.release is not None
        law, step, so_far = self.setup.release.law, self.trace.step(round_), slice(round_ + 1)
        everybody = len(senders) == len(file.members) and bool((np.diff(senders) == 1).all())
        rows = slice(None) if everybody else torch.from_numpy(senders)
        sums = added(file.sums, x, rows, step, self.spare[0])
        # numpy: for so few numbers torch would wake all its threads, which takes longer than to add them.
        carried, coefficients = (
            _copied(one, spare)
            for spare, one in zip(self.spare[1:], (file.carried, file.coefficients), strict=True)
        )
        mine = slice(None) if everybody else senders
        held = self.trace.keeps(round_) * carried[mine, so_far]
        held[:, round_] = self.trace.adds(round_)
        carried[mine, so_far] = held
        coefficients[mine, so_far] += step * held
        spreads, shared, clips = file.spreads.clone(), file.shared.clone(), file.clips.clone()
        shared[round_] = law.sigma_cor**2
        spreads[round_] = law.sigma_ind**2 + (sharing or len(file.staying)) * law.sigma_cor**2
        length = float(torch.linalg.vector_norm(file.origin + file.moved)) if self.trace.decay else 0.0
        clips[round_] = self.setup.release.clip + self.trace.decay * length
        return replace(
            file,
            sums=sums,
            carried=torch.from_numpy(carried),
            coefficients=torch.from_numpy(coefficients),
            spreads=spreads,
            shared=shared,
            clips=clips,
        )

    def law(self, file: File) -> Law:
        """Return the law of all clients' sums."""
        return file.law(file.coefficients, np.arange(len(file.members)))

    def sums(self, file: File, gram: Array, law: Law | None = None) -> Look:
        """Return the look at all rounds' sums of the members; `gram` (n, n) is everybody's."""
        rows = file.staying
        kept = gram if len(rows) == len(gram) else gram[np.ix_(rows, rows)]
        return Look(rows, kept, law or self.law(file).select(rows))

    def messages(self, file: File, gram: Array, senders: Places, law: Law | None = None) -> Look:
        """Return the look at this round's messages of `senders`, all members; `gram` (k, k) is theirs."""
        return Look(senders, gram, law or file.law(file.carried, senders))

    @property
    def alarms(self) -> tuple[float, float]:
        """With what probability a single look at sums, and one at messages, may expel an honest client."""
        half = self.settings.alarm / 2
        return half / len(self.schedule), half / self.setup.rounds

    def convict(self, sums: Look | None, messages: Look, file: File) -> list[Expulsion]:
        """Return who is proved to lie, each client once: by the sums, where they are looked at, by messages.

        Whoever the sums convict is no part of what is looked at next: it explains the pairs that it is in.
        """
        found = list[Expulsion]()
        for look, alarm in zip((sums, messages), self.alarms, strict=True):
            if look is None:
                continue
            left = look.without(clients_of(found))
            liars = max(0, self.liars(file) - int(proved(found)))
            for one in left.convicted(liars, alarm):
                client, others = left.rows[one.client], (int(left.rows[j]) for j in one.others)
                found.append(replace(one, client=int(client), others=tuple(others)))
        return sorted(found, key=lambda one: one.client)

    def undone(self, before: File, found: Sequence[Expulsion], sums: Look, file: File) -> Tensor:
        """Return what to take out of the model's move (d,); `before` is the file before the round.

        The round's own messages of the expelled never moved the model: there is nothing of them to take back.
        `sums` is the look at all members' sums in `file`, those of the expelled among them.
        """
        total = float(before.taken.sum())
        if not self.settings.undo or not found or total == 0:
            return torch.zeros_like(before.moved)
        shares, expelled = before.taken.cpu().numpy() / total, clients_of(found)
        part = np.zeros(len(before.sums))
        part[expelled] = shares[expelled]
        squared = before.coefficients.cpu().numpy() ** 2 @ before.shared.cpu().numpy()
        pairs = before.sums.shape[1] * (len(before.staying) - len(expelled))
        noise = pairs * float(part**2 @ squared)
        rest, seen = combined(before.sums, part), torch.zeros_like(before.moved)
        others = before.moved - combined(before.sums, np.where(before.members.numpy(), shares - part, 0.0))
        for direction in sums.seen(self.liars(file)):
            mix = np.zeros(len(file.sums))
            mix[sums.rows[sums.law.heard]] = direction.mix
            way = combined(file.sums, mix)  # of length 1
            seen, rest = seen + (way @ others) * way, rest - (way @ rest) * way
        length = float(rest @ rest)
        return seen + rest * (max(0.0, 1 - noise / length) if length > 0 else 0.0)

    @cached_property
    def robust(self) -> bool:
        """Whether the rule after this stage does without it: whether it is not the mean."""
        return not self.setup.rule.name.endswith("mean")

    def rule(self, count: int, file: File) -> Chain | None:
        """Return the rule as it is applied to so many messages; None: it is their mean."""
        rule = lessened(self.setup.rule, self.expected(count, file))
        assert isinstance(rule, Chain)
        plain = isinstance(rule.last, Mean) and all(step.passes for step in rule.steps)
        return None if plain else rule

    def able(self, members: int, file: File) -> bool:
        """Whether the moves of so many are set right."""
        return bool(self.settings.correct) and worth_correcting(members, self.liars(file), self.robust)

    def shares(self, rows: Places, weights: Tensor) -> Array:
        """Return what scales the sums of `rows` to a whole run's; `weights` (n, T) as in `corrected`."""
        weight = np.abs(weights.cpu().numpy()[rows].sum(axis=1))
        found: Array = weight.max(initial=0.0) / np.maximum(weight, 1e-300)
        return found

    def corrected(
        self,
        look: Look,
        moved: Callable[[], Array],
        weights: Tensor,
        file: File,
        parts: Callable[[], Array] | None = None,
    ) -> Correction:
        """Return how a move is set right by what is looked at; `moved` and `parts` (m,) as in `correct`.

        Both are asked for only where a direction stands out; elsewhere nothing is set right.
        `weights` (n, T) say how much of every round's release is in it; clients that were not always heard
        count as if they had been.
        """
        liars = self.liars(file)
        seen = look.seen(liars) if self.able(len(look.law.heard), file) else []
        if not seen:
            return Correction(1.0, np.zeros(len(look.gram)))
        known = None if parts is None else parts()
        return correct(look.gram, moved(), look.law, liars, self.shares(look.rows, weights), known, seen)

    def parts(self, file: File) -> Array:
        """Return the members' shares in the model's move (m,)."""
        taken = file.taken.cpu().numpy()
        found: Array = taken[file.staying] / max(float(taken[file.staying].sum()), 1e-300)
        return found


def _copied(part: Tensor, spare: Spare) -> Array:
    """Return a copy of what lies on the host, in what is spare."""
    found: Array = spare.like(part).numpy()
    np.copyto(found, part.numpy())
    return found


def combined(sums: Tensor, coefficients: Array) -> Tensor:
    """Return coefficients @ sums, where the sums are."""
    return torch.from_numpy(coefficients).to(sums.device, sums.dtype) @ sums
