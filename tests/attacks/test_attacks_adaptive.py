"""Adaptive liars: they pass every test, do harm by doing so, and keep what they claim to keep."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trilemma import config, simulate
from trilemma.attacks import View, attacks
from trilemma.attacks.adaptive import _Stage
from trilemma.keys import Key

RUN = {
    "federation": {"clients": 20, "byzantine": 4},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "aggregation": {"rule": "evidence+mean"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 30.0, "delta": 1e-4},
    "attack": {"name": "adaptive"},
    "run": {"rounds": 4},
}


def steps(*changes: str) -> list[simulate.engine.Record]:
    ready = simulate.assemble(config.parse(RUN, changes), 1)
    progress, records = simulate.engine.start(ready), []
    for _ in range(ready.config.run.rounds):
        progress, record = simulate.engine.step(ready, progress)
        records.append(record)
    return records


def stage(noise: str, limit: float = np.inf) -> _Stage:
    """Ten clients' random sums, the last three liars', and a judge that expels sums longer than `limit`."""
    rng = torch.Generator().manual_seed(1)
    sums = torch.randn(10, 50, generator=rng, dtype=torch.float64)

    def judge(gram: np.ndarray, moved: np.ndarray) -> tuple[int, np.ndarray]:
        return int((gram.diagonal() > limit).sum()), np.zeros(10)

    defence = SimpleNamespace(sums=sums, moved=sums.mean(0), step=-0.5, rows=np.arange(10), judge=judge)
    return _Stage(defence, (7, 8, 9), np.ones(3), torch.ones(50, dtype=torch.float64), noise)


@pytest.mark.parametrize("noise", ["protocol", "rotated"])
def test_harm_is_what_the_messages_do_to_the_mean(noise: str) -> None:
    """The Gram matrix's answer against the messages themselves."""
    made, way = stage(noise), -torch.ones(50, dtype=torch.float64) / 50**0.5
    passes, harm = made.harm(way, 4.0, greedy=True)
    extra = made.messages(torch.zeros(3, 50, dtype=torch.float64), way, 4.0)
    after = made.defence.moved + -0.5 * extra.sum(0) / 10
    assert passes
    assert harm == pytest.approx(-float(after @ made.downhill))
    assert harm > made.quiet


def test_rotated_noise_keeps_every_length_and_inner_product_among_liars() -> None:
    made, way = stage("rotated"), -torch.ones(50, dtype=torch.float64) / 50**0.5
    sums = made.sums.clone()
    sums[7:] += -0.5 * made.messages(torch.zeros(3, 50, dtype=torch.float64), way, 4.0)
    assert torch.allclose(sums[7:] @ sums[7:].T, made.sums[7:] @ made.sums[7:].T)
    assert float((sums[7:] @ way).mean()) == pytest.approx(float((made.sums[7:] @ way).mean()) - 2.0)
    assert made.changed(way, 1e3) is None


def test_a_lie_that_would_be_expelled_is_not_a_candidate() -> None:
    bold = stage("protocol", limit=float(np.diag(stage("protocol").gram).max()) * 1.01)
    way = -torch.ones(50, dtype=torch.float64) / 50**0.5
    assert bold.harm(way, 1e-3, greedy=True)[0]
    assert not bold.harm(way, 1e3, greedy=True)[0]


def test_nobody_is_expelled_and_the_descent_suffers() -> None:
    records = steps()
    assert not any(record.expelled for record in records)
    assert any(record.attack_strength > 0 for record in records)


def test_sleepers_behave_until_they_strike_and_a_burst_ends() -> None:
    strengths = [record.attack_strength for record in steps("attack.start=2", "attack.stop=3")]
    assert strengths[:2] == [0.0, 0.0]
    assert strengths[3] == 0.0
    assert strengths[2] > 0


@pytest.mark.parametrize("direction", ["ones", "std", "top", "best"])
def test_every_direction_is_searched(direction: str) -> None:
    assert len(steps(f"attack.direction={direction}", "attack.role=turns", "run.rounds=2")) == 2


def test_without_memory_they_face_the_rule_alone() -> None:
    honest = torch.ones(5, 4)
    view = View(
        honest=honest,
        own=torch.ones(2, 4),
        byzantine=2,
        target=lambda x, key=None: SimpleNamespace(value=x.mean(0)),
        round=0,
        key=Key(0),
    )
    crafted = attacks["adaptive"]().build().craft(view)
    assert crafted.strength > 100
    assert (crafted.messages < 0).all()


@pytest.mark.parametrize("attack", ["alie", "foe"])
def test_known_attacks_are_searched_against_the_defended_pipeline(attack: str) -> None:
    """Strengths that get their senders expelled achieve nothing; the search knows."""
    records = steps(f"attack.name={attack}", "run.rounds=1")
    assert records[0].attack_strength is not None
