"""The adaptive search as slow and as obvious as it can be: every lie is sent to the defended server, alone.

Nothing here knows of the Gram matrix of a basis: messages are changed, the server is run on them, and the
model it leads to is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilemma import aggregation
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.stage import staged
from trilemma.learning.protocol import Algorithm, State
from trilemma.models import build
from trilemma.privacy import SimulatedNoise
from trilemma.privacy.types import NoiseLaw, Release
from trilemma_lab.adversary.lookahead import Lookahead


@dataclass(frozen=True)
class Round:
    """A round of a defended federation: what everybody computed, honest ones with a common contribution."""

    algorithm: Algorithm
    state: State
    number: int
    sent: Tensor
    senders: tuple[int, ...]
    liars: int
    truth: Tensor

    @property
    def lookahead(self) -> Lookahead:
        return Lookahead.of(self.algorithm.detector, self.state, self.sent, self.senders, self.number)

    @property
    def rows(self) -> slice:
        """The liars' rows among the messages: the last."""
        return slice(len(self.senders) - self.liars, None)

    def after(self, lies: Tensor) -> tuple[bool, Tensor]:
        """Return whether somebody is expelled, and how far the model then is from where it started."""
        messages = self.sent.clone()
        messages[self.rows] += lies.to(messages)
        step = self.algorithm.server(
            Messages(messages, senders=self.senders), self.state, self.number, Key(1)
        )
        move = step.broadcast["params"] - self.state["evidence.origin"]
        return bool(step.report["expelled"]), move.double()

    def harm(self, lies: Tensor) -> float:
        """Return how far the model lands against the truth, −∞ if somebody is expelled."""
        expelled, move = self.after(lies)
        sense = np.copysign(1.0, self.lookahead.step)
        return -np.inf if expelled else -float(sense * move @ (self.truth / self.truth.norm()))


def rounds(
    seed: int, rule: str, clients: int, liars: int, dim: int, before: int, unheard: int = 0, push: float = 0.0
) -> Round:
    """Return a round after so many `before`, in which some were `unheard` and liars pushed a little."""
    law, everyone, source = NoiseLaw(1.0, 0.65), tuple(range(clients)), SimulatedNoise(Key(seed), clients)
    setup = Setup(clients, liars, 30, aggregation.parse(rule, f=liars), Release(clip=2.25, law=law))
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=0.5).build, setup)
    model = build("multinomial", (dim // 2 - 1,), 2, start="zero")
    truth = torch.randn(model.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    truth = 1.1 * truth / truth.norm()
    state = algorithm.init(model, everyone, Key(seed)).server
    for number in range(before + 1):
        senders = everyone[unheard:] if number % 2 else everyone
        sent = truth.float() + source.draw(law, senders, model.dim, number, torch.device("cpu"))
        if number == before:
            return Round(algorithm, state, number, sent, senders, liars, truth)
        sent[-liars:] -= push * truth.float()
        state = algorithm.server(Messages(sent, senders=senders), state, number, Key(1)).state
        assert algorithm.members(state) == everyone  # nobody is expelled yet
    raise AssertionError


def lie(round_: Round, way: Tensor, strength: float, turned: str | None) -> Tensor | None:
    """Return what liars add (f, d): a shift, or what turns messages, or sums; None if impossible."""
    if turned is None:
        return strength * way.expand(round_.liars, -1)
    lookahead = round_.lookahead
    n, k = len(lookahead.vectors) - len(round_.senders) - 1, len(round_.senders)
    places, scale = (range(n + k - round_.liars, n + k), 1.0)
    if turned == "sums":
        places, scale = round_.senders[-round_.liars :], lookahead.step
    rows = lookahead.vectors[list(places)].double()
    along = rows @ way
    across, goal = rows - along[:, None] * way, along.mean() + scale * strength
    inner = (rows @ rows.T - goal**2).numpy()
    present = (across @ across.T).numpy()
    if np.linalg.eigvalsh(inner)[0] < 0:
        return None
    values, vectors = np.linalg.eigh(present)
    root, back = (vectors * values**0.5) @ vectors.T, (vectors * values**-0.5) @ vectors.T
    inside, axes = np.linalg.eigh(root @ inner @ root)
    mix = back @ (axes * np.sqrt(np.maximum(inside, 0))) @ axes.T @ back
    return (torch.from_numpy(mix) @ across + goal * way - rows) / scale


def strongest(round_: Round, way: Tensor, strengths: list[float], noise: str) -> tuple[float, float]:
    """Return the most harm and its strength, of these strengths and of eight more around the best of them."""
    kinds = [None] if noise == "protocol" else ["messages", "sums"]

    def best(tried: list[float]) -> tuple[float, float]:
        lies = [(lie(round_, way, strength, kind), strength) for strength in tried for kind in kinds]
        return max((round_.harm(one), strength) for one, strength in lies if one is not None)

    _, strength = best(strengths)
    ratio = strengths[1] / strengths[0]
    return best([strength * ratio ** (step / 5) for step in range(-4, 5)])
