"""Images at ten clients: a convolutional network with group normalisation whose body is frozen.

    export IMAGES=mnist.npz                  # arrays x_train, y_train, x_test, y_test, as Keras packs them
    trilemma check examples/images/task.py
    trilemma run examples/images/run.toml --task examples/images/task.py

Batch normalisation mixes the examples of a batch, so that no example has a gradient of its own; group
normalisation does not, and private training needs that. Here the body is random and frozen, and only the
head is trained: few coordinates, little noise. Take `requires_grad_(False)` out to train all of it.
"""

from __future__ import annotations

import os
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from trilemma import Declaration, Values

clients = 10
metrics = ("accuracy",)
loss = nn.CrossEntropyLoss()
expects = Declaration(Values("numbers", (1, 28, 28), low=0, high=1), Values("whole", low=0, high=9))


class Net(nn.Module):
    """Two convolutions with group normalisation below, a linear head above."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.GroupNorm(8, 32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 5, stride=2, padding=2), nn.GroupNorm(8, 64), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten()),
        )
        self.head = nn.Linear(64 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ten scores per image."""
        return self.head(self.body(x))


def model() -> nn.Module:
    """Return the network, its body frozen."""
    torch.manual_seed(1)  # a frozen body must be the same at every client
    net = Net()
    net.body.requires_grad_(False)
    return net


@lru_cache(maxsize=1)
def _arrays() -> dict[str, np.ndarray]:
    with np.load(os.environ.get("IMAGES", "mnist.npz")) as file:
        return {name: file[name] for name in file.files}


def _pixels(images: np.ndarray) -> np.ndarray:
    return images[:, None].astype(np.float32) / 255.0


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every tenth image."""
    arrays = _arrays()
    mine = slice(client, None, clients)
    return _pixels(arrays["x_train"][mine]), arrays["y_train"][mine].astype(np.int64)


def test() -> tuple[np.ndarray, np.ndarray]:
    """Return the test images."""
    arrays = _arrays()
    return _pixels(arrays["x_test"]), arrays["y_test"].astype(np.int64)
