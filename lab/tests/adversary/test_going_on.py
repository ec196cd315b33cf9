"""Liars who climb towards what is mistaken after clients went on at home."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trilemma import config, simulate
from trilemma_lab.adversary import ahead
from trilemma_lab.adversary.ahead import Ahead
from trilemma_lab.adversary.going_on import AheadGoingOn, _Choice

RUN = {
    "data": {"examples": 200},
    "federation": {"clients": 10, "byzantine": 2},
    "algorithm": {"name": "fedavg", "lr": 0.5, "local_steps": 20, "batch_size": 10},
    "aggregation": {"rule": "evidence+mean", "tune": "clients"},
    "attack": {"name": "adaptive", "points": 6},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 50.0, "delta": 1e-4},
    "run": {"rounds": 1},
}


def looking(*changes: str) -> Ahead:
    ready = simulate.assemble(config.parse(RUN, changes), 1)
    progress = simulate.engine.start(ready)
    key = ready.key.fold("round", 0)
    sent = ready.resolved.algorithm.client(progress.broadcast, progress.clients, ready.clients, 0, key)
    return Ahead(ready, progress, sent.messages, tuple(range(10)))


def test_the_slope_after_going_on_is_that_of_small_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SHOWN", 2)
    seen = AheadGoingOn.of(looking())
    assert seen is not None
    seen = replace(seen, choices=[[_Choice(1.0, 0.3, 1.0)], [_Choice(2.0, 1.0, 1.0)]])
    move = seen.after - seen.start
    slope = seen._slope(move, 1.0)[1]
    way = slope / slope.norm()
    up, down = (seen._slope(move + sign * 0.05 * way, 1.0)[0] for sign in (1, -1))
    assert (up - down) / 0.1 == pytest.approx(float(slope.norm()), rel=0.05)


def test_where_nobody_goes_on_there_is_nothing_to_look_at() -> None:
    assert AheadGoingOn.of(looking("aggregation.tune=no")) is None
    assert AheadGoingOn.of(looking("run.rounds=2")) is None, "this is not the last round"


@pytest.mark.slow
def test_after_going_on_at_home_they_do_more_harm_than_those_who_do_not_know_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "SHOWN", 4)

    def left(direction: str) -> float:
        ready = simulate.assemble(config.parse(RUN, [f"attack.direction={direction}"]), 2)
        progress, _ = simulate.engine.step(ready, simulate.engine.start(ready))
        return float(simulate.evaluate(ready, progress.chosen).metrics["accuracy"])

    assert left("unshown-errors") < left("errors") - 0.02
