"""Byz-Clip21's figures: what the module says of their grids and their noise, and SAFE-DSHB's momentum."""

from __future__ import annotations

import math

import pytest
import torch

from trilemma import simulate
from trilemma.experiment import Config, load
from trilemma_lab.papers.byz_clip21 import ALGORITHMS, AMPLIFIED_PANELS, ATTACKS, amplified_noise
from trilemma_lab.papers.safe_dshb import SUMMED


def trained(config: Config, rounds: int = 4) -> torch.Tensor:
    experiment = simulate.assemble(config.with_(f"run.rounds={max(1, rounds)}", "run.device=cpu"), seed=1)
    progress = simulate.start(experiment)
    for _ in range(rounds):
        progress, _ = simulate.step(experiment, progress)
    return progress.server["params"].double()


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_where_all_is_clipped_only_the_product_of_step_and_clip_matters(algorithm: str) -> None:
    """So of the paper's 30 points those with smaller clips repeat others: noise is a multiple of the clip."""
    base = load("safe-dshb-phishing", ["aggregation.rule=nnm+cwmed", ATTACKS["IPM"], "model.name=logistic"])
    found = [
        trained(
            base.with_(
                f"algorithm={{{algorithm}, lr={lr}, batch_size=25}}",
                f"privacy={{threat='ldp', delta=4e-4, clip={clip}, epsilon=13.0, noise='paper'}}",
            )
        )
        for lr, clip in ((1.0, 1e-3), (10.0, 1e-4))
    ]
    moved = (found[0] - trained(base, rounds=0)).norm()
    assert moved > 0
    assert (found[0] - found[1]).norm() < 1e-4 * moved


def test_noise_on_the_sum_is_that_on_the_mean_over_the_batch() -> None:
    panel = AMPLIFIED_PANELS[0]
    said = amplified_noise(0.1, panel, 0.1, "sum")
    on_the_mean = 0.1 * (32 / 2400) * math.sqrt(2250 * math.log(1 / 4e-4)) / 0.1
    assert float(said.removeprefix("sigma_ind=")) == pytest.approx(on_the_mean / 32, rel=1e-4)


def test_a_momentum_that_adds_up_is_the_average_with_a_longer_step() -> None:
    """Against the loop written out: m ← 0.99 m + g, θ ← θ − m of one honest client, without noise."""
    base = load(
        "safe-dshb-phishing",
        [
            *("federation={clients=1, byzantine=0}", "aggregation.rule=mean", "attack={name='none'}"),
            *("privacy={threat='none', clip=1.0}", SUMMED),
        ],
    )
    plain = base.with_("algorithm.momentum=0.0", "algorithm.lr=1.0")
    first = trained(plain, rounds=0)
    one = trained(plain, rounds=1)
    assert torch.allclose(trained(base, rounds=1), one, atol=1e-5)  # m = g after one round
    experiment = simulate.assemble(base.with_("run.rounds=2", "run.device=cpu"), seed=1)
    progress = simulate.start(experiment)
    before = first
    summed = torch.zeros_like(first)
    for _ in range(2):
        progress, _ = simulate.step(experiment, progress)
        after = progress.server["params"].double()
        step = before - after
        gradient = step - 0.99 * summed
        assert gradient.norm() < 1.1  # what is new in m is one clipped gradient, with its weight decay
        summed, before = step, after
