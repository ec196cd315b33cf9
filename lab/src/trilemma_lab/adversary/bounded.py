"""Bounded: liars whose contribution is no longer than the clip and whose noise is honest.

    b_j = o_j + p_t (C v − g)          o_j: what liar j would send by the protocol, noise included

g is the honest mean contribution without noise and v a unit vector: against g, or up the honest loss. So a
liar puts C v in the place of a contribution and leaves its noise as it is. That is what is left to liars who
must prove both (GOPA's idea), and what a short clip takes away from them: f liars push by fC/n, honest
clients pull by |g|. Where the clip follows a quantile, g is in units of today's clip, and a liar counts no
length as below.

With momentum a message averages contributions of all rounds, p_t = 1 − β^(t+1) of them: the attack sends what
it would be if v and g had always been today's. Without momentum it is exact.

Reference: Sabater, Bellet, Ramon, "An accurate, scalable and verifiable protocol for federated differentially
private averaging" (GOPA), Machine Learning 2022, for proofs of noise.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from trilemma.attacks.settings import AttackSettings, Promise, attacks
from trilemma.attacks.span import finite_rows
from trilemma.attacks.types import Attack, Crafted, View
from trilemma_lab.adversary.informed import Informed, Room
from trilemma_lab.adversary.liars import informed


@attacks.register("bounded")
class Bounded(AttackSettings):
    """Bounded: a contribution as long as the clip, in the worst direction, with honest noise."""

    lacks: ClassVar[frozenset[Promise]] = frozenset({"scale"})

    times: float = Field(default=1.0, gt=0)
    """How many times the clip the contribution is: what a looser check than a proof lets through."""
    clip: float = Field(default=2.25, gt=0)
    """C, where `[privacy] clip` does not say it."""
    direction: Literal["gradient", "loss"] = "gradient"
    """Where contributions point: against the honest mean contribution, or up the honest loss."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("bounded", craft=self._craft, reads_own=True, informed=informed)

    def _craft(self, sent: View) -> Crafted:
        view = Informed.of(sent)
        honest = view.honest
        own = honest.new_zeros(view.byzantine, honest.shape[1]) if view.own is None else view.own
        known = finite_rows(honest).double().mean(0) if view.truth is None else view.truth()
        truth = known.to(own.device, torch.float64)  # lengths of tiny and huge messages are numbers in it
        room = Room(truth.shape[0]) if view.room is None else view.room()
        way = -truth[: room.moving]
        if self.direction == "loss" and view.uphill is not None:
            way = view.uphill().to(truth)[: room.moving]
        lie = torch.zeros_like(truth)
        clip = self.times * (self.clip if room.clip is None else room.clip)
        lie[: room.moving] = clip * way / torch.linalg.vector_norm(way).clamp(min=1e-100)
        held = torch.full_like(truth, room.held)
        held[room.moving :] = room.latest
        return Crafted((own.double() + held * (lie - truth)).to(own.dtype), self.times)
