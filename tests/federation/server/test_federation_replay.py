"""A run and its replay: the same to the bit, and where a file is damaged it is named."""

from __future__ import annotations

import contextlib

import pytest
import torch

from federation_harness import Direct, command, coordinator, make, small_config
from trilemma.base.errors import UserError
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.server.replay import compared, differences

CLIENTS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server of a run of two rounds that kept a transcript."""
    config = small_config(CLIENTS, rounds=2)
    parties = make(tmp_path_factory.mktemp("replay") / "federation", CLIENTS, config, transcript=True)
    coordinator(parties, Direct(parties))[0].go()
    return parties[0]


@contextlib.contextmanager
def instead(path, content: bytes | None):
    """Put something else into a file for a while, or take it away."""
    kept = path.read_bytes()
    path.unlink()
    try:
        if content is not None:
            path.write_bytes(content)
        yield
    finally:
        path.write_bytes(kept)


def vector(tensor: torch.Tensor, name: str = "vector", epoch: int = 0) -> bytes:
    return wire.dumps(kinds.Answer(client=1, run="run", epoch=epoch, round=1), {name: tensor})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a block"),
        (b"[" * 10_000, "not a block"),
        (vector(torch.zeros(69), name="other"), "no vector"),
        (vector(torch.zeros(68)), "no vector"),
        (vector(torch.zeros(3, 23)), "no vector"),
        (vector(torch.zeros(69, dtype=torch.float64)), "no vector"),
        (None, "lacks"),
        (
            wire.dumps(kinds.Answer(client=1, run="run", epoch=7, round=1), {"vector": torch.zeros(69)}),
            "lacks",
        ),
    ],
)
def test_a_transcript_that_is_not_as_it_was_written_is_named_and_not_computed_with(server, content, why):
    """Without one vector another model follows: that is no difference of the run's, and no traceback."""
    path = server.run_folder("run") / "transcript" / "1-1"
    with instead(path, content), pytest.raises(UserError, match=why) as refusal:
        differences(server, "run")
    assert "1-1" in str(refusal.value) or "client 1 in round 2" in str(refusal.value)


def test_a_result_that_cannot_be_read_is_named(server):
    result = server.run_folder("run") / "result"
    with instead(result, b"gibberish"), pytest.raises(UserError, match=r"run/result: not a block"):
        differences(server, "run")


def test_a_folder_of_clients_alone_has_no_transcript(server, tmp_path):
    (tmp_path / "client-0").mkdir()
    (tmp_path / "client-0" / "federation.toml").write_bytes((server.folder / "federation.toml").read_bytes())
    with pytest.raises(UserError, match="there is no server's folder in"):
        command("replay", tmp_path)


NAN = torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize(
    ("kept", "follows", "said"),
    [
        (NAN, NAN.clone(), []),
        (NAN, torch.tensor([1.0, 2.0]), ["differs in 1 of 2 numbers, by up to nan"]),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.5]), ["differs in 2 of 2 numbers, by up to 0.5"]),
        (torch.ones(2), torch.ones(2).double(), ["is there on one side only, or has another shape or type"]),
        (torch.zeros(0), torch.zeros(0), []),
    ],
)
def test_the_same_is_the_same_bits(kept, follows, said):
    """A model with NaN in it is itself, and minus nought is not nought."""
    assert list(compared("x", {"p": kept}, {"p": follows})) == [f"x: p {one}" for one in said]
