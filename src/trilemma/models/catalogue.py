"""The models by name.

| name | on | parameters | from |
|---|---|---|---|
| logistic | phishing (68 features) | 69 | one logit; from three classes on, one logit per class |
| multinomial | Synthetic(α, β) (60 features, 10 classes) | 610 | lp-proj, Synthetic |
| mlp | anything | by `hidden` | Byz-Clip21 (which does not print its sizes) |
| cnn | MNIST, Fashion-MNIST | 431,080 | CafCor, section 6; Safe-DSHB |
| mnist-mlp | MNIST | 79,510 | lp-proj |
| emnist-mlp | EMNIST byclass (62 classes) | 94,862 | lp-proj |
| cifar-cnn | CIFAR-10 | 62,006 | lp-proj |
| fashion-resnet | Fashion-MNIST | 678,794 | lp-proj |

Sizes follow the shape of the features and the number of classes; the counts are those on the data set named.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from trilemma.base.errors import ConfigError
from trilemma.base.options import Options
from trilemma.base.registry import Registry
from trilemma.models.layers.convolution import Stencil
from trilemma.models.layers.layers import (
    BINARY_CROSS_ENTROPY,
    BatchNorm,
    Conv,
    Layer,
    Linear,
    MaxPool,
    MeanPool,
    Relu,
    Reshape,
    Residual,
    sequential,
)
from trilemma.models.types import Model

Shape = tuple[int, ...]


class ModelOptions(Options, ABC):
    """A model and its options."""

    @abstractmethod
    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model for examples of that shape and number of classes."""


models: Registry[type[ModelOptions]] = Registry("model")
"""Every model by the name configurations use."""


def build(name: str, features_shape: Sequence[int], classes: int, **options: Any) -> Model:
    """Build the model called `name` for examples of that shape and number of classes.

    >>> build("cnn", (1, 28, 28), 10).dim
    431080
    >>> build("mlp", (1, 28, 28), 10, hidden=(32, 16)).dim
    25818
    >>> build("cnn", (1, 28, 28), 10, hiden=3)
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: model 'cnn': unknown option 'hiden': allowed: (none)
    """
    chosen = models[name]
    shape = tuple(int(size) for size in features_shape)
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"an example's shape must be positive sizes such as (68,) or (1, 28, 28), got {shape}"
        )
    if classes < 2:
        raise ConfigError(f"a classifier needs at least 2 classes, got {classes}")
    try:
        return chosen.parse(**options).build(shape, classes)
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}") from None


@models.register("logistic")
class Logistic(ModelOptions):
    """Logistic regression: one logit for two classes (69 parameters on phishing), else multinomial."""

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        if classes != 2:
            return _perceptron("multinomial", shape, (), classes)
        features = math.prod(shape)
        layers = [Reshape(len(shape), (features,)), Linear("linear", features, 1)]
        return sequential("logistic", layers, BINARY_CROSS_ENTROPY)


@models.register("multinomial")
class Multinomial(ModelOptions):
    """Multinomial logistic regression: one logit per class (610 parameters on Synthetic)."""

    start: Literal["drawn", "zero"] = Field(
        default="drawn", description="where training starts: drawn as other layers are, or at zero"
    )

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        model = _perceptron("multinomial", shape, (), classes)
        return model if self.start == "drawn" else replace(model, init=lambda _: torch.zeros(model.dim))


@models.register("mlp")
class Mlp(ModelOptions):
    """Multilayer perceptron with ReLU between the hidden sizes."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(100,), description="sizes of the hidden layers, as in [100, 50]"
    )

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        return _perceptron("mlp", shape, self.hidden, classes)


@models.register("mnist-mlp")
class MnistMlp(ModelOptions):
    """One hidden layer of 100: 79,510 parameters on MNIST (lp-proj)."""

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        return _perceptron("mnist-mlp", shape, (100,), classes)


@models.register("emnist-mlp")
class EmnistMlp(ModelOptions):
    """Two hidden layers of 100: 94,862 parameters on EMNIST byclass (lp-proj)."""

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        return _perceptron("emnist-mlp", shape, (100, 100), classes)


@models.register("cnn")
class Cnn(ModelOptions):
    """Two 5×5 convolutions (20, 50 channels) and two linear layers: 431,080 parameters (CafCor)."""

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        return _lenet("cnn", shape, (20, 50), (500,), classes)


@models.register("cifar-cnn")
class CifarCnn(ModelOptions):
    """Two 5×5 convolutions (6, 16 channels) and three linear layers: 62,006 on CIFAR-10 (lp-proj)."""

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        return _lenet("cifar-cnn", shape, (6, 16), (120, 84), classes)


@models.register("fashion-resnet")
class FashionResnet(ModelOptions):
    """Four residual units with batch normalisation: 678,794 parameters on Fashion-MNIST (lp-proj)."""

    def build(self, shape: Shape, classes: int) -> Model:
        """Return the model."""
        channels, height, width = _image(shape, at_least=2)
        layers = [
            Reshape(len(shape), (channels, height, width)),
            Conv("conv", channels, 64, Stencil(7, 2, 3)),
            BatchNorm("norm", 64, rectified=True),
            MaxPool(Stencil(3, 2, 1)),
            _unit("unit1", 64, 64),
            _unit("unit2", 64, 64),
            _unit("unit3", 64, 128, stride=2),
            _unit("unit4", 128, 128),
            MeanPool(),
            Linear("fc", 128, classes),
        ]
        return sequential("fashion-resnet", layers)


def _unit(name: str, inputs: int, outputs: int, stride: int = 1) -> Residual:
    """A residual unit; the shortcut is a convolution where the shape changes, without normalisation."""
    changes = stride != 1 or inputs != outputs
    return Residual(
        Conv(f"{name}.conv1", inputs, outputs, Stencil(3, stride, 1)),
        Conv(f"{name}.conv2", outputs, outputs, Stencil(3, 1, 1)),
        Conv(f"{name}.shortcut", inputs, outputs, Stencil(1, stride)) if changes else None,
        BatchNorm(f"{name}.norm1", outputs, rectified=True),
        BatchNorm(f"{name}.norm2", outputs),
    )


def _perceptron(name: str, shape: Shape, hidden: Shape, classes: int) -> Model:
    features = math.prod(shape)
    return sequential(name, [Reshape(len(shape), (features,)), *_dense((features, *hidden, classes))])


def _lenet(name: str, shape: Shape, maps: Shape, hidden: Shape, classes: int) -> Model:
    """Convolutions 5×5, each with ReLU and 2×2 max pooling, then linear layers.

    Pooling comes before the rectifier: the two commute, values and gradients alike (a window's maximum passes
    the rectifier if anything in the window does), and the rectifier then sees a quarter of the values.
    """
    channels, height, width = _image(shape, at_least=16)
    layers: list[Layer] = [Reshape(len(shape), (channels, height, width))]
    for number, outputs in enumerate(maps, start=1):
        layers += [Conv(f"conv{number}", channels, outputs, Stencil(5)), MaxPool(Stencil(2, 2)), Relu()]
        channels, height, width = outputs, (height - 4) // 2, (width - 4) // 2
    features = channels * height * width
    return sequential(name, [*layers, Reshape(3, (features,)), *_dense((features, *hidden, classes))])


def _dense(sizes: Shape) -> list[Layer]:
    """Linear layers through `sizes`, with ReLU between them."""
    layers: list[Layer] = []
    for number, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        layers += [Relu()] if layers else []
        layers.append(Linear(f"fc{number}", inputs, outputs))
    return layers


def _image(shape: Shape, at_least: int) -> tuple[int, int, int]:
    """Return (channels, height, width), where (height, width) alone means one channel."""
    image = (1, *shape) if len(shape) == 2 else shape
    if len(image) != 3 or min(image[1:]) < at_least:
        raise ConfigError(
            f"needs images (channels, height, width) of at least {at_least}×{at_least}, "
            f"got examples of shape {shape}"
        )
    return image[0], image[1], image[2]
