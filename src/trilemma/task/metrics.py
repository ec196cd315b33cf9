"""Metrics by name: how good a model's outputs are on test examples, beside the loss.

A metric is a function `(outputs, targets) -> number` of a whole test set; any callable of that shape will do,
and the ones here have names that configurations and task files may use. Metrics of scikit-learn, which take
targets first, are taken as they are.

`outputs` are what the model returned, unchanged: one logit (n,) or (n, 1) for two classes, one per class
(n, c), one per label (n, labels), one per token and class (n, t, c), or predicted numbers. `targets` are as
the data has them: class numbers (n,), yes-or-no labels (n, labels), token labels (n, t) with `IGNORED` where
there is none, or numbers like the outputs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.records import SUMMARY
from trilemma.base.registry import Registry
from trilemma.data.types import IGNORED

Metric = Callable[[Tensor, Tensor], float]

metrics: Registry[Metric] = Registry("metric")
"""Every metric by the name configurations and task files use."""

LOWER_IS_BETTER = frozenset({"loss", "mse", "mae", "backdoor"})
"""Names of scores of which less is better; of all others, more."""


def chosen(
    wanted: Metric | Iterable[str | Metric] | Mapping[str, str | Metric] | None, classes: int | None
) -> dict[str, Metric]:
    """Return metrics by name; without a choice accuracy where there are classes, else the squared error.

    >>> [*chosen(None, classes=10)], [*chosen(None, classes=None)], [*chosen(["auc"], classes=2)]
    (['accuracy'], ['mse'], ['auc'])
    >>> chosen(["acuracy"], classes=2)
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: unknown metric 'acuracy': did you mean 'accuracy'? ...
    """
    if wanted is None:
        wanted = ("mse",) if classes is None else ("accuracy",)
    if isinstance(wanted, str) or callable(wanted):
        wanted = (wanted,)
    named: dict[str, Any] = (
        dict(wanted) if isinstance(wanted, Mapping) else {name_of(one): one for one in wanted}
    )
    found = {name: metrics[metric] if isinstance(metric, str) else metric for name, metric in named.items()}
    for name, metric in [*found.items()]:
        if not callable(metric):
            raise UserError(f"metric {name!r} is a {type(metric).__name__}; allowed: a name or a function")
        if of_sklearn(metric):
            found[name] = from_sklearn(metric, classes)
    for name in found:
        if name in SUMMARY:
            raise UserError(
                f"a metric cannot be called {name!r}: a summary has that already; choose another name"
            )
    return found


def name_of(metric: Any) -> str:
    """Return what a metric is called: a name is one; of a `functools.partial` its function counts.

    >>> name_of(partial(mse, targets=None)), name_of(mae)
    ('mse', 'mae')
    """
    bare = _bare(metric)
    if isinstance(bare, str):
        return bare
    return str(getattr(bare, "__name__", type(bare).__name__))


def of_sklearn(metric: Any) -> bool:
    """Tell whether a function is one of scikit-learn's, which takes targets first, as arrays."""
    return str(getattr(_bare(metric), "__module__", "")).startswith("sklearn.")


def from_sklearn(metric: Callable[..., Any], classes: int | None) -> Metric:
    """Return a metric of scikit-learn as one of outputs and targets.

    What it calls `y_pred` are labels, or numbers where there are no classes; anything else (`y_score`,
    `y_proba`) are chances: of the second of two classes, else of each.
    """
    takes = [*inspect.signature(_bare(metric)).parameters][1]

    def score(outputs: Tensor, targets: Tensor) -> float:
        outputs, targets = outputs.detach().cpu(), targets.detach().cpu()
        if classes is None:
            return float(metric(targets.numpy(), outputs.reshape(targets.shape).numpy()))
        if takes == "y_pred":
            predicted, right = _predicted(outputs, targets)
            known = right != IGNORED
            if predicted.dim() == 2 and outputs.shape == targets.shape and outputs.shape[1] > 1:
                return float(metric(right.numpy(), predicted.numpy()))  # several labels of each example
            return float(metric(right[known].numpy(), predicted[known].numpy()))
        if outputs.shape == targets.shape or outputs.shape[-1] == 1:
            return float(metric(targets.numpy(), outputs.sigmoid().reshape(targets.shape).numpy()))
        chances = outputs.softmax(-1)
        return float(metric(targets.numpy(), (chances[:, 1] if chances.shape[1] == 2 else chances).numpy()))

    return score


def _bare(metric: Any) -> Any:
    return metric.func if isinstance(metric, partial) else metric


@metrics.register("accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of right answers: of examples, of single labels, or of tokens.

    >>> accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
    0.5
    >>> accuracy(torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [1.0]]))
    0.5
    """
    predicted, right = _predicted(outputs, targets)
    known = right != IGNORED
    return _mean((predicted == right)[known].double())


@metrics.register("f1")
def f1(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean over classes (labels) of 2·precision·recall/(precision + recall); absent ones count 0.

    >>> f1(torch.tensor([[2.0, 1.0], [0.0, 3.0], [0.0, 3.0]]), torch.tensor([0, 1, 1]))
    1.0
    """
    predicted, right = _predicted(outputs, targets)
    if outputs.shape == targets.shape and outputs.dim() == 2 and outputs.shape[1] > 1:
        said, true = predicted == 1, right == 1
    else:
        known = right != IGNORED
        classes = max(outputs.shape[-1] if outputs.shape != targets.shape else 2, 2)
        numbers = torch.arange(classes, device=outputs.device)
        said, true = predicted[known][:, None] == numbers, right[known][:, None] == numbers
    both, either = (said & true).sum(0).double(), said.sum(0).double() + true.sum(0)
    return _mean(torch.where(either > 0, 2 * both / either.clamp(min=1), 0.0)[either > 0])


@metrics.register("auc")
def auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the chance that a positive example scores above a negative one, ties counting half.

    For two classes: one logit, or the difference of two.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.875
    """
    if outputs.shape != targets.shape and outputs.dim() == 2 and outputs.shape[1] == 2:
        outputs = outputs[:, 1] - outputs[:, 0]
    score, positive = outputs.flatten().double(), targets.flatten() > 0.5
    if score.shape != positive.shape:
        raise UserError(f"auc is for two classes; got outputs of shape {tuple(outputs.shape)}")
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    # Ranks with ties at their mean: the rank-sum form of the area.
    _, place, count = torch.unique(score, sorted=True, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    ranks = (last - (count.double() - 1) / 2)[place]
    total = float(ranks[positive].sum()) - positives * (positives + 1) / 2
    return total / (positives * negatives)


@metrics.register("mse")
def mse(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean squared error.

    >>> mse(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 3.0]))
    0.5
    """
    return _mean(_errors(outputs, targets).square())


@metrics.register("mae")
def mae(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error.

    >>> mae(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 3.0]))
    0.5
    """
    return _mean(_errors(outputs, targets).abs())


@metrics.register("r2")
def r2(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that is explained.

    >>> r2(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]))
    1.0
    """
    errors, values = _errors(outputs, targets), targets.flatten().double()
    around = (values - values.mean()).square().sum()
    return float(1.0 - errors.square().sum() / around) if float(around) else math.nan


def _predicted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return predicted and true labels of one shape."""
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape == targets.shape:  # a logit each
        return (outputs > 0).long(), targets.long()
    if outputs.shape[:-1] == targets.shape:
        return outputs.argmax(-1), targets.long()
    raise UserError(
        f"cannot compare outputs of shape {tuple(outputs.shape)} with targets of shape "
        f"{tuple(targets.shape)}; allowed: one output per class after the targets' axes, "
        "or outputs like the targets"
    )


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.numel() != targets.numel():
        raise UserError(
            f"{tuple(outputs.shape)} outputs for {tuple(targets.shape)} targets; a regression "
            "predicts one each"
        )
    return outputs.flatten().double() - targets.flatten().double()


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan
