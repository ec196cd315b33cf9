"""Metrics against scikit-learn, and on shapes that users have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.metrics
import torch

from trilemma.base.errors import UserError
from trilemma.data.types import IGNORED
from trilemma.task.metrics import chosen, metrics


@pytest.fixture(name="rng")
def _rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_classes_agree_with_scikit_learn(rng: np.random.Generator) -> None:
    logits, labels = rng.normal(size=(200, 4)).round(1), rng.integers(4, size=200)
    outputs, targets = torch.tensor(logits), torch.tensor(labels)
    predicted = logits.argmax(1)
    assert metrics["accuracy"](outputs, targets) == sklearn.metrics.accuracy_score(labels, predicted)
    expected = sklearn.metrics.f1_score(labels, predicted, average="macro")
    assert metrics["f1"](outputs, targets) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(200,), (200, 1), (200, 2)])
def test_two_classes_agree_with_scikit_learn(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    logits, labels = rng.normal(size=shape).round(1), rng.integers(2, size=200)
    score = logits[:, 1] - logits[:, 0] if shape[1:] == (2,) else logits.reshape(-1)
    targets = torch.tensor(labels)
    if shape == (200, 1):
        targets = targets[:, None].float()
    assert metrics["auc"](torch.tensor(logits), targets) == pytest.approx(
        sklearn.metrics.roc_auc_score(labels, score)
    )
    said = score > 0 if shape[1:] != (2,) else logits.argmax(1)
    assert metrics["accuracy"](torch.tensor(logits), targets) == pytest.approx((said == labels).mean())


def test_several_labels_at_once(rng: np.random.Generator) -> None:
    logits, labels = rng.normal(size=(100, 5)), rng.integers(2, size=(100, 5))
    outputs, targets = torch.tensor(logits), torch.tensor(labels).float()
    assert metrics["accuracy"](outputs, targets) == pytest.approx(((logits > 0) == labels).mean())
    expected = sklearn.metrics.f1_score(labels, logits > 0, average="macro")
    assert metrics["f1"](outputs, targets) == pytest.approx(expected)


def test_ignored_tokens_do_not_count(rng: np.random.Generator) -> None:
    outputs, targets = torch.tensor(rng.normal(size=(6, 7, 3))), torch.tensor(rng.integers(3, size=(6, 7)))
    targets[:, 4:] = IGNORED
    alone = metrics["accuracy"](outputs[:, :4], targets[:, :4])
    assert metrics["accuracy"](outputs, targets) == alone


def test_regression_agrees_with_scikit_learn(rng: np.random.Generator) -> None:
    said, true = rng.normal(size=50), rng.normal(size=50)
    outputs, targets = torch.tensor(said)[:, None], torch.tensor(true)
    assert metrics["mse"](outputs, targets) == pytest.approx(sklearn.metrics.mean_squared_error(true, said))
    assert metrics["mae"](outputs, targets) == pytest.approx(sklearn.metrics.mean_absolute_error(true, said))
    assert metrics["r2"](outputs, targets) == pytest.approx(sklearn.metrics.r2_score(true, said))


def test_one_class_alone_has_no_auc() -> None:
    assert math.isnan(metrics["auc"](torch.randn(4), torch.ones(4)))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="one output per class"):
        metrics["accuracy"](torch.zeros(4, 3), torch.zeros(5))


def test_a_callable_and_a_name_mix_and_loss_is_taken() -> None:
    found = chosen({"mine": lambda outputs, targets: 1.0, "area": "auc"}, classes=2)
    assert found["area"] is metrics["auc"]
    with pytest.raises(UserError, match="cannot be called 'loss'"):
        chosen({"loss": "mse"}, classes=None)
