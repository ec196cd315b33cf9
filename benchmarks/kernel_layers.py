"""The kernels of the models on what their layers see: convolutions, batch normalisation, whole gradients.

On a GPU all clients go through a layer at once, on a CPU as many as fit the cache
(`trilemma.models.engines.groups`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.grad import conv2d_weight
from torch.nn.utils import vector_to_parameters

from kernel_cases import KernelCase
from trilemma.base.keys import Key
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.kernels.compiled import STEP
from trilemma.models.layers import convolution, normalisation, pooling
from trilemma.models.layers.convolution import Stencil
from trilemma.models.layers.layers import CROSS_ENTROPY, Linear

CONVOLUTIONS = {
    "cnn, first": (1, 20, 28, Stencil(5)),
    "cnn, second": (20, 50, 12, Stencil(5)),
    "cifar-cnn, second": (6, 16, 14, Stencil(5)),
    "resnet, first": (1, 64, 28, Stencil(7, 2, 3)),
    "resnet, unit 1": (64, 64, 7, Stencil(3, 1, 1)),
    "resnet, unit 3": (64, 128, 7, Stencil(3, 2, 1)),
    "resnet, unit 4": (128, 128, 4, Stencil(3, 1, 1)),
}
"""Input and output channels, height (and width), and stencil of the catalogue's convolutions."""


def cases(device: str, clients: int, size: int) -> Iterator[KernelCase]:
    """Yield all kernels on all layers."""
    for layer, (inputs, outputs, side, stencil) in CONVOLUTIONS.items():
        reached = stencil.output(side)
        given = KernelInputs(
            draw(device, clients, size, inputs, side, side),
            draw(device, clients, outputs, inputs, stencil.kernel, stencil.kernel),
            draw(device, clients, outputs),
            draw(device, clients, size, outputs, reached, reached),
            stencil,
        )
        work = f"{layer}: {inputs}→{outputs}, {clients} × {size}"
        if device == "cpu" or "cnn" in layer:  # the ResNet's are personal
            yield from shared_cases(given, work)
        yield from weight_cases(given, work)
        yield from personal_cases(given, work)
        if layer == "resnet, first" and device == "cuda":
            yield from pooling_cases(
                given.grad, Stencil(3, 2, 1), f"{layer}: {outputs} channels of {reached}²"
            )
        if layer.startswith("resnet"):
            yield from normalisation_cases(
                given.grad, given.bias, f"{layer}: {outputs} channels of {reached}²"
            )
    if device == "cpu":
        yield from narrow_cases()
    yield from whole_cases(device, size)


class KernelInputs:
    """A layer's input, personal weights and biases, and the gradient at its output, for k clients.

    Plain torch gets them as they are; `inner` are input and gradient with the channels innermost, as layers
    hand them on: on a CPU all, on a GPU those whose windows are read where they lie.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, stencil: Stencil) -> None:
        self.x, self.weight, self.bias, self.grad, self.stencil = x, weight, bias, grad, stencil
        self.windows = x.is_cuda and all(channels % STEP == 0 for channels in weight.shape[1:3])
        self.inner = (x, grad) if x.is_cuda and not self.windows else (innermost(x), innermost(grad))

    def run(self, way: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, tf32: bool = False) -> Any:
        """Go forth and back; the input of a model's first layer needs no gradient."""
        if x.shape[2] > 1:
            return forth_and_back(way, x, grad, tf32)
        with exactly(tf32):
            return way(x)


def draw(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def innermost(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    return torch.empty_like(flat, memory_format=torch.channels_last).copy_(flat).view(x.shape)


def exactly(tf32: bool = False) -> AbstractContextManager[Any]:
    """Ask plain torch for what the library promises: sums that are reproducible, TF32 only when allowed."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32)


def forth_and_back(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, tf32: bool = False) -> Any:
    """Return the output and the gradient at the input."""
    leaf = x.detach().requires_grad_()
    with exactly(tf32):
        z = run(leaf)
        return z, torch.autograd.grad(z, leaf, grad)[0]


def shared_cases(given: KernelInputs, work: str) -> Iterator[KernelCase]:
    """A convolution whose weights all clients share: output, pooled if it is a CNN's, and input gradient."""
    weight, bias, stencil = given.weight[0], given.bias[0], given.stencil
    x, grad = given.inner
    pooled = "cnn" in work

    def plain(x: Tensor) -> Tensor:
        z = F.conv2d(x.flatten(0, 1), weight, bias, stencil.stride, stencil.padding)
        z = z.view(*x.shape[:2], *z.shape[1:])
        return F.max_pool2d(z.flatten(0, 1), 2) if pooled else z

    def ours(x: Tensor) -> Tensor:
        z = convolution.forward(x, weight, bias, stencil)
        return pooling.largest(z, Stencil(2, 2)).flatten(0, 1) if pooled else z

    if pooled:
        grad = F.max_pool2d(grad.flatten(0, 1), 2)
    layout = "" if x.is_cuda else ", channels innermost"
    name = f"shared convolution{layout}{', pooled' if pooled else ''}"
    direct = {"conv2d": partial(given.run, plain, given.x, grad.contiguous())}
    yield KernelCase(name, work, partial(given.run, ours, x, grad), direct, 1e-4)


def weight_cases(given: KernelInputs, work: str) -> Iterator[KernelCase]:
    """Weight gradients of every client, and of every example with norms and a weighted sum."""
    x, grad, stencil = given.x, given.grad, given.stencil

    def one(x: Tensor, grad: Tensor) -> Tensor:
        return conv2d_weight(x, given.weight.shape[1:], grad, stencil.stride, stencil.padding)

    def looped(tf32: bool = False) -> Tensor:
        with exactly(tf32):
            return torch.stack([one(a, g) for a, g in zip(x, grad, strict=True)])

    def mapped(tf32: bool = False) -> Tensor:
        with exactly(tf32):
            return vmap(one)(x, grad)

    def unfolded() -> Tensor:
        columns = F.unfold(x.flatten(0, 1), stencil.kernel, 1, stencil.padding, stencil.stride)
        each = torch.bmm(grad.flatten(0, 1).flatten(2), columns.mT)
        return each.view(*x.shape[:2], *given.weight.shape[1:])

    def mapped_by_example() -> Tensor:
        with exactly():
            each = zip(x.unsqueeze(2), grad.unsqueeze(2), strict=True)
            return torch.stack([vmap(one)(a, g) for a, g in each])

    def by_example(products: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        flat = products().flatten(2)
        return flat.norm(dim=2).square(), torch.bmm(factor[:, None], flat).view(given.weight.shape)

    def ours_by_example() -> tuple[Tensor, Tensor]:
        found = convolution.example_gradients(*given.inner, stencil)
        return found.lengths().norms, found.summed(factor)

    factor = draw(x.device.type, *x.shape[:2])
    ours = partial(convolution.client_gradients, *given.inner, stencil)
    plain = {"unfold": lambda: unfolded().sum(1), "loop": looped, "vmap": mapped}
    yield KernelCase("weight gradients of clients", work, ours, plain, 1e-4)
    if given.windows:
        allowed = {"loop": partial(looped, True), "vmap": partial(mapped, True)}
        allowed["columns"] = under_tf32(convolution.client_gradients_batched, x, grad, stencil)
        faster = under_tf32(convolution.client_gradients, *given.inner, stencil)
        yield KernelCase("weight gradients of clients, TF32", work, faster, allowed, 1e-2)
    if "resnet" not in work:  # batch normalisation: no example has a gradient of its own
        plain = {"unfold": partial(by_example, unfolded), "vmap": partial(by_example, mapped_by_example)}
        yield KernelCase("weight gradients of examples", work, ours_by_example, plain, 1e-4)


def under_tf32(run: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Run where factors may be rounded to TF32."""

    def allowed() -> Any:
        torch.set_float32_matmul_precision("high")
        try:
            return run(*arguments)
        finally:
            torch.set_float32_matmul_precision("highest")

    return allowed


def personal_cases(given: KernelInputs, work: str) -> Iterator[KernelCase]:
    """Output and input gradient of a convolution with weights of each client's own."""
    weight, bias, stencil = given.weight, given.bias, given.stencil
    move = stencil.stride, stencil.padding

    def looped(x: Tensor) -> Tensor:
        return torch.stack([F.conv2d(*one, *move) for one in zip(x, weight, bias, strict=True)])

    def by_groups(x: Tensor) -> Tensor:
        side = x.transpose(0, 1).flatten(1, 2)
        z = F.conv2d(side, weight.flatten(0, 1), bias.flatten(), *move, 1, len(x))
        return z.view(x.shape[1], len(x), -1, *z.shape[2:]).transpose(0, 1)

    def ours(x: Tensor) -> Tensor:
        return convolution.forward(x, weight, bias, stencil)

    ways = {"loop": looped, "groups": by_groups}
    plain = {name: partial(given.run, way, given.x, given.grad) for name, way in ways.items()}
    yield KernelCase("personal convolution", work, partial(given.run, ours, *given.inner), plain, 1e-4)
    if given.windows:

        def columns(x: Tensor) -> Tensor:
            return convolution.forward_batched(x, weight, bias, stencil)

        allowed = {name: partial(given.run, way, given.x, given.grad, True) for name, way in ways.items()}
        allowed["columns"] = under_tf32(given.run, columns, given.x, given.grad, True)
        fast = under_tf32(given.run, ours, *given.inner, True)
        yield KernelCase("personal convolution, TF32", work, fast, allowed, 1e-2)


def pooling_cases(x: Tensor, window: Stencil, work: str) -> Iterator[KernelCase]:
    """Maximum pooling of innermost channels, forth and back, against the library in either layout."""
    grad = F.max_pool2d(x.flatten(0, 1), window.kernel, window.stride, window.padding).unflatten(
        0, x.shape[:2]
    )

    def plain(x: Tensor) -> Tensor:
        z = F.max_pool2d(x.flatten(0, 1), window.kernel, window.stride, window.padding)
        return z.unflatten(0, x.shape[:2])

    def ours(x: Tensor) -> Tensor:
        return pooling.largest(x, window)

    last = partial(forth_and_back, plain, innermost(x), innermost(grad))
    ways = {"channels first": partial(forth_and_back, plain, x, grad), "channels last": last}
    yield KernelCase("pooling", work, partial(forth_and_back, ours, innermost(x), innermost(grad)), ways)


def normalisation_cases(x: Tensor, scale: Tensor, work: str) -> Iterator[KernelCase]:
    """Batch normalisation forth and back, without and with padding, and the gradients of γ and β."""
    x, grad = innermost(x), innermost(draw(x.device.type, *x.shape, seed=1))  # as the layers around leave it
    present = torch.ones(x.shape[:2], device=x.device)
    present[:, -5:] = 0.0

    def formula(x: Tensor, real: Tensor | None = None) -> Tensor:
        axes, each = normalisation.AXES, torch.ones_like(x[:, :, :1]) if real is None else real
        count = each.sum((1, 2, 3, 4), keepdim=True) * (1 if real is None else x[0, 0, 0].numel())
        mean = (x * each).sum(axes, keepdim=True) / count
        variance = ((x - mean).square() * each).sum(axes, keepdim=True) / count
        normal = (x - mean) * torch.rsqrt(variance + normalisation.EPSILON)
        return normal * normalisation.per_channel(scale) + normalisation.per_channel(scale)

    def library(x: Tensor) -> Tensor:
        flat, own = x.transpose(0, 1).flatten(1, 2), scale.flatten()
        z = F.batch_norm(flat, None, None, own, own, True, 0.0, normalisation.EPSILON)
        return z.view(x.shape[1], *x.shape[:1], *x.shape[2:]).transpose(0, 1)

    def ours(x: Tensor, present: Tensor | None = None) -> Tensor:
        return normalisation.train(x, scale, scale, present)[0]

    def gradients_by_formula() -> tuple[Tensor, Tensor]:
        normal = (x - normalisation.per_channel(statistics.mean)) * normalisation.per_channel(
            statistics.inverse
        )
        return (grad * normal).sum(normalisation.AXES), grad.sum(normalisation.AXES)

    padded = partial(formula, real=present[:, :, None, None, None])
    back = partial(forth_and_back, x=x, grad=grad)
    plain = {"formula": partial(back, formula), "batch_norm": partial(back, library)}
    yield KernelCase("batch normalisation", work, partial(back, ours), plain, 1e-4)
    plain = {"formula": partial(back, padded)}
    yield KernelCase(
        "batch normalisation, padded", work, partial(back, partial(ours, present=present)), plain, 1e-4
    )
    # With channels innermost on a GPU the way back has found these two already.
    x, grad = x.contiguous(), grad.contiguous()
    statistics = normalisation.train(x, scale, scale, None)[1]
    found = partial(normalisation.parameter_gradients, x, grad, statistics)
    yield KernelCase("normalisation, parameters", work, found, {"formula": gradients_by_formula}, 1e-4)


def narrow_cases() -> Iterator[KernelCase]:
    """Linear layers of few outputs and the cross-entropy of few classes, computed transposed on a CPU."""
    for inputs, personal in ((60, True), (500, False)):
        x, grad = draw("cpu", 100, 64, inputs), draw("cpu", 100, 64, 10)
        weight, bias = draw("cpu", 100, 10, inputs), draw("cpu", 100, 10)
        own = {"fc.weight": weight if personal else weight[0], "fc.bias": bias if personal else bias[0]}
        way = (
            (lambda x, w=weight, b=bias: torch.baddbmm(b[:, None], x, w.mT))
            if personal
            else (lambda x, w=weight[0], b=bias[0]: F.linear(x, w, b))
        )
        layer, saved = Linear("fc", inputs, 10), SavedActivations()
        ours = partial(
            forth_and_back, lambda x, own=own, layer=layer, saved=saved: layer(own, x, saved), x, grad
        )
        work = f"{inputs}→10, 100 × 64, {'personal' if personal else 'shared'}"
        yield KernelCase(
            "narrow linear layer", work, ours, {"product": partial(forth_and_back, way, x, grad)}
        )
    logits, labels = draw("cpu", 100, 64, 10), torch.arange(64).remainder(10).repeat(100, 1)

    def plain(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    grad, entropy = draw("cpu", 100, 64), CROSS_ENTROPY.loss
    transposed = logits.mT.contiguous().mT  # as a narrow layer leaves them
    ours = partial(forth_and_back, lambda logits: entropy(logits, labels), transposed, grad)
    direct = {"cross_entropy": partial(forth_and_back, plain, logits, grad)}
    yield KernelCase("cross-entropy of few classes", "10 classes, 100 × 64", ours, direct)


def whole_cases(device: str, size: int) -> Iterator[KernelCase]:
    """Gradients of whole models, all kernels and their engine together."""
    try:
        import gradients  # the whole room of models, not only its kernels
    except ImportError as error:
        print(f"no whole models: {error}", file=sys.stderr)
        return
    for name, few in (("cnn", 20), ("fashion-resnet", 4)):
        clients, problem = few if device == "cpu" else 100, gradients.CASES[name]
        model = gradients.models.build(name, problem.shape, problem.classes)
        module = problem.module().to(device)
        params = model.init(Key(1)).to(device)
        vector_to_parameters(params, module.parameters())
        x = draw(device, clients, size, *problem.shape)
        batch = gradients.GradientBatch(x, torch.arange(size, device=device).remainder(10).repeat(clients, 1))
        ours = partial(gradients.ours, model, gradients.Clip.none(), params, batch)
        peers = {"loop": gradients.loop, "vmap": gradients.mapped}
        plain = {way: partial(exact, run, module, params, batch) for way, run in peers.items()}
        # Where a rectifier is undecided to the last bit, two correct ways take different sides.
        yield KernelCase("gradients of clients", f"{name}, {clients} × {size}", ours, plain, 1e-2)


def exact(run: Callable[..., Any], *arguments: Any) -> Any:
    """Run under what the library promises."""
    with exactly():
        return run(*arguments)
