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
    role        all        all liars shift alike
                half       the first half shifts, the others stay honest in reserve
                turns      one half in even rounds, the other in odd rounds
    rounds      start, stop: honest before `start` and from `stop` on

**Harm** is how far the model moves against the true descent, −⟨θ' − θ_0, h⟩, where h is the direction in
which the truth would move it; for `loss` and the directions after it, how far the model moves uphill. It is
computed for what the defended server would do, with its rule and its corrections. All candidates are
combinations of sums, messages and directions. So each costs n × n work in their Gram matrix, which is
measured once per round, and all are evaluated together (`tryout`).

Without `greedy`, a candidate may be set right by at most a tenth more than no lie at all, so that liars stay
below what can be seen. If the server looks at sums in some rounds only, liars assume a look in every round,
because they mean to stay and the next look counts; `bold` liars do not. A server without memory has only its
rule (`memoryless`); liars then use `gradient`, `loss`, `slanted` or `errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trilemma.attacks.memoryless import RuleAlone, leaning, one_by_one
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import finite_rows
from trilemma.attacks.tryout import Lies, Tryout
from trilemma.attacks.turning import Array
from trilemma.attacks.types import Attack, Crafted, Defence, View
from trilemma.transfers import to_the_host

DIRECTIONS = ("gradient", "ones", "std", "top", "across")
UPHILL = ("loss", "slanted", "unshown", "errors", "unshown-errors")

SLANTS = (-0.5, 0.25, 0.5, 1.0, 2.0)
"""How far slanted lies lean back along the gradient, relative to a length of 1 uphill."""

ERRING = ((1.0, 0.0), (1.0, 0.0), (1.0, -0.25), (0.9, 0.0), (1.1, 0.0), (1.0, -0.25))
"""The lies towards errors, in the order they are tried. Each pair is the distance, as a multiple of what the
best lie so far reaches, and how far the lie leans back along the gradient, relative to a length of 1. Several
are tried because the server's reaction to lies has edges."""

SECOND_SHARPNESS = 2.0
"""A second sharpness of counting errors that `unshown-errors` tries in addition to the usual one."""

CLIMBS = 4
"""The most climbs towards errors after tuning, each from the best lie before it."""

PARTS_OF_THE_WAY = (1.0, 0.5, 0.25, 0.1)
"""How far towards the end of such a climb lies go, tried in this order until one is better."""

NEAR = 3.0
"""The strength of lies towards errors is between 1/NEAR and NEAR times that of the lie along `loss`."""

OUTRIGHT = 64.0
"""At this sharpness an example counts as either mistaken or not. Liars who climbed at several sharpnesses
compare their results by it."""

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
        "unshown",
        "errors",
        "unshown-errors",
        "best",
    ] = "gradient"
    """Where liars push the model: against the honest gradient, up the honest clients' loss, to where most
    examples are mistaken (`errors`), …; docs/frontier.md explains each."""
    noise: Literal["protocol", "rotated", "stretched"] = "protocol"
    """The liars' own noise: as the protocol wants it, turned to where they push, or turned and lengthened."""
    role: Literal["all", "half", "turns"] = "all"
    """Who lies: all liars in every round, only half of them, or the two halves in turns."""
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

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("adaptive", craft=self._craft, reads_own=True, reads_truth=True)

    def _craft(self, view: View) -> Crafted:
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
            return self._towards_errors(view, _Found(crafted, far), truth, partial(lie, lambda: tried))
        return crafted

    def _strengths(self, length: float) -> list[float]:
        """Return the strengths to try if the truth has this length."""
        found: list[float] = (length * 0.1 * (10 * self.reach) ** np.linspace(0, 1, self.points)).tolist()
        return found

    def _towards_errors(
        self, view: View, along_loss: _Found, truth: Tensor, lie: Callable[[Tensor], tuple[Crafted, float]]
    ) -> Crafted:
        """Return the lie after which most examples are mistaken, searched from the lie `along_loss`."""
        if view.errors is None or view.mistaken is None:
            return along_loss.crafted
        mistaken, sharpness = view.mistaken, [1.0, *({self.sharper} - {1.0})]
        if self.direction == "unshown-errors" and view.unshown_errors is not None:
            sharpness = [*sharpness, *({SECOND_SHARPNESS} - {self.sharper})]
        tries = [_climbed(view, along_loss, truth, lie, view.errors, mistaken, sharp) for sharp in sharpness]
        if self.direction == "unshown-errors" and view.unshown_errors and view.unshown_mistaken:
            every = [one for tried in tries for one in tried]
            return _best_after_tuning(view, every, truth, lie, view.unshown_errors, view.unshown_mistaken)
        if len(tries) == 1:
            return tries[0][-1].crafted
        found = [tried[-1].crafted for tried in tries]
        return max(found, key=lambda one: mistaken(view.stack(one.messages), OUTRIGHT))

    def _lie(
        self,
        view: View,
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
            tryout = Tryout(defence, view.members, lying, directions, against, self.noise)
            return self._strongest(tryout, own, strengths())
        shift = -truth if uphill is None else uphill.double()
        shift = shift / torch.linalg.vector_norm(shift).clamp(min=1e-30)
        ways = leaning(shift, None if view.trusted is None else view.trusted().to(shift))
        ways += _slanted(shift, truth) if self.direction == "slanted" else []
        if defence is None:
            return one_by_one(view, own, ways, lying, strengths(), self.noise)
        liars = tuple(np.flatnonzero(view.order.numpy() >= len(view.honest)).tolist())
        tryout = Tryout(defence, liars, lying, torch.stack(ways), -shift, self.noise)
        return self._strongest(tryout, own, strengths())

    def _strongest(self, tryout: Tryout, own: Tensor, strengths: list[float]) -> tuple[Crafted, float]:
        """Return the most harmful lie that is allowed, and how much further it gets the aggregate than none.

        All strengths are tried first, then finer ones around the best.
        """
        ways = range(len(tryout.directions))
        lies = [tryout.lies(way, [*strengths, *tryout.furthest(way)]) for way in ways]
        tried = Lies.joined([tryout.honest, *lies])
        found = tryout.judged(tried)
        quiet, unseen = found.harm[0], math.inf if self.greedy else 1.1 * found.corrected[0] + 1e-9
        if len(tried) == 1:
            return Crafted(own, 0.0), 0.0
        best = 1 + np.argsort(-found.allowed(unseen)[1:], kind="stable")[:BEST]
        finer = (10 * self.reach) ** (np.arange(-4, 5) / 5 / (self.points - 1))
        around = [
            tryout.lies(way, np.outer(tried.strength[best[tried.which[best] == way]], finer).ravel())
            for way in sorted(set(tried.which[best].tolist()))
        ]
        tried = Lies.joined([tried.only(best), *around])
        harm = tryout.judged(tried).allowed(unseen)
        most = int(harm.argmax())
        if not harm[most] > quiet:
            return Crafted(own, 0.0), 0.0
        far = float(harm[most] - quiet) / abs(tryout.defence.step) if math.isfinite(quiet) else 0.0
        return Crafted(own + tryout.sent(tried, most).to(own), float(tried.strength[most])), far

    def _lying(self, view: View) -> Array:
        """Return each liar's factor of the shift in this round (f,): 1 if it lies, 0 if not."""
        first = (np.arange(view.byzantine) < (view.byzantine + 1) // 2).astype(float)
        if self.role == "all":
            return np.ones(view.byzantine)
        return first if self.role == "half" or view.round % 2 == 0 or view.byzantine == 1 else 1 - first

    def _uphill(self, view: View) -> Tensor | None:
        """Return where a loss rises (d,); None if the direction is another, or the loss is not available."""
        if self.direction not in UPHILL:
            return None
        asked = view.unshown if self.direction == "unshown" else view.uphill
        return None if asked is None else asked()

    def _directions(self, view: View, truth: Tensor, uphill: Tensor | None, defence: Defence) -> Tensor:
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


@dataclass(frozen=True)
class _Found:
    """A lie, how `far` it gets the aggregate, and the direction (d,) it was made for; None: along `loss`."""

    crafted: Crafted
    far: float
    way: Tensor | None = None


def _climbed(
    view: View,
    begin: _Found,
    truth: Tensor,
    lie: Callable[[Tensor], tuple[Crafted, float]],
    errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor],
    mistaken: Callable[[Tensor, float], float],
    sharp: float,
) -> list[_Found]:
    """Return the lie `begin` and those found after it; last the one after which most examples are mistaken.

    `sharp` says how sharply mistakes are counted. Each lie starts from the best before it, because where a
    lie leads, with its noise and the server's weights, is known only after it was tried.
    """
    sent = view.stack(begin.crafted.messages)
    found, best, most = [begin], begin, mistaken(sent, sharp)
    from_, distance = None, begin.far
    for share, lean in ERRING:
        way = _leaning(errors(share * distance, from_, sharp).to(truth), truth, lean)
        tried, reached = lie(way)
        sent = view.stack(tried.messages)
        count = mistaken(sent, sharp)
        found.append(_Found(tried, reached, way))
        if count > most:
            best, most = found[-1], count
        if reached > 0 and (best is found[-1] or from_ is None):
            from_, distance = (way, sent), reached
    return [*(one for one in found if one is not best), best]


def _best_after_tuning(
    view: View,
    every: Sequence[_Found],
    truth: Tensor,
    lie: Callable[[Tensor], tuple[Crafted, float]],
    errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor],
    mistaken: Callable[[Tensor, float], float],
) -> Crafted:
    """Return the lie after which most examples are mistaken once the model has been tuned.

    It is the best of `every` lie towards errors, or one found by climbing from there. Owners choose scale and
    pull anew after every lie, and the server lets some directions pass much further than others. So if the
    lie at the end of a climb is not better, one that goes only a part of the way may be. Mistakes are counted
    outright (`OUTRIGHT`), because the confidence of tuned models says nothing.
    """

    def counted(one: _Found) -> float:
        return mistaken(view.stack(one.crafted.messages), OUTRIGHT)

    best = max(every, key=counted)
    most = counted(best)
    for _ in range(CLIMBS):
        from_ = (
            None if best.way is None or not best.far > 0 else (best.way, view.stack(best.crafted.messages))
        )
        aim = errors(best.far, from_, 1.0).to(truth)
        for part in PARTS_OF_THE_WAY if best.way is not None else (1.0,):
            way = _leaning(
                aim if best.way is None else part * aim + (1 - part) * best.way.to(aim), truth, 0.0
            )
            tried = _Found(*lie(way), way)
            if (count := counted(tried)) > most:
                best, most = tried, count
                break
        else:
            break
    return best.crafted


def _leaning(uphill: Tensor, truth: Tensor, slant: float) -> Tensor:
    """Return the unit vector (d,) along up + slant · back; up is along `uphill`, back against the truth."""
    up, back = (one / torch.linalg.vector_norm(one).clamp(min=1e-30) for one in (uphill, -truth))
    found: Tensor = up + slant * back
    return found / float(torch.linalg.vector_norm(found).clamp(min=1e-30))


def _slanted(uphill: Tensor, truth: Tensor) -> list[Tensor]:
    """Return the unit directions (d,) of slanted lies, one for each of `SLANTS`."""
    return [_leaning(uphill, truth, slant) for slant in SLANTS]


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
