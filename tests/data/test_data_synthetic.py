"""Synthetic(α, β): sizes and the law of every draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trilemma import data
from trilemma.base.keys import Key


def per_client(made: data.Dataset) -> list[torch.Tensor]:
    assert made.natural is not None
    return [made.x_train[torch.from_numpy(rows)] for rows in made.natural.train]


@pytest.mark.parametrize("size", [315, 316])
def test_published_training_size(size: int) -> None:
    made = data.load("synthetic", key=Key(1), size=size)
    assert made.natural is not None
    held = made.natural
    assert {len(rows) for rows in held.train} == {202}
    assert {len(a) + len(b) + len(c) for a, b, c in zip(held.train, held.valid, held.test, strict=True)} == {
        size
    }
    assert held.clients == 100
    assert made.x_train.shape[1:] == (60,)


@pytest.mark.parametrize("size", range(5, 60))
def test_split_follows_the_formula(size: int) -> None:
    held = data.load("synthetic", key=Key(1), size=size, clients=1).natural
    assert held is not None
    learn = 8 * size // 10
    assert len(held.test[0]) == size - learn
    assert len(held.valid[0]) == learn // 5
    assert len(held.train[0]) == learn - learn // 5


def test_the_key_decides_everything() -> None:
    one, again, other = (
        data.load("synthetic", key=Key(s), clients=3, size=30, alpha=1, beta=1) for s in (1, 1, 2)
    )
    assert torch.equal(one.x_train, again.x_train)
    assert torch.equal(one.y_test, again.y_test)
    assert not torch.equal(one.x_train, other.x_train)


def test_balanced_and_unbalanced_sizes() -> None:
    def sizes(**options: bool) -> list[int]:
        held = data.load("synthetic", key=Key(4), clients=60, **options).natural
        assert held is not None
        parts = zip(held.train, held.valid, held.test, strict=True)
        return [len(a) + len(b) + len(c) for a, b, c in parts]

    assert len(set(sizes())) == 1
    drawn = np.array(sizes(balance=False))
    assert drawn.min() >= 100
    assert len(set(drawn.tolist())) > 30
    # log(n − 100) is about N(4, 2²) once the floor no longer matters.
    logs = np.log(drawn[drawn > 110] - 99.5)
    assert 3 < np.median(logs) < 5.5


def test_features_have_variance_j_to_the_minus_1_2() -> None:
    clients = per_client(data.load("synthetic", key=Key(2), clients=4, size=20_000))
    for x in clients:
        expected = torch.arange(1, 61, dtype=torch.float32) ** -1.2
        assert torch.allclose(x.var(dim=0) / expected, torch.ones(60), atol=0.08)


@pytest.mark.parametrize(("beta", "variance"), [(0.0, 1.0), (3.0, 1.0)])
def test_centres_scatter_around_a_shift_of_deviation_beta(beta: float, variance: float) -> None:
    centres = torch.stack(
        [x.mean(dim=0) for x in per_client(data.load("synthetic", key=Key(3), beta=beta, size=400))]
    )
    within = centres.var(dim=1).mean()
    between = centres.mean(dim=1).var() - within / 60
    assert float(within) == pytest.approx(variance, rel=0.1)
    assert float(between) == pytest.approx(beta**2, rel=0.5, abs=0.01)


def test_labels_come_from_one_linear_model_per_client_and_iid_shares_it() -> None:
    """A linear classifier fitted on one half of the clients predicts the other half only if iid."""

    def transfer(**options: bool) -> float:
        made = data.load("synthetic", key=Key(5), clients=2, size=4_000, **options)
        assert made.natural is not None
        (x, y), (z, t) = (
            (made.x_train[torch.from_numpy(rows)], made.y_train[torch.from_numpy(rows)])
            for rows in made.natural.train
        )
        weights = torch.nn.Parameter(torch.zeros(61, 10))
        optimiser = torch.optim.LBFGS([weights], max_iter=60)

        def with_bias(features: torch.Tensor) -> torch.Tensor:
            return torch.cat([features, torch.ones(len(features), 1)], dim=1)

        def closure() -> torch.Tensor:
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(with_bias(x) @ weights, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        assert float(((with_bias(x) @ weights).argmax(1) == y).float().mean()) > 0.97
        return float(((with_bias(z) @ weights).argmax(1) == t).float().mean())

    assert transfer(iid=True) > 0.8
    assert transfer() < 0.6
