"""Attacks of a given strength: their formulas, and that what they hide stays hidden."""

import pytest
import torch
from attack_helpers import send, view_of
from scipy.stats import norm

from trilemma.attacks import attacks
from trilemma.attacks.alie import zmax
from trilemma.base.errors import UserError
from trilemma.base.keys import Key


@pytest.fixture
def honest():
    return torch.randn(8, 50, generator=torch.Generator().manual_seed(1)) + 3.0


def test_sign_flip_is_minus_the_honest_mean(honest):
    crafted = send("sf", view_of(honest, 3))
    torch.testing.assert_close(crafted.messages, (-honest.mean(0)).expand(3, -1))


def test_ipm_of_ten_is_minus_ten_times_the_mean_and_foe_in_its_scale_the_same(honest):
    ipm = send("ipm", view_of(honest), strength=10.0)
    foe = send("foe", view_of(honest), strength=11.0)
    torch.testing.assert_close(ipm.messages[0], -10 * honest.mean(0))
    torch.testing.assert_close(ipm.messages, foe.messages)
    assert (ipm.strength, foe.strength) == (10.0, 11.0)


@pytest.mark.parametrize("tau", [1.1, 2.0, 30.0])
def test_foe_past_one_has_a_negative_inner_product_with_the_mean(honest, tau):
    assert torch.dot(send("foe", view_of(honest), strength=tau).messages[0], honest.mean(0)) < 0


def test_alie_moves_every_coordinate_by_tau_standard_deviations(honest):
    crafted = send("alie", view_of(honest), strength=1.5)
    expected = honest.double().mean(0) + 1.5 * honest.double().std(0, correction=0)
    torch.testing.assert_close(crafted.messages[1].double(), expected, rtol=1e-5, atol=1e-5)
    assert crafted.strength == 1.5


@pytest.mark.parametrize(("n", "f"), [(7, 3), (50, 12), (100, 5), (30, 14), (10, 1)])
def test_zmax_is_the_formula_of_the_paper(n, f):
    s = int(n / 2 + 1) - f
    assert zmax(n, f) == pytest.approx(norm.ppf((n - f - s) / (n - f)), abs=1e-12)


def test_alie_at_zmax_hides_behind_enough_honest_clients():
    # What z_max promises: in each coordinate of Gaussian messages s honest clients are further out.
    n, f = 50, 12
    honest = torch.randn(n - f, 20_000, generator=torch.Generator().manual_seed(2))
    message = send("alie", view_of(honest, f), strength="zmax").messages[0]
    supporters = n // 2 + 1 - f
    beyond = (honest > message).sum(0).double().mean()
    assert beyond == pytest.approx(supporters, abs=0.5)


def test_zmax_without_an_honest_majority_is_refused(honest):
    with pytest.raises(UserError, match="honest majority"):
        send("alie", view_of(honest, 9), strength="zmax")


def test_a_common_offset_does_not_spoil_the_deviation():
    spread = torch.randint(-8, 9, (9, 40), generator=torch.Generator().manual_seed(3)).float()
    offset = 2.0**20
    near = send("alie", view_of(spread), strength=4.0).messages[0]
    far = send("alie", view_of(spread + offset), strength=4.0).messages[0]
    torch.testing.assert_close(far - offset, near, rtol=0, atol=0.2)  # float32 steps by 1/8 at 2^20


def test_labels_are_mirrored_and_random_labels_are_uniform():
    labels = torch.tensor([0, 3, 9])
    assert attacks["lf"]().build().poison(labels, 10, Key(0)).tolist() == [9, 6, 0]
    assert attacks["lf"]().build().poison(torch.tensor([0, 1]), 2, Key(0)).tolist() == [1, 0]
    drawn = attacks["random-labels"]().build().poison(torch.zeros(62_000, dtype=torch.int64), 62, Key(0))
    counts = torch.bincount(drawn, minlength=62)
    assert counts.shape == (62,)
    assert ((counts - 1000).abs() < 160).all()  # five standard deviations of a count


def test_no_attack_touches_nothing():
    none = attacks["none"]().build()
    assert none.craft is None
    assert none.poison is None


def test_messages_are_stacked_at_the_byzantine_positions():
    honest = torch.arange(3.0).reshape(3, 1)
    stacked = view_of(honest, 2, positions=(3, 0)).stack(torch.tensor([[10.0], [20.0]]))
    assert stacked.ravel().tolist() == [20.0, 0.0, 1.0, 10.0, 2.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"honest": torch.zeros(3)},
        {"honest": torch.zeros(2, 3, dtype=torch.int64)},
        {"byzantine": -1},
        {"own": torch.zeros(1, 3)},
        {"positions": (0, 0)},
        {"positions": (0, 5)},
    ],
)
def test_a_view_that_makes_no_sense_is_refused(changes):
    with pytest.raises(UserError):
        view_of(**({"honest": torch.zeros(2, 3), "byzantine": 2} | changes))
