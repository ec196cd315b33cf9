"""Examples around their holder's own mean, or whitened: by whose, whose examples, and where it is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trilemma import config, data
from trilemma.config.assembly import everybody
from trilemma.data import Dataset, Holdings
from trilemma.errors import UserError
from trilemma.keys import Key

X = torch.arange(16.0).reshape(8, 2) ** 2
DATA = Dataset("squares", X, torch.zeros(8).long(), X + 3, torch.zeros(8).long(), 2)


def rows(*of: int) -> np.ndarray:
    return np.array(of)


def test_every_clients_mean_is_its_own_and_a_mirror_takes_nothing_off_twice() -> None:
    held = Holdings([rows(0, 1, 2), rows(3, 4, 5, 6, 7), rows(0, 1, 2)], [], [])
    found = data.centred(DATA, held)
    assert torch.equal(found.x_train[:3], X[:3] - X[:3].mean(0))
    assert torch.equal(found.x_train[3:], X[3:] - X[3:].mean(0))
    assert torch.equal(found.x_test, DATA.x_test - DATA.x_test.mean(0))
    assert torch.equal(DATA.x_train, X)


def test_a_clients_other_examples_stand_around_what_it_trains_on() -> None:
    held = Holdings([rows(0, 1), rows(4, 5)], [rows(2), rows(6)], [rows(0, 1), rows(2, 3, 4)])
    found = data.centred(DATA, held)
    assert torch.equal(found.x_train[2], X[2] - X[:2].mean(0))
    assert torch.equal(found.x_test[2:5], DATA.x_test[2:5] - X[4:6].mean(0))


def test_whitened_examples_vary_alike_in_every_direction_in_which_they_vary_and_are_not_turned() -> None:
    x = torch.randn(60, 3, generator=Key(1).torch()) @ torch.tensor([[5.0, 1, 0], [0, 2, 0], [0, 0, 0.0]]) + 7
    given = Dataset("stretched", x, torch.zeros(60).long(), x[:30] * 2, torch.zeros(30).long(), 2)
    found = data.centred(given, Holdings([np.arange(20), np.arange(20, 60)], [], []), whiten=True)
    for part in (found.x_train[:20], found.x_train[20:], found.x_test):
        assert torch.allclose(part.mean(0), torch.zeros(3), atol=1e-5)
        assert torch.allclose(part.T @ part / len(part), torch.diag(torch.tensor([1.0, 1, 0])), atol=1e-4)
    between = (x[:20] - x[:20].mean(0)).T @ found.x_train[:20] / 20  # S^½: symmetric, as nothing was turned
    assert torch.allclose(between, between.T, atol=1e-4)


def test_only_vectors_are_whitened() -> None:
    images = Dataset("images", X[:, None], DATA.y_train, X[:, None], DATA.y_test, 2)
    with pytest.raises(UserError, match="no vectors"):
        data.centred(images, Holdings([rows(0, 1)], [], []), whiten=True)


def test_clients_who_share_some_examples_are_refused() -> None:
    with pytest.raises(UserError, match="share no examples"):
        data.centred(DATA, Holdings([rows(0, 1), rows(1, 2)], [], []))


@pytest.mark.parametrize("asked", ["centre", "whiten"])
@pytest.mark.parametrize("allowed", [True, False])
def test_no_guarantee_for_one_example_covers_it(allowed: bool, asked: str) -> None:
    chosen = config.load("safe-dshb-phishing").with_(f"data.{asked}=true")
    if allowed:
        chosen = chosen.with_("algorithm={name='fedavg'}", "attack={name='none'}", "aggregation.rule=mean")
        held = everybody(chosen, Key(1), None, 4).data
        assert held is not None
        assert held.everything((0,)).x.mean(1).abs().max() < 1e-5
    else:
        with pytest.raises(UserError, match="one example moves all others"):
            everybody(chosen, Key(1), None, 4)
