"""Search of the most harmful strength, in every round, against the server's own aggregation.

An attack on a line sends b(τ) = m + τ u (see `trilemma.attacks.span`). The search maximises over τ

    distance   ‖F(honest, b(τ), …, b(τ)) − m‖       how far the aggregate F is pulled from the honest mean
    descent    −⟨F(honest, b(τ), …, b(τ)), m⟩       how little of the honest descent is left

on a grid of both signs, then by golden section beside its highest points. The result is never worse than the
best grid point. One side alone, a third as fine, found down to .41 of a fine grid's harm.

**Gram targets.** If F is a geometric rule, F = Σ w_i x_i with weights w that depend only on the Gram matrix
of the messages. All n messages are B(τ) [z_1 … z_h, u, m] for a small matrix B. So with the Gram matrix K of
these h + 2 vectors, measured once, every candidate costs n × n work and no pass over d:

    w = F.weights(B K Bᵀ),    F − m = cᵀ [z, u, m],  c = Bᵀ w − e_m,    ‖F − m‖² = cᵀ K c.

B is linear in τ, so B K Bᵀ is a quadratic polynomial in τ whose three coefficient matrices are computed once.
On a GPU, a `ManyGramsTarget` weighs all grid points together, and then all points that the next steps of
golden section may need (`golden.Together`). The result is the same.

**Other targets** (coordinate-wise rules, any callable) are evaluated on the messages themselves, one
aggregation per candidate; `Search.passes` bounds how many.

**The grid** is geometric, in units of the honest radius: at τ = radius/‖u‖ the Byzantine message is as far
from the mean as honest ones are (τ = 1 for ALIE). Published strengths of an attack (2 for the sign flip,
z_max for ALIE) are added to the grid.

The worst-case objective and the search per round follow Allouah et al., "On the privacy-robustness-utility
trilemma in distributed learning", ICML 2023, appendix on experiments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.attacks.golden import Objective, Together, maximise
from trilemma.attacks.span import Direction, Line, Span, draw_line, finite_rows, measure
from trilemma.attacks.types import Crafted, GramTarget, ManyGramsTarget, View
from trilemma.base.keys import Key
from trilemma.base.options import Options

MANY = 32
"""On a GPU, strengths are evaluated together from this number of clients on; fewer are faster one by one."""

MARGIN = 1e-3
"""In Gram space, a refined strength must still be better after a relative change by this share. Harm
typically grows with τ up to an edge, where the rule drops the attackers; rounding may cross that edge."""


class Search(Options):
    """How a strength is searched.

    The grid runs from 1/reach to reach honest radii, in `points` points, then `refinements` steps of golden
    section follow.

    >>> one_side = Search(reach=10.0, points=3, sides="positive")
    >>> [round(tau, 3) for tau in one_side.grid(unit=1.0, count=3, anchors=(2.0,))]
    [0.1, 1.0, 2.0, 10.0]
    """

    objective: Literal["distance", "descent"] = "distance"
    """What the search makes large: how far the aggregate is moved, or how far against the descent."""
    sides: Literal["positive", "both"] = "both"
    """Positive strengths only, as in the papers, or as many negative ones too."""
    reach: float = Field(default=100.0, gt=1.0)
    """The largest strength on the grid, in honest radii; the smallest is 1/reach."""
    points: int = Field(default=41, ge=2)
    """Strengths on the grid, on each side."""
    refinements: int = Field(default=24, ge=0)
    """Steps of golden section around the highest points of the grid."""
    passes: int = Field(default=48, ge=3)
    """About how many aggregations both may take where every candidate is one of the full messages."""

    def grid(self, unit: float, count: int, anchors: tuple[float, ...] = ()) -> list[float]:
        """Return the strengths of the grid: `count` around `unit`, and the `anchors`."""
        steps = torch.linspace(-1.0, 1.0, count, dtype=torch.float64).tolist()
        positive = {unit * self.reach**step for step in steps} | set(anchors)
        return sorted(positive | {-tau for tau in positive} if self.sides == "both" else positive)


def send(view: View, line: Line, tau: float) -> Crafted:
    """Let all Byzantine clients send m + τ u; τ is the reported strength."""
    return Crafted(line.at(tau).to(view.honest.dtype).expand(view.byzantine, -1), tau)


def fixed(view: View, direction: Direction, tau: float) -> Crafted:
    """Let all Byzantine clients send m + τ u for a given τ."""
    return send(view, draw_line(finite_rows(view.honest), direction), tau)


def searched(
    view: View,
    direction: Direction,
    search: Search,
    anchors: tuple[float, ...] = (),
    together: bool | None = None,
) -> Crafted:
    """Let all Byzantine clients send m + τ u, with the τ that harms `view.target` most.

    `together`: evaluate many strengths at a time if the target can; None: on a GPU, from `MANY` clients on.
    """
    if view.byzantine == 0:
        return Crafted(view.honest[:0])
    honest = finite_rows(view.honest)
    span = measure(honest, direction)
    # Messages that are not finite have no Gram matrix; such rounds are rare and take the slow way.
    if isinstance(view.target, GramTarget) and view.target.geometric and len(honest) == len(view.honest):
        many = view.honest.is_cuda and view.clients >= MANY if together is None else together
        objective = _in_gram_space(view, view.target, span, search, many)
        grid = search.grid(_unit(span), search.points, anchors)
        return send(view, span.line, maximise(objective, grid, search.refinements, MARGIN))
    objective = _on_messages(view, span.line, search)
    refinements = search.passes // 3
    per_side = (search.passes - refinements) // (2 if search.sides == "both" else 1)
    grid = search.grid(_unit(span), max(2, per_side - len(anchors)), anchors)
    return send(view, span.line, maximise(objective, grid, refinements))


def _in_gram_space(view: View, target: GramTarget, span: Span, search: Search, together: bool) -> Objective:
    """Return the objective as a function of n × n matrices."""
    line, descent = _GramLine.of(view, span), search.objective == "descent"
    if together and isinstance(target, ManyGramsTarget) and target.weights_from_grams is not None:
        here, weigh_many = line.to(view.honest.device), target.weights_from_grams

        def all_achieved(strengths: list[float]) -> list[float]:
            tau = torch.tensor(strengths, dtype=torch.float64, device=here.constant.device)
            weights = weigh_many(here.gram(tau[:, None, None]))
            found: list[float] = here.achieved(weights, tau[:, None], descent).tolist()
            return found

        return Together(all_achieved)
    weigh = weigher(view, target)

    def achieved(tau: float) -> float:
        return float(line.achieved(weigh(line.gram(tau)), tau, descent))

    return achieved


def weigher(view: View, target: GramTarget) -> Callable[[Tensor], Tensor]:
    """Return the map from a Gram matrix (n, n) on the host to weights (n,), with the attackers' own key."""
    weigh = target.weights_from_gram
    if "key" in inspect.signature(weigh).parameters:
        weigh = partial(weigh, key=_coin(view))

    def weights(gram: Tensor) -> Tensor:
        return torch.as_tensor(weigh(gram), dtype=torch.float64, device="cpu")

    return weights


@dataclass(frozen=True)
class _GramLine:
    """The messages of a round as functions of τ, in the basis z_1 … z_h, u, m.

    Client i sends row i of B(τ) = `fixed` + τ `moving`: m + z_i if honest, m + τ u if not. So the Gram matrix
    B K Bᵀ = `constant` + τ `linear` + τ² `square`. Methods also take many τ, as (B, 1, 1) or (B, 1), and then
    return results with a leading axis.
    """

    fixed: Tensor
    moving: Tensor
    spanned: Tensor
    constant: Tensor
    linear: Tensor
    square: Tensor

    @classmethod
    def of(cls, view: View, span: Span) -> _GramLine:
        honest, order = span.honest, view.order
        fixed = torch.zeros(view.clients, honest + 2, dtype=torch.float64)
        fixed[:, -1] = 1.0
        fixed[:honest, :honest] = torch.eye(honest, dtype=torch.float64)
        moving = torch.zeros_like(fixed)
        moving[honest:, -2] = 1.0
        fixed, moving = fixed[order], moving[order]
        constant = fixed @ span.gram @ fixed.T
        cross = fixed @ span.gram @ moving.T
        square = moving @ span.gram @ moving.T
        return cls(fixed, moving, span.gram, constant, cross + cross.T, square)

    def to(self, device: torch.device) -> _GramLine:
        """Return the same on another device."""
        return _GramLine(**{name: part.to(device) for name, part in vars(self).items()})

    def gram(self, tau: float | Tensor) -> Tensor:
        """Return the Gram matrix of the messages (n, n)."""
        return self.constant + tau * self.linear + tau**2 * self.square

    def achieved(self, weights: Tensor, tau: float | Tensor, descent: bool) -> Tensor:
        """Return the attackers' objective for an aggregate with these weights (n,)."""
        aggregate = weights @ self.fixed + tau * (weights @ self.moving)
        if descent:
            along: Tensor = (aggregate @ self.spanned)[..., -1]
            return -along
        pull = aggregate - self._origin
        squared: Tensor = torch.linalg.vecdot(pull @ self.spanned, pull)
        return squared

    @property
    def _origin(self) -> Tensor:
        """The honest mean, as coefficients in the basis."""
        origin = torch.zeros_like(self.spanned[-1])
        origin[-1] = 1.0
        return origin


def _on_messages(view: View, line: Line, search: Search) -> Objective:
    """Return the objective as a function of τ that runs the target on the messages themselves."""
    stacked = view.stack(view.honest.new_zeros(view.byzantine, view.honest.shape[1]))
    byzantine = (view.order >= view.honest.shape[0]).to(stacked.device)
    mean = line.mean.double()

    def achieved(tau: float) -> float:
        stacked[byzantine] = line.at(tau).to(stacked.dtype)
        value = view.target(stacked, key=_coin(view)).value.double()
        if search.objective == "descent":
            return -float(value @ mean)
        return float((value - mean).square().sum())

    return achieved


def _coin(view: View) -> Key:
    """Return the key for rules that draw at random: the attackers' own, as they do not know the server's."""
    return view.key.fold("coin")


def _unit(span: Span) -> float:
    """Return the τ at which m + τ u is as far from the mean as honest messages are; 1 if there is none."""
    if span.radius > 0.0 and span.reach > 0.0:
        return span.radius / span.reach
    return 1.0
