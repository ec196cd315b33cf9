"""The grid: contributions are bounded in integers, noise is whole steps, and drawn as it should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_privacy_secrets import nodes_of

import trilemma.privacy.noise.grid
from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.keys import Key
from trilemma.privacy import NoiseLaw, Release, SimulatedNoise
from trilemma.privacy.noise.grid import Grid, in_steps, step_for
from trilemma.privacy.secrets import ChaChaStream, add_gaussians

CPU = torch.device("cpu")
LAW = NoiseLaw(sigma_ind=0.1, sigma_cor=0.6)


@pytest.fixture(params=["whole", "some at a time"])
def rows_are_worked_on(request, monkeypatch):
    """Rows of more than a few numbers count as long."""
    if request.param == "some at a time":
        monkeypatch.setattr(trilemma.privacy.noise.grid, "LONG", 50)


@pytest.mark.parametrize("dim", [1, 69, 4001])
@pytest.mark.parametrize("clip", [0.05, 2.25])
def test_contributions_keep_the_bound_in_integers(rows_are_worked_on, dim, clip):
    grid = Grid.of(Release(clip, LAW), dim, clients=10)
    generator = Key(3).torch()
    rows = (
        torch.randn(6, dim, generator=generator) * torch.tensor([1e-6, 0.01, 1.0, 1e10, 1e19, 3e37])[:, None]
    )
    whole = grid.contribution(rows)
    assert ((whole * whole).sum(1).double() <= (clip / grid.step) ** 2).all()
    exact = rows.double()
    exact = exact * (clip / exact.norm(dim=1, keepdim=True)).clamp(max=1.0)
    assert ((whole * grid.step - exact).norm(dim=1) <= clip / 7).all(), "rounding hardly moves them"
    assert (whole[2:].double().norm(dim=1) * grid.step > 0.98 * exact[2:].norm(dim=1)).all()


@pytest.mark.parametrize("unit", ["user", "example"])
def test_a_long_row_is_the_same_worked_on_some_at_a_time(monkeypatch, unit):
    """Contribution, message and numbers; only a norm is added up in another order."""
    grid = Grid.of(Release(1.0, LAW, unit), 1001, clients=10)
    rows = torch.randn(3, 1001, generator=Key(4).torch()) * torch.tensor([1e-3, 1.0, 1e6])[:, None]
    noise = torch.randint(-1000, 1000, (3, 1001), generator=Key(5).torch())
    whole = grid.contribution(rows)
    message = grid.message(whole, noise)
    numbers = grid.numbers(message)
    monkeypatch.setattr(trilemma.privacy.noise.grid, "LONG", 50)
    assert (grid.contribution(rows) - whole).abs().max() <= 1
    assert torch.equal(grid.message(whole, noise), message)
    assert torch.equal(grid.numbers(message), numbers)


@pytest.mark.parametrize("unit", ["user", "example"])
def test_what_is_not_finite_counts_as_zero_and_nothing_else_does(rows_are_worked_on, unit):
    grid = Grid.of(Release(1.0, LAW, unit), 60, clients=10)
    rows = torch.tensor([[math.nan, 1, 1], [math.inf, 0, 0], [-math.inf, 0, 1], [3e38, 3e38, 3e38]])
    rows = torch.cat([torch.ones(4, 57), rows], dim=1)
    whole = grid.contribution(rows)
    assert not whole[:3].any()
    assert whole[3].any()


def test_what_is_finite_and_in_steps_is_not_keeps_the_bound(rows_are_worked_on):
    """Doubles go further than steps: infinity times nothing is no number, and no number an integer."""
    grid = Grid.of(Release(1.0, LAW), 60, clients=10)
    rows = torch.ones(2, 60, dtype=torch.float64)
    rows[0, -1], rows[1, -1] = 1e308, 1e200
    assert not grid.contribution(rows).any()


@pytest.mark.parametrize("width", [2, 3, 4])
def test_integers_travel_whole(width):
    grid = Grid(step=1.0, width=width, dim=5, bound=1.0, unit="user")
    sent = torch.tensor([0, -1, 1, grid.limit, -grid.limit])
    data = grid.encode(sent)
    assert len(data) == 5 * width
    assert torch.equal(grid.decode(data), sent.int())
    with pytest.raises(UserError, match="were declared"):
        grid.decode(data + b"0")
    far = grid.message(torch.tensor([[10**12, -(10**12)]]), torch.zeros(1, 2, dtype=torch.int64))
    assert far.tolist() == [[grid.limit, -grid.limit]]


def test_a_message_has_room_and_is_short():
    assert Grid.of(Release(1.0, NoiseLaw(0.5)), 69, 10).width == 2
    assert Grid.of(Release(2.25, LAW), 431_080, 100).width == 3
    for law in (LAW, NoiseLaw(0.5), NoiseLaw(0.0, 0.6)):
        grid = Grid.of(Release(2.25, law), 1000, 100)
        spread = math.hypot(law.sigma_ind, math.sqrt(99) * law.sigma_cor)
        assert grid.limit * grid.step > 2.25 + 10 * spread
        assert math.log2(grid.step) % 1 == 0
    with pytest.raises(PrivacyError, match="too far apart"):
        Grid.of(Release(1.0, NoiseLaw(1e-6, 10.0)), 10, 100)
    with pytest.raises(PrivacyError, match="clipped and noised"):
        Grid.of(Release(1.0, NoiseLaw()), 10, 100)


def test_an_examples_move_stays_within_the_declared_one():
    """A batch's rounded sum: clip of an example and rounding together move it by at most 2C/b."""
    for dim in (69, 431_080):
        release = Release(1.0, NoiseLaw(0.08), "example", 25)
        grid = Grid.of(release, dim, clients=10)
        assert 2 * grid.clip / 25 + grid.step * math.sqrt(dim) <= release.sensitivity * (1 - 2**-9)
        assert grid.clip > 0.99


def test_pairwise_noise_cancels_exactly_in_the_sum():
    nodes, law = nodes_of(5), NoiseLaw(sigma_cor=0.6)
    step = step_for(law)
    total = sum(node.steps(law, step, (node.index,), 1001, 3, CPU) for node in nodes)
    assert not total.any()


def test_simulated_noise_is_whole_and_has_the_law():
    source, step = SimulatedNoise(Key(1), 5), step_for(LAW)
    whole = source.steps(LAW, step, (0, 1, 2, 3, 4), 20_000, 2, CPU)
    assert whole.dtype == torch.int64
    plain = source.draw(LAW, (0, 1, 2, 3, 4), 20_000, 2, CPU)
    assert (whole * step - plain).abs().max() <= step / 2 + 1e-6


def expected(scale: float, edges: np.ndarray) -> np.ndarray:
    """Probabilities of the integers from each edge up to the next, of a rounded Gaussian."""
    cuts = (edges - 0.5) / scale
    low = np.diff(stats.norm.cdf(cuts[cuts <= 0]))
    return np.concatenate([low, -np.diff(stats.norm.sf(cuts[len(low) :]))])


@pytest.mark.slow
def test_a_stream_is_a_rounded_gaussian():
    """χ² over bins within 4.5 standard deviations and both tails, 10⁷ draws, fine and coarse steps."""
    for scale in (3.0, 64.0, in_steps(0.6, step_for(LAW))):
        drawn = np.zeros(10_000_000)
        add_gaussians(ChaChaStream(b"g" * 32).fill, drawn, scale)
        last = math.ceil(4.5 * scale)
        stride = max(1, int(scale / 16))
        edges = np.arange(-last, last + 1, stride).astype(float)
        seen = np.histogram(drawn, np.concatenate([[-np.inf], edges - 0.5, [np.inf]]))[0]
        tails = [stats.norm.cdf((edges[0] - 0.5) / scale), stats.norm.sf((edges[-1] - 0.5) / scale)]
        wanted = len(drawn) * np.concatenate([[tails[0]], expected(scale, edges), [tails[1]]])
        assert wanted.min() > 5
        assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-6
