"""What a private run leaves open is chosen from public numbers alone, alike wherever it runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trilemma import simulate
from trilemma.base.errors import ConfigError
from trilemma.experiment import Config, auto, parse
from trilemma.experiment.resolve import resolve
from trilemma.learning.steps.momentum import MomentumSettings
from trilemma.simulate import experiment


def private(epsilon: float = 8.0, n: int = 7, **more: Any) -> Config:
    raw = {
        "algorithm": {"name": "safe-dshb"},
        "privacy": {"threat": "ldp", "epsilon": epsilon},
        "federation": {"clients": n},
    }
    return parse({**raw, **more})


def numbers(config: Config) -> tuple[int, float, int, float]:
    options = config.algorithm.options
    assert isinstance(options, MomentumSettings)
    return config.run.rounds, options.lr, options.batch_size, options.momentum


def test_what_is_said_stays_and_what_is_not_is_chosen() -> None:
    said = private(
        algorithm={"name": "safe-dshb", "lr": 0.3, "batch_size": 30, "momentum": 0.5}, run={"rounds": 17}
    )
    assert not said.auto
    assert numbers(said) == (17, 0.3, 30, 0.5)
    some = auto.settled(private(run={"rounds": 200}), 600, 771)
    assert some.run.rounds == 200
    assert numbers(some)[3] == pytest.approx(0.95)
    assert some.privacy.clip == 1.0
    assert "d = 771" in some.notes[-1]
    assert f"lr = {numbers(some)[1]:g}" in some.notes[-1]


def test_the_step_is_the_one_of_the_formula() -> None:
    chosen = auto.settled(private(privacy={"threat": "ldp", "epsilon": 2.0, "accountant": "rdp"}), 600, 771)
    release = resolve(chosen, 600).release
    assert release is not None
    noise = 771 * release.law.sigma_ind**2 / 7
    assert numbers(chosen)[1] == pytest.approx(6 / math.sqrt(100 * (0.25 + noise)), rel=0.05)


def test_more_to_hide_means_shorter_steps() -> None:
    def step(epsilon: float, dim: int = 1000, n: int = 7) -> float:
        return numbers(auto.settled(private(epsilon, n), 600, dim))[1]

    assert step(8) > step(2) > step(0.5)
    assert step(1, dim=100) > step(1) > step(1, dim=100_000)
    assert step(1, n=50) > step(1)


def test_rounds_double_while_they_pay() -> None:
    def rounds(examples: int, batch: int, epsilon: float) -> int:
        table = {"name": "safe-dshb", "batch_size": batch}
        return auto.settled(private(epsilon, algorithm=table), examples, 100).run.rounds

    assert rounds(40, 40, 1.0) == 100  # every example is in every batch: more rounds are more noise
    assert rounds(4000, 25, 8.0) == 800  # few of many: the noise of a round hardly grows
    assert rounds(4000, 25, 8.0) >= rounds(4000, 25, 0.5)


def test_momentum_reaches_its_length_within_the_run() -> None:
    def momentum(rounds: int, **table: Any) -> float:
        options = parse({"algorithm": {"name": "safe-dshb", **table}, "run": {"rounds": rounds}})
        return numbers(options)[3]

    assert [momentum(T) for T in (5, 25, 100, 1000, 5000)] == [0, 0.6, 0.9, 0.99, 0.99]
    assert momentum(25, momentum=0.99) == 0.99


def test_a_configuration_as_text_leaves_the_same_open() -> None:
    config = private(run={"rounds": "auto", "seeds": 3})
    assert parse(config.with_("federation.byzantine=1").dump()).auto == config.auto
    chosen = auto.settled(config, 600, 771)
    assert not chosen.auto
    assert chosen.run.seeds == (3,)
    assert numbers(parse(chosen.dump())) == numbers(chosen.with_("federation.byzantine=1")) == numbers(chosen)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"algorithm": {"name": "dsgd", "lr": "auto"}}, "it comes from clip and noise; give a number"),
        ({"algorithm": {"name": "fedavg", "lr": "auto"}}, "fedavg has no rule for it; give a number"),
        ({"algorithm": {"name": "safe-dshb", "lr": "fast"}}, "lr = 'fast'"),
    ],
)
def test_what_cannot_be_chosen_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(raw)


def test_no_noise_is_calculated_for_rounds_that_are_not_chosen() -> None:
    with pytest.raises(ConfigError, match="chosen when a run or a federation begins"):
        resolve(private(), 600)


def test_a_run_and_its_seeds_have_what_was_chosen() -> None:
    config = private(run={"seeds": "1-2", "device": "cpu"})
    chosen = simulate.settled(config)
    assert simulate.assemble(config, 1).config.dump() == chosen.dump()
    assert simulate.settled(chosen) is chosen


def test_a_run_assembles_once_what_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though numbers are chosen from what it assembles, and everything is tried before a file is written."""
    calls, told = [], []
    everybody = experiment.everybody

    def counted(*given: Any) -> Any:
        calls.append(given)
        return everybody(*given)

    monkeypatch.setattr(experiment, "everybody", counted)
    config = private(run={"rounds": 1, "device": "cpu"})
    simulate.run(config, tmp_path / "run", announce=lambda *both: told.append(both))
    assert len(calls) == 1
    [(chosen, learner)] = told
    assert (chosen.auto, learner) == (frozenset(), None)
    assert simulate.RunDirectory.open(tmp_path / "run").config.dump() == chosen.dump()
