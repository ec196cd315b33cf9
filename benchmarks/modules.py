"""Gradients of any module: ours against a plain pass, a loop over clients and `vmap(grad)`, in one process.

    python benchmarks/modules.py --device cuda
    PYTHONPATH=src:tests/models python benchmarks/modules.py --zoo

The first is a BERT-like encoder (4 layers of 256, 128 tokens, 5.4 M parameters), 20 clients with 32 examples
each. "plain" is one forward and backward pass over all 640 examples, which knows nothing of clients: a lower
bound. The second goes through the modules of the tests. Opacus is shown where it is installed.
Times are the best of several rounds in which the variants take turns; answers are compared before.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from trilemma import models
from trilemma.base.keys import Key
from trilemma.models import Clip


@dataclass(frozen=True)
class ModuleBatch:
    """One batch per client."""

    x: Any
    y: Tensor
    weight: Tensor | None = None


class TransformerLayer(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads

    def forward(self, h: Tensor) -> Tensor:
        """Attend, then transform every token."""
        parts = (
            part(h).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        h = self.norm1(h + self.out(mixed))
        return self.norm2(h + self.narrow(F.gelu(self.wide(h))))


class Encoder(nn.Module):
    """BERT in small."""

    def __init__(self, vocabulary: int, width: int, layers: int, tokens: int, classes: int = 2) -> None:
        super().__init__()
        self.spread = False
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([TransformerLayer(width, max(1, width // 64)) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Classify sequences of tokens."""
        places = torch.arange(ids.shape[1], device=ids.device)
        h = self.norm(
            self.embedding(ids)
            + self.position(places.expand(ids.shape).contiguous() if self.spread else places)
        )
        for layer in self.layers:
            h = layer(h)
        return self.head(h[:, 0])


def _flat(batch: ModuleBatch) -> tuple[Any, Tensor]:
    x = (
        batch.x.flatten(0, 1)
        if isinstance(batch.x, Tensor)
        else {n: c.flatten(0, 1) for n, c in batch.x.items()}
    )
    return x, batch.y.flatten(0, 1)


def _row(x: Any, row: int) -> Any:
    return x[row] if isinstance(x, Tensor) else {name: column[row] for name, column in x.items()}


def _call(net: nn.Module, x: Any) -> Any:
    outputs = net(x) if isinstance(x, Tensor) else net(**x)
    return getattr(outputs, "logits", outputs)


def plain(net: nn.Module, loss: Any, batch: ModuleBatch) -> Callable[[], Any]:
    x, y = _flat(batch)
    trained = [part for part in net.parameters() if part.requires_grad]
    return lambda: torch.autograd.grad(loss(_call(net, x), y), trained, allow_unused=True)


def loop(
    net: nn.Module, loss: Any, batch: ModuleBatch, by_example: float | None = None
) -> Callable[[], Tensor]:
    trained = [part for part in net.parameters() if part.requires_grad]

    def one(x: Any, y: Tensor) -> Tensor:
        found = torch.autograd.grad(loss(_call(net, x), y), trained, allow_unused=True)
        parts = [torch.zeros_like(part) if g is None else g for part, g in zip(trained, found, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    def clients() -> Tensor:
        return torch.stack([one(_row(batch.x, row), batch.y[row]) for row in range(len(batch.y))])

    def examples() -> Tensor:
        rows = []
        for row in range(len(batch.y)):
            x = _row(batch.x, row)
            total = None
            for i in range(batch.y.shape[1]):
                column = x[i : i + 1] if isinstance(x, Tensor) else {n: c[i : i + 1] for n, c in x.items()}
                g = one(column, batch.y[row, i : i + 1])
                g = g * (by_example / g.norm()).clamp(max=1.0) / batch.y.shape[1]
                total = g if total is None else total + g
            rows.append(total)
        return torch.stack(rows)

    return clients if by_example is None else examples


def mapped(
    net: nn.Module, loss: Any, batch: ModuleBatch, by_example: float | None = None
) -> Callable[[], Tensor]:
    params = {name: part.detach() for name, part in net.named_parameters() if part.requires_grad}

    def lost(params: Any, x: Any, y: Tensor) -> Tensor:
        outputs = functional_call(
            net, params, (x,) if isinstance(x, Tensor) else (), None if isinstance(x, Tensor) else x
        )
        return loss(getattr(outputs, "logits", outputs), y)

    def alone(params: Any, x: Any, y: Tensor) -> Tensor:
        return lost(params, x[None] if isinstance(x, Tensor) else {n: c[None] for n, c in x.items()}, y[None])

    def clients() -> Tensor:
        found = vmap(grad(lost), in_dims=(None, 0, 0))(params, batch.x, batch.y)
        return torch.cat([part.flatten(1) for part in found.values()], 1)

    def examples() -> Tensor:
        rows = []
        for row in range(len(batch.y)):
            found = vmap(grad(alone), in_dims=(None, 0, 0))(params, _row(batch.x, row), batch.y[row])
            flat = torch.cat([part.reshape(batch.y.shape[1], -1) for part in found.values()], 1)
            rows.append(((by_example / flat.norm(dim=1)).clamp(max=1.0) / len(flat)) @ flat)
        return torch.stack(rows)

    return clients if by_example is None else examples


def opacus(net: nn.Module, batch: ModuleBatch, limit: float) -> Callable[[], Any] | None:
    """Ghost clipping of all examples as one batch, without the clients' sums."""
    if importlib.util.find_spec("opacus") is None:
        return None
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    copied = copy.deepcopy(net)
    copied.spread = True  # it takes the first axis of every layer's input for the examples
    private = GradSampleModuleFastGradientClipping(copied, max_grad_norm=limit, use_ghost_clipping=True)

    class Nothing:
        loss_reduction = "mean"

        def zero_grad(self) -> None:
            private.zero_grad()

    criterion = DPLossFastGradientClipping(private, Nothing(), nn.CrossEntropyLoss(), "mean")
    x, y = _flat(batch)
    return lambda: criterion(private(x), y).backward()


def timed(
    variants: dict[str, Callable[[], Any]], repeats: int, device: str
) -> dict[str, tuple[float, float]]:
    """Return the best time in ms and, on CUDA, the most memory in MB over what was there before."""
    best = {name: (float("inf"), 0.0) for name in variants}
    for variant in variants.values():
        variant()
    for _ in range(repeats):
        for name, variant in variants.items():
            memory = 0.0
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter() if device == "cuda" else time.process_time()
            result = variant()
            if device == "cuda":
                torch.cuda.synchronize()
                memory = (torch.cuda.max_memory_allocated() - before) / 2**20
            spent = (time.perf_counter() if device == "cuda" else time.process_time()) - start
            best[name] = min(best[name][0], 1e3 * spent), max(best[name][1], memory)
            del result
    return best


def encoder(device: str, repeats: int, clients: int, size: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    net = Encoder(*sizes).to(device)
    batch = ModuleBatch(
        torch.randint(sizes[0], (clients, size, sizes[3]), device=device),
        torch.randint(2, (clients, size), device=device),
    )
    loss = nn.CrossEntropyLoss()
    model = models.from_module(net, loss)
    theta = model.init(Key(1)).to(device)
    norms = models.gradients(model, theta, batch, clip=Clip.example(float("inf"))).norms
    assert norms is not None
    limit = float(norms.median())
    variants: dict[str, Callable[[], Any]] = {
        "plain, all examples": plain(net, loss, batch),
        "vmap(grad) over clients": mapped(net, loss, batch),
        "loop over clients": loop(net, loss, batch),
        "ours, per client": lambda: models.gradients(model, theta, batch, memory=64 << 30).value,
        "ours, per example": lambda: (
            models.gradients(model, theta, batch, clip=Clip.example(limit), memory=64 << 30).value
        ),
        "ours, per example, 4 GiB": lambda: (
            models.gradients(model, theta, batch, clip=Clip.example(limit)).value
        ),
    }
    rival = opacus(net, batch, limit)
    if rival is not None:
        variants["Opacus, ghost, one batch"] = rival
    theirs, ours = variants["loop over clients"](), variants["ours, per client"]()
    print(
        f"torch {torch.__version__}, {device}, {model.dim} parameters, "
        f"{clients} clients × {size} × {sizes[3]} tokens"
    )
    paths = models.paths(model, batch)
    print(f"way: {paths.way}, {paths.bytes / 2**20:.1f} MiB an example; {paths.note}")
    print(f"per client: error {float((ours - theirs).norm() / theirs.norm()):.1e}")
    few = ModuleBatch(batch.x[:1, :4], batch.y[:1, :4])
    theirs = loop(net, loss, few, limit)()
    ours = models.gradients(model, theta, few, clip=Clip.example(limit)).value
    print(f"per example: error {float((ours - theirs).norm() / theirs.norm()):.1e}")
    found = timed(variants, repeats, device)
    base = found["plain, all examples"]
    for name, (ms, memory) in found.items():
        ratio = f"{memory:8.0f} MB ({memory / base[1]:.2f} ×)" if device == "cuda" else ""
        print(f"{name:28} {ms:9.2f} ms ({ms / base[0]:.2f} ×) {ratio}")


def zoo(repeats: int, clients: int, size: int, only: list[str]) -> None:
    from module_zoo import ZOO

    print(f"{'module':22} {'loop':>9} {'vmap':>9} {'ours':>9}  ratio | examples: loop, vmap, ours, ratio")
    for name in [name for name in ZOO if not only or name in only]:
        _one(name, ZOO[name], repeats, clients, size)


def _one(name: str, exhibit: Any, repeats: int, clients: int, size: int) -> None:
    torch.manual_seed(1)
    net = exhibit.module()
    x = exhibit.x if isinstance(exhibit.x, Tensor) else dict(exhibit.x)

    def repeated(part: Tensor) -> Tensor:
        flat = part.flatten(0, 1)
        return flat[torch.arange(clients * size) % len(flat)].unflatten(0, (clients, size))

    batch = ModuleBatch(
        repeated(x) if isinstance(x, Tensor) else {n: repeated(c) for n, c in x.items()},
        repeated(exhibit.y),
    )
    if any(isinstance(part, nn.LazyLinear) for part in net.modules()):
        net(batch.x[0])
    model = models.from_module(net, exhibit.loss)
    theta = model.init(Key(1))
    start = model.initial_buffers(clients) or None
    line = f"{name:22}"
    for limit in (None, 0.1):
        if exhibit.mixes and limit is not None:
            line += " | refused"
            continue
        clip = Clip.none() if limit is None else Clip.example(limit)
        variants: dict[str, Callable[[], Any]] = {
            "loop": loop(net, exhibit.loss, batch, limit),
            "vmap": mapped(net, exhibit.loss, batch, limit),
            "ours": lambda clip=clip: models.gradients(model, theta, batch, clip=clip, buffers=start).value,
        }
        try:
            variants["vmap"]()
        except Exception:
            del variants["vmap"]
        found = {key: ms for key, (ms, _) in timed(variants, repeats, "cpu").items()}
        better = min(ms for key, ms in found.items() if key != "ours")
        shown = [f"{found[key]:9.2f}" if key in found else "        –" for key in ("loop", "vmap", "ours")]
        line += f" {' '.join(shown)} {found['ours'] / better:6.2f} |"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--zoo", action="store_true", help="the modules of the tests, on a CPU")
    parser.add_argument("--only", nargs="*", default=[], help="names of modules of the zoo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--size", type=int, default=32)
    options = parser.parse_args()
    if options.zoo:
        zoo(options.repeats, options.clients, options.size, options.only)
    elif options.device == "cuda":
        encoder("cuda", options.repeats, options.clients, options.size, (8192, 256, 4, 128))
    else:
        encoder("cpu", options.repeats, 4, 8, (512, 64, 2, 32))


if __name__ == "__main__":
    main()
