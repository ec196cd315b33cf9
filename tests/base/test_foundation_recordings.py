"""What is recorded on a GPU is replayed with the same bits; what is forgotten takes its memory along."""

from __future__ import annotations

import pytest
import torch

from trilemma.base import recordings
from trilemma.base.recordings import Recordings

on_a_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def products(of):
    """What is recorded here."""
    return {"product": of["x"] @ of["y"], "sum": of["x"].sum(0)}


def drawn(turn, device, rows=20):
    generator = torch.Generator().manual_seed(turn)
    x, y = torch.randn(2, rows, rows, generator=generator).to(device)
    return {"x": x, "y": y}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_replayed_is_computed_and_nothing_that_was_returned_is_overwritten(device):
    kept = Recordings(most=2)
    found = [kept.run("products", products, drawn(turn, device)) for turn in range(5)]
    for turn, parts in enumerate(found):
        expected = products(drawn(turn, device))
        assert parts.keys() == expected.keys()
        assert all(torch.equal(parts[name], expected[name]) for name in parts)
    assert len(kept.kept) == (device == "cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_shapes_and_names_are_told_apart_and_the_oldest_forgotten():
    kept, doubled = Recordings(most=2), lambda of: {"product": 2 * (of["x"] @ of["y"])}
    for turn in range(3):
        for rows in (4, 5, 4):
            of = drawn(turn, "cuda", rows)
            assert torch.equal(kept.run("products", products, of)["product"], of["x"] @ of["y"])
            assert torch.equal(kept.run("doubled", doubled, of)["product"], 2 * (of["x"] @ of["y"]))
            assert len(kept.kept) <= 2


def test_the_memory_of_recordings_that_are_all_forgotten_is_not_asked_for_again(monkeypatch):
    """With its last graph a pool is gone, and CUDA fails an assertion when its old name is asked for."""
    kept, alive = Recordings(most=4), []

    class Recording:
        """Stands for a recording: its graph has a pool of its own unless one that is there is handed over."""

        def __init__(self, function, arguments, pool):
            there = [one.graph.pool() for one in kept.kept.values() if one]
            assert pool is None or pool in there
            name = object() if pool is None else pool
            self.graph, self.arguments = type("Graph", (), {"pool": lambda self: name})(), arguments
            alive.append(name)

        def replay(self, arguments):
            return arguments

    monkeypatch.setattr(recordings, "Recording", Recording)
    arguments = {"params": torch.zeros(1)}
    for run in range(3):
        for number in range(8):
            kept._run((run, number), lambda found: found, arguments)
        for _ in range(2):
            kept._run((run, "last"), lambda found: found, arguments)
            kept._run((run, "the last but one"), lambda found: found, arguments)
    assert len(alive) == 6


def test_what_is_forgotten_is_computed_and_recorded_anew(monkeypatch):
    """Whoever keeps it; what is asked for afterwards goes on as if it were the first time."""
    monkeypatch.setattr(recordings, "Recording", lambda function, arguments, pool: None)
    several = [Recordings(most=4), Recordings(most=4)]
    for kept in several:
        kept._run("products", lambda found: found, {"params": torch.zeros(1)})
    assert [len(kept.kept) for kept in several] == [1, 1]
    recordings.forget()
    assert [len(kept.kept) for kept in several] == [0, 0]
    assert several[0]._run("products", lambda found: found, {"params": torch.ones(1)})["params"] == 1
