"""Gradients of k clients at once: ours against a plain loop and a plain vmap, in one process.

    python benchmarks/gradients.py --device cpu
    python benchmarks/gradients.py --device cuda --models cnn multinomial

The peers are what one would write without this library: a torch.nn module, `backward` client by client, and
`torch.func.vmap(grad)` over clients; both leave one (k, d) tensor, as ours does. Every answer is compared
with the loop's before it is timed; each time is the best of several rounds in which the variants take turns,
so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from trilemma import models
from trilemma.keys import Key
from trilemma.models import Clip


@dataclass(frozen=True)
class Batch:
    """One batch per client."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A model, the shape of its examples and the batch per client."""

    shape: tuple[int, ...]
    classes: int
    size: int
    module: Callable[[], nn.Module]


def _lenet(channels: int, first: int, second: int, *dense: int) -> nn.Module:
    layers: list[nn.Module] = [
        *(nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    ]
    return nn.Sequential(*layers, *_dense(*dense))


def _dense(*sizes: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):  # noqa: RUF007
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


CASES = {
    "cnn": Case((1, 28, 28), 10, 50, lambda: _lenet(1, 20, 50, 800, 500, 10)),
    "cifar-cnn": Case((3, 32, 32), 10, 64, lambda: _lenet(3, 6, 16, 400, 120, 84, 10)),
    "multinomial": Case((60,), 10, 64, lambda: nn.Sequential(*_dense(60, 10))),
    "mnist-mlp": Case((784,), 10, 64, lambda: nn.Sequential(*_dense(784, 100, 10))),
    "emnist-mlp": Case((784,), 62, 64, lambda: nn.Sequential(*_dense(784, 100, 100, 62))),
}


def loop(module: nn.Module, params: Tensor, batch: Batch) -> Tensor:
    """One backward pass per client."""
    out = torch.empty(len(batch.y), params.shape[-1], device=params.device)
    weights = list(module.parameters())
    for i in range(len(batch.y)):
        if params.dim() == 2:
            vector_to_parameters(params[i], weights)
        loss = F.cross_entropy(module(batch.x[i]), batch.y[i])
        torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)], out=out[i])
    return out


def _views(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    sizes = [part.numel() for part in module.parameters()]
    return {
        name: piece.view(part.shape)
        for (name, part), piece in zip(module.named_parameters(), flat.split(sizes), strict=True)
    }


def mapped(module: nn.Module, params: Tensor, batch: Batch, chunk: int | None = None) -> Tensor:
    """vmap(grad) over clients."""

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, _views(module, flat), (x,)), y)

    axis = 0 if params.dim() == 2 else None
    return vmap(grad(loss), in_dims=(axis, 0, 0), chunk_size=chunk)(params, batch.x, batch.y)


def mapped_by_example(module: nn.Module, params: Tensor, batch: Batch, threshold: float) -> Tensor:
    """vmap(grad) over the examples of one client at a time, every gradient formed, then clipped."""

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, _views(module, flat), (x[None],)), y[None])

    rows = []
    for i in range(len(batch.y)):
        own = params[i] if params.dim() == 2 else params
        each = vmap(grad(loss), in_dims=(None, 0, 0))(own, batch.x[i], batch.y[i])
        factor = (threshold / each.norm(dim=1)).clamp(max=1.0)
        rows.append(factor @ each / len(factor))
    return torch.stack(rows)


def ours(model: models.Model, clip: Clip, params: Tensor, batch: Batch) -> Tensor:
    """The library's stacked gradients."""
    return models.gradients(model, params, batch, clip=clip).value


def clock(variants: dict[str, Callable[[], Tensor]], repeats: int, device: str) -> dict[str, float]:
    """Return each variant's best time in milliseconds; the variants take turns."""
    best = dict.fromkeys(variants, math.inf)
    for turn in range(repeats + 1):
        for name, call in variants.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            best[name] = min(best[name], elapsed) if turn else best[name]
    return {name: 1e3 * seconds for name, seconds in best.items()}


def compare(name: str, personal: bool, arguments: argparse.Namespace) -> None:
    case, device = CASES[name], arguments.device
    model = models.build(name, case.shape, case.classes)
    module = case.module().to(device)
    key, size = Key(1).fold(name), arguments.batch or case.size
    params = torch.stack([model.init(key.fold(i)) for i in range(arguments.clients)]).to(device)
    params = params if personal else params[0].clone()
    if not personal:
        vector_to_parameters(params, module.parameters())
    assert personal or torch.equal(parameters_to_vector(module.parameters()), params)
    generator = key.fold("batch").torch()
    x = torch.randn(arguments.clients, size, *case.shape, generator=generator).to(device)
    y = torch.randint(case.classes, (arguments.clients, size), generator=generator).to(device)
    batch = Batch(x, y)
    norms = models.gradients(model, params, batch, clip=Clip.example(math.inf)).norms
    assert norms is not None
    threshold = float(norms.median())
    variants = {
        "loop": partial(loop, module, params, batch),
        "vmap": partial(mapped, module, params, batch, arguments.vmap_chunk),
        "ours": partial(ours, model, Clip.none(), params, batch),
        "ours, clip client": partial(ours, model, Clip.client(threshold), params, batch),
        "ours, clip example": partial(ours, model, Clip.example(threshold), params, batch),
    }
    if arguments.example_peer:
        variants["vmap, clip example"] = partial(mapped_by_example, module, params, batch, threshold)
    expected = variants["loop"]()
    norm = torch.linalg.vector_norm(expected, dim=1, keepdim=True)
    by_example = mapped_by_example(module, params, batch, threshold)
    answers = {
        "vmap": expected,
        "ours": expected,
        "ours, clip client": expected * (threshold / norm).clamp(max=1.0),
        "ours, clip example": by_example,
    }
    errors = {
        variant: float((variants[variant]() - answer).abs().max() / answer.abs().max())
        for variant, answer in answers.items()
    }
    assert max(errors.values()) < 1e-5, errors
    times = clock(variants, arguments.repeats, device)
    peer = min(times["loop"], times["vmap"])
    kind = "personal" if personal else "shared"
    print(f"\n{name} (d = {model.dim}), {arguments.clients} clients × {size}, {kind} parameters, {device}")
    print(f"{'variant':<22}{'ms':>10}{'÷ better peer':>16}{'÷ ours':>10}{'error':>12}")
    for variant, elapsed in times.items():
        error = f"{errors[variant]:.1e}" if variant in errors else ""
        ratios = f"{elapsed / peer:>16.2f}{elapsed / times['ours']:>10.2f}"
        print(f"{variant:<22}{elapsed:>10.2f}{ratios}{error:>12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=["cnn", "multinomial"])
    parser.add_argument("--parameters", nargs="+", choices=["shared", "personal"], default=["shared"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--batch", type=int, default=0, help="examples per client (default: the papers')")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vmap-chunk", type=int, default=None, help="clients per vmap (default: all)")
    parser.add_argument("--example-peer", action="store_true", help="also time per-example vmap")
    arguments = parser.parse_args()
    threads = f", {torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    print(f"torch {torch.__version__}{threads}")
    if arguments.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # the peers too compute in full float32
        print(torch.cuda.get_device_name())
    for name in arguments.models:
        for kind in arguments.parameters:
            compare(name, kind == "personal", arguments)


if __name__ == "__main__":
    main()
