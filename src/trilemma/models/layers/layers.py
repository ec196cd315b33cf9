"""Layers: frozen descriptions of their parameters that act on all clients at once.

A batch has the axes (b, …) or (k, b, …). Parameters have their own shape, shared by all clients, or a leading
client axis, one model per client; every layer takes both. Layers with parameters save their input and output
when asked to (`trilemma.models.engines.saved`). The initialisation law is PyTorch's default:
weights and biases uniform on ±1/√fan-in, drawn from a key of their own; normalisation starts as the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.engines.terms import PerClient, Product, Shift, Term, Whole
from trilemma.models.layers import convolution, normalisation, pooling
from trilemma.models.layers.convolution import KernelGradients, Stencil
from trilemma.models.layers.normalisation import EPSILON
from trilemma.models.types import Model, Params, Shapes

NARROW = 64
"""Linear layers with fewer outputs are computed transposed on a CPU (docs/gradients-speed.md)."""

FEW = 16
"""With fewer classes than a vector register holds, cross-entropy is computed transposed on a CPU."""

MOMENTUM = 0.1
"""Share of the newest batch in the running statistics."""


class Layer:
    """A layer without parameters, unless a subclass says otherwise."""

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of the parameters, in flat order."""
        return ()

    @property
    def buffers(self) -> Shapes:
        """Names and shapes of the running statistics of one client."""
        return ()

    def init(self, key: Key) -> Tensor:
        """Draw the flat initial parameters."""
        return torch.empty(0)

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Map a batch to the next layer's batch."""
        raise NotImplementedError


def _uniform(shapes: Shapes, fan_in: int, key: Key) -> Tensor:
    bound = 1.0 / math.sqrt(fan_in)
    sizes = [(name, math.prod(shape)) for name, shape in shapes]
    return torch.cat(
        [
            torch.empty(size).uniform_(-bound, bound, generator=key.fold("init", name).torch())
            for name, size in sizes
        ]
    )


@dataclass(frozen=True)
class Linear(Layer):
    """z = a Wᵀ + β."""

    name: str
    inputs: int
    outputs: int

    @property
    def shapes(self) -> Shapes:
        """Weight (out, in), bias (out)."""
        return (f"{self.name}.weight", (self.outputs, self.inputs)), (f"{self.name}.bias", (self.outputs,))

    def init(self, key: Key) -> Tensor:
        """Uniform on ±1/√in."""
        return _uniform(self.shapes, self.inputs, key)

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Map (…, b, in) to (…, b, out)."""
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if x.dim() == 3 and self.outputs < NARROW and not x.is_cuda:
            # Few outputs: a product is faster with the examples on its wide side.
            z = torch.baddbmm(bias[..., None], weight.expand(len(x), -1, -1), x.mT).mT
        elif weight.dim() == 3:
            z = torch.baddbmm(bias[:, None], x, weight.mT)
        else:
            z = F.linear(x, weight, bias)
        if not saved.record:
            return z
        a = x.detach()

        def terms(grad: Tensor) -> dict[str, Term]:
            product = Product(grad.unsqueeze(2), a.unsqueeze(2))
            return {f"{self.name}.weight": product, f"{self.name}.bias": Whole(grad)}

        return saved.add(self.name, z, terms, floats=x.numel() + 3 * z.numel())


@dataclass(frozen=True)
class Conv(Layer):
    """z = W ∗ a + β, a square two-dimensional convolution."""

    name: str
    inputs: int
    outputs: int
    stencil: Stencil

    @property
    def shapes(self) -> Shapes:
        """Weight (out, in, kernel, kernel), bias (out)."""
        size = self.stencil.kernel
        return (
            (f"{self.name}.weight", (self.outputs, self.inputs, size, size)),
            (f"{self.name}.bias", (self.outputs,)),
        )

    def init(self, key: Key) -> Tensor:
        """Uniform on ±1/√(in·kernel²)."""
        return _uniform(self.shapes, self.inputs * self.stencil.kernel**2, key)

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Map (…, b, in, h, w) to (…, b, out, h', w')."""
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if not saved.record:
            return convolution.forward(x, weight, bias, self.stencil)
        z, columns = convolution.forward_kept(x, weight, bias, self.stencil)
        a = x.detach()

        def terms(grad: Tensor) -> dict[str, Term]:
            kernel = KernelGradients(a, grad, self.stencil, columns)
            return {f"{self.name}.weight": kernel, f"{self.name}.bias": Shift(grad, (3, 4))}

        unfolded = self.inputs * self.stencil.kernel**2
        floats = x.numel() + 3 * z.numel() + unfolded * z.numel() // self.outputs
        return saved.add(self.name, z, terms, floats, products=z.shape[:2].numel() * self.outputs * unfolded)


@dataclass(frozen=True)
class BatchNorm(Layer):
    """z = γ (x − μ)/√(σ² + ε) + β per channel; μ, σ² of the client's batch when training, else running ones.

    Padding does not count in the statistics. Running statistics are the client's own: they come in and go out
    with what is saved. `rectified`: what comes out is max(z, 0).
    """

    name: str
    channels: int
    rectified: bool = False

    @property
    def shapes(self) -> Shapes:
        """Scale γ, then shift β."""
        return (f"{self.name}.weight", (self.channels,)), (f"{self.name}.bias", (self.channels,))

    @property
    def buffers(self) -> Shapes:
        """Running mean and variance."""
        return (f"{self.name}.mean", (self.channels,)), (f"{self.name}.variance", (self.channels,))

    def init(self, key: Key) -> Tensor:
        """Start as the identity: γ = 1, β = 0."""
        return torch.cat([torch.ones(self.channels), torch.zeros(self.channels)])

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Normalise (…, b, channels, h, w)."""
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if not saved.train:
            names = f"{self.name}.mean", f"{self.name}.variance"
            # One model without a client axis has one set of statistics.
            running = (saved.buffers[name] for name in names)
            mean, variance = (part[0] if x.dim() == 4 else part for part in running)
            z = normalisation.apply(x, weight, bias, mean, torch.rsqrt(variance + EPSILON))
            return F.relu(z) if self.rectified else z
        z, batch = normalisation.train(x, weight, bias, saved.present, self.rectified)
        if saved.buffers:
            # A client without examples keeps what it had.
            momentum = MOMENTUM * (batch.count > 0).to(x.dtype)
            for part, fresh in (("mean", batch.mean), ("variance", batch.unbiased)):
                old = saved.buffers[f"{self.name}.{part}"]
                saved.updated[f"{self.name}.{part}"] = torch.lerp(old, fresh, momentum)
        if saved.record:
            a = x.detach()

            def terms(grad: Tensor) -> dict[str, Term]:
                scaled, summed = normalisation.parameter_gradients(a, grad, batch)
                return {f"{self.name}.weight": PerClient(scaled), f"{self.name}.bias": PerClient(summed)}

            z = saved.add(self.name, z, terms, floats=6 * z.numel())
        return F.relu(z) if self.rectified and not batch.cut else z


@dataclass(frozen=True)
class Relu(Layer):
    """max(x, 0)."""

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Rectify."""
        return F.relu(x)


@dataclass(frozen=True)
class MaxPool(Layer):
    """The largest value of every window."""

    window: Stencil

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Pool the last two axes."""
        return pooling.largest(x, self.window)


@dataclass(frozen=True)
class MeanPool(Layer):
    """The mean of every channel."""

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Average over the last two axes."""
        return x.mean((-2, -1))


@dataclass(frozen=True)
class Reshape(Layer):
    """Give every example, of `axes` axes, another shape."""

    axes: int
    shape: tuple[int, ...]

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Reshape the last `axes` axes."""
        return x.reshape(*x.shape[: x.dim() - self.axes], *self.shape)


@dataclass(frozen=True)
class Residual(Layer):
    """relu(norm2(conv2(norm1(conv1 x))) + shortcut x), with a rectified norm1.

    The shortcut is a 1×1 convolution or nothing.
    """

    conv1: Conv
    conv2: Conv
    shortcut: Conv | None
    norm1: BatchNorm
    norm2: BatchNorm

    @property
    def parts(self) -> tuple[Layer, ...]:
        """The layers inside, in flat order."""
        convolutions = (self.conv1, self.conv2, *([self.shortcut] if self.shortcut else []))
        return (*convolutions, self.norm1, self.norm2)

    @property
    def shapes(self) -> Shapes:
        """Those of the parts."""
        return tuple(shape for part in self.parts for shape in part.shapes)

    @property
    def buffers(self) -> Shapes:
        """Those of the parts."""
        return tuple(shape for part in self.parts for shape in part.buffers)

    def init(self, key: Key) -> Tensor:
        """Draw every part."""
        return torch.cat([part.init(key) for part in self.parts])

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations) -> Tensor:
        """Apply the unit."""
        inner = self.norm1(params, self.conv1(params, x, saved), saved)
        inner = self.norm2(params, self.conv2(params, inner, saved), saved)
        return F.relu(inner + (self.shortcut(params, x, saved) if self.shortcut else x))


@dataclass(frozen=True)
class Objective:
    """What logits mean: the loss of every example and the predicted label."""

    loss: Callable[[Tensor, Tensor], Tensor]
    predict: Callable[[Tensor], Tensor]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() == 3 and logits.shape[-1] < FEW and not logits.is_cuda:
        # The softmax is vectorised along the innermost axis: make it the examples.
        return F.cross_entropy(logits.mT, labels, reduction="none")
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def _binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits[..., 0], labels.to(logits.dtype), reduction="none")


CROSS_ENTROPY = Objective(_cross_entropy, lambda logits: logits.argmax(-1))
"""Softmax cross-entropy over one logit per class."""

BINARY_CROSS_ENTROPY = Objective(_binary_cross_entropy, lambda logits: (logits[..., 0] > 0).long())
"""Logistic loss of one logit; labels 0 and 1."""


def sequential(name: str, layers: Sequence[Layer], objective: Objective = CROSS_ENTROPY) -> Model:
    """Chain layers into a model; models of equal layers are equal, and share what is kept for a model.

    >>> model = sequential("tiny", [Linear("fc1", 4, 3), Relu(), Linear("fc2", 3, 2)])
    >>> model.dim, model.init(Key(1)).shape
    (23, torch.Size([23]))
    """
    chain = tuple(layers)
    return Model(
        name=name,
        shapes=tuple(shape for layer in chain for shape in layer.shapes),
        forward=Forward(chain),
        init=Initial(chain),
        loss=objective.loss,
        predict=objective.predict,
        buffers=tuple(shape for layer in chain for shape in layer.buffers),
    )


@dataclass(frozen=True)
class Forward:
    """What layers one after the other make of a batch; the same where the layers are."""

    layers: tuple[Layer, ...]

    def __call__(self, params: Params, x: Tensor, saved: SavedActivations | None = None) -> Tensor:
        """Map a batch to logits."""
        saved = SavedActivations() if saved is None else saved
        for layer in self.layers:
            x = layer(params, x, saved)
        return x


@dataclass(frozen=True)
class Initial:
    """The initial parameters of layers one after the other; the same where the layers are."""

    layers: tuple[Layer, ...]

    def __call__(self, key: Key) -> Tensor:
        """Draw them."""
        return torch.cat([layer.init(key) for layer in self.layers])
