"""What the defended server would do with messages before they are sent, for liars who know its state.

`Lookahead` computes what `trilemma.learning.defences.rehearsal` would run from Gram matrices, for searches
that try many lies in a round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import Chain
from trilemma.attacks.span import bordered, inner_products
from trilemma.base.transfers import to_the_device
from trilemma.learning.defences.evidence import conviction, correction
from trilemma.learning.defences.evidence.detector import Detector
from trilemma.learning.defences.evidence.directions import Directions, visible
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.messages import side_by_side
from trilemma.learning.protocol import State
from trilemma.learning.steps.trace import Law, Places
from trilemma_lab.adversary.changed import Changed
from trilemma_lab.adversary.informed import Foreseen
from trilemma_lab.adversary.many_rounds import ForeseenRound, SearchEffort, Weigher, foreseen, recordable

SINGULAR = 1e-10
"""Relative cut-off for the eigenvalues of the basis' normalised Gram matrix. It may be singular: after the
first round, for instance, sums are multiples of messages."""


@dataclass(frozen=True)
class Lookahead:
    """A defended server in one round, ready to evaluate changes of the messages.

    The effect of a lie is determined by the Gram matrix of a basis, which is measured once: all clients'
    sums, this round's messages, the model's move before the round, and any vectors that liars add to them. A
    candidate lie then costs a few matrices with n rows, whatever d is.

    Attributes:
        messages: The k messages without lies (k, d), less the model if they contain it.
        moved: The model's move before the round (d,).
        senders: The clients that send them.
        step: The model moves by `step` × the round's aggregate.
        due: Whether the sums are looked at in this round.
        detector: How the server judges.
        history: The server's history with this round's messages added.
    """

    messages: Tensor
    moved: Tensor
    senders: Places
    step: float
    due: bool
    detector: Detector
    history: ClientHistory

    @classmethod
    def of(
        cls, detector: Detector, state: State, messages: Tensor, senders: tuple[int, ...], round_: int
    ) -> Lookahead:
        """Return the lookahead on a round in which `senders` send `messages` (k, d)."""
        before, trace = ClientHistory.read(state), detector.trace
        x = trace.vectors(messages, state[trace.model])
        places = np.array(senders, dtype=np.int64)
        history = detector.updated(before, x, places, round_)
        due = detector.due(before, round_)  # between looks the model moves on from its last value
        moved = before.moved if due else state[trace.model] - before.origin
        return cls(x.to(history.sums.dtype), moved, places, trace.step(round_), due, detector, history)

    @property
    def basis(self) -> tuple[Tensor, Tensor, Tensor]:
        """The vectors of the basis, in three parts: sums of all n, messages, the move so far."""
        return self.history.sums, self.messages, self.moved[None]

    @property
    def size(self) -> int:
        """How many vectors the basis has."""
        return sum(len(part) for part in self.basis)

    @cached_property
    def vectors(self) -> Tensor:
        """The basis (n + k + 1, d) in one tensor. This is a copy: use `rows` for a few rows."""
        return torch.cat(self.basis)

    def rows(self, places: Places) -> Tensor:
        """Return the vectors of the basis at `places`, which must be in rising order."""
        ends = np.cumsum([len(part) for part in self.basis])
        shared, found = np.split(places, np.searchsorted(places, ends[:-1])), []
        for part, mine, end in zip(self.basis, shared, ends, strict=True):
            if len(mine) or part is self.history.sums:
                rows = (mine - (end - len(part))).tolist()
                found.append(part[side_by_side(rows) or rows])
        return torch.cat(found)

    def looked(self) -> Lookahead:
        """Return the same round as if the sums were looked at in it: what the next look would find."""
        if self.due:
            return self
        return replace(self, moved=self.history.moved, due=True)

    def gram(self, beside: Tensor) -> Tensor:
        """Return the Gram matrix (p, p) of the basis followed by rows `beside` (q, d), on their device."""
        rows = beside.to(self.messages)
        return bordered(self._measured[0], self.basis, rows) if self._measured else self._gram(rows)

    def _gram(self, beside: Tensor) -> Tensor:
        if not beside.is_cuda:
            return aggregation.gram(torch.cat([*self.basis, beside]))
        # The vectors are noise around zero, so plain inner products are accurate: no row is subtracted first.
        found = inner_products(*self.basis, beside)
        _ = self._looks  # computed on the host while the GPU works
        return found

    @cached_property
    def _measured(self) -> list[Tensor]:
        """The Gram matrix of the basis alone, once it is known."""
        return []

    def destination(self) -> Tensor | None:
        """Return the model's move since the start (d,) to which the round leads if nobody lies.

        None if Gram matrices do not tell: the sums are not looked at, the rule works column by column,
        somebody would be expelled, or a message is not finite.
        """
        if not (self.due and self._geometric):
            return None
        self._measured[:] = [self._gram(self.messages[:0])]
        gram = self._measured[0]
        found = self.outcomes(gram, np.zeros(1, np.int64), gram.new_zeros(1, 1, len(gram)), self.messages[:0])
        if not math.isfinite(float(found.harm[0])):  # −∞: somebody is expelled; NaN: not finite
            return None
        shares = torch.split(found.move[0].to(self.messages), [len(part) for part in self.basis])
        return torch.stack([some @ part for some, part in zip(shares, self.basis, strict=True)]).sum(0)

    def outcomes(self, gram: Tensor, rows: Places, changes: Tensor, beside: Tensor) -> Foreseen:
        """Return for B lies whether somebody would be expelled, and where the model would move.

        `gram` (p, p) is the Gram matrix of the basis with the rows `beside` (q, d), as `Lookahead.gram`
        returns it. `changes` (B, r, p), coefficients in this basis, are added to the messages in `rows` (r,).
        The work is done on the device of `gram` and `changes`.
        """
        k, (whole, fresh) = len(self.senders), self._looks
        n, taken, geometric = len(self.history.sums), self._taken, self._geometric
        everybody = n == k and bool((self.senders == np.arange(n)).all())
        which = to_the_device(rows, gram.device)
        if gram.is_cuda and self.due and everybody and geometric and recordable(whole, fresh):
            found = foreseen(
                gram, which, changes, self.step, whole, fresh, taken, self._weigher, self._effort
            )
            if found is not None:
                return found
        whose = torch.from_numpy(self.senders[rows]).to(gram.device)
        sent = Changed(gram, n, k, which, changes)
        looked_at = [(sent.grams(fresh.rows), fresh)]
        sums = Changed(gram, 0, n, whose, self.step * changes)
        if self.due:
            looked_at.append((sums.grams(whole.rows), whole))
        judged = _judged(looked_at)
        left = judged.left
        sums, sent, grams = sums.only(left), sent.only(left), [some[left] for some, _ in looked_at]
        if geometric:
            weights = self._weights(grams[0] if fresh.rows is None else sent.grams())
            aggregates = sent.combined(weights)
        else:
            aggregates, weights = self._columnwise(sent, beside)
        seen, counted = judged.seen, None
        if self.due:
            seen[1], counted = correction.left_out(grams[1], whole, seen[1])
        round_ = ForeseenRound(sent, sums if self.due else None, (fresh, whole), self.step)
        after, corrected = round_.moved(grams, seen, counted, aggregates, self._parts(weights, taken))
        return Foreseen.of(
            gram,
            judged.expelled,
            gram.new_zeros(len(changes), len(gram)).index_copy(0, left, after),
            gram.new_full((len(changes),), math.inf).index_copy(0, left, corrected),
        )

    @cached_property
    def _effort(self) -> SearchEffort:
        """How many steps recordings need for the lies of this round; it learns."""
        return SearchEffort()

    @cached_property
    def _taken(self) -> Tensor:
        """The sum of each client's weights so far (n,), on the device of the messages."""
        return to_the_device(self.history.weights, self.messages.device)

    def _parts(self, weights: Tensor, taken: Tensor) -> Tensor:
        """Return the shares (B, m) of the clients looked at in the model's move, this round included."""
        staying, rows = self.history.staying, self._looks[0].rows
        now = taken.repeat(len(weights), 1)
        now[:, torch.from_numpy(self.senders).to(weights.device)] += weights
        members = now if len(staying) == len(taken) else now[:, torch.from_numpy(staying).to(weights.device)]
        own = now if rows is None else now[:, rows]
        return own / members.sum(1, keepdim=True).clamp(min=1e-300)

    @cached_property
    def _looks(self) -> tuple[LookLimits, LookLimits]:
        """The looks at the sums and at the messages; they do not depend on the lie."""
        detector, history, sent = self.detector, self.history, self.senders
        whole, fresh = detector.law(history).select(history.staying), detector.law_of_messages(history, sent)

        def look(
            clients: Places, rows: Places, count: int, law: Law, weights: Tensor, alarm: float
        ) -> LookLimits:
            heard, device = law.participating, self.messages.device
            able = detector.able(len(heard), history)
            shares = detector.shares(clients, weights)[heard] if able else None
            there = rows_of(rows[heard], count, device)
            return LookLimits.of(law.select(heard), detector.liars(history), alarm, shares, there, device)

        n, k = len(history.members), len(sent)
        return (
            look(history.staying, history.staying, n, whole, history.coefficients, detector.alarms[0]),
            look(self.senders, np.arange(k), k, fresh, history.carried, detector.alarms[1]),
        )

    @cached_property
    def _rule(self) -> Chain | None:
        """The rule as the server applies it to the round's messages; None: it is their mean."""
        return self.detector.rule(len(self.senders), self.history)

    @property
    def _geometric(self) -> bool:
        """Whether the aggregate is a weighted sum of the messages with weights from their Gram matrix."""
        return self._rule is None or self._rule.geometric

    @property
    def _weigher(self) -> Weigher | None:
        """The rule as recordings have it; None: it is the mean."""
        rule = self._rule
        if rule is None:
            return None
        return Weigher((rule.name, rule.f), self._weights, rule.weights_from_grams is not None)

    def _columnwise(self, sent: Changed, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Return the aggregates (B, p) of a rule that works column by column, and its weights (B, k).

        Such an aggregate is not a combination of the basis. So the rule is applied to the messages of one lie
        after the other, and the aggregate is replaced by the combination of the basis that has the same inner
        product with every basis vector. The rest of the round uses only these inner products.
        """
        assert self._rule is not None
        basis = torch.cat([self.vectors, beside.to(self.messages)])
        messages = basis[sent.start : sent.start + sent.count]
        products, weights = sent.gram.new_zeros(len(sent.changes), len(basis)), []
        for place, change in enumerate(sent.changes.to(basis)):
            done = self._rule(messages.index_add(0, sent.which, change @ basis))
            products[place] = basis @ done.value
            weights.append(done.weights)
        scale = sent.gram.diagonal().clamp(min=1e-300).rsqrt() * (sent.gram.diagonal() > 0)
        inverse = torch.linalg.pinv(scale[:, None] * sent.gram * scale, hermitian=True, rtol=SINGULAR)
        shares = torch.stack(weights) if weights else products[:, : sent.count]
        return (products * scale) @ inverse * scale, shares.to(products)

    def _weights(self, grams: Tensor) -> Tensor:
        """Return a geometric rule's weights (B, k) for Gram matrices (B, k, k) of messages."""
        rule = self._rule
        if rule is None or not len(grams):
            return grams.new_full(grams.shape[:2], 1 / grams.shape[1])
        if grams.is_cuda and rule.weights_from_grams is not None:  # also while it is recorded
            found: Tensor = rule.weights_from_grams(grams)
            return found
        return torch.stack([rule.weights_from_gram(one) for one in grams.cpu()]).to(grams)


@dataclass(frozen=True)
class _Judged:
    """The judgement of B lies: which lead to an expulsion, `expelled` (B,).

    `left` are the places of those that do not, `seen` the directions that each look shows there.
    """

    expelled: Tensor
    left: Tensor
    seen: list[Directions]


def _judged(looked_at: list[tuple[Tensor, LookLimits]]) -> _Judged:
    """Judge B lies by looks, each with its Gram matrices (B, m, m): by lengths and pairs, then directions."""
    looks = tuple(look for _, look in looked_at)
    groups: list[tuple[Tensor, tuple[LookLimits, ...]]]
    if len({look.facts.members for look in looks}) == 1:  # in every round in which all are heard
        groups = [(torch.stack([some for some, _ in looked_at]), looks)]
    else:
        groups = [(some[None], (look,)) for some, look in looked_at]
    expelled = torch.cat([conviction.improbable(some, at) for some, at in groups]).any(0)
    left = torch.nonzero(~expelled)[:, 0]
    seen = [one for some, at in groups for one in visible(some[:, left], at)]
    named = torch.stack([conviction.apart(one, look) for one, look in zip(seen, looks, strict=True)]).any(0)
    kept = torch.nonzero(~named)[:, 0]
    return _Judged(expelled.index_copy(0, left, named), left[kept], [one.only(kept) for one in seen])


def rows_of(rows: Places, count: int, device: torch.device) -> Tensor | None:
    """Return `rows` on the device; None if they are all of the `count` vectors.

    >>> rows_of(np.arange(3), 3, torch.device("cpu")), rows_of(np.arange(2), 3, torch.device("cpu"))
    (None, tensor([0, 1]))
    """
    return None if len(rows) == count else to_the_device(rows, device)
