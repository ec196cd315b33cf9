"""What the models' fixed rules choose between on a CPU: layouts of layers, and how many clients go at once.

    python benchmarks/gradient_rules.py [--threads 1] [--clock cpu] [--repeats 10]

The rules are listed in docs/gradients-speed.md; they follow from shapes and never from a clock. What is
chosen on a GPU, and every kernel against plain torch, is in `benchmarks/kernels.py --only layers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gradients import GradientBatch, clock
from trilemma import models
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.engines import groups
from trilemma.models.layers import convolution
from trilemma.models.layers.convolution import Stencil


def rules(arguments: argparse.Namespace) -> None:
    """Time the alternatives between which the library's fixed rules choose on a CPU."""
    generator = Key(2).torch()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def last(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)

    def show(what: str, variants: dict[str, Callable[[], object]]) -> None:
        times = clock(variants, arguments)
        print(f"{what:<58}" + "   ".join(f"{name} {elapsed:.2f} ms" for name, elapsed in times.items()))

    x, kernel, grad = draw(100, 20, 12, 12), draw(50, 20, 5, 5), draw(100, 50, 8, 8)
    five, inner, inner_grad = Stencil(5), last(x), last(grad)
    first = x.view(2, 50, *x.shape[1:]), grad.view(2, 50, *grad.shape[1:]), five
    innermost = inner.view(2, 50, *x.shape[1:]), inner_grad.view(2, 50, *grad.shape[1:]), five
    show(
        "convolution 20→50 5×5, 100 examples: forward",
        {
            "channels first": lambda: F.conv2d(x, kernel),
            "channels last": lambda: F.conv2d(inner, last(kernel)),
        },
    )
    show(
        "  weight gradients of 2 clients",
        {
            "channels first": lambda: convolution.client_gradients(*first),
            "channels last": lambda: convolution.client_gradients(*innermost),
            "by example": lambda: convolution.example_gradients(*innermost),
            "one product": lambda: convolution.client_gradients_batched(*innermost),
        },
    )
    image, image_grad = draw(2, 50, 1, 28, 28), last(draw(100, 20, 24, 24)).view(2, 50, 20, 24, 24)
    show(
        "convolution 1→20 5×5: weight gradients of 2 clients",
        {
            "library": lambda: [
                nn.grad.conv2d_weight(a, [20, 1, 5, 5], g) for a, g in zip(image, image_grad, strict=True)
            ],
            "by example": lambda: convolution.client_gradients(image, image_grad, five),
        },
    )
    wide = draw(100, 20, 24, 24)
    wide_inner = last(wide)
    show(
        "max pooling 2×2 of 20×24×24, 100 examples",
        {
            "channels first": lambda: F.max_pool2d(wide, 2),
            "channels last": lambda: F.max_pool2d(wide_inner, 2),
        },
    )
    a, weight, shift = draw(100, 64, 60), draw(100, 10, 60), draw(100, 10)
    show(
        "linear 60→10, 100 clients × 64, personal",
        {
            "direct": lambda: torch.baddbmm(shift[:, None], a, weight.mT),
            "transposed": lambda: torch.baddbmm(shift[..., None], weight, a.mT),
        },
    )
    logits, labels = draw(100, 64, 10).requires_grad_(), torch.zeros(100, 64, dtype=torch.int64)

    def slope(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss.sum(), logits)[0]

    show(
        "cross-entropy and gradient, 100 × 64 × 10 classes",
        {
            "along classes": lambda: slope(F.cross_entropy(logits.flatten(0, 1), labels.flatten())),
            "along examples": lambda: slope(F.cross_entropy(logits.mT, labels)),
        },
    )
    model = models.build("cnn", (1, 28, 28), 10)
    batch = GradientBatch(draw(20, 50, 1, 28, 28), torch.zeros(20, 50, dtype=torch.int64))
    theta, chosen = model.init(Key(1)), groups.CACHE

    def grouped(size: int, clip: Clip) -> Tensor:
        groups.CACHE = size << 20
        return models.gradients(model, theta, batch, clip=clip).value

    for clip in (Clip.none(), Clip.example(1.0)):
        sizes = {f"{size} MiB": partial(grouped, size, clip) for size in (16, 32, 64, 128, 256, 512)}
        show(f"groups of the CNN, 20 clients × 50, clip {clip.unit}", sizes)
    groups.CACHE = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="cpu: for a busy machine")
    arguments = parser.parse_args()
    arguments.device = "cpu"
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.clock} time")
    rules(arguments)


if __name__ == "__main__":
    main()
