r"""What a push of known length leaves of a linear classifier, and whether training can withstand it.

    python lab/benchmarks/frontier_flat.py    five minutes on one thread; docs/frontier-notes.md quotes it
    python lab/benchmarks/frontier_flat.py \
        --set "data.features={name='strokes', components=24, box=20, drawn=4}"

Clients of `frontier-mnist-whitened` train alone, each model is made as long as the clip, and their mean, made
1 long, is pushed by r to where most training examples are mistaken: no noise, no server, no rule. So this is
what liars would leave who hide a push of r times the honest mean. Rows are ways to train:

* plain: gradient steps on the loss, as fedavg takes them;
* flat: the gradient is taken where a push of ρ times the model's length raises the loss most (sharpness-aware
  minimisation: Foret, Kleiner, Mobahi, Neyshabur, ICLR 2021; in federations Caldarola, Caputo, Ciccone, ECCV
  2022, and Qu and others, ICML 2022), two steps of ascent from where the last one ended, or raises errors
  most: the mean of 1 − p, p the probability of the truth;
* means: every class's mean, which is what least squares gives on whitened examples;
* the best: one model for all examples at once, trained against eight pushes of length r that climb as it
  learns. Nothing that clients can do alone is better informed.

Every cell is the least accuracy over the climbs' sharpness: what a model's scores are multiplied by
before errors are counted softly. Accuracies are of test examples.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from trilemma import config
from trilemma.base.keys import Key
from trilemma.simulate.experiment import assemble

CLASSES = 10
SHARP = torch.tensor([3.0, 6.0, 12.0, 25.0, 50.0])[:, None, None]
LOOKED_AT = 5000
"""Training examples by which liars climb."""


def lengths(models: Tensor) -> Tensor:
    """Return the lengths of models (…, k, classes), to divide them by."""
    return models.flatten(-2).norm(dim=-1)[..., None, None].clamp(min=1e-30)


def slopes(models: Tensor, x: Tensor, truth: Tensor, errors: bool) -> Tensor:
    """Return the gradient of the mean loss, or of the mean of 1 − p, for models (b, k, c) on x (b, m, k)."""
    likely = torch.softmax(x @ models, dim=-1)
    weight = (likely * truth).sum(-1, keepdim=True) if errors else 1.0
    return x.mT @ ((likely - truth) * weight) / x.shape[-2]


def trained(
    x: Tensor, truth: Tensor, steps: int, flat: float = 0.0, errors: bool = False, rate: float = 0.5
) -> Tensor:
    """Return every client's model (n, k, c) after so many steps, each where a push of `flat` harms most."""
    models = x.new_zeros(len(x), x.shape[2], CLASSES)
    way = torch.zeros_like(models)
    for _ in range(steps):
        far = flat * lengths(models)
        for _ in range(2 if flat else 0):
            uphill = slopes(models + far * way, x, truth, errors)
            way = way + uphill / lengths(uphill)
            way = way / lengths(way)
        models = models - rate * slopes(models + far * way, x, truth, errors=False)
    return models


def pushed(model: Tensor, x: Tensor, truth: Tensor, far: float, looks: int = 80) -> Tensor:
    """Return the model (s, k, c), pushed so far to where most examples are mistaken, for every sharpness."""
    way = model.new_zeros(len(SHARP), *model.shape)
    for look in range(looks):
        uphill = slopes(SHARP * (model + far * way), x, truth, errors=True)
        way = way + (1.0 if look < looks // 2 else 0.3) * uphill / lengths(uphill)
        way = way / lengths(way)
    return model + far * way


def best(start: Tensor, x: Tensor, truth: Tensor, far: float, sharp: float, steps: int = 500) -> Tensor:
    """Return a model (k, c) of length 1 that was trained against eight pushes that climb as it learns."""
    generator = Key(0, ("best",)).torch()
    model, momentum, mean = start / lengths(start), torch.zeros_like(start), torch.zeros_like(start)
    ways = torch.randn(8, *start.shape, generator=generator)
    ways = ways / lengths(ways)
    climbs = sharp * torch.tensor([1.0, 0.5] * 4)[:, None, None]
    for step in range(steps):
        some = torch.randint(len(x), (2000,), generator=generator)
        rows, labels = x[some], truth[some]
        for _ in range(2):
            uphill = slopes(climbs * (model + far * ways), rows, labels, errors=True)
            ways = ways + 0.5 * uphill / lengths(uphill)
            ways = ways / lengths(ways)
        scores = sharp * (model + far * ways)
        wrong = 1 - (torch.softmax(rows @ scores, -1) * labels).sum(-1).mean(-1)
        if step % 50 == 49:  # the weakest push sets out anew
            new = torch.randn(start.shape, generator=generator)
            ways[wrong.argmin()] = new / lengths(new)
        worst = torch.softmax(20 * wrong, 0)[:, None, None]
        momentum = 0.9 * momentum + (worst * slopes(scores, rows, labels, errors=True)).sum(0)
        model = model - (0.05 if step < 0.6 * steps else 0.015) * momentum
        model = model / lengths(model)
        mean = mean + model if step >= 0.7 * steps else mean
    return mean / lengths(mean)


def main(given: argparse.Namespace) -> None:
    """Print the table."""
    ready = assemble(config.load("frontier-mnist-whitened").with_(*given.set), given.seed)
    data = ready.clients.data.dataset
    assert isinstance(data.x_train, Tensor)
    rows = [torch.from_numpy(one) for one in ready.clients.data.holdings.train]
    size = min(len(one) for one in rows)
    held = torch.stack([one[:size] for one in rows])
    x, truth = data.x_train[held], torch.nn.functional.one_hot(data.y_train[held], CLASSES).float()
    everything, labels = x.flatten(0, 1), truth.flatten(0, 1)
    few = torch.arange(0, len(everything), math.ceil(len(everything) / LOOKED_AT))

    def accuracies(model: Tensor) -> Tensor:
        return ((data.x_test @ model).argmax(-1) == data.y_test).float().mean(-1)

    def line(name: str, models: list[Tensor]) -> None:
        cells = [
            float(accuracies(pushed(model, everything[few], labels[few], far)).min())
            for model, far in zip(models, given.push, strict=True)
        ]
        shown = " | ".join(f"{cell:.3f}" for cell in cells)
        print(f"| {name} | {float(accuracies(models[0])):.3f} | {shown} |", flush=True)

    def together(models: Tensor) -> list[Tensor]:
        mean = (models / lengths(models)).mean(0)
        return [mean / lengths(mean)] * len(given.push)

    print("| trained | not pushed | " + " | ".join(f"pushed by {far:g}" for far in given.push) + " |")
    print("|---|---:|" + "---:|" * len(given.push))
    for steps in (150, 60, 25):
        line(f"plain, {steps} steps", together(trained(x, truth, steps)))
    for flat, errors in ((0.2, False), (0.4, False), (0.2, True), (0.4, True)):
        what = "errors" if errors else "the loss"
        line(f"flat, ρ = {flat:g}, by {what}, 150 steps", together(trained(x, truth, 150, flat, errors)))
    line("means", together(x.mT @ truth / size))
    start = together(trained(x, truth, 150))[0]
    for sharp in (8.0, 15.0):
        line(
            f"the best, sharpness {sharp:g}",
            [best(start, everything, labels, far, sharp) for far in given.push],
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", action="append", default=[], help="changes to the ready configuration")
    parser.add_argument("--push", type=float, nargs="+", default=[0.2, 0.3, 0.4])
    parser.add_argument("--seed", type=int, default=4)
    main(parser.parse_args())
