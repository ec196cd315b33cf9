"""Each attack does what its paper says it does: min-max, min-sum, mimic, lp-proj's four."""

import numpy as np
import pytest
import torch
from attack_helpers import gaussian_rows, send, view_of

from trilemma.base.errors import UserError
from trilemma.base.keys import Key

PERTURBATIONS = ["unit", "std", "sign"]


def heterogeneous(seed):
    rows = gaussian_rows(9, 40, seed) * torch.linspace(0.2, 3.0, 9)[:, None]
    return rows + 0.5


def direction(honest, perturbation):
    mean = honest.mean(0)
    choices = {"unit": -mean / mean.norm(), "std": -honest.std(0, correction=0), "sign": -mean.sign()}
    return choices[perturbation]


def max_side(honest, message):
    return float((honest - message).norm(dim=1).max()), float(torch.cdist(honest, honest).max())


def sum_side(honest, message):
    squares = torch.cdist(honest, honest).square()
    return float((honest - message).square().sum()), float(squares.sum(dim=1).max())


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "sides"), [("min-max", max_side), ("min-sum", sum_side)])
def test_the_condition_holds_with_equality_and_breaks_one_step_further(name, sides, perturbation, seed):
    honest = heterogeneous(seed).double()
    crafted = send(name, view_of(honest), perturbation=perturbation)
    p = direction(honest, perturbation)
    torch.testing.assert_close(crafted.messages[0], honest.mean(0) + crafted.strength * p)
    ours, allowed = sides(honest, crafted.messages[0])
    assert ours == pytest.approx(allowed, rel=1e-9)
    further, _ = sides(honest, honest.mean(0) + 1.001 * crafted.strength * p)
    assert further > allowed
    assert crafted.strength > 0


def test_mimic_copies_the_client_furthest_along_the_direction_of_largest_variance():
    for seed in range(5):
        honest = heterogeneous(seed)
        wide = honest.double()
        _, _, axes = torch.linalg.svd(wide - wide.mean(0))
        expected = (wide @ axes[0]).abs().argmax()
        crafted = send("mimic", view_of(honest, 3))
        assert torch.equal(crafted.messages, honest[expected].expand(3, -1))


def test_mimic_takes_a_given_victim_and_refuses_one_that_is_not_there():
    honest = gaussian_rows(4, 6)
    assert torch.equal(send("mimic", view_of(honest), victim=2).messages[1], honest[2])
    with pytest.raises(UserError, match="victim 4"):
        send("mimic", view_of(honest), victim=4)


def test_same_value_sends_one_number_of_the_stated_spread_per_client():
    crafted = send("same-value", view_of(torch.zeros(1, 3), 20_000))
    first = crafted.messages[:, 0]
    assert torch.equal(crafted.messages, first[:, None].expand(-1, 3))
    assert float(first.std()) == pytest.approx(100.0, rel=0.03)
    assert abs(float(first.mean())) < 4.0
    assert crafted.strength == 100.0


def test_scaled_flip_turns_each_own_message_by_a_half_normal_factor():
    own = gaussian_rows(20_000, 2)
    crafted = send("scaled-flip", view_of(torch.zeros(1, 2), 20_000, own=own))
    factor = crafted.messages / own
    torch.testing.assert_close(factor[:, 0], factor[:, 1], rtol=1e-4, atol=1e-5)
    assert (factor <= 0).all()
    # E|c| = τ √(2/π) = 7.98 for τ = 10.
    assert float(factor[:, 0].mean()) == pytest.approx(-10.0 * np.sqrt(2 / np.pi), rel=0.03)


def test_data_poison_scales_each_own_message_by_a_normal_factor():
    own = torch.ones(20_000, 1)
    factor = send("data-poison", view_of(torch.zeros(1, 1), 20_000, own=own)).messages
    assert float(factor.std()) == pytest.approx(20.0, rel=0.03)
    assert abs(float(factor.mean())) < 0.8


def test_gaussian_sends_noise_of_the_stated_spread_in_every_coordinate():
    noise = send("gaussian", view_of(torch.zeros(1, 400), 100)).messages
    assert float(noise.std()) == pytest.approx(100.0, rel=0.03)
    assert abs(float(torch.corrcoef(noise[:2])[0, 1])) < 0.25


def test_draws_by_round_repeat_over_runs_as_in_the_authors_code():
    one = send("same-value", view_of(torch.zeros(1, 1), 3, round=5, key=Key(1)), draws="round")
    two = send("same-value", view_of(torch.zeros(1, 1), 3, round=5, key=Key(2)), draws="round")
    assert torch.equal(one.messages, two.messages)
    # numpy.random.seed(5); numpy.random.normal(0, 100)
    assert float(one.messages[0, 0]) == pytest.approx(44.12274887, rel=1e-6)


@pytest.mark.parametrize("name", ["scaled-flip", "data-poison"])
def test_attacks_on_own_messages_ask_for_them(name):
    with pytest.raises(UserError, match=r"View\.own"):
        send(name, view_of(torch.zeros(2, 3)))


def test_inf_and_nan_send_what_they_say():
    assert send("inf", view_of(torch.zeros(2, 3))).messages.isposinf().all()
    assert send("nan", view_of(torch.zeros(2, 3))).messages.isnan().all()
