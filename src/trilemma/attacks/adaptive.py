"""Adaptive: liars who know everything but honest secrets, the defence's state included, and hide in noise.

Liars send what the protocol asks for, their noise included, plus a lie that is chosen in every round: of all
directions and strengths that are tried, the one that does most harm to the model and lets nobody be expelled.

    direction   gradient   against the honest clients' mean contribution (free of noise: they know the data)
                ones       (1, …, 1)/√d
                std        the honest messages' standard deviation, coordinate by coordinate
                top        the direction in which the sums of all clients differ most
                best       all of them, in every round
    noise       protocol   own message + shift
                rotated    their sums are turned so that all their lengths and inner products stay what
                           honest ones would be, and yet their common part points in the direction
    role        all        everybody shifts alike
                half       the first half shifts, the others stay honest in reserve
                turns      in even rounds one half, in odd rounds the other
    rounds      start, stop: sleep before, behave afterwards

**Harm** is how far the model lands against the true descent, −⟨θ' − θ_0, h⟩ with h the direction in which the
truth would move it, as the defended server would have it, corrections included (the rule behind the defence
is supposed to be the mean). All candidates are combinations of the n sums and the direction, so each costs
n × n work in their Gram matrix, measured once, and a pass over the direction. With `greedy` off candidates
must also leave the correction as small as it is without the lie: liars then stay below what can be seen.
Against a server without memory they face its rule alone.
"""

from __future__ import annotations

import math
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
DIRECTIONS = ("gradient", "ones", "std", "top")


@attacks.register("adaptive")
class Adaptive(AttackSettings):
    """Liars who know the defence: the most harmful lie each round that lets nobody be expelled."""

    direction: Literal["gradient", "ones", "std", "top", "best"] = "gradient"
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
    points: int = Field(default=16, ge=2)
    """Strengths tried for every direction."""
    reach: float = Field(default=300.0, gt=1)
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
            return _unopposed(view, own, -truth / length, lying, strengths)
        stage = _Stage(view.defence(), view.members, lying, truth, self.noise)
        tried = [
            (*stage.harm(direction, strength, self.greedy), direction, strength)
            for direction in self._directions(view, truth, stage)
            for strength in strengths
        ]
        passes, harm, direction, strength = max(tried, key=lambda found: found[:2])
        if not passes or harm <= stage.quiet:
            return Crafted(own, 0.0)
        return Crafted(stage.messages(own, direction, strength).to(own.dtype), strength)

    def _lying(self, view: View) -> Array:
        """Return who lies this round (f,), as factors of the shift."""
        first = (np.arange(view.byzantine) < (view.byzantine + 1) // 2).astype(float)
        if self.role == "all":
            return np.ones(view.byzantine)
        return first if self.role == "half" or view.round % 2 == 0 or view.byzantine == 1 else 1 - first

    def _directions(self, view: View, truth: Tensor, stage: _Stage) -> list[Tensor]:
        """Return the unit directions tried."""
        wanted = DIRECTIONS if self.direction == "best" else (self.direction,)
        found = []
        for name in wanted:
            if name == "gradient":
                vector = -truth
            elif name == "ones":
                vector = torch.ones_like(truth)
            elif name == "std":
                vector = view.honest.double().std(0, correction=0)
            else:
                vector = stage.top()
            length = torch.linalg.vector_norm(vector)
            found.append(
                vector / length if float(length) > 0 else torch.ones_like(vector) / len(vector) ** 0.5
            )
        return found


class _Stage:
    """A round's sums, and what becomes of them when liars change theirs."""

    def __init__(
        self, defence: Defence, liars: tuple[int, ...], lying: Array, truth: Tensor, noise: str
    ) -> None:
        self.defence, self.noise = defence, noise
        self.liars, self.lying = np.array(liars)[lying > 0], lying[lying > 0]
        self.everyone = np.array(liars)
        sums, self.moved = defence.sums.double(), defence.moved.double()
        # The truth moves the model by step × truth; harm is counted against that.
        self.downhill = math.copysign(1.0, defence.step) * truth.double()
        self.downhill /= max(float(torch.linalg.vector_norm(self.downhill)), 1e-30)
        self.sums, self.gram = sums, _numbers(sums @ sums.T)
        nothing = np.zeros(len(sums)), np.zeros(len(sums))
        self.quiet, self.still = self.outcome(np.eye(len(sums)), nothing[0], self.downhill)

    def top(self) -> Tensor:
        """Return the direction in which sums differ most."""
        n = len(self.sums)
        centre = np.eye(n) - 1 / n
        vector = np.linalg.eigh(centre @ self.gram @ centre)[1][:, -1]
        return torch.from_numpy(centre @ vector).to(self.sums) @ self.sums

    def harm(self, direction: Tensor, strength: float, greedy: bool) -> tuple[bool, float]:
        """Return whether a candidate may be sent, and its harm."""
        changed = self.changed(direction, strength)
        if changed is None:
            return False, -math.inf
        harm, correction = self.outcome(*changed, direction)
        return math.isfinite(harm) and (greedy or correction <= 1.1 * self.still + 1e-9), harm

    def messages(self, own: Tensor, direction: Tensor, strength: float) -> Tensor:
        """Return what liars send (f, d) for a candidate."""
        found = self.changed(direction, strength)
        assert found is not None
        rows = torch.from_numpy(found[0] - np.eye(len(self.sums)))[self.everyone].to(self.sums)
        along = torch.from_numpy(found[1])[self.everyone, None].to(self.sums)
        return own + (rows @ self.sums + along * direction.double()) / self.defence.step

    def changed(self, direction: Tensor, strength: float) -> tuple[Array, Array] | None:
        """Return changed sums as combinations (n, n) of sums, and (n,) of the direction; None: impossible."""
        n = len(self.sums)
        mixed, along = np.eye(n), np.zeros(n)
        shift = self.defence.step * strength * self.lying
        if self.noise == "protocol":
            along[self.liars] = shift
            return mixed, along
        before = _numbers(self.sums @ direction.double())[self.liars]
        inner = self.gram[np.ix_(self.liars, self.liars)]
        goal = before.mean() + shift
        # M (Γ − before beforeᵀ) Mᵀ + goal goalᵀ = Γ: as honest as before, and pointing to the goal.
        turned = _transport(inner - np.outer(before, before), inner - np.outer(goal, goal))
        if turned is None:
            return None
        mixed[np.ix_(self.liars, self.liars)] = turned
        along[self.liars] = goal - turned @ before
        return mixed, along

    def outcome(self, mixed: Array, along: Array, direction: Tensor) -> tuple[float, float]:
        """Return the harm, −∞ where somebody is expelled, and the length of the correction."""
        down, way = self.downhill, direction.double()
        sums, m = self.sums, len(self.defence.rows)
        change = (mixed - np.eye(len(mixed)))[self.everyone].sum(axis=0) / m
        push = along[self.everyone].sum() / m
        moved = self.moved + torch.from_numpy(change).to(sums) @ sums + push * way
        beside = _numbers(sums @ torch.stack([way, moved, down]).T)
        ends = _numbers(torch.stack([way @ way, way @ moved, way @ down, moved @ down]))
        cross = np.outer(mixed @ beside[:, 0], along)
        gram = mixed @ self.gram @ mixed.T + cross + cross.T + ends[0] * np.outer(along, along)
        expelled, y = self.defence.judge(gram, mixed @ beside[:, 1] + along * ends[1])
        if expelled:
            return -math.inf, math.inf
        harm = -float(ends[3] + y @ (mixed @ beside[:, 2] + along * ends[2]))
        return harm, math.sqrt(max(float(y @ gram @ y), 0.0))


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


def _numbers(tensor: Tensor) -> Array:
    found: Array = tensor.detach().double().cpu().numpy()
    return found


def _unopposed(view: View, own: Tensor, shift: Tensor, lying: Array, strengths: list[float]) -> Crafted:
    """Return the shift that leaves least of the descent, against a server that forgets."""
    factors = torch.from_numpy(lying).to(own.dtype).to(own.device)[:, None]
    candidates = [own, *(own + factors * (strength * shift).to(own.dtype) for strength in strengths)]
    values = [view.target(view.stack(one), key=view.key.fold("coin")).value.double() for one in candidates]
    harm = [float(value @ shift.to(value.device)) for value in values]
    best = max(range(len(harm)), key=harm.__getitem__)
    return Crafted(candidates[best], [0.0, *strengths][best])
