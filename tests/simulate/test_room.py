"""Runs that no machine has room for: refused in words before anything is computed, and nothing is left."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from trilemma import config, simulate
from trilemma.api import configured
from trilemma.base.errors import ConfigError, UserError
from trilemma.simulate import room, runner


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        ("run.rounds=1e9", "allowed: at most 1e.08"),
        ("run.rounds=1.5", "rounds = 1.5: must be a whole number"),
        ("federation.clients=1000000000", "allowed: at most 1e.07"),
    ],
)
def test_numbers_that_nobody_can_have_meant_are_refused(assignment: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config.parse({}, [assignment])


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    assert config.parse({}, ["run.rounds=1e3"]).run.rounds == 1000


def test_more_seeds_than_anybody_wants_are_not_counted_out() -> None:
    with pytest.raises(ConfigError, match="more seeds than the 10,000"):
        configured(seeds=10**12)
    with pytest.raises(ConfigError, match="seeds"):
        configured(seeds=0)


@pytest.mark.parametrize(
    ("state", "having", "said"),
    [("memory", "_memory", "state = 'disk' with at_once"), ("disk", "_free", "the disk has room for")],
)
def test_messages_that_fit_nowhere_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, having: str, said: str
) -> None:
    """7 messages of 69 numbers, where there is room for one byte less."""
    settings = config.parse({}, [f"run.state={state}", "run.at_once=1", "run.rounds=1", "run.device=cpu"])
    monkeypatch.setattr(room, having, lambda *_: 7 * 69 * 4 - 1)
    with pytest.raises(ConfigError, match=r"7 clients, 69 numbers long") as refused:
        simulate.run(settings, tmp_path / "run")
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(room, having, lambda *_: 7 * 69 * 4)
    simulate.run(settings, tmp_path / "run")


def test_what_memory_lacks_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """10¹² local steps: their batches alone are more than can be addressed."""
    settings = config.parse({}, ["algorithm={name='fedavg', local_steps=1000000000000}", "run.rounds=3"])
    with pytest.raises(UserError, match=r"does not fit into memory \(.*\): 7 clients, 3 rounds.*local_steps"):
        simulate.run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_only_a_lack_of_memory_is_called_one() -> None:
    settings = config.parse({})
    for lack in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), _torch_on_the_host()):
        with (
            pytest.raises(UserError, match="does not fit into memory"),
            room.said_where_memory_ends(settings),
        ):
            raise lack
    with pytest.raises(RuntimeError, match="something else"), room.said_where_memory_ends(settings):
        raise RuntimeError("something else")


def _torch_on_the_host() -> RuntimeError:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**61, dtype=torch.uint8)
    return error.value


def test_seeds_are_assembled_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of every seed are its own: all of them together may not fit."""
    seen: list[weakref.ref[simulate.Experiment]] = []
    together: list[int] = []

    def assembled(*arguments: object) -> simulate.Experiment:
        together.append(sum(one() is not None for one in seen))
        found = assemble(*arguments)
        seen.append(weakref.ref(found))
        return found

    assemble = runner._assembled
    monkeypatch.setattr(runner, "_assembled", assembled)
    simulate.run(config.parse({}, ["run.seeds=1-4", "run.rounds=1"]), tmp_path / "run")
    assert len(together) == 8
    assert max(together) <= 1
