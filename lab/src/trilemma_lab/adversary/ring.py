"""Ring: liars whose noise cancels among themselves, and who spend what it covered on a common signal.

    b_j = o_j − ō + s ‖ō‖ v          o_j: what liar j would send by the protocol, noise included; ō their mean

v is a unit vector: where the loss of marked examples falls (a backdoor), or against the honest mean. Taken
one by one the messages are noise of honest size: at s = 1 the sum of their squared lengths is what it was.
Added up they are f s ‖ō‖ v, without any noise. Private noise covers the signal, and a sum reveals it.

The paper describes shares that are noise each and a backdoor together, whatever backdoor it is; the length of
the signal is ours: as much as the noise that cancels leaves room for.

Reference: Li, Wang, Li, Sun, "Your privacy my cloak: backdoor attacks on differentially private federated
learning", arXiv 2606.17035, 2026.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from trilemma.attacks.backdoor import Backdoor
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import finite_rows
from trilemma.attacks.types import Attack, Crafted, View
from trilemma_lab.adversary.informed import Informed
from trilemma_lab.adversary.liars import informed


@attacks.register("ring")
class Ring(AttackSettings):
    """Ring: each liar's message looks like noise, and together they are a backdoor."""

    direction: Literal["backdoor", "gradient"] = "backdoor"
    """What the shares add up to: a backdoor, or minus the honest mean."""
    strength: float = Field(default=1.0, gt=0)
    """s: the signal's length, relative to that of the noise that cancels; at 1 lengths stay honest."""

    def build(self) -> Attack:
        """Return the attack."""
        planted = self.direction == "backdoor"
        return Attack(
            "ring",
            craft=self._craft,
            reads_own=True,
            informed=informed,
            needs_classes=planted,
            backdoor=Backdoor() if planted else None,
        )

    def _craft(self, sent: View) -> Crafted:
        view = Informed.of(sent)
        own = view.honest.new_zeros(view.byzantine, view.honest.shape[1]) if view.own is None else view.own
        if view.byzantine == 0:
            return Crafted(own)
        mean = own.double().mean(0)  # lengths of tiny and huge messages are numbers in float64
        way = self._way(view).to(mean)
        signal = torch.zeros_like(mean)  # a count may stand behind the numbers that move the model
        length = self.strength * torch.linalg.vector_norm(mean)
        signal[: len(way)] = length * way / torch.linalg.vector_norm(way).clamp(min=1e-100)
        shares = own.double() - mean + signal
        return Crafted(shares.to(own.dtype), self.strength)

    def _way(self, view: Informed) -> torch.Tensor:
        """Return where the shares push; without a model to plant a backdoor in, against the honest mean."""
        if self.direction == "backdoor" and view.backdoored is not None:
            return view.backdoored()
        return -finite_rows(view.honest).double().mean(0)
