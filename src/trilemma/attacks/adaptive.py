"""Adaptive: liars who know everything but honest secrets, the defence's state included, and hide in noise.

Liars send what the protocol asks for, their noise included, plus a lie that is chosen in every round: of all
directions and strengths that are tried, the one that does most harm to the model and lets nobody be expelled.

    direction   gradient   against the honest clients' mean contribution (free of noise: they know the data)
                ones       (1, …, 1)/√d
                std        the honest messages' standard deviation, coordinate by coordinate
                top        the direction in which the sums of all clients differ most
                across     against the gradient, but at right angles to what the mean shows of it
                loss       where the honest clients' loss rises most at the model the round would lead to
                unshown    the same, but after the model went on on public examples (`[aggregation] tune`)
                best       all but the last two, in every round
    noise       protocol   own message + shift
                rotated    their messages, or their sums, are turned so that all their lengths and inner
                           products stay what honest ones would be, and yet their common part points in the
                           direction
    role        all        everybody shifts alike
                half       the first half shifts, the others stay honest in reserve
                turns      in even rounds one half, in odd rounds the other
    rounds      start, stop: sleep before, behave afterwards

**Harm** is how far the model lands against the true descent, −⟨θ' − θ_0, h⟩ with h the direction in which the
truth would move it (for `loss`: how far it lands uphill), as the defended server would have it: its rule, its
corrections. All candidates are combinations of sums, messages and directions, so each costs n × n work in
their Gram matrix, measured once a round. With `greedy` off candidates must also be set right no further than
a tenth more than without the lie: liars then stay below what can be seen. Where the server looks at sums in
some rounds only, liars keep to what would pass a look in every round, for they mean to stay; `bold` ones do
not. Against a server without memory they face its rule alone, along `gradient` or `loss`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import finite_rows
from trilemma.attacks.types import Attack, Crafted, Defence, View

Array = NDArray[np.float64]
DIRECTIONS = ("gradient", "ones", "std", "top", "across")


@attacks.register("adaptive")
class Adaptive(AttackSettings):
    """Liars who know the defence: the most harmful lie each round that lets nobody be expelled."""

    direction: Literal["gradient", "ones", "std", "top", "across", "loss", "unshown", "best"] = "gradient"
    """Where the model is pushed."""
    noise: Literal["protocol", "rotated"] = "protocol"
    """What liars do with their own noise."""
    role: Literal["all", "half", "turns"] = "all"
    """Who of them lies in a round."""
    start: int = Field(default=0, ge=0)
    """The first round in which they lie."""
    stop: int | None = Field(default=None, ge=0)
    """The first round in which they do not lie any more."""
    greedy: bool = True
    """Take the most harm now; otherwise stay below what can be seen."""
    bold: bool = False
    """Push between looks at sums as far as messages alone let pass, although the next look will see it."""
    points: int = Field(default=40, ge=2)
    """Strengths tried for every direction; then eight more around the best, and how far noise can turn."""
    reach: float = Field(default=100.0, gt=1)
    """Largest strength, in lengths of the honest mean contribution; the smallest is a tenth of one."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("adaptive", craft=self._craft, reads_own=True, reads_truth=True)

    def _craft(self, view: View) -> Crafted:
        own = view.honest.new_zeros(view.byzantine, view.honest.shape[1]) if view.own is None else view.own
        if view.byzantine == 0 or view.round < self.start or (self.stop or math.inf) <= view.round:
            return Crafted(own, 0.0)
        honest = finite_rows(view.honest)
        if len(honest) < len(view.honest):  # the server leaves these out, and so do the attackers
            view = replace(view, honest=honest, positions=None)
        truth = (honest.mean(0) if view.truth is None else view.truth()).double()
        length = float(torch.linalg.vector_norm(truth)) or 1.0
        strengths = (length * 0.1 * (10 * self.reach) ** np.linspace(0, 1, self.points)).tolist()
        lying = self._lying(view)
        if view.defence is None:
            uphill = self._uphill(view)
            shift = -truth if uphill is None else uphill.double()
            shift = shift / torch.linalg.vector_norm(shift).clamp(min=1e-30)
            trusted = None if view.trusted is None else view.trusted().to(shift)
            return _unopposed(view, own, shift, trusted, lying, strengths, self.noise)
        defence = view.defence()
        directions = self._directions(view, truth, defence)
        against = -directions[0] if self.direction in ("loss", "unshown") else truth
        stage = _Stage(defence, view.members, lying, directions, against, self.noise, self.bold)

        def most(tried: Iterable[tuple[int, float]]) -> tuple[bool, float, int, float]:
            found = (
                (*stage.harm(which, strength, self.greedy), which, strength) for which, strength in tried
            )
            return max(found, key=lambda one: one[:2])

        best = most(
            (which, strength)
            for which in range(len(directions))
            for strength in (*strengths, *stage.furthest(which))
        )
        finer = best[3] * (10 * self.reach) ** (np.arange(-4, 5) / 5 / (self.points - 1))
        passes, harm, which, strength = most((best[2], float(strength)) for strength in (best[3], *finer))
        if not passes or harm <= stage.quiet:
            return Crafted(own, 0.0)
        return Crafted(own + stage.lies(which, strength).to(own), strength)

    def _lying(self, view: View) -> Array:
        """Return who lies this round (f,), as factors of the shift."""
        first = (np.arange(view.byzantine) < (view.byzantine + 1) // 2).astype(float)
        if self.role == "all":
            return np.ones(view.byzantine)
        return first if self.role == "half" or view.round % 2 == 0 or view.byzantine == 1 else 1 - first

    def _uphill(self, view: View) -> Tensor | None:
        """Return where a loss rises, if that is the direction asked for and there is a loss to ask."""
        asked = {"loss": view.uphill, "unshown": view.unshown}.get(self.direction)
        return None if asked is None else asked()

    def _directions(self, view: View, truth: Tensor, defence: Defence) -> Tensor:
        """Return the unit directions tried (q, d), each on the side that leads away from the truth."""
        wanted = DIRECTIONS if self.direction == "best" else (self.direction,)
        found = []
        for name in wanted:
            if name == "ones":
                vector = torch.ones_like(truth)
            elif name == "std":
                vector = view.honest.double().std(0, correction=0)
            elif name == "top":
                vector = _top(defence)
            elif (uphill := self._uphill(view)) is not None:
                vector = uphill
            else:
                vector = -truth
                if name == "across":
                    vector = _across(vector, defence)
                vector = vector if float(vector @ vector) > 0 else torch.ones_like(vector)
            vector = vector.to(truth)
            found.append(vector / torch.linalg.vector_norm(vector).clamp(min=1e-30))
        return torch.stack(found)


def _sums(defence: Defence) -> Tensor:
    return defence.vectors[: len(defence.vectors) - len(defence.senders) - 1].double()


def _top(defence: Defence) -> Tensor:
    """Return the direction in which sums differ most."""
    sums = _sums(defence)
    centred = sums - sums.mean(0)
    found: Tensor = torch.linalg.eigh(centred @ centred.T)[1][:, -1] @ centred
    return found


def _across(vector: Tensor, defence: Defence) -> Tensor:
    """Return the part of the vector at right angles to the mean of the sums and of the messages."""
    n = len(defence.vectors) - len(defence.senders) - 1
    means = torch.stack([_sums(defence).mean(0), defence.vectors[n:-1].double().mean(0)])
    basis: Tensor = torch.linalg.qr(means.T.to(vector))[0]
    return vector - basis @ (basis.T @ vector)


class _Stage:
    """A round in the Gram matrix of its vectors, and what becomes of it when liars change their messages.

    The basis is the defence's, then the directions, then the way the truth would move the model.
    """

    def __init__(
        self,
        defence: Defence,
        liars: tuple[int, ...],
        lying: Array,
        directions: Tensor,
        truth: Tensor,
        noise: str,
        bold: bool = False,
    ) -> None:
        self.defence, self.noise, self.directions, self.bold = defence, noise, directions, bold
        self.k = len(defence.senders)
        self.n = len(defence.vectors) - self.k - 1
        rows = {int(client): row for row, client in enumerate(defence.senders)}
        self.places = np.array([rows[i] for i in liars])  # of all liars among the senders
        self.active, self.lying = self.places[lying > 0], lying[lying > 0]
        # The truth moves the model by step × truth; harm is counted against that.
        downhill = math.copysign(1.0, defence.step) * truth
        downhill = downhill / max(float(torch.linalg.vector_norm(downhill)), 1e-30)
        self.gram: Array = defence.gram(torch.cat([directions, downhill[None]]))
        self.quiet, self.still = self.outcome(np.zeros((self.k, len(self.gram))))

    def harm(self, which: int, strength: float, greedy: bool) -> tuple[bool, float]:
        """Return whether a candidate may be sent, and its harm; where there are two kinds, of the worse."""
        found = [self.outcome(changes) for changes in self.candidates(which, strength)]
        allowed = [harm for harm, seen in found if greedy or seen <= 1.1 * self.still + 1e-9]
        worst = max(allowed, default=-math.inf)
        return math.isfinite(worst), worst

    def lies(self, which: int, strength: float) -> Tensor:
        """Return what liars add to their messages (f, d)."""
        changes = max(self.candidates(which, strength), key=lambda changes: self.outcome(changes)[0])
        mix = torch.from_numpy(changes[self.places, :-1]).to(self.directions)
        basis = torch.cat([self.defence.vectors.to(self.directions), self.directions])
        return mix @ basis

    def furthest(self, which: int) -> list[float]:
        """Return the largest strengths that turned noise allows; none where noise is not turned."""
        if self.noise == "protocol":
            return []
        along, step = len(self.gram) - 1 - len(self.directions) + which, self.defence.step
        sums = np.array([int(i) for i in np.asarray(self.defence.senders)[self.active]])
        return [
            _furthest(self.gram[np.ix_(rows, rows)], self.gram[rows, along], scale * self.lying)
            for rows, scale in ((self.n + self.active, 1.0), (sums, step))
        ]

    def candidates(self, which: int, strength: float) -> list[Array]:
        """Return changes (k, p) of all messages, in the basis; none where they are impossible."""
        shift, along = strength * self.lying, len(self.gram) - 1 - len(self.directions) + which
        if self.noise == "protocol":
            changes = np.zeros((self.k, len(self.gram)))
            changes[self.active, along] = shift
            return [changes]
        step = self.defence.step
        sums = [int(i) for i in np.asarray(self.defence.senders)[self.active]]
        turned = [
            self._turned(self.n + self.active, along, shift, 1.0),
            self._turned(np.array(sums), along, shift * step, step),
        ]
        return [one for one in turned if one is not None]

    def _turned(self, rows: NDArray[np.int64], along: int, shift: Array, scale: float) -> Array | None:
        """Return changes that turn the basis' `rows`, scale × messages or sums of them, among themselves."""
        before, inner = self.gram[rows, along], self.gram[np.ix_(rows, rows)]
        goal = before.mean() + shift
        # M (Γ − before beforeᵀ) Mᵀ + goal goalᵀ = Γ: as honest as before, and pointing to the goal.
        turned = _transport(inner - np.outer(before, before), inner - np.outer(goal, goal))
        if turned is None:
            return None
        changes = np.zeros((self.k, len(self.gram)))
        changes[np.ix_(self.active, rows)] = (turned - np.eye(len(rows))) / scale
        changes[self.active, along] = (goal - turned @ before) / scale
        return changes

    def outcome(self, changes: Array) -> tuple[float, float]:
        """Return the harm, −∞ where somebody is expelled, and how far the model is set right."""
        found = self.defence.outcome(self.gram, changes)
        if found.expelled or (found.awaited and not self.bold):
            return -math.inf, math.inf
        return -float(found.move @ self.gram[:, -1]), found.corrected


def _furthest(inner: Array, before: Array, way: Array) -> float:
    """Return the largest s for which rows of Gram matrix Γ = `inner` can have goal = mean(before) + s · way.

    A vector of length 1 may have inner products g with rows of Gram matrix Γ as long as gᵀ Γ⁻¹ g ≤ 1.

    >>> round(_furthest(np.eye(4), np.zeros(4), np.ones(4)), 4)
    0.5
    """
    scale = np.abs(inner).max()
    if not scale > 0:
        return 0.0
    sides = np.stack([way, np.full(len(way), before.mean())], 1)
    solved = np.linalg.lstsq(inner / scale, sides, rcond=None)[0]
    square, mixed = way @ solved / scale
    rest = before.mean() * float(solved[:, 1].sum()) / scale - 1
    inside = mixed**2 - square * rest
    return max(0.0, float((math.sqrt(inside) - mixed) / square)) * (1 - 1e-6) if inside > 0 else 0.0


def _transport(present: Array, wanted: Array) -> Array | None:
    """Return the symmetric M with M present M = wanted; None where wanted is no Gram matrix."""
    values, vectors = np.linalg.eigh(present)
    if values[0] <= 1e-9 * values[-1] or np.linalg.eigvalsh(wanted)[0] < 0:
        return None
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    inside, axes = np.linalg.eigh(root @ wanted @ root)
    middle = (axes * np.sqrt(np.maximum(inside, 0.0))) @ axes.T
    found: Array = inverse @ middle @ inverse
    return found


TILTS = (0.0, 0.3, 1.0)
"""How far lies lean to what the server trusts, beside a lie of length 1."""


def _unopposed(
    view: View,
    own: Tensor,
    shift: Tensor,
    trusted: Tensor | None,
    lying: Array,
    strengths: list[float],
    noise: str,
) -> Crafted:
    """Return the lie that leaves least of the descent, against a server that keeps no evidence.

    Where it measures messages by one of its own, `trusted`, lies are also tried at right angles to that, and
    leaning towards it.
    """
    ways, active = [shift], np.flatnonzero(lying)
    if trusted is not None:
        towards = trusted / torch.linalg.vector_norm(trusted).clamp(min=1e-30)
        across = shift - (shift @ towards) * towards
        across = across / torch.linalg.vector_norm(across).clamp(min=1e-30)
        ways += [(across + tilt * towards) / math.sqrt(1 + tilt**2) for tilt in TILTS]

    def furthest(way: Tensor) -> list[float]:
        if noise == "protocol":
            return []
        rows = own.double()[torch.from_numpy(active).to(own.device)]
        beside: Array = (rows @ torch.cat([rows, way[None]]).T).cpu().numpy()
        return [_furthest(beside[:, :-1], beside[:, -1], lying[active])]

    made = [(0.0, own)]
    made += [
        (strength, lies)
        for way in ways
        for strength in (*strengths, *furthest(way))
        if (lies := _shifted(own, way, strength * lying, noise)) is not None
    ]

    def harm(messages: Tensor) -> float:
        value = view.target(view.stack(messages), key=view.key.fold("coin")).value.double()
        return float(value @ shift.to(value.device))

    strength, best = max(made, key=lambda one: harm(one[1]))
    return Crafted(best, strength)


def _shifted(own: Tensor, way: Tensor, along: Array, noise: str) -> Tensor | None:
    """Return liars' messages (f, d) with `along` (f,) of the unit direction `way`; None where impossible.

    Their noise stays, or is turned so that their Gram matrix stays what it was.
    """
    if not along.any():
        return own
    active = torch.from_numpy(np.flatnonzero(along)).to(own.device)
    rows, goal = own.double()[active], along[np.flatnonzero(along)]
    mix = np.eye(len(rows))
    if noise == "rotated":
        beside: Array = (rows @ torch.cat([rows, way[None]]).T).cpu().numpy()
        inner, before = beside[:, :-1], beside[:, -1]
        goal = before.mean() + goal
        turned = _transport(inner - np.outer(before, before), inner - np.outer(goal, goal))
        if turned is None:
            return None
        mix, goal = turned, goal - turned @ before
    lies = torch.from_numpy(mix).to(rows) @ rows + torch.from_numpy(goal).to(rows)[:, None] * way
    return own.index_copy(0, active, lies.to(own))
