"""A run is followed through moments in which nobody answers."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from trilemma.errors import UserError
from trilemma.federation.layout import Party
from trilemma.federation.under_way import under_way
from trilemma.flower import following
from trilemma.flower.control import SuperLinkAway
from trilemma.flower.following import Following


class Link:
    """A SuperLink that plays a script: what it says at each look, or `away`; a name is a newer run's."""

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.connections = 0

    @contextmanager
    def connect(self, server):
        self.connections += 1
        if self.script[0] == "away":
            self.script.pop(0)
            raise SuperLinkAway("no SuperLink answers")
        yield self

    def active(self):
        if self.script[0] == "away":
            self.script.pop(0)
            raise SuperLinkAway("no SuperLink answers")
        if self.script[0] == "again":
            self.script.pop(0)
            return {7: "another", 8: "default"}
        return {}

    def status(self, run):
        return f"{self.script.pop(0)}"

    def reason(self, run):
        return f"why {run}"


class Clock:
    """It is a second later at every look."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


def follow(monkeypatch, link, folder=Path("nowhere")):
    monkeypatch.setattr(following, "connect", link.connect)
    said: list[str] = []
    return Following(Party(folder, None), "default", 3, said.append, Clock()), said


def test_a_superlink_that_is_away_for_a_moment_is_waited_for_and_that_is_said(monkeypatch):
    link = Link("running", "away", "away", "away", "again", "running", "finished:completed")
    one, said = follow(monkeypatch, link)
    assert list(one.states()) == ["running", "away", "away", "away", "running", "finished:completed"]
    assert said == ["no SuperLink answers; run 'default' is watched on", "the SuperLink is back"]
    assert (one.run, one.reason) == (8, "why 8"), "the run was continued under another number"


def test_one_that_stays_away_is_given_up(monkeypatch):
    one, said = follow(monkeypatch, Link("running", *["away"] * 1000))
    seen = []
    with pytest.raises(UserError, match="no SuperLink answers"):
        seen += one.states()
    assert len(said) == 1
    assert one.now() <= following.AWAY + 5


def test_a_run_that_broke_off_is_given_a_while_to_go_on(monkeypatch, tmp_path):
    with pytest.raises(KeyError), under_way(Party(tmp_path, None), "default", (KeyError,)):
        raise KeyError  # as a killed server app leaves it
    link = Link("finished:failed", "finished:failed", "again", "running", "finished:completed")
    one, _ = follow(monkeypatch, link, tmp_path)
    assert list(one.states()) == ["broken off", "broken off", "running", "finished:completed"]
    one, _ = follow(monkeypatch, Link(*["finished:failed"] * 1000), tmp_path)
    *before, last = one.states()
    assert (set(before), last, one.reason) == ({"broken off"}, "finished:failed", "why 3")


def test_a_run_that_failed_for_good_is_not_waited_for(monkeypatch, tmp_path):
    one, _ = follow(monkeypatch, Link("running", "finished:failed"), tmp_path)
    assert list(one.states()) == ["running", "finished:failed"]
