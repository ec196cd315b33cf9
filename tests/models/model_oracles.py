"""Slow, obvious versions: torch.nn modules of the same models, and gradients example by example."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from trilemma.testing.examples import Stack, clip


class Unit(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride != 1 else None
        self.norm1 = nn.BatchNorm2d(outputs)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + (x if self.shortcut is None else self.shortcut(x)))


def _convolutional(channels: int, maps: tuple[int, int], dense: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in zip((channels, maps[0]), maps, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), *_dense(dense))


def _dense(sizes: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Unit(64, 64),
        Unit(64, 64),
        Unit(64, 128, 2),
        Unit(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


CASES = {
    "logistic": ((68,), 2, 69),
    "multinomial": ((60,), 10, 610),
    "mlp": ((1, 28, 28), 10, 79510),
    "mnist-mlp": ((784,), 10, 79510),
    "emnist-mlp": ((1, 28, 28), 62, 94862),
    "cnn": ((1, 28, 28), 10, 431080),
    "cifar-cnn": ((3, 32, 32), 10, 62006),
    "fashion-resnet": ((1, 28, 28), 10, 678794),
}
"""name -> (shape of an example, classes, parameters)."""


def module(name: str) -> nn.Module:
    """Return the same model as a torch.nn module, layers in definition order."""
    makers = {
        "logistic": lambda: nn.Linear(68, 1),
        "multinomial": lambda: nn.Linear(60, 10),
        "mlp": lambda: nn.Sequential(nn.Flatten(), *_dense((784, 100, 10))),
        "mnist-mlp": lambda: nn.Sequential(*_dense((784, 100, 10))),
        "emnist-mlp": lambda: nn.Sequential(nn.Flatten(), *_dense((784, 100, 100, 62))),
        "cnn": lambda: _convolutional(1, (20, 50), (800, 500, 10)),
        "cifar-cnn": lambda: _convolutional(3, (6, 16), (400, 120, 84, 10)),
        "fashion-resnet": _resnet,
    }
    return makers[name]()


def at(net: nn.Module, flat: Tensor) -> nn.Module:
    """Put flat parameters into the module."""
    vector_to_parameters(flat.clone(), net.parameters())
    return net


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of every example."""
    if logits.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits.dtype), reduction="none")
    return F.cross_entropy(logits, y, reduction="none")


def gradient(net: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the flat gradient of Σ w_i ℓ_i."""
    total = (losses(net(x), y) * weight).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, list(net.parameters()))])


def reference(
    net: nn.Module,
    params: Tensor,
    batch: Stack,
    unit: str = "none",
    threshold: float = math.inf,
) -> Tensor:
    """Return the gradients (k, d) one client, one example at a time.

    In double precision: a rectifier within float32's rounding of zero is then on the side where it should be.
    """
    clients, size = batch.y.shape
    weight = torch.full((clients, size), 1.0 / size) if batch.weight is None else batch.weight
    net, params, weight, features = net.double(), params.double(), weight.double(), batch.x.double()
    rows = []
    for i in range(clients):
        theta = params if params.dim() == 1 else params[i]
        at(net, theta)
        real = weight[i] > 0
        x, y, w = features[i][real], batch.y[i][real], weight[i][real]
        if unit == "example":
            one = torch.ones(1, dtype=torch.float64)
            examples = [gradient(net, x[j : j + 1], y[j : j + 1], one) for j in range(len(y))]
            rows.append(sum(w[j] * clip(g, threshold) for j, g in enumerate(examples)))
        else:
            rows.append(clip(gradient(net, x, y, w), threshold))
    return torch.stack(rows).float()
