"""Min-max and min-sum: as far from the honest mean as the honest messages' own distances allow.

    b = m + γ p,   p = −m/‖m‖ ("unit"), −σ ("std") or −sign(m) ("sign"),   γ the largest with

    min-max    max_i ‖b − x_i‖   ≤  max_{i,j} ‖x_i − x_j‖
    min-sum    Σ_i ‖b − x_i‖²    ≤  max_i Σ_j ‖x_i − x_j‖²

The papers halve intervals to find γ; both have a closed form in the Gram matrix of z_i = x_i − m and p. With
D the largest honest distance, ‖γp − z_i‖² ≤ D² bounds γ for every i by the larger root of a quadratic, and
min-max takes the smallest of these bounds. Since Σ z_i = 0, min-sum's sides are h γ²‖p‖² + Σ_j ‖z_j‖² and
h max_i ‖z_i‖² + Σ_j ‖z_j‖², so γ = max_i ‖z_i‖ / ‖p‖: as far from the mean as the furthest honest message.

Reference: Shejwalkar, Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and
defenses for federated learning", NDSS 2021.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from trilemma.attacks.search import send
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import Span, finite_rows, measure, minus_deviation, minus_mean, minus_sign
from trilemma.attacks.types import Attack, Crafted, View

Perturbation = Literal["unit", "std", "sign"]

DIRECTIONS = {"unit": minus_mean, "std": minus_deviation, "sign": minus_sign}


@attacks.register("min-max")
class MinMax(AttackSettings):
    """Min-max: no honest message is further from it than two honest ones are from each other."""

    perturbation: Perturbation = "unit"
    """The direction p: against the honest mean, its deviations, or its signs."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("min-max", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        span = measure(finite_rows(view.honest), DIRECTIONS[self.perturbation])
        return _in_units(span, self.perturbation, send(view, span.line, largest_min_max(span)))


@attacks.register("min-sum")
class MinSum(AttackSettings):
    """Min-sum: its squared distances to the honest messages sum to no more than an honest message's."""

    perturbation: Perturbation = "unit"
    """The direction p: against the honest mean, its deviations, or its signs."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("min-sum", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        span = measure(finite_rows(view.honest), DIRECTIONS[self.perturbation])
        return _in_units(span, self.perturbation, send(view, span.line, largest_min_sum(span)))


def largest_min_max(span: Span) -> float:
    """Return the largest γ ≥ 0 that keeps min-max's condition along the span's direction.

    >>> largest_min_max(measure(torch.tensor([[1.0], [3.0]]), minus_sign))
    1.0
    """
    if span.reach == 0.0:
        return 0.0
    squares = span.spread.diagonal()
    limit = (squares[:, None] + squares[None, :] - 2.0 * span.spread).max()
    length = span.gram[-2, -2]
    inner = span.gram[-2, : span.honest]
    # γ²‖p‖² − 2γ⟨p, z_i⟩ + ‖z_i‖² ≤ D². Honest distances to the mean are at most D, so both roots are real.
    roots = (inner + torch.sqrt(inner.square() + length * (limit - squares).clamp(min=0.0))) / length
    return max(0.0, float(roots.min()))


def largest_min_sum(span: Span) -> float:
    """Return the largest γ ≥ 0 that keeps min-sum's condition along the span's direction.

    >>> largest_min_sum(measure(torch.tensor([[1.0], [3.0]]), minus_sign))
    1.0
    """
    if span.reach == 0.0:
        return 0.0
    return math.sqrt(float(span.spread.diagonal().max())) / span.reach


def _in_units(span: Span, perturbation: Perturbation, crafted: Crafted) -> Crafted:
    """Report γ in the paper's scale, where the direction "unit" has length one."""
    if perturbation != "unit" or crafted.strength is None:
        return crafted
    return Crafted(crafted.messages, crafted.strength * span.reach)
