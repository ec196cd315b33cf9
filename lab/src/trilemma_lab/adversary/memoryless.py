"""Adaptive lies against a server without memory, which has only its rule.

If the rule needs only the Gram matrix of the messages, it evaluates all lies at once, like any defence
(`RuleAlone`). Other rules, and servers with a screen, aggregate the messages of one lie after the other
(`one_by_one`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trilemma.attacks.search import weigher
from trilemma.attacks.span import inner_products
from trilemma.attacks.types import Crafted, GramTarget, ManyGramsTarget, View
from trilemma.base.recordings import Recordings, Tensors, at_least, filled_up, unasked
from trilemma.base.transfers import to_the_device
from trilemma_lab.adversary.changed import Changed, Places
from trilemma_lab.adversary.informed import Foreseen, harm
from trilemma_lab.adversary.turning import Array, TurnedRows

TILTS = (0.0, 0.3, 1.0)
"""How far lies lean towards the server's own message, relative to their part across it."""


WALKS, FIRST_WALK, KEPT = (3, 6, 9), 6, 8
"""Steps of an iterative rule within a recording, how many the first lies of a round take, and how many
recordings are kept."""

_recordings = Recordings(KEPT)


@dataclass(frozen=True)
class RuleAlone:
    """A geometric rule in one round, for many lies at once (`types.Defence`).

    `vectors` (k + 1, d) are the k messages and a row of zeros, which stands for the model's move so far.
    """

    vectors: Tensor
    view: View
    target: GramTarget
    step: float = 1.0
    needed: dict[str, float] = field(default_factory=lambda: {"walk": FIRST_WALK}, compare=False)
    """`walk`: how many steps the rule took for the last lies; the next ones of the round begin with these."""

    @classmethod
    def of(cls, view: View, own: Tensor) -> RuleAlone | None:
        """Return the rule in this round; None if it needs more than the Gram matrix of the messages."""
        if not (isinstance(view.target, GramTarget) and view.target.geometric):
            return None
        nothing = view.honest.new_zeros(1, view.honest.shape[1])
        vectors = torch.cat([view.honest, own.to(nothing), nothing])
        if view.positions is not None:
            vectors = vectors[[*view.order.tolist(), view.clients]]
        return cls(vectors, view, view.target)

    def rows(self, places: Places) -> Tensor:
        """Return the vectors of the basis at `places`."""
        return self.vectors[to_the_device(places, self.vectors.device)]

    @property
    def size(self) -> int:
        """How many vectors the basis has."""
        return len(self.vectors)

    @property
    def senders(self) -> Places:
        """The rows of all messages (k,)."""
        return np.arange(len(self.vectors) - 1)

    def looked(self) -> RuleAlone:
        """Return the same object: a server without memory has no sums to look at."""
        return self

    def gram(self, beside: Tensor) -> Tensor:
        """Return the Gram matrix (p, p) of the basis followed by the rows `beside`, on their device."""
        wide = torch.promote_types(self.vectors.dtype, torch.float32)
        return inner_products(self.vectors.to(wide), beside.to(wide))

    def outcomes(self, gram: Tensor, rows: Places, changes: Tensor, beside: Tensor) -> Foreseen:
        """Return the aggregate for each of B lies; nobody is expelled and nothing is set right."""
        which, nothing = to_the_device(rows, gram.device), gram.new_zeros(len(changes))
        found = self._recorded(gram, which, changes) if gram.is_cuda else None
        if found is not None:
            return found
        messages = Changed(gram, 0, len(self.senders), which, changes)
        move = messages.combined(self._weights(messages.grams()))
        return Foreseen.of(gram, nothing > 0, move, nothing)

    def _recorded(self, gram: Tensor, which: Tensor, changes: Tensor) -> Foreseen | None:
        """Return the same from a recording; None if the rule needs more steps than any recording has."""
        target, count = self.target, len(self.senders)
        if not (isinstance(target, ManyGramsTarget) and isinstance(target, Hashable)):
            return None
        if (weigh := target.weights_from_grams) is None:
            return None

        def aggregated(of: Tensors, steps: int) -> Tensors:
            messages = Changed(of["gram"], 0, count, of["which"], of["changes"])
            with unasked(steps) as needed:
                move = messages.combined(weigh(messages.grams()))
            nothing = torch.zeros_like(move[:, 0])
            told = (harm(of["gram"], nothing > 0, move), nothing, torch.stack([nothing, *needed]).amax(0))
            return {"move": move, "told": torch.stack(told)}

        given = {"gram": gram, "which": which, "changes": filled_up(changes)}
        for steps in at_least(WALKS, self.needed["walk"]):
            found = _recordings.run((target, count, steps), partial(aggregated, steps=steps), given)
            told = found["told"][:, : len(changes)].cpu()  # waits for the device
            self.needed["walk"] = float(told[2].amax())
            if self.needed["walk"] <= steps:
                return Foreseen(told[0], told[1], found["move"][: len(changes)])
        return None

    def _weights(self, grams: Tensor) -> Tensor:
        target = self.target
        if grams.is_cuda and isinstance(target, ManyGramsTarget) and target.weights_from_grams is not None:
            return target.weights_from_grams(grams)
        weigh = weigher(self.view, target)
        return torch.stack([weigh(one) for one in grams.cpu()]).to(grams)


def leaning(shift: Tensor, trusted: Tensor | None) -> list[Tensor]:
    """Return the unit directions (d,) in which lies push: `shift`, which is a unit vector, and others.

    If the server compares messages with its own, `trusted` (d,), there are also the part of `shift`
    orthogonal to it, and directions that lean from there towards `trusted`.
    """
    if trusted is None:
        return [shift]
    towards = trusted / torch.linalg.vector_norm(trusted).clamp(min=1e-30)
    across = shift - (shift @ towards) * towards
    across = across / torch.linalg.vector_norm(across).clamp(min=1e-30)
    return [shift] + [(across + tilt * towards) / math.sqrt(1 + tilt**2) for tilt in TILTS]


def one_by_one(
    view: View, own: Tensor, way: Tensor, lies: Iterable[tuple[float, Tensor]]
) -> tuple[Crafted, float]:
    """Return the lie that moves the aggregate furthest along `way` (d,), and how far compared with no lie.

    `lies` are strengths and the liars' messages (f, d); each is aggregated by the target.
    """

    def harm(messages: Tensor) -> float:
        value = view.target(view.stack(messages), key=view.key.fold("coin")).value.double()
        return float(value @ way.to(value.device))

    made = [(0.0, own), *lies]
    done = [harm(messages) for _, messages in made]
    most = int(np.argmax(done))
    return Crafted(made[most][1], made[most][0]), done[most] - done[0]


def shifted(
    own: Tensor, way: Tensor, lying: Array, strengths: list[float], noise: str
) -> Iterator[tuple[float, Tensor]]:
    """Yield each strength, and the liars' messages (f, d) when they push along `way` with it."""
    active = torch.from_numpy(np.flatnonzero(lying)).to(own.device)
    rows, shares, tried = own.double()[active], lying[lying > 0], np.array(strengths)
    basis = torch.cat([rows, way[None].to(rows)])
    products: Array = (rows @ basis.T).cpu().numpy()
    turnable = TurnedRows(products[:, :-1], products[:, -1])
    if noise != "protocol":
        tried = np.append(tried, turnable.furthest(shares))
    possible, mixes = turnable.mixed(tried[:, None] * shares, noise)
    for strength, mix in zip(tried[possible].tolist(), mixes, strict=True):
        yield strength, own.index_copy(0, active, (torch.from_numpy(mix).to(basis) @ basis).to(own))
