"""Adaptive: liars who know everything but honest secrets, including the defence's state, and hide in noise.

Each liar sends what the protocol asks for, with its own noise, plus a lie. In every round, of all directions
and strengths that are tried, the lie is chosen that does most harm to the model and gets nobody expelled.

    direction   gradient   against the honest clients' mean contribution (without noise: they know the data)
                ones       (1, …, 1)/√d
                std        the honest messages' standard deviation, coordinate by coordinate
                top        the direction in which the sums of all clients differ most
                across     against the gradient, but orthogonal to the means of the sums and of the messages
                loss       where the honest clients' loss rises most at the model after the round
                slanted    as loss, and also directions that lean back or forward along the gradient: a lie
                           orthogonal to the mean that it leads to is not visible along it
                poisoned   where the loss of the honest clients' examples with flipped labels falls most
                backdoor   where the loss of marked examples falls most, if the answer to a mark is class 0
                unshown    as loss, but for the model after tuning (`[aggregation] tune`)
                errors     where most honest examples are mistaken if the model is pushed as far as a lie
                           along `loss` gets
                unshown-errors
                           as errors, but after tuning: starting from the lies of `errors`, liars climb to
                           more examples that are mistaken once clients or the server have tuned the model;
                           before the last round, and without tuning, the same as `errors`
                best       the first five, all tried in every round
    noise       protocol   own message + shift
                rotated    turned noise: the liars' messages, or their sums, are mixed so that all lengths and
                           inner products stay honest, but their common part points in the direction
                stretched  turned as far as possible, and the common part then made longer, as far as the
                           tests of lengths and pairs and the edge of the spectrum leave room
                ranked     nothing is added: each liar's numbers change places (`own_ways`), so that length
                           and distribution of its message stay, and it points as far along as they allow
    role        all        all liars shift alike
                half       the first half shifts, the others stay honest in reserve
                turns      one half in even rounds, the other in odd rounds
                apart      shifts that add up to the same, but have no inner products (`own_ways`)
                sacrificed all but one shift alike; this one sends `reach` times the truth against it and
                           is expelled for it, so that its share of the common noise cancels nobody's;
                           in the next round it is another's turn, until one liar is left
    rounds      start, stop: honest before `start` and from `stop` on

**Harm** is how far the model moves against the true descent, −⟨θ' − θ_0, h⟩, where h is the direction in
which the truth would move it; for `loss` and the directions after it, how far the model moves uphill. It is
computed for what the defended server would do, with its rule and its corrections. All candidates are
combinations of sums, messages and directions. So each costs n × n work in their Gram matrix, which is
measured once per round, and all are evaluated together (`candidates`).

Without `greedy`, a candidate may be set right by at most a tenth more than no lie at all, so that liars stay
below what can be seen. If the server looks at sums in some rounds only, liars assume a look in every round,
because they mean to stay and the next look counts; `bold` liars do not. A server without memory has only its
rule (`memoryless`); liars then use `gradient`, `loss`, `slanted` or `errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from trilemma.attacks.backdoor import Backdoor
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import finite_rows
from trilemma.attacks.types import Attack, Crafted, View
from trilemma.base.transfers import to_the_host
from trilemma_lab.adversary.candidate import Candidates, Lies
from trilemma_lab.adversary.erring import (
    OUTRIGHT,
    SECOND_SHARPNESS,
    Climb,
    Lie,
    best_after_tuning,
    climbed,
    leaning_back,
)
from trilemma_lab.adversary.informed import Defence, Informed
from trilemma_lab.adversary.liars import informed
from trilemma_lab.adversary.memoryless import RuleAlone, leaning, one_by_one, shifted
from trilemma_lab.adversary.own_ways import SHARES, apart, ranked
from trilemma_lab.adversary.turning import Array

DIRECTIONS = ("gradient", "ones", "std", "top", "across")
UPHILL = ("loss", "slanted", "poisoned", "backdoor", "unshown", "errors", "unshown-errors")
"""Directions along which harm is counted; for the others it is counted against the truth."""

SLANTS = (-0.5, 0.25, 0.5, 1.0, 2.0)
"""How far slanted lies lean back along the gradient, relative to a length of 1 uphill."""

NEAR = 3.0
"""The strength of lies towards errors is between 1/NEAR and NEAR times that of the lie along `loss`."""

BEST = 3
"""Finer strengths are tried around this number of the best lies: harm has edges and several peaks."""


@attacks.register("adaptive")
class Adaptive(AttackSettings):
    """Liars who know the defence: in every round the most harmful lie that gets none of them expelled."""

    direction: Literal[
        "gradient",
        "ones",
        "std",
        "top",
        "across",
        "loss",
        "slanted",
        "poisoned",
        "backdoor",
        "unshown",
        "errors",
        "unshown-errors",
        "best",
    ] = "gradient"
    """Where liars push the model: against the honest gradient, up the honest clients' loss, to where most
    examples are mistaken (`errors`), …; docs/frontier.md explains each."""
    noise: Literal["protocol", "rotated", "stretched", "ranked"] = "protocol"
    """The liars' own noise: as the protocol wants it, turned to where they push, turned and lengthened, or
    with its numbers in another order."""
    role: Literal["all", "half", "turns", "apart", "sacrificed"] = "all"
    """Who lies and how: all liars alike, only half of them, the two halves in turns, all with shifts of their
    own that add up to the same (`apart`), or all but one, who is expelled in this round (`sacrificed`)."""
    start: int = Field(default=0, ge=0)
    """The first round with lies, counted from 0; before it, liars behave honestly."""
    stop: int | None = Field(default=None, ge=0)
    """From this round on, liars behave honestly again."""
    greedy: bool = True
    """true: the most harm in this round that gets nobody expelled; false: only lies that the server does not
    notice and correct."""
    bold: bool = False
    """Against a server that tests sums over rounds (`evidence`) only now and then: between two such tests,
    lie as much as tests of single messages allow, although the next test of sums will find out."""
    sharper: float = Field(default=1.0, ge=1.0)
    """For `direction` "errors": mistakes are counted by a smooth function, since a plain count has no slope.
    Above 1, the search also runs with a function steeper by this factor, and the more harmful lie is sent."""
    points: int = Field(default=40, ge=2)
    """How many strengths are tried in every direction; afterwards, eight finer ones around each of the three
    best lies."""
    reach: float = Field(default=100.0, gt=1)
    """The largest strength tried, as a multiple of the length of the honest clients' mean contribution; the
    smallest is 0.1 times that length."""

    @model_validator(mode="after")
    def _one_way_to_differ(self) -> Adaptive:
        if self.role == "apart" and self.noise != "protocol":
            raise ValueError(
                f"role 'apart' gives every liar a shift of its own, and noise {self.noise!r} its own noise; "
                "allowed with it: noise 'protocol'"
            )
        return self

    def build(self) -> Attack:
        """Return the attack."""
        return Attack(
            "adaptive",
            craft=self._craft,
            reads_own=True,
            informed=informed,
            needs_classes=self.direction in ("poisoned", "backdoor"),
            backdoor=Backdoor() if self.direction == "backdoor" else None,
        )

    def _craft(self, sent: View) -> Crafted:
        view = Informed.of(sent)
        own = view.honest.new_zeros(view.byzantine, view.honest.shape[1]) if view.own is None else view.own
        stop = math.inf if self.stop is None else self.stop
        if view.byzantine == 0 or not self.start <= view.round < stop:
            return Crafted(own, 0.0)
        honest = finite_rows(view.honest)
        if len(honest) < len(view.honest):  # the server drops messages that are not finite
            view = replace(view, honest=honest, positions=None)
        defence = RuleAlone.of(view, own) if view.defence is None else view.defence()
        truth = (honest.mean(0) if view.truth is None else view.truth()).double()
        length = to_the_host(torch.linalg.vector_norm(truth))

        @cache
        def strengths() -> list[float]:
            """Return the strengths to try; reading the length of the truth waits for its device."""
            return self._strengths(float(length()) or 1.0)

        if defence is not None and not self.bold:
            defence = defence.looked()
        lie = partial(self._lie, view, own, truth, defence)
        crafted, far = lie(strengths, self._uphill(view))
        if self.direction in ("errors", "unshown-errors") and far > 0:
            near = [one for one in strengths() if 1 / NEAR < one / (crafted.strength or 1.0) < NEAR]
            tried = near or strengths()
            crafted = self._towards_errors(view, Climb(crafted, far), truth, partial(lie, lambda: tried))
        if self.role == "sacrificed" and view.byzantine > 1:
            gross = own[:1] - (self.reach * truth).to(own)
            crafted = replace(crafted, messages=torch.cat([gross, crafted.messages[1:]]))
        return crafted

    def _strengths(self, length: float) -> list[float]:
        """Return the strengths to try if the truth has this length."""
        found: list[float] = (length * 0.1 * (10 * self.reach) ** np.linspace(0, 1, self.points)).tolist()
        return found

    def _towards_errors(self, view: Informed, along_loss: Climb, truth: Tensor, lie: Lie) -> Crafted:
        """Return the lie after which most examples are mistaken, searched from the lie `along_loss`."""
        if view.errors is None or view.mistaken is None:
            return along_loss.crafted
        mistaken, sharpness = view.mistaken, [1.0, *({self.sharper} - {1.0})]
        if self.direction == "unshown-errors" and view.unshown_errors is not None:
            sharpness = [*sharpness, *({SECOND_SHARPNESS} - {self.sharper})]
        tries = [climbed(view, along_loss, truth, lie, view.errors, mistaken, sharp) for sharp in sharpness]
        if self.direction == "unshown-errors" and view.unshown_errors and view.unshown_mistaken:
            every = [one for tried in tries for one in tried]
            return best_after_tuning(view, every, truth, lie, view.unshown_errors, view.unshown_mistaken)
        if len(tries) == 1:
            return tries[0][-1].crafted
        found = [tried[-1].crafted for tried in tries]
        return max(found, key=lambda one: mistaken(view.stack(one.messages), OUTRIGHT))

    def _lie(
        self,
        view: Informed,
        own: Tensor,
        truth: Tensor,
        defence: Defence | None,
        strengths: Callable[[], list[float]],
        uphill: Tensor | None,
    ) -> tuple[Crafted, float]:
        """Return the most harmful lie, and how much further it gets the aggregate than no lie does.

        `uphill` (d,) is where a loss rises; None: the attack's direction is another. `defence` is None if
        every lie has to be aggregated by itself.
        """
        lying = self._lying(view)
        if view.defence is not None and defence is not None:
            directions = self._directions(view, truth, uphill, defence)
            against = -directions[0] if self.direction in UPHILL else truth
            candidates = self._tryout(view, own, defence, view.members, lying, directions, against)
            return self._strongest(candidates, own, strengths())
        shift = -truth if uphill is None else uphill.double()
        shift = shift / torch.linalg.vector_norm(shift).clamp(min=1e-30)
        ways = leaning(shift, None if view.trusted is None else view.trusted().to(shift))
        ways += _slanted(shift, truth) if self.direction == "slanted" else []
        if defence is None:
            return one_by_one(view, own, ways[0], self._messages(view, own, ways, lying, strengths()))
        liars = tuple(np.flatnonzero(view.order.numpy() >= len(view.honest)).tolist())
        candidates = self._tryout(view, own, defence, liars, lying, torch.stack(ways), -shift)
        return self._strongest(candidates, own, strengths())

    def _tryout(
        self,
        view: Informed,
        own: Tensor,
        defence: Defence,
        liars: tuple[int, ...],
        lying: Array,
        directions: Tensor,
        truth: Tensor,
    ) -> Candidates:
        """Return a candidates of lies along `directions` (q, d); for its other arguments see there."""
        shifts = self._own_shifts(view, own, lying, directions)
        if shifts is None:
            return Candidates(defence, liars, lying, directions, truth, self.noise)
        return Candidates(defence, liars, lying, shifts.flatten(0, 1), truth, "protocol", own_ways=True)

    def _own_shifts(self, view: Informed, own: Tensor, lying: Array, directions: Tensor) -> Tensor | None:
        """Return what each of the r who lie adds, in all ways to try (ways, r, d); None: all add the same."""
        if self.role == "apart":
            return apart(directions, int((lying > 0).sum()), view.key.fold("apart"))
        if self.noise == "ranked":
            rows = own.to(directions)[torch.from_numpy(lying > 0).to(own.device)]
            # Divided by a power of four, which is exact, so that a lie's strength is the share it reorders.
            moved = [(ranked(rows, way, share) - rows) / share for way in directions for share in SHARES]
            return torch.stack(moved)
        return None

    def _messages(
        self, view: Informed, own: Tensor, ways: list[Tensor], lying: Array, strengths: list[float]
    ) -> Iterator[tuple[float, Tensor]]:
        """Yield each lie to try: its strength, and all liars' messages (f, d)."""
        shifts = self._own_shifts(view, own, lying, torch.stack(ways))
        if shifts is None:
            for way in ways:
                yield from shifted(own, way, lying, strengths, self.noise)
            return
        active = torch.from_numpy(np.flatnonzero(lying)).to(own.device)
        rows = own.to(shifts)[active]
        for number, shift in enumerate(shifts):
            for strength in self._tried(number, strengths):
                yield strength, own.index_copy(0, active, (rows + strength * shift).to(own))

    def _tried(self, way: int, strengths: list[float]) -> list[float]:
        """Return the strengths to try in a way; a `ranked` lie has only its own, the share it reorders."""
        return [SHARES[way % len(SHARES)]] if self.noise == "ranked" else strengths

    def _strongest(
        self, candidates: Candidates, own: Tensor, strengths: list[float]
    ) -> tuple[Crafted, float]:
        """Return the most harmful lie that is allowed, and how much further it gets the aggregate than none.

        All strengths are tried first, then finer ones around the best.
        """
        ways = range(candidates.ways)
        lies = [
            candidates.lies(way, [*self._tried(way, strengths), *candidates.furthest(way)]) for way in ways
        ]
        tried = Lies.joined([candidates.honest, *lies])
        found = candidates.judged(tried)
        quiet, unseen = found.harm[0], math.inf if self.greedy else 1.1 * found.corrected[0] + 1e-9
        if len(tried) == 1:
            return Crafted(own, 0.0), 0.0
        best = 1 + np.argsort(-found.allowed(unseen)[1:], kind="stable")[:BEST]
        finer = (10 * self.reach) ** (np.arange(-4, 5) / 5 / (self.points - 1))
        finer = np.ones(1) if self.noise == "ranked" else finer
        around = [
            candidates.lies(way, np.outer(tried.strength[best[tried.which[best] == way]], finer).ravel())
            for way in sorted(set(tried.which[best].tolist()))
        ]
        tried = Lies.joined([tried.only(best), *around])
        harm = candidates.judged(tried).allowed(unseen)
        most = int(harm.argmax())
        if not harm[most] > quiet:
            return Crafted(own, 0.0), 0.0
        far = float(harm[most] - quiet) / abs(candidates.defence.step) if math.isfinite(quiet) else 0.0
        return Crafted(own + candidates.sent(tried, most).to(own), float(tried.strength[most])), far

    def _lying(self, view: Informed) -> Array:
        """Return each liar's factor of the shift in this round (f,): 1 if it lies, 0 if not."""
        first = (np.arange(view.byzantine) < (view.byzantine + 1) // 2).astype(float)
        if self.role in ("all", "apart") or view.byzantine == 1:
            return np.ones(view.byzantine)
        if self.role == "sacrificed":
            return (np.arange(view.byzantine) > 0).astype(float)
        return first if self.role == "half" or view.round % 2 == 0 else 1 - first

    def _uphill(self, view: Informed) -> Tensor | None:
        """Return where a loss rises (d,); None if the direction is another, or the loss is not available."""
        if self.direction not in UPHILL:
            return None
        others = {"unshown": view.unshown, "poisoned": view.poisoned, "backdoor": view.backdoored}
        asked = others.get(self.direction, view.uphill)
        return None if asked is None else asked()

    def _directions(self, view: Informed, truth: Tensor, uphill: Tensor | None, defence: Defence) -> Tensor:
        """Return the unit directions to try (q, d)."""
        wanted = DIRECTIONS if self.direction == "best" else (self.direction,)
        found = []
        for name in wanted:
            if name == "ones":
                vector = torch.ones_like(truth)
            elif name == "std":
                vector = view.honest.double().std(0, correction=0)
            elif name == "top":
                vector = _top(defence)
            elif uphill is not None:
                vector = uphill
            else:
                vector = -truth
                if name == "across":
                    vector = _across(vector, defence)
                # `where` and not `if`: this does not wait for the device.
                vector = torch.where(vector @ vector > 0, vector, 1.0)
            vector = vector.to(truth)
            found.append(vector / torch.linalg.vector_norm(vector).clamp(min=1e-30))
        return torch.stack(found + (_slanted(found[0], truth) if self.direction == "slanted" else []))


def _slanted(uphill: Tensor, truth: Tensor) -> list[Tensor]:
    """Return the unit directions (d,) of slanted lies, one for each of `SLANTS`."""
    return [leaning_back(uphill, truth, slant) for slant in SLANTS]


def _sums(defence: Defence) -> Tensor:
    return defence.vectors[: len(defence.vectors) - len(defence.senders) - 1].double()


def _top(defence: Defence) -> Tensor:
    """Return the direction in which sums differ most."""
    sums = _sums(defence)
    centred = sums - sums.mean(0)
    found: Tensor = torch.linalg.eigh(centred @ centred.T)[1][:, -1] @ centred
    return found


def _across(vector: Tensor, defence: Defence) -> Tensor:
    """Return the part of the vector orthogonal to the mean of the sums and to the mean of the messages."""
    n = len(defence.vectors) - len(defence.senders) - 1
    means = torch.stack([_sums(defence).mean(0), defence.vectors[n:-1].double().mean(0)])
    basis: Tensor = torch.linalg.qr(means.T.to(vector))[0]
    return vector - basis @ (basis.T @ vector)
