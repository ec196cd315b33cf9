"""Mimic: all Byzantine clients send what one honest client sends, so that the rule over-counts it.

    z   = argmax_{‖z‖ = 1}  Σ_{i honest} ⟨z, x_i − m⟩²      the direction in which honest clients differ most
    i*  = argmax_{i honest} |⟨z, x_i⟩|                       the client that stands out most along it
    b   = x_{i*}

Each message is one that an honest client sent, so no rule can tell it apart, yet on heterogeneous data the
aggregate leans towards that client. The paper learns z and i* in a warm-up of several rounds and then keeps
them; these attackers use the current round only, or a `victim` chosen beforehand.

z is a combination of the centred messages, z ∝ Σ v_i (x_i − m) with v the top eigenvector of their Gram
matrix: one pass over the messages, then h × h work.

Reference: Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing",
ICLR 2022.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import Span, finite_rows, measure, minus_mean
from trilemma.attacks.types import Attack, Crafted, View
from trilemma.base.errors import UserError


@attacks.register("mimic")
class Mimic(AttackSettings):
    """Mimic: every Byzantine client copies one honest client.

    `victim` is a row of the honest messages, or "variance": the paper's choice.
    """

    victim: Annotated[int, Field(ge=0)] | Literal["variance"] = "variance"
    """Row of the honest message that is copied, or the one along the direction of most variance."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("mimic", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        if self.victim == "variance":
            honest = finite_rows(view.honest)
            message = honest[most_extreme(measure(honest, minus_mean))].to(view.honest.dtype)
        elif self.victim < view.honest.shape[0]:
            message = view.honest[self.victim]
        else:
            raise UserError(
                f"mimic: victim {self.victim} is not one of the {view.honest.shape[0]} honest clients "
                f"(0 … {view.honest.shape[0] - 1})"
            )
        return Crafted(message.expand(view.byzantine, -1))


def most_extreme(span: Span) -> int:
    """Return the honest client that stands out most along the direction of largest variance.

    >>> rows = torch.tensor([[1.0, 5.0], [1.1, 5.0], [0.9, 9.0]])
    >>> most_extreme(measure(rows, minus_mean))
    2
    """
    _, vectors = torch.linalg.eigh(span.spread)
    top = vectors[:, -1]
    # ⟨z, x_i⟩ = ⟨z, x_i − m⟩ + ⟨z, m⟩, all up to the length of z, which does not change who is largest.
    along = span.spread @ top + top @ span.gram[: span.honest, -1]
    return int(along.abs().argmax())
