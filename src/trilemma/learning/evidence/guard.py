"""A server that remembers: evidence before the rule.

Every round, beside what the algorithm's own server does:

    S_i ← S_i + step · x_i          what client i alone would have moved the model by (`trace`)
    expelled ← convict(looks)       for good; secrets are shared anew among those who stay
    a = R(x) + xᵀ y                 y = correct(x): the round's aggregate, set right along visible directions
    moved ← moved + step · a − what is undone
    model = θ_0 + moved + Sᵀ y      y = correct(S): the same over all rounds

**Looks.** The tests look at Gram matrices alone: of S, all rounds, and of x, this round's messages, which are
windows of about 1/(1 − β) rounds where clients average with momentum β. Sums alone would let liars jump: who
has pushed one way as far as hides in all rounds may push as far the other way in a single one.

**Cost.** The messages' Gram matrix is measured once, for the look and for the rule. That of the sums is one
more, its products in float32: an error of 10⁻⁷ where noise leaves 1/√d undecided. Whatever else passes over
all coordinates does so only where a direction stands out.

The state is one number per client and coordinate beside two vectors. The first `wait` rounds leave the model
at θ_0; nothing is lost, since sums go on.

**Undo.** An expelled client's part in the move, q = Σ_{i out} w_i S_i, is taken back as far as it is not the
noise that cancels other clients': of ‖q‖² about x² = dσ_cor² Σ_s c²·(pairs of one out and one in) is, so that
1 − x²/‖q‖² of q leaves the least error in mean square. Gross lies are taken back whole, subtle ones hardly:
those are the correction's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import Chain, Geometry, Rule
from trilemma.aggregation.evidence import Evidence
from trilemma.errors import ConfigError
from trilemma.keys import Key
from trilemma.learning.evidence.conviction import Expulsion, convict
from trilemma.learning.evidence.correction import Correction, Direction, correct, visible, worth_correcting
from trilemma.learning.evidence.file import File, added
from trilemma.learning.messages import Messages
from trilemma.learning.privatise import all_finite
from trilemma.learning.protocol import Algorithm, ServerStep, Start, State
from trilemma.learning.screens.screen import check_one_vector, lessened, stage_of
from trilemma.learning.settings import Setup
from trilemma.learning.trace import Array, Law, Places, Trace
from trilemma.mapped_rows import chosen
from trilemma.models.types import Model


def evidence_of(rule: Rule) -> Evidence | None:
    """Return the evidence stage a rule begins with, None where it has none.

    >>> evidence_of(aggregation.parse("evidence+nnm+mean", f=1)).label
    'evidence'
    """
    stage = stage_of(rule)
    return stage if isinstance(stage, Evidence) else None


@dataclass(frozen=True)
class Look:
    """One vector of every client in `rows`: their Gram matrix, and what it is like if they are honest."""

    rows: Places
    gram: Array
    law: Law
    _seen: dict[int, list[Direction]] = field(default_factory=dict, repr=False, compare=False)

    def seen(self, liars: int) -> list[Direction]:
        """Return the directions that stand out among those who sent something; worked out once."""
        if liars not in self._seen:
            heard = self.law.heard
            gram = self.gram if len(heard) == len(self.gram) else self.gram[np.ix_(heard, heard)]
            self._seen[liars] = visible(gram, self.law.select(heard), liars + 1) if len(heard) else []
        return self._seen[liars]

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

    @property
    def silent(self) -> bool:
        """Whether there is no noise, hence no evidence."""
        return self.setup.release is None or self.setup.release.law.silent

    def liars(self, file: File) -> int:
        """How many of the members may still lie."""
        return max(0, self.setup.byzantine - (len(file.members) - len(file.staying)))

    def heard(
        self, file: File, x: Tensor, senders: tuple[int, ...], round_: int, sharing: int | None = None
    ) -> File:
        """Add a round's messages x (k, d), all finite, of `senders` to the file.

        `sharing` is how many clients share secrets in the round; None: all who are in.
        """
        assert self.setup.release is not None
        rows, law = torch.tensor(senders), self.setup.release.law
        step = self.trace.step(round_)
        sums = added(file.sums, x, rows, step)
        carried, coefficients = file.carried.clone(), file.coefficients.clone()
        carried[rows] *= self.trace.keeps(round_)
        carried[rows, round_] = self.trace.adds(round_)
        coefficients[rows] += step * carried[rows]
        spreads, shared, clips = file.spreads.clone(), file.shared.clone(), file.clips.clone()
        shared[round_] = law.sigma_cor**2
        spreads[round_] = law.sigma_ind**2 + (sharing or len(file.staying)) * law.sigma_cor**2
        length = float(torch.linalg.vector_norm(file.origin + file.moved)) if self.trace.decay else 0.0
        clips[round_] = self.setup.release.clip + self.trace.decay * length
        return replace(
            file,
            sums=sums,
            carried=carried,
            coefficients=coefficients,
            spreads=spreads,
            shared=shared,
            clips=clips,
        )

    def law(self, file: File) -> Law:
        """Return the law of all clients' sums."""
        return file.law(file.coefficients)

    def looks(
        self,
        file: File,
        sums: Array,
        messages: Array,
        senders: Places,
        laws: tuple[Law, Law] | None = None,
    ) -> tuple[Look, Look]:
        """Return what is looked at: all rounds' sums of the members, and this round's messages of `senders`.

        `sums` (n, n) and `messages` (k, k) are Gram matrices, of everybody's sums and of the messages, all of
        members. `laws` are theirs, where they are known.
        """
        rows, (whole, fresh) = file.staying, laws or self.laws(file, senders)
        kept = sums if len(rows) == len(sums) else sums[np.ix_(rows, rows)]
        return Look(rows, kept, whole), Look(senders, messages, fresh)

    def laws(self, file: File, senders: Places) -> tuple[Law, Law]:
        """Return the laws of both looks."""
        fresh = file.law(file.carried[torch.from_numpy(senders)])
        return self.law(file).select(file.staying), fresh

    def convict(self, looks: tuple[Look, ...], file: File) -> list[Expulsion]:
        """Return who is proved to lie, each client once."""
        alarm = self.settings.alarm / self.setup.rounds / len(looks)
        found: dict[int, Expulsion] = {}
        for look in looks:
            liars = self.liars(file)
            for one in convict(look.gram, look.law, liars, alarm, partial(look.seen, liars)):
                client, others = look.rows[one.client], (int(look.rows[j]) for j in one.others)
                found.setdefault(int(client), replace(one, client=int(client), others=tuple(others)))
        return [found[client] for client in sorted(found)]

    def undone(self, before: File, expelled: Places) -> Tensor:
        """Return what to take out of the model's move (d,); `before` is the file before the round.

        The round's own messages of the expelled never moved the model: there is nothing of them to take back.
        """
        total = float(before.taken.sum())
        if not self.settings.undo or not len(expelled) or total == 0:
            return torch.zeros_like(before.moved)
        part = np.zeros(len(before.sums))
        part[expelled] = before.taken.cpu().numpy()[expelled] / total
        squared = before.coefficients.cpu().numpy() ** 2 @ before.shared.cpu().numpy()
        pairs = before.sums.shape[1] * (len(before.staying) - len(expelled))
        noise = pairs * float(part**2 @ squared)
        found = _combined(before.sums, part)
        length = float(found @ found)
        return found * (max(0.0, 1 - noise / length) if length > 0 else 0.0)

    @property
    def robust(self) -> bool:
        """Whether the rule after this stage does without it: whether it is not the mean."""
        return not self.setup.rule.name.endswith("mean")

    def weights(self, gram: Array, file: File) -> Array:
        """Return the rule's weights (k,) of messages with this Gram matrix; the mean's if they do not say."""
        k, rule = len(gram), lessened(self.setup.rule, self.liars(file))
        if not rule.geometric or not self.robust or k <= 2 * rule.f:
            return np.full(k, 1 / k)
        assert isinstance(rule, Chain)
        found: Array = rule.weights_from_gram(gram)
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
        able = self.settings.correct and worth_correcting(len(look.gram), liars, self.robust)
        seen = look.seen(liars) if able else []
        if not seen:
            return Correction(1.0, np.zeros(len(look.gram)))
        weight = np.abs(weights.cpu().numpy()[look.rows].sum(axis=1))
        shares = weight.max(initial=0.0) / np.maximum(weight, 1e-300)
        known = None if parts is None else parts()
        return correct(look.gram, moved(), look.law, liars, shares, known, seen)

    def parts(self, file: File) -> Array:
        """Return the members' shares in the model's move (m,)."""
        taken = file.taken.cpu().numpy()
        found: Array = taken[file.staying] / max(float(taken[file.staying].sum()), 1e-300)
        return found


def guarded(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm with evidence before its rule, if the rule asks for it and there is noise."""
    algorithm = build(setup)
    settings = evidence_of(setup.rule)
    if settings is None or setup.release is None or setup.release.law.silent:
        return algorithm
    trace = _traceable(algorithm, setup)
    court = Court(settings, setup, trace)

    @cache
    def without(liars: int) -> Algorithm:
        return build(replace(setup, byzantine=liars, rule=lessened(setup.rule, liars)))

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        start = algorithm.init(model, ids, key)
        check_one_vector("evidence", algorithm, start)
        file = File.empty(setup.clients, setup.rounds, start.broadcast[trace.model])
        return replace(start, server={**start.server, **file.state()})

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        model = state[trace.model]
        senders = messages.senders or tuple(range(setup.clients))
        file = before = File.read(state).reaching(max(senders, default=-1) + 1)
        broken = _broken(messages.vectors)
        sound = messages.rows([row for row in range(len(senders)) if row not in broken])
        found = [Expulsion(senders[row], "not finite") for row in broken]
        file = file.without(np.array([one.client for one in found], dtype=np.int64))
        sane = tuple(i for row, i in enumerate(senders) if row not in broken)
        x = trace.vectors(sound.vectors, model)
        file = court.heard(file, x, sane, round_, messages.sharing or len(before.staying))
        places = np.array(sane, dtype=np.int64)
        gram = aggregation.gram(file.sums, single=True).numpy()
        if len(x) and not trace.around:
            sound = replace(sound, geometry=aggregation.geometry(x))
        sums, fresh = court.looks(file, gram, _gram(x, sound.geometry), places)
        convicted = court.convict((sums, fresh), file)
        names = np.array([one.client for one in convicted], dtype=np.int64)
        file, sums, fresh = file.without(names), sums.without(names), fresh.without(names)

        staying = np.flatnonzero(~np.isin(places, names))
        weights, report, change = torch.zeros(len(senders), dtype=torch.float64), {}, torch.zeros_like(model)
        if len(staying):  # where all who were asked this time are expelled, the model stays where it is
            inner = without(min(court.liars(file), max(0, (len(staying) - 1) // 2)))
            step = inner.server(sound.rows(staying.tolist()), {trace.model: model}, round_, key)
            report, change = dict(step.report), step.broadcast[trace.model] - model
            weights[[senders.index(int(i)) for i in fresh.rows]] = report["weights"].detach().double().cpu()
            everybody = len(staying) == len(x)
            heard, by = x if everybody else chosen(x, staying.tolist()), trace.step(round_)
            beside = partial(_products, heard, change / by)
            change = _moved(change, heard, by * court.corrected(fresh, beside, file.carried, file).mix)
        taken = file.taken.clone()
        taken[torch.tensor(senders)] += weights.to(taken.device)
        gone = np.array([one.client for one in found + convicted], dtype=np.int64)
        moved = file.moved + change - court.undone(before, gone)
        file = replace(file, taken=taken, moved=moved)
        if round_ < setup.rounds - 1 and round_ + 1 < settings.wait:
            after = file.origin
        else:
            y, total = np.zeros(len(gram)), file

            def beside_sums() -> Array:
                return _products(total.sums, total.moved)[sums.rows]

            right = court.corrected(sums, beside_sums, file.coefficients, file, partial(court.parts, file))
            y[sums.rows] = right.mix
            after = _moved(file.origin + right.kept * file.moved, file.sums, y)
        told = {**report, "weights": weights, "expelled": tuple(found + convicted)}
        return ServerStep({trace.model: after}, {trace.model: after, **file.state()}, told)

    def members(state: State) -> tuple[int, ...]:
        return tuple(int(i) for i in File.read(state).staying)

    return replace(algorithm, init=init, server=server, members=members, court=court)


def _traceable(algorithm: Algorithm, setup: Setup) -> Trace:
    """Return how releases reach the model, or refuse with the reason."""
    assert setup.release is not None
    if algorithm.trace is None:
        raise ConfigError(
            f"evidence needs messages that are sums of clipped contributions and known noise; those of "
            f"{algorithm.name} are not, or not only; allowed: a rule without evidence"
        )
    if setup.release.sampling.scheme == "poisson":
        raise ConfigError(
            "evidence needs a bound on every contribution; a Poisson batch has none on its size; "
            "allowed: algorithm.sampling = 'without-replacement'"
        )
    return algorithm.trace


def _broken(vectors: Tensor) -> list[int]:
    """Return the rows that are not finite."""
    if all_finite(vectors):
        return []
    return [row for row, vector in enumerate(vectors) if not all_finite(vector)]


def _gram(x: Tensor, known: Geometry | None) -> Array:
    if not len(x):
        return np.zeros((0, 0))
    return (aggregation.gram(x) if known is None else known.gram).numpy()


def _products(rows: Tensor, vector: Tensor) -> Array:
    found: Array = (rows @ vector).double().cpu().numpy()
    return found


def _moved(start: Tensor, rows: Tensor, coefficients: Array) -> Tensor:
    """Return start + coefficients @ rows; where there is nothing to add, nothing is read."""
    return start + _combined(rows, coefficients) if coefficients.any() else start


def _combined(sums: Tensor, coefficients: Array) -> Tensor:
    return torch.from_numpy(coefficients).to(sums.device, sums.dtype) @ sums
