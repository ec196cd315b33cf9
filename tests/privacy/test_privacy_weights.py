"""Noise that cancels in a weighted sum: its law, its price for every client, and its integers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.keys import Key
from trilemma.privacy import NoiseLaw, Release, SimulatedNoise, Threat, calibrate, judge, mean_noise
from trilemma.privacy.mechanism import multiplier
from trilemma.privacy.noise.grid import Grid
from trilemma.privacy.noise.grid_price import drawing
from trilemma.privacy.secrets import SecretNoise
from trilemma.privacy.threats.covariance import SecretGraph, covariance, weighed_multiplier

CPU = torch.device("cpu")
SCALES = (0.4, 0.7, 1.0, 1.3, 1.6)
LAW = NoiseLaw(sigma_ind=0.7, sigma_cor=1.1)


def dense(
    scales: tuple[float, ...], law: NoiseLaw, known: tuple[int, ...], hidden: tuple[int, ...]
) -> dict[int, float]:
    """1/√(Σ⁻¹)_ii of every sender from Σ = σ_cor² D⁻¹LD⁻¹ + diag, written out pair by pair."""
    n = len(scales)
    seen = [i for i in range(n) if i not in (*known, *hidden)]
    sigma = np.zeros((len(seen), len(seen)))
    for a, i in enumerate(seen):
        sigma[a, a] += law.sigma_ind**2
        for j in range(n):
            if j != i and j not in known:
                sigma[a, a] += (law.sigma_cor / scales[i]) ** 2
        for b, j in enumerate(seen):
            if a != b:
                sigma[a, b] -= law.sigma_cor**2 / (scales[i] * scales[j])
    inverse = np.linalg.inv(sigma)
    return {i: 1 / math.sqrt(inverse[a, a]) for a, i in enumerate(seen)}


@pytest.mark.parametrize("q", [0, 1, 2, 3])
@pytest.mark.parametrize("law", [LAW, NoiseLaw(0.05, 2.0), NoiseLaw(1.0, 0.0), NoiseLaw(3.0, 1e-3)])
def test_a_client_is_worst_off_among_all_colluders_and_liars(q: int, law: NoiseLaw) -> None:
    """By dense inverses over every set of at most q colluders and every set of others that hide."""
    for client, own in enumerate(SCALES):
        others = [i for i in range(len(SCALES)) if i != client]
        least = math.inf
        for count in range(q + 1):
            for known in itertools.combinations(others, count):
                rest = [i for i in others if i not in known]
                for hiding in range(len(rest) + 1):
                    for hidden in itertools.combinations(rest, hiding):
                        least = min(least, dense(SCALES, law, known, hidden)[client])
        assert weighed_multiplier(law, 1.0, SCALES, q, own) == pytest.approx(least, rel=1e-9)
    every = [weighed_multiplier(law, 1.0, SCALES, q, own) for own in SCALES]
    assert weighed_multiplier(law, 1.0, SCALES, q) == min(every)


def test_equal_scales_are_lemma_a_4() -> None:
    for n, q in itertools.product((2, 5, 40), (0, 1)):
        equal = Threat("secldp", n, q, q)
        weighed = Threat("secldp", n, q, q, scales=(1.0,) * n)
        release = Release(1.5, LAW)
        assert multiplier(release, weighed) == pytest.approx(multiplier(release, equal), rel=1e-12)


def test_the_mean_under_cdp_hides_the_heaviest_least() -> None:
    release = Release(1.0, NoiseLaw(sigma_ind=2.0))
    for own in SCALES:
        rest = sorted(one for one in SCALES if one != own)[:-1]  # the heaviest other lies
        expected = math.sqrt(own**2 + sum(one**2 for one in rest)) / own
        assert multiplier(release, Threat("cdp", 5, 1, scales=SCALES, own=own)) == pytest.approx(expected)
    worst = multiplier(release, Threat("cdp", 5, 1, scales=SCALES))
    assert worst == min(multiplier(release, Threat("cdp", 5, 1, scales=SCALES, own=own)) for own in SCALES)


def test_under_ldp_weights_change_nothing() -> None:
    release = Release(1.0, NoiseLaw(sigma_ind=2.0))
    assert multiplier(release, Threat("ldp", 5, scales=SCALES)) == multiplier(release, Threat("ldp", 5))


def test_a_verdict_is_the_worst_clients_and_each_has_its_own() -> None:
    release = Release(1.0, LAW)

    def epsilon(own: float) -> float:
        held = judge(release, Threat("secldp", 5, 1, 1, scales=SCALES, own=own), 10, 1e-5)
        return held.epsilon

    own = [epsilon(one) for one in SCALES]
    assert own == sorted(own)
    assert epsilon(0.0) == max(own) > 1.1 * min(own)
    assert any(
        "ε of their own" in note
        for note in judge(release, Threat("secldp", 5, 1, 1, scales=SCALES), 10, 1e-5).assumptions
    )


def test_what_is_calibrated_holds_for_the_worst() -> None:
    for name, f in (("secldp", 1), ("byzldp", 2), ("cdp", 1), ("ldp", 0)):
        threat = Threat(name, 5, f, scales=SCALES)
        law = calibrate(4.0, 1e-5, rounds=10, clip=1.0, threat=threat)
        for own in SCALES:
            held = judge(Release(1.0, law), Threat(name, 5, f, scales=SCALES, own=own), 10, 1e-5)
            assert held.epsilon <= 4.0


def test_noise_of_the_weighted_mean() -> None:
    """Drawn, with the heaviest absent: what its partners share with it stays in."""
    noise = SimulatedNoise(Key(3), 5, scales=SCALES)
    drawn = torch.cat([noise.draw(LAW, (0, 1, 2, 3, 4), 4000, r, CPU).double() for r in range(5)], dim=1)
    scales = torch.tensor(SCALES, dtype=torch.float64)
    left = (scales[:4, None] * drawn[:4]).sum(0) / scales[:4].sum()
    assert float(left.var()) == pytest.approx(mean_noise(LAW, 5, 1, scales=SCALES), rel=0.05)


def test_simulated_noise_has_the_law() -> None:
    noise = SimulatedNoise(Key(5), 5, scales=SCALES)
    drawn = torch.cat(
        [noise.draw(LAW, (0, 1, 2, 3, 4), 20_000, r, CPU).double() for r in range(5)], dim=1
    ).numpy()
    D = np.diag(1 / np.array(SCALES))
    expected = LAW.sigma_cor**2 * D @ SecretGraph.complete(5).laplacian @ D + LAW.sigma_ind**2 * np.eye(5)
    np.testing.assert_allclose(np.cov(drawn), expected, atol=0.03 * expected.max())
    alone = noise.draw(LAW, (3,), 20_000, 2, CPU)
    assert torch.equal(alone[0], noise.draw(LAW, (0, 1, 2, 3, 4), 20_000, 2, CPU)[3])


def test_the_law_is_that_of_the_scaled_federation() -> None:
    """D Σ D is σ_cor² L + diag(ω²σ_ind²): Σ has no null vector but w, where σ_ind is 0."""
    D = np.diag(SCALES)
    plain = covariance(SecretGraph.complete(5), NoiseLaw(0.0, 1.0), range(5))
    sigma = np.linalg.inv(D) @ plain @ np.linalg.inv(D)
    np.testing.assert_allclose(sigma @ np.array(SCALES), 0, atol=1e-12)
    assert np.linalg.eigvalsh(sigma)[1] > 0.1
    with pytest.raises(PrivacyError, match="cancels in the weighted sum"):
        weighed_multiplier(NoiseLaw(0.0, 1.0), 1.0, SCALES, 0)


# ------------------------------------------------------------------------------------------ on the grid


def keys(n: int) -> dict[int, dict[int, bytes]]:
    pairs = {(i, j): bytes([i, j] * 16) for i in range(n) for j in range(i + 1, n)}
    return {i: {j: pairs[min(i, j), max(i, j)] for j in range(n) if j != i} for i in range(n)}


@pytest.mark.parametrize("scales", [SCALES, (1 / 3, 0.1, 5 / 7, math.pi / 2, 1.0)])
def test_the_weighted_sum_is_free_of_what_pairs_share_to_the_last_bit(scales: tuple[float, ...]) -> None:
    """Of the integers, whatever 1/ω is: nothing is multiplied after pairs' integers are drawn."""
    law = NoiseLaw(sigma_ind=0.0, sigma_cor=1.0)
    release = Release(1.0, law)
    grid = Grid.of(release, 64, 5, scales)
    total, weighted = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.float64)
    vectors = torch.nn.functional.normalize(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))
    for i, pairs in keys(5).items():
        own = grid.among((i,))
        whole = own.contribution(vectors[i : i + 1])
        sent = own.message(
            whole, SecretNoise(i, pairs, scale=scales[i]).steps(law, grid.step, (i,), 64, 1, CPU)
        )
        assert int(sent.abs().max()) < own.limit
        total += sent[0] - whole[0]
        weighted += scales[i] * own.numbers(sent[0]).double()
    assert not total.any()
    expected = (torch.tensor(scales)[:, None].double() * vectors).sum(0)
    assert float((weighted - expected).abs().max()) < 5 * grid.step + 1e-4


def test_simulated_integers_cancel_up_to_rounding_and_all_at_once_is_one_by_one() -> None:
    law = NoiseLaw(sigma_ind=0.0, sigma_cor=1.0)
    grid, noise = Grid.of(Release(1.0, law), 50, 5, SCALES), SimulatedNoise(Key(1), 5, scales=SCALES)
    steps = noise.steps(law, grid.step, (0, 1, 2, 3, 4), 50, 1, CPU)
    assert int(steps.sum(0).abs().max()) <= 5
    vectors = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    together = grid.among((0, 1, 2, 3, 4))
    whole = together.contribution(vectors)
    for i in range(5):
        alone = grid.among((i,))
        assert torch.equal(alone.contribution(vectors[i : i + 1])[0], whole[i])
        assert torch.equal(alone.numbers(steps[i]), together.numbers(steps)[i])


@pytest.mark.parametrize("dim", [3, 1000, (1 << 20) + 5])
@pytest.mark.parametrize("scale", SCALES)
def test_no_client_moves_further_than_its_scale_times_the_clip(scale: float, dim: int) -> None:
    """In whole steps, exactly: Σ q² ≤ (ω C/g)², whatever ω C/g is."""
    grid = Grid.of(Release(2.25, LAW), dim, 5, SCALES).among((SCALES.index(scale),))
    vector = torch.randn(1, dim, generator=torch.Generator().manual_seed(3)) * 100
    whole = grid.contribution(vector)
    square = sum(int((part * part).sum()) for part in whole[0].split(1 << 20))
    exact = (Fraction(2.25) * Fraction(scale) / Fraction(grid.step)) ** 2
    assert 0.98 * exact < square <= exact


def test_an_example_moves_a_rounded_sum_by_no_more_than_its_scale_times_the_declared() -> None:
    release = Release(1.0, NoiseLaw(0.4), unit="example", batch=8)
    generator = torch.Generator().manual_seed(4)
    for i, scale in enumerate(SCALES):
        grid = Grid.of(release, 200, 5, SCALES).among((i,))
        for _ in range(20):
            rows = (
                torch.nn.functional.normalize(torch.randn(9, 200, generator=generator).double()) * grid.clip
            )
            one, other = rows[:8].sum(0) / 8, (rows[1:8].sum(0) - rows[0]) / 8
            moved = (grid.contribution(one[None]) - grid.contribution(other[None])).double().norm()
            assert float(moved) * grid.step <= scale * release.sensitivity


def test_the_grid_is_fine_enough_for_the_lightest_and_wide_enough_for_the_heaviest() -> None:
    plain, grid = (Grid.of(Release(1.0, LAW), 100, 5, scales) for scales in ((), SCALES))
    assert grid.step < plain.step
    for i, scale in enumerate(SCALES):
        assert LAW.sigma_ind * scale / grid.step >= 2**10
        assert grid.among((i,)).radius <= scale / grid.step
    assert drawing(LAW, grid, 5).spread >= drawing(LAW, plain, 5).spread


def test_a_contribution_that_is_not_finite_is_zero_at_every_scale() -> None:
    grid = Grid.of(Release(1.0, LAW), 4, 5, SCALES)
    bad = torch.tensor([[math.nan, 1.0, 0.0, 0.0], [1e38, 0.0, 0.0, 1.0]])
    whole = grid.among((0, 4)).contribution(bad)
    assert not whole[0].any()
    assert float(whole[1].double().norm()) <= grid.among((4,)).radius


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scales": SCALES[:4]}, "4 weights for 5 clients"),
        ({"scales": SCALES, "own": 9.0}, "no client has the scale 9"),
        ({"scales": SCALES, "neighbours": 2}, "secrets are shared with all"),
        ({"scales": SCALES, "assume": "published"}, "count on no liars"),
    ],
)
def test_what_has_no_proof_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Threat("secldp", 5, 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_nodes_own_noise_is_sigma_ind_in_its_message_whatever_it_weighs(scale: float) -> None:
    law, step = NoiseLaw(sigma_ind=0.7), 2.0**-12
    source = SecretNoise(0, {1: bytes(32)}, own=bytes(32), scale=scale)
    drawn = source.steps(law, step, (0,), 200_000, 1, CPU).double() * step / scale
    assert float(drawn.std()) == pytest.approx(0.7, rel=0.01)


def test_a_nodes_shared_noise_is_larger_in_a_lighter_message() -> None:
    law, step = NoiseLaw(sigma_cor=0.7), 2.0**-12
    light, heavy = (
        SecretNoise(0, {1: bytes(32)}, scale=scale).draw(law, (0,), 50, 1, CPU) for scale in (0.5, 2.0)
    )
    torch.testing.assert_close(light, 4 * heavy)
    assert step < float(light.std())
