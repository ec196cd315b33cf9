"""Gradients of k clients at once: ours against a plain loop and a plain vmap, in one process.

    python benchmarks/gradients.py --device cpu
    python benchmarks/gradients.py --device cuda --models cnn multinomial

The peers are what one would write without this library: a torch.nn module, `backward` client by client, and
`torch.func.vmap(grad)` over clients; both leave one (k, d) tensor, as ours does. Every answer is compared
with the loop's before it is timed: the error is the median over clients, relative to the client's largest
entry, and in brackets stands the number of clients who differ by more than 1e-5 because a rectifier or a
pooling window was undecided to the last bit. Each time is the best of several rounds in which the variants
take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.utils import vector_to_parameters

from trilemma import models
from trilemma.base.keys import Key
from trilemma.models import Clip
from turns import take_turns


@dataclass(frozen=True)
class GradientBatch:
    """One batch per client."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class GradientCase:
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
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


class ResidualUnit(nn.Module):
    """A residual unit."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()
        self.norm1, self.norm2 = _norm(outputs), _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def _resnet() -> nn.Module:
    stem = nn.Conv2d(1, 64, 7, 2, 3), _norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    units = ResidualUnit(64, 64), ResidualUnit(64, 64), ResidualUnit(64, 128, 2), ResidualUnit(128, 128)
    return nn.Sequential(*stem, *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


FEW = 4
"""Clients whose per-example clipping is checked: the peer forms every gradient."""

CASES = {
    "cnn": GradientCase((1, 28, 28), 10, 50, lambda: _lenet(1, 20, 50, 800, 500, 10)),
    "cifar-cnn": GradientCase((3, 32, 32), 10, 64, lambda: _lenet(3, 6, 16, 400, 120, 84, 10)),
    "multinomial": GradientCase((60,), 10, 64, lambda: nn.Sequential(*_dense(60, 10))),
    "mnist-mlp": GradientCase((784,), 10, 64, lambda: nn.Sequential(*_dense(784, 100, 10))),
    "fashion-resnet": GradientCase((1, 28, 28), 10, 64, _resnet),
    "emnist-mlp": GradientCase((784,), 62, 64, lambda: nn.Sequential(*_dense(784, 100, 100, 62))),
}


def loop(module: nn.Module, params: Tensor, batch: GradientBatch) -> Tensor:
    """One backward pass per client."""
    out = torch.empty(len(batch.y), params.shape[-1], device=params.device, dtype=params.dtype)
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


def mapped(module: nn.Module, params: Tensor, batch: GradientBatch, chunk: int | None = None) -> Tensor:
    """vmap(grad) over clients."""

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, _views(module, flat), (x,)), y)

    axis = 0 if params.dim() == 2 else None
    return vmap(grad(loss), in_dims=(axis, 0, 0), chunk_size=chunk)(params, batch.x, batch.y)


def mapped_by_example(module: nn.Module, params: Tensor, batch: GradientBatch, threshold: float) -> Tensor:
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


def doubled(
    case: GradientCase, params: Tensor, batch: GradientBatch
) -> tuple[nn.Module, Tensor, GradientBatch]:
    """The same problem in float64: what answers are judged by."""
    module, params = case.module().to(params.device, torch.float64), params.double()
    if params.dim() == 1:
        vector_to_parameters(params, module.parameters())
    return module, params, GradientBatch(batch.x.double(), batch.y)


def ours(model: models.Model, clip: Clip, params: Tensor, batch: GradientBatch) -> Tensor:
    """The library's stacked gradients."""
    return models.gradients(model, params, batch, clip=clip).value


def clock(variants: Mapping[str, Callable[[], object]], arguments: argparse.Namespace) -> dict[str, float]:
    """Return each variant's best time in milliseconds; the variants take turns."""
    times, busy = take_turns(variants, arguments.repeats, arguments.device), arguments.clock == "cpu"
    return {name: 1e3 * (best.busy if busy else best.seconds) for name, best in times.items()}


def compare(name: str, personal: bool, arguments: argparse.Namespace) -> None:
    """Check every variant against a loop in float64, time them in turns, print a table."""
    case, device = CASES[name], arguments.device
    model = models.build(name, case.shape, case.classes)
    module = case.module().to(device)
    key, clients, size = Key(1).fold(name), arguments.clients, arguments.batch or case.size
    params = torch.stack([model.init(key.fold(i)) for i in range(clients if personal else 1)]).to(device)
    params = params if personal else params[0]
    if not personal:
        vector_to_parameters(params, module.parameters())
    generator = key.fold("batch").torch()
    x = torch.randn(clients, size, *case.shape, generator=generator).to(device)
    y = torch.randint(case.classes, (clients, size), generator=generator).to(device)
    batch = GradientBatch(x, y)
    unit = Clip.client if model.buffers else Clip.example
    norms = models.gradients(model, params, batch, clip=unit(math.inf)).norms
    assert norms is not None
    threshold = float(norms.median())
    expected = loop(*doubled(case, params, batch))
    factor = threshold / torch.linalg.vector_norm(expected, dim=1, keepdim=True)
    variants = {
        "loop": partial(loop, module, params, batch),
        "vmap": partial(mapped, module, params, batch, arguments.vmap_chunk),
        "ours": partial(ours, model, Clip.none(), params, batch),
        "ours, clip client": partial(ours, model, Clip.client(threshold), params, batch),
    }
    answers = {
        "loop": expected,
        "vmap": expected,
        "ours": expected,
        "ours, clip client": expected * factor.clamp(max=1.0),
    }
    if not model.buffers:
        few = GradientBatch(x[:FEW], y[:FEW])
        variants["ours, clip example"] = partial(ours, model, Clip.example(threshold), params, batch)
        answers["ours, clip example"] = mapped_by_example(*doubled(case, params, few), threshold)
    if arguments.example_peer and not model.buffers:
        variants["vmap, clip example"] = partial(mapped_by_example, module, params, batch, threshold)
    errors = {}
    for variant, answer in answers.items():
        found = variants[variant]()[: len(answer)]
        by_client = (found - answer).abs().amax(1) / answer.abs().amax(1)
        kinks = int((by_client > 1e-5).sum())
        # Piecewise linear layers: where two values of a pooling window, or a rectifier and zero, are as close
        # as rounding, two correct ways may take different sides. The median client is not at such a place.
        # The peers' errors are shown, not judged: on a GPU they may convolve by FFT.
        assert by_client.median() < 1e-5 or variant in ("loop", "vmap"), (variant, by_client)
        errors[variant] = f"{float(by_client.quantile(0.5)):.0e}{f' ({kinks})' if kinks else ''}"
    times = clock(variants, arguments)
    peer = min(times["loop"], times["vmap"])
    kind = "personal" if personal else "shared"
    print(f"\n{name} (d = {model.dim}), {clients} clients × {size}, {kind} parameters, {device}")
    print(f"{'variant':<22}{'ms':>10}{'÷ better peer':>16}{'÷ ours':>10}{'error':>12}")
    for variant, elapsed in times.items():
        error = errors.get(variant, "")
        ratios = f"{elapsed / peer:>16.2f}{elapsed / times['ours']:>10.2f}"
        print(f"{variant:<22}{elapsed:>10.2f}{ratios}{error:>12}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=["cnn", "multinomial"])
    parser.add_argument("--parameters", nargs="+", choices=["shared", "personal"], default=["shared"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--batch", type=int, default=0, help="examples per client (default: the papers')")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall", help="cpu: for a busy machine")
    parser.add_argument("--vmap-chunk", type=int, default=None, help="clients per vmap (default: all)")
    parser.add_argument("--example-peer", action="store_true", help="also time per-example vmap")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    threads = f", {torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    print(f"torch {torch.__version__}{threads}, {arguments.clock} time")
    if arguments.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # the peers too compute in full float32
        print(torch.cuda.get_device_name())
    for name in arguments.models:
        for kind in arguments.parameters:
            compare(name, kind == "personal", arguments)


if __name__ == "__main__":
    main()
