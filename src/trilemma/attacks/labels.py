"""Attacks through the data only: Byzantine clients follow the protocol on labels they have changed.

    none            y → y
    lf              y → classes − 1 − y   (for two classes 1 − y)
    random-labels   y → uniform on {0, …, classes − 1}, drawn once

References: label flipping as in Allen-Zhu et al., "Byzantine-resilient non-convex stochastic gradient
descent", ICLR 2021; random labels as in Lin et al., "Personalized federated learning towards communication
efficiency, robustness and fairness", NeurIPS 2022 (there together with a rescaling: `data-poison`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.types import Attack
from trilemma.base.keys import Key


def flip(labels: Tensor, classes: int, key: Key) -> Tensor:
    """Return the mirrored labels, classes − 1 − y.

    >>> flip(torch.tensor([0, 1, 9]), 10, Key(0)).tolist()
    [9, 8, 0]
    """
    return classes - 1 - labels


def scramble(labels: Tensor, classes: int, key: Key) -> Tensor:
    """Return labels drawn uniformly, whatever the true ones are.

    >>> scramble(torch.zeros(5, dtype=torch.int64), 10, Key(0)).tolist()
    [9, 7, 6, 6, 5]
    """
    # Drawn on the CPU, so that a key gives the same labels on every device.
    drawn = torch.randint(classes, labels.shape, generator=key.torch(), dtype=labels.dtype)
    return drawn.to(labels.device)


@attacks.register("none")
class NoAttack(AttackSettings):
    """No attack: Byzantine clients behave like honest ones."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("none")


@attacks.register("lf")
class LabelFlip(AttackSettings):
    """Label flip: train on labels classes − 1 − y.

    >>> LabelFlip().build().poison(torch.tensor([0, 1]), 2, Key(0)).tolist()
    [1, 0]
    """

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("lf", poison=flip)


@attacks.register("random-labels")
class RandomLabels(AttackSettings):
    """Random labels: train on labels drawn uniformly once.

    >>> int(RandomLabels().build().poison(torch.zeros(100, dtype=torch.int64), 10, Key(0)).max())
    9
    """

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("random-labels", poison=scramble)
