"""Blocks longer than a message: in pieces, both ways; broken off and continued; aggregated from files."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation_harness import (
    PRIVATE,
    Direct,
    check_against_simulation,
    coordinator,
    make,
    result_of,
    share_seeds,
    small_config,
)
from trilemma.aggregation import parse
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.protocol import kinds, shelf, wire
from trilemma.federation.protocol.long_blocks import Arriving, LongBlocks, described, piece_of
from trilemma.federation.protocol.reasons import Refused
from trilemma.federation.protocol.sizes import ROOM
from trilemma.federation.protocol.transport import FIRST_NODE

CLIENTS, SMALL = 4, 4096
WIDE = ("model.name=mlp", "model.hidden=[64]", "data.holders=all")
"""4,546 parameters: five pieces."""
PATIENT = Timing(round_limit=5.0, join_limit=1.0, poll=0.05)


@pytest.fixture
def short_messages(monkeypatch):
    """Nothing longer than a few thousand bytes travels at once, so that every round is in pieces."""
    monkeypatch.setattr(wire, "PIECE", SMALL)


@pytest.fixture
def on_files(monkeypatch):
    monkeypatch.setattr(shelf, "IN_MEMORY", 0)


class Counting(Direct):
    """Remembers how long blocks were."""

    def __init__(self, parties):
        super().__init__(parties)
        self.lengths: list[int] = []

    def reply(self, node, block):
        reply = super().reply(node, block)
        self.lengths += [len(block), len(reply.block) if reply and reply.block else 0]
        return reply


def federation(folder, *options, rounds=1, tolerate=1, **facts):
    config = small_config(CLIENTS, *WIDE, *options, rounds=rounds, tolerate=tolerate)
    private = any("sigma" in option for option in options)
    parties = make(folder, CLIENTS, config, timing=PATIENT, budget=1e9 if private else None, **facts)
    share_seeds(parties, config)
    return config, parties


@pytest.mark.parametrize("options", [(), PRIVATE], ids=["plain", "private"])
def test_a_run_in_pieces_equals_the_simulation(tmp_path, short_messages, on_files, options):
    config, parties = federation(tmp_path / "federation", *options, rounds=3, transcript=True)
    transport = Counting(parties)
    coordinator(parties, transport)[0].go()
    check_against_simulation(parties, config, "run")
    kinds = {kind for _, kind in transport.asked}
    assert {"long", "piece", "fetch"} <= kinds
    assert "ask" not in kinds, "the question is too long for one message"
    assert max(transport.lengths) <= SMALL + ROOM


def test_a_run_is_the_same_in_pieces_and_whole(tmp_path, monkeypatch):
    """Number for number: how a message travels is no part of what it says."""
    results = []
    for size in (wire.PIECE, SMALL):
        monkeypatch.setattr(wire, "PIECE", size)
        _, parties = federation(tmp_path / str(size), rounds=2)
        coordinator(parties, Direct(parties))[0].go()
        results.append(result_of(parties, "run")["params"])
    assert torch.equal(*results)


class Dies(Direct):
    """A server that is killed when it has fetched some pieces."""

    fetched, moment = 0, 0

    def reply(self, node, block):
        self.fetched += wire.kind_of(block) == "fetch"
        if self.fetched > self.moment:
            raise KeyboardInterrupt("the server is killed")
        return super().reply(node, block)


@pytest.mark.parametrize("moment", [6, 13])
def test_a_transfer_goes_on_where_it_stopped_when_the_server_dies(tmp_path, short_messages, moment):
    _, parties = federation(tmp_path / "federation")
    first = Dies(parties)
    first.moment = moment
    with pytest.raises(KeyboardInterrupt):
        coordinator(parties, first)[0].go()
    arriving = parties[0].run_folder("run") / "arriving"
    arrived = sum(-(-path.stat().st_size // SMALL) for path in arriving.glob("*/*"))
    second = Direct(parties)
    coordinator(parties, second)[0].go()
    pieces = max(-(-path.stat().st_size // SMALL) for path in arriving.glob("*/*"))
    fetched = [kind for _, kind in second.asked].count("fetch")
    assert pieces == 5
    assert 0 < arrived <= moment
    assert fetched == CLIENTS * pieces - arrived, "what had come is not fetched again"


def test_what_a_disk_made_of_pieces_is_not_taken_for_what_was_sent(tmp_path, short_messages):
    """The machine went down: files are as long as they were, and there is nothing in them."""
    results = []
    for damaged in (False, True):
        _, parties = federation(tmp_path / str(damaged), transcript=True)
        first = Dies(parties)
        first.moment = 13
        with pytest.raises(KeyboardInterrupt):
            coordinator(parties, first)[0].go()
        arrived = [path for path in (parties[0].run_folder("run") / "arriving").glob("*/*") if damaged]
        for path in arrived:
            path.write_bytes(path.read_bytes()[:SMALL] + bytes(path.stat().st_size - SMALL))
        assert bool(arrived) == damaged
        coordinator(parties, Direct(parties))[0].go()
        results.append(result_of(parties, "run")["params"])
    assert torch.equal(*results)


def test_a_question_that_was_lost_in_the_middle_is_not_handed_over_twice(tmp_path, short_messages):
    """A client loses the server after its third piece: asked again, it says so, and the rest comes."""
    _, parties = federation(tmp_path / "federation", tolerate=0)

    class Loses(Direct):
        handed: ClassVar = []

        def reply(self, node, block):
            if wire.kind_of(block) == "piece" and node == FIRST_NODE:
                self.handed.append(wire.loads(block, kinds.Piece)[0].place)
                if len(self.handed) == 4:
                    return None
            return super().reply(node, block)

    transport = Loses(parties)
    runner, _ = coordinator(parties, transport)
    runner.go()
    assert runner.log.records()[0]["absent"] == []
    first_question = transport.handed[: transport.handed.index(4) + 1]
    assert first_question == [0, 1, 2, 3, 3, 4], "only what was lost is sent once more"


class Announced(Direct):
    """A client that announces what it does not have, or has otherwise."""

    how = ""

    def reply(self, node, block):
        reply = super().reply(node, block)
        if node != FIRST_NODE or reply is None or reply.block is None:
            return reply
        kind = wire.kind_of(reply.block)
        if self.how == "endless" and kind == "long":
            long, _ = wire.loads(reply.block, kinds.Long)
            huge = long.model_copy(update={"length": 1 << 50})
            return type(reply)(node, wire.dumps(huge))
        if self.how == "unwritable" and kind == "long":
            long, _ = wire.loads(reply.block, kinds.Long)
            odd = long.model_copy(update={"checksums": ["\ud800" for _ in long.checksums]})
            return type(reply)(node, wire.dumps(odd))
        if self.how == "changed" and kind == "piece":
            header, tensors = wire.loads(reply.block, kinds.Piece)
            return type(reply)(node, wire.dumps(header, {"bytes": tensors["bytes"] ^ 1}))
        if self.how == "forgetful" and kind == "have":
            have, _ = wire.loads(reply.block, kinds.Have)
            return type(reply)(node, wire.dumps(have.model_copy(update={"pieces": 0})))
        return reply


@pytest.mark.parametrize("how", ["endless", "unwritable", "changed", "forgetful"])
def test_a_liar_in_the_carrying_is_rejected_and_the_round_goes_on(tmp_path, short_messages, how):
    _, parties = federation(tmp_path / "federation")
    transport = Announced(parties)
    transport.how = how
    runner, _ = coordinator(parties, transport)
    runner.go()
    (record,) = runner.log.records()
    assert record["absent"] == []
    assert [client for client, _ in record["rejected"]] == [0]


def test_a_client_stores_no_question_longer_than_its_configurations(tmp_path, short_messages):
    _, parties = federation(tmp_path / "federation")
    node = Direct(parties).clients[0]
    block = wire.dumps(kinds.Finished(run="run"), {"params": torch.zeros(1 << 20)})
    long = described(block)
    with pytest.raises(Refused, match="block"):
        node.answer(wire.dumps(long))
    with pytest.raises(Refused, match="block"):
        node.answer(piece_of(block, long.digest, 0))
    assert not list((parties[1].state / "long").rglob("*"))


@given(st.data())
def test_pieces_in_any_order_and_number_give_the_block_or_nothing(tmp_path_factory, data):
    """Repeated, out of turn, cut off by a crash: what is complete is what was announced."""
    folder = tmp_path_factory.mktemp("pieces")
    size = data.draw(st.integers(1, 5 * SMALL))
    block = bytes(data.draw(st.binary(min_size=1, max_size=8)) * size)[:size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE", SMALL)
        long = described(block)
        arriving = Arriving(long, folder / "block")
        for place in data.draw(st.lists(st.integers(0, len(long.checksums) - 1), max_size=30)):
            if data.draw(st.booleans()) and arriving.path.is_file():
                with arriving.path.open("ab") as file:
                    file.truncate(max(0, arriving.path.stat().st_size - data.draw(st.integers(0, 50))))
            have = arriving.have
            try:
                arriving.take(piece_of(block, long.digest, place))
            except wire.WireError:
                assert place > have
        if arriving.complete:
            assert arriving.mapped()[:] == block


@pytest.mark.parametrize("length", [10, SMALL + 10])
def test_a_piece_is_as_long_as_pieces_are(tmp_path, short_messages, length):
    """Or it would be the next one again: with the same in the former block, for ever."""
    odd = bytes(length)
    long = kinds.Long(length=2 * SMALL, checksums=[wire.digest(odd), wire.digest(b"")])
    arriving = Arriving(long, tmp_path / "block")
    piece = {"bytes": torch.frombuffer(bytearray(odd), dtype=torch.uint8)}
    with pytest.raises(wire.WireError, match="not as it was announced"):
        arriving.take(wire.dumps(kinds.Piece(digest=long.digest, place=0), piece))
    assert not arriving.path.exists()


def test_nothing_comes_after_the_last_piece(tmp_path, short_messages):
    block = bytes(2 * SMALL)
    long = described(block)
    arriving = Arriving(long, tmp_path / "block")
    for place in range(2):
        arriving.take(piece_of(block, long.digest, place))
    nothing = {"bytes": torch.empty(0, dtype=torch.uint8)}
    with pytest.raises(wire.WireError):
        arriving.take(wire.dumps(kinds.Piece(digest=long.digest, place=2), nothing))
    assert arriving.mapped()[:] == block


def test_an_answer_that_left_can_be_fetched_again_and_nothing_else(tmp_path, short_messages):
    answer = wire.dumps(kinds.Noted(client=0, run="run"), {"x": torch.arange(2000)})
    end = LongBlocks(tmp_path, lambda: 0)
    long, _ = wire.loads(end.answer("ask", b"", lambda _: answer), kinds.Long)
    places = range(len(long.checksums))
    fetches = [wire.dumps(kinds.Fetch(digest=long.digest, place=place)) for place in places]
    again = LongBlocks(tmp_path, lambda: 0)  # it was restarted
    pieces = [wire.loads(again.answer("fetch", one, lambda _: b""), kinds.Piece)[1] for one in fetches]
    assert b"".join(piece["bytes"].numpy().tobytes() for piece in pieces) == answer
    for digest, place in (("../../secrets/identity.key", 0), (long.digest, len(places)), ("", 0)):
        with pytest.raises(wire.WireError):
            again.answer("fetch", wire.dumps(kinds.Fetch(digest=digest, place=place)), lambda _: b"")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_question_asked_anew_needs_only_the_pieces_that_differ(tmp_path, short_messages, damaged):
    """Another epoch's question is the same broadcast under another header: what had come of it stays."""
    broadcast = {"params": torch.randn(5000, generator=torch.Generator().manual_seed(1))}
    heard = []
    end = LongBlocks(tmp_path, lambda: 1 << 20)

    def announce(long):
        return end.answer("long", wire.dumps(long), lambda whole: heard.append(whole) or b"")

    def hand(block, place):
        answer = end.answer("piece", piece_of(block, described(block).digest, place), lambda _: b"")
        return wire.loads(answer, kinds.Have)[0].pieces

    first, second = (
        wire.dumps(kinds.Ask(run="run", epoch=epoch, round=0, heard={}, unused=[]), broadcast)
        for epoch in (0, 1)
    )
    announce(described(first))
    assert [hand(first, place) for place in range(3)] == [1, 2, 3]
    if damaged:
        (path,) = (path for path in (tmp_path / "arriving").iterdir() if not path.suffix)
        content = bytearray(path.read_bytes())
        content[2 * SMALL] ^= 1
        path.write_bytes(content)
    assert wire.loads(announce(described(second)), kinds.Have)[0].pieces == 0
    have = hand(second, 0)
    assert have == (2 if damaged else 3), "what is not as announced is not taken from anywhere"
    while have < len(described(second).checksums):
        have = hand(second, have)
    announce(described(second))
    assert [whole[:] for whole in heard] == [second]
    assert len(list((tmp_path / "arriving").iterdir())) == 2, "what came before is not kept any longer"


LIMITED = """
import mmap, resource, sys, torch
from pathlib import Path
import trilemma.learning.steps.server as server
from trilemma.aggregation import parse, stream
from trilemma.federation import kinds, wire
from trilemma.storage.mapped_rows import stacked

def numbers(client, dim):
    return torch.randn(dim, generator=torch.Generator().manual_seed(client))

clients, dim, room = 16, 1 << 21, 64 << 20
folder = Path(sys.argv[1])
server.BLOCK = 1 << 20
torch.set_num_threads(1)
rules = [parse(name, f=3) for name in sys.argv[2:]]
small = torch.stack([numbers(client, 1 << 16) for client in range(clients)])
for rule in rules:
    stream(rule, [small, small])                 # what is compiled is compiled before the limit
for client in range(clients):
    header = kinds.Answer(client=client, run="run", epoch=0, round=0)
    (folder / str(client)).write_bytes(wire.dumps(header, {"vector": numbers(client, dim)}))

def sent(client):
    with (folder / str(client)).open("rb") as file:
        return wire.loads(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kinds.Answer)[1]["vector"]

used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
X = stacked(folder, [sent(client) for client in range(clients)], dim)
lines = Path("/proc/self/maps").read_text().splitlines()
print(sum(str(folder) in line for line in lines), sum(".mapped-" in line for line in lines))
for rule in rules:
    print(float(stream(rule, lambda: server.column_blocks(X)).value.norm()))
try:
    torch.zeros(clients, dim)
except RuntimeError:
    print("all of it does not fit")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_messages_on_files_are_aggregated_in_less_memory_than_they_have(tmp_path):
    """128 MB of messages with 64 MB for everything: a limit of the system's, not an estimate."""
    program = [sys.executable, "-c", LIMITED, str(tmp_path), "cwtm", "caf"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown, *limited, refused = done.stdout.splitlines()
    assert shown == "16 0", "files are seen where they lie, none is copied"
    assert refused == "all of it does not fit"
    X = torch.stack([torch.randn(1 << 21, generator=torch.Generator().manual_seed(i)) for i in range(16)])
    expected = [float(parse(rule, f=3)(X).value.norm()) for rule in ("cwtm", "caf")]
    assert [float(text) for text in limited] == pytest.approx(expected, rel=1e-5)
