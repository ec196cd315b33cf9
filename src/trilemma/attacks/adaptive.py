"""Adaptive: liars who know everything but honest secrets, the defence's state included, and hide in noise.

Liars send what the protocol asks for, their noise included, plus a lie that is chosen in every round: of all
directions and strengths that are tried, the one that does most harm to the model and lets nobody be expelled.

    direction   gradient   against the honest clients' mean contribution (free of noise: they know the data)
                ones       (1, …, 1)/√d
                std        the honest messages' standard deviation, coordinate by coordinate
                top        the direction in which the sums of all clients differ most
                across     against the gradient, but at right angles to what the mean shows of it
                loss       where the honest clients' loss rises most at the model the round would lead to
                slanted    the same and, beside it, leaning back along the gradient or on along it: a lie that
                           is at right angles to the mean it leads to does not show along it
                unshown    as loss, but after the model went on on public examples (`[aggregation] tune`)
                errors     where most of the honest clients' examples are taken for something else once the
                           model is pushed as far as can be: as far as a lie along `loss` gets
                unshown-errors
                           as errors, but after the model went on: from the lie of `errors` on they climb to
                           examples that are mistaken once clients, or the server, learnt from it on their
                           own; before the last round, and where nobody goes on, it is `errors`
                best       all but the last five, in every round
    noise       protocol   own message + shift
                rotated    their messages, or their sums, are turned so that all their lengths and inner
                           products stay what honest ones would be, and yet their common part points in the
                           direction
                stretched  turned as far as that goes, and their common part then made longer: tests of
                           lengths and pairs leave room for it, and a spectrum up to its edge
    role        all        everybody shifts alike
                half       the first half shifts, the others stay honest in reserve
                turns      in even rounds one half, in odd rounds the other
    rounds      start, stop: sleep before, behave afterwards

**Harm** is how far the model lands against the true descent, −⟨θ' − θ_0, h⟩ with h the direction in which the
truth would move it (for `loss` and its kin: how far it lands uphill), as the defended server would have it:
its rule, its corrections. All candidates are combinations of sums, messages and directions, so each costs
n × n work in their Gram matrix, measured once a round, and all are looked at together (`tryout`). With
`greedy` off candidates must also be set right no further than a tenth more than without the lie: liars then
stay below what can be seen. Where the server looks at sums in some rounds only, liars reckon as if it did in
every one, for they mean to stay and the next look counts; `bold` ones do not. Against a server without memory
they face its rule alone, along `gradient`, `loss`, `slanted` or `errors`.
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

DIRECTIONS = ("gradient", "ones", "std", "top", "across")
UPHILL = ("loss", "slanted", "unshown", "errors", "unshown-errors")

SLANTS = (-0.5, 0.25, 0.5, 1.0, 2.0)
"""How far slanted lies lean back along the gradient, beside a length of 1 uphill."""

ERRING = ((1.0, 0.0), (1.0, 0.0), (1.0, -0.25), (0.9, 0.0), (1.1, 0.0), (1.0, -0.25))
"""Lies towards errors, one after the other: at which multiple of the distance that the best so far gets, and
how far they lean back along the gradient beside a length of 1. What a server makes of lies has edges."""

OTHERWISE = 2.0
"""How sharply errors are counted for lies beside the usual ones, where others go on from where they lead."""

CLIMBS = 4
"""Climbs at most towards what is mistaken after others have gone on, each from the best lie before it."""

PARTS_OF_THE_WAY = (1.0, 0.5, 0.25, 0.1)
"""How far towards the end of such a climb lies go, one after the other, until one is better."""

NEAR = 3.0
"""Lies towards errors have up to so many times the strength of the one along `loss`, or as small a part."""

OUTRIGHT = 64.0
"""Counted so many times as sharply, an example is mistaken or it is not: by this, liars who climbed at more
than one sharpness compare what they found."""

BEST = 3
"""Around so many of the best lies finer strengths are tried: harm has edges, and more than one peak."""


@attacks.register("adaptive")
class Adaptive(AttackSettings):
    """Liars who know the defence: the most harmful lie each round that lets nobody be expelled."""

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
    """Where the model is pushed."""
    noise: Literal["protocol", "rotated", "stretched"] = "protocol"
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
    sharper: float = Field(default=1.0, ge=1.0)
    """Above 1: towards errors as many lies again are tried that count them so many times as sharply."""
    points: int = Field(default=40, ge=2)
    """Strengths tried for every direction; then eight more around the best, and as far as noise can turn."""
    reach: float = Field(default=100.0, gt=1)
    """Largest strength, in lengths of the honest mean contribution; the smallest is a tenth of one."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("adaptive", craft=self._craft, reads_own=True, reads_truth=True)

    def _craft(self, view: View) -> Crafted:
        own = view.honest.new_zeros(view.byzantine, view.honest.shape[1]) if view.own is None else view.own
        stop = math.inf if self.stop is None else self.stop
        if view.byzantine == 0 or not self.start <= view.round < stop:
            return Crafted(own, 0.0)
        honest = finite_rows(view.honest)
        if len(honest) < len(view.honest):  # the server leaves these out, and so do the attackers
            view = replace(view, honest=honest, positions=None)
        defence = RuleAlone.of(view, own) if view.defence is None else view.defence()
        truth = (honest.mean(0) if view.truth is None else view.truth()).double()
        longest = torch.linalg.vector_norm(truth)

        @cache
        def strengths() -> list[float]:
            """Return what is tried; who asks waits for the truth."""
            return self._strengths(float(longest) or 1.0)

        if defence is not None and not self.bold:
            defence = defence.looked()
        lie = partial(self._lie, view, own, truth, defence)
        crafted, far = lie(strengths, self._uphill(view))
        if self.direction in ("errors", "unshown-errors") and far > 0:
            near = [one for one in strengths() if 1 / NEAR < one / (crafted.strength or 1.0) < NEAR]
            tried = near or strengths()
            return self._erring(view, _Found(crafted, far), truth, partial(lie, lambda: tried))
        return crafted

    def _strengths(self, length: float) -> list[float]:
        """Return the strengths that are tried where the truth is so long."""
        found: list[float] = (length * 0.1 * (10 * self.reach) ** np.linspace(0, 1, self.points)).tolist()
        return found

    def _erring(
        self, view: View, along_loss: _Found, truth: Tensor, lie: Callable[[Tensor], tuple[Crafted, float]]
    ) -> Crafted:
        """Return the lie after which most examples are mistaken, of those that set out from `along_loss`."""
        if view.errors is None or view.mistaken is None:
            return along_loss.crafted
        mistaken, sharpness = view.mistaken, [1.0, *({self.sharper} - {1.0})]
        if self.direction == "unshown-errors" and view.unshown_errors is not None:
            sharpness = [*sharpness, *({OTHERWISE} - {self.sharper})]
        tries = [_climbed(view, along_loss, truth, lie, view.errors, mistaken, sharp) for sharp in sharpness]
        if self.direction == "unshown-errors" and view.unshown_errors and view.unshown_mistaken:
            every = [one for tried in tries for one in tried]
            return _gone_on(view, every, truth, lie, view.unshown_errors, view.unshown_mistaken)
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
        """Return what is sent, and how much further it gets the aggregate where it is meant to go.

        `uphill` is where a loss rises, None where that is not asked for. `defence` is None where every lie
        has to be sent to the server.
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
        """Return the most harmful lie that may be sent, of all strengths, then of those around the best.

        Also how much further it gets the aggregate than no lie does.
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
        """Return who lies this round (f,), as factors of the shift."""
        first = (np.arange(view.byzantine) < (view.byzantine + 1) // 2).astype(float)
        if self.role == "all":
            return np.ones(view.byzantine)
        return first if self.role == "half" or view.round % 2 == 0 or view.byzantine == 1 else 1 - first

    def _uphill(self, view: View) -> Tensor | None:
        """Return where a loss rises, if that is the direction asked for and there is a loss to ask."""
        if self.direction not in UPHILL:
            return None
        asked = view.unshown if self.direction == "unshown" else view.uphill
        return None if asked is None else asked()

    def _directions(self, view: View, truth: Tensor, uphill: Tensor | None, defence: Defence) -> Tensor:
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
            elif uphill is not None:
                vector = uphill
            else:
                vector = -truth
                if name == "across":
                    vector = _across(vector, defence)
                vector = torch.where(vector @ vector > 0, vector, 1.0)  # nobody waits for the answer
            vector = vector.to(truth)
            found.append(vector / torch.linalg.vector_norm(vector).clamp(min=1e-30))
        return torch.stack(found + (_slanted(found[0], truth) if self.direction == "slanted" else []))


@dataclass(frozen=True)
class _Found:
    """A lie, how `far` it gets the aggregate and, where that is known, which `way` it was meant to go."""

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
    """Return `begin` and lies after it, the one after which most examples are mistaken, so `sharp`, last.

    Each sets out from the best before it: where that one leads, its noise and the server's weights included,
    is known only once it was tried.
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


def _gone_on(
    view: View,
    every: Sequence[_Found],
    truth: Tensor,
    lie: Callable[[Tensor], tuple[Crafted, float]],
    errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor],
    mistaken: Callable[[Tensor, float], float],
) -> Crafted:
    """Return the lie after which most examples are mistaken outright once others have gone on from it.

    The best of `every` lie towards errors, or one found from there. Whoever goes on chooses anew after every
    lie, and a server lets some directions pass much further than others: where the lie at the end of a climb
    is none, one that goes a part of that way may be. How sure of themselves models are that went on says
    nothing, so examples are mistaken or they are not.
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
    """Return the unit direction (d,) between the direction `uphill` and the way back, or beyond."""
    up, back = (one / torch.linalg.vector_norm(one).clamp(min=1e-30) for one in (uphill, -truth))
    found: Tensor = up + slant * back
    return found / float(torch.linalg.vector_norm(found).clamp(min=1e-30))


def _slanted(uphill: Tensor, truth: Tensor) -> list[Tensor]:
    """Return unit directions (d,) between the direction `uphill` and the way back, and beyond."""
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
    """Return the part of the vector at right angles to the mean of the sums and of the messages."""
    n = len(defence.vectors) - len(defence.senders) - 1
    means = torch.stack([_sums(defence).mean(0), defence.vectors[n:-1].double().mean(0)])
    basis: Tensor = torch.linalg.qr(means.T.to(vector))[0]
    return vector - basis @ (basis.T @ vector)
