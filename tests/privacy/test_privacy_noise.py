"""Simulated noise has the joint law of the secrets it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.privacy import NoiseLaw, SecretGraph, SimulatedNoise, covariance
from trilemma.privacy.threats.covariance import agreed_graph

CPU = torch.device("cpu")


def check_covariance(samples: np.ndarray, sigma: np.ndarray, false_alarm: float = 1e-6) -> None:
    """Fail if the rows' covariance over `d` coordinates is not `sigma`.

    For d independent coordinates N(0, Σ), d · wᵀSw / wᵀΣw is χ² with d degrees of freedom for every w. The
    test takes the n axes, the sum and n random directions, each two-sided with a share of `false_alarm`: it
    rejects the right law with at most that probability, and sees a variance off by about 7 √(2/d).
    """
    n, d = samples.shape
    directions = [*np.eye(n), np.ones(n), *Key(0).fold("directions").numpy().standard_normal((n, n))]
    level = false_alarm / (2 * len(directions))
    low, high = stats.chi2.ppf(level, d), stats.chi2.isf(level, d)
    for w in directions:
        expected = w @ sigma @ w
        total = ((w @ samples) ** 2).sum()
        if expected < 1e-10 * np.trace(sigma):
            assert total < 1e-9 * d * np.trace(sigma)  # noise that cancels does so up to rounding
        else:
            assert low < total / expected < high


@pytest.mark.parametrize("law", [NoiseLaw(0.7, 0.0), NoiseLaw(0.0, 0.4), NoiseLaw(0.3, 0.9)])
@pytest.mark.parametrize("n", [2, 13])
def test_joint_law_over_all_clients(law, n):
    noise = SimulatedNoise(Key(5), n).draw(law, tuple(range(n)), 40_000, 2, CPU)
    sigma = covariance(SecretGraph.complete(n), law, senders=range(n))
    check_covariance(noise.double().numpy(), sigma)


@pytest.mark.parametrize("law", [NoiseLaw(0.0, 0.4), NoiseLaw(0.3, 0.9)])
def test_joint_law_where_each_shares_with_some(law):
    """Four neighbours each among eleven: the graph's covariance, alone or all at once."""
    noise = SimulatedNoise(Key(5), 11, neighbours=4)
    together = noise.draw(law, tuple(range(11)), 40_000, 2, CPU)
    check_covariance(together.double().numpy(), covariance(agreed_graph(11, 4), law, senders=range(11)))
    assert torch.equal(noise.draw(law, (7,), 40_000, 2, CPU)[0], together[7])


def test_a_lone_client_has_no_pairs():
    noise = SimulatedNoise(Key(5), 1).draw(NoiseLaw(0.7, 40.0), (0,), 40_000, 2, CPU).double().numpy()
    check_covariance(noise, np.array([[0.49]]))


def test_what_q_colluders_leave_is_the_predicted_residual():
    """Subtracting what clients 0 and 1 know leaves Σ of the other honest ones.

    Given the noise of the colluders' own messages, the others' shares of it follow the Gaussian conditional
    law; its covariance is the Schur complement, which the samples must show.
    """
    n, law = 9, NoiseLaw(0.5, 0.8)
    noise = SimulatedNoise(Key(6), n).draw(law, tuple(range(n)), 60_000, 0, CPU).double().numpy()
    sigma = covariance(SecretGraph.complete(n), law, senders=range(n))
    known, honest = [0, 1], list(range(2, n))
    gain = sigma[np.ix_(honest, known)] @ np.linalg.inv(sigma[np.ix_(known, known)])
    residual = noise[honest] - gain @ noise[known]
    check_covariance(residual, sigma[np.ix_(honest, honest)] - gain @ sigma[np.ix_(known, honest)])


@pytest.mark.parametrize("law", [NoiseLaw(0.7, 0.0), NoiseLaw(0.0, 0.4), NoiseLaw(0.3, 50.0)])
def test_one_by_one_equals_all_at_once(law):
    source = SimulatedNoise(Key(1), 6)
    together = source.draw(law, tuple(range(6)), 1001, 4, CPU)
    for i in (3, 0, 5):
        alone = SimulatedNoise(Key(1), 6).draw(law, (i,), 1001, 4, CPU)
        assert torch.equal(alone[0], together[i])
    assert torch.equal(source.draw(law, (4, 1), 1001, 4, CPU), together[[4, 1]])


def test_rounds_keys_and_dimensions_are_fresh():
    law, ids = NoiseLaw(1.0, 1.0), (0, 1, 2)
    draw = SimulatedNoise(Key(1), 3).draw(law, ids, 500, 1, CPU)
    for other in (
        SimulatedNoise(Key(2), 3).draw(law, ids, 500, 1, CPU),
        SimulatedNoise(Key(1), 3).draw(law, ids, 500, 2, CPU),
    ):
        assert np.abs(np.corrcoef(draw.flatten(), other.flatten())[0, 1]) < 0.15
    assert draw.dtype == torch.float32


def test_remembered_means_do_not_leak_between_rounds():
    source, law = SimulatedNoise(Key(1), 4), NoiseLaw(0.0, 1.0)
    for round_ in (1, 2, 1):
        fresh = SimulatedNoise(Key(1), 4).draw(law, (2,), 64, round_, CPU)
        assert torch.equal(source.draw(law, (2,), 64, round_, CPU), fresh)


def test_silence_draws_nothing(monkeypatch):
    monkeypatch.setattr(Key, "torch", lambda *_: pytest.fail("drew"))
    noise = SimulatedNoise(Key(1), 3).draw(NoiseLaw(), (0, 2), 10, 0, CPU)
    assert noise.shape == (2, 10)
    assert not noise.any()


def test_strangers_are_refused():
    with pytest.raises(UserError, match="not one of the 3"):
        SimulatedNoise(Key(1), 3).draw(NoiseLaw(1.0), (3,), 10, 0, CPU)


@pytest.mark.parametrize("law", [NoiseLaw(0.7, 0.0), NoiseLaw(0.3, 0.9)])
def test_drawn_in_one_launch_the_law_is_the_same_and_clients_alone_get_theirs(monkeypatch, law):
    monkeypatch.setattr(SimulatedNoise, "_fits", lambda self, dim, device: True)
    members = (0, 2, 3, 5, 6)
    for n, ids in ((5, tuple(range(5))), (7, members)):
        noise = SimulatedNoise(Key(5), n).among(ids)
        together = noise.draw(law, ids, 20_000, 3, CPU)
        sigma = covariance(SecretGraph.complete(5), law, senders=range(5))
        check_covariance(together.double().numpy(), sigma)
        alone = [noise.draw(law, (i,), 20_000, 3, CPU)[0] for i in ids]
        assert torch.equal(together, torch.stack(alone))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_joint_law_on_cuda():
    n, law, device = 13, NoiseLaw(0.3, 0.9), torch.device("cuda")
    source = SimulatedNoise(Key(5), n)
    noise = source.draw(law, tuple(range(n)), 40_000, 2, device)
    check_covariance(noise.double().cpu().numpy(), covariance(SecretGraph.complete(n), law, senders=range(n)))
    assert torch.equal(source.draw(law, (3,), 40_000, 2, device)[0], noise[3])
