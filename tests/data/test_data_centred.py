"""Examples around their holder's own mean, or whitened: by whose, whose examples, and where it is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trilemma import config, data, models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Dataset, Holdings
from trilemma.experiment.assembly import everybody, one_party
from trilemma.experiment.resolve import resolve
from trilemma.simulate import assemble
from trilemma.task import Task

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


def private(asked: str, *changes: str) -> config.Config:
    chosen = config.load("safe-dshb-phishing").with_(f"data.{asked}=true", "attack={name='none'}")
    return chosen.with_("aggregation.rule=mean", *changes)


@pytest.mark.parametrize("asked", ["centre", "whiten"])
def test_user_level_privacy_covers_it_and_who_reads_the_results_is_told(asked: str) -> None:
    ready = assemble(private(asked, "algorithm={name='fedavg'}"), 1)
    assert ready.clients.data.everything((0,)).x.mean(1).abs().max() < 1e-5
    assert ready.resolved.certified
    assert any("hold all classes alike" in note for note in ready.resolved.notes)


@pytest.mark.parametrize("asked", ["centre", "whiten"])
def test_no_guarantee_for_one_example_covers_it(asked: str) -> None:
    """Not even where nobody has looked at any data yet: an audit's plan, a federation's server."""
    with pytest.raises(UserError, match="one example moves all others"):
        resolve(private(asked), 1000)
    with pytest.raises(UserError, match="one example moves all others"):
        assemble(private(asked), 1)


@pytest.mark.parametrize("whiten", [True, False])
def test_one_example_moves_a_sum_of_clipped_gradients_five_times_as_far_as_clipping_promises(
    whiten: bool,
) -> None:
    """Why: the sum of clipped gradients of examples, where one of two hundred is another one."""
    x = torch.randn(200, 3, generator=Key(1).torch())
    other = torch.cat([x[:-1], 1e4 * torch.ones(1, 3)])
    sums = []
    for rows_ in (x, other):
        held = Holdings([np.arange(200)], [], [])
        given = Dataset("one", rows_, torch.zeros(200).long(), rows_[:0], torch.zeros(0).long(), 2)
        seen = data.centred(given, held, whiten).x_train
        sums.append((seen / seen.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0))  # a linear model's, clip 1
    assert float((sums[0] - sums[1]).norm()) > 5 * 2.0


def test_the_server_of_a_federation_scores_on_examples_as_everybody_sees_them() -> None:
    """Its test examples are around their own mean, as in the simulation of the same task."""
    x = torch.randn(60, 3, generator=Key(1).torch()) + 5
    task = Task(
        lambda: models.build("multinomial", (3,), 2),
        [(x, (x[:, 0] > 5).long()), (x + 1, (x[:, 1] > 5).long())],
        test=(2 * x, (x[:, 0] > 5).long()),
    )
    for said in ("data.centre=true", "data.whiten=true"):
        chosen = config.parse({}, [said, "federation.clients=2", "federation.tolerate=0"])
        server = one_party(chosen, Key(1), task, None, 60)
        simulated = everybody(chosen, Key(1), task, 2)
        assert server.tests is not None
        assert torch.equal(server.tests.x_test, simulated.held.dataset.x_test)
        assert server.tests.x_test.mean(0).abs().max() < 1e-5
        for client in (0, 1):
            own = one_party(chosen, Key(1), task, client, 60).held.everything((0,)).x
            assert torch.equal(own, simulated.held.everything((client,)).x)
