"""Generated lists of faults: nothing is applied twice, no noise is used twice, everything is paid for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from fault_simulator import (
    LYING,
    SHAPES,
    Carried,
    Crash,
    Full,
    Jump,
    Killed,
    MemoryBroken,
    NewKeys,
    ServerSetBack,
    SetBack,
    happens,
)
from hypothesis import find, given, note, settings
from hypothesis import strategies as st

from trilemma.federation.client import journal, rounds, spending
from trilemma.federation.client.journal import Fresh
from trilemma.federation.protocol.disk_backed import Memory
from trilemma.federation.protocol.reasons import Refused
from trilemma.federation.server import commits, hearing
from trilemma.federation.server.commits import Commit
from trilemma.federation.server.next_commit import NextCommit
from trilemma.privacy.ledger.ledger import Ledger


def lists_of_faults(name: int | str):
    """Up to eight faults, early and late, of every kind."""
    clients = st.integers(0, SHAPES[name].clients - 1)
    blocks, writes, sends, looks = (
        st.integers(1, 8),
        st.integers(1, 14),
        st.integers(1, 10),
        st.integers(1, 10),
    )
    how = st.sampled_from(["lose request", "lose reply", "repeat", "late request", "late reply"])
    what = st.sampled_from(["session", "journal", "ledger", "joined", "state"])
    crash = st.sampled_from(["before", "torn", "after"])
    return st.lists(
        st.one_of(
            st.builds(Carried, clients, blocks, how, looks),
            st.builds(Crash, clients, writes, crash, looks),
            st.builds(Crash, st.just(-1), st.integers(1, 40) if name == LYING else writes, crash),
            st.builds(
                Full,
                st.integers(-1, SHAPES[name].clients - 1),
                writes,
                st.integers(0, 6),
                st.sampled_from(["before", "torn"]),
            ),
            st.builds(Killed, sends, st.sampled_from(["before", "after"])),
            st.builds(SetBack, clients, blocks, what, st.integers(1, 6)),
            st.builds(ServerSetBack, sends, st.integers(1, 3)),
            st.builds(NewKeys, sends),
            st.builds(MemoryBroken, sends, st.sampled_from(["changed", "cut", "gone"])),
            st.builds(Jump, sends, st.sampled_from([0.3, 1.0, 5.0])),
        ),
        max_size=8,
    )


@pytest.mark.parametrize("name", [0, 1])
def test_nothing_happens(name):
    """Without faults everybody is heard in every round, in one epoch, and is asked once for everything."""
    world = happens([], name)
    shape = SHAPES[name]
    assert len(world.releases.messages) == shape.clients * shape.rounds
    assert [record["absent"] for record in world.log.records()] == [[]] * shape.rounds
    assert world.carrier.sent == 4 + shape.rounds


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("name", [0, 1])
def test_a_server_killed_at_any_exchange_continues(name, how):
    """Hello, keys, confirm, rounds, result: it goes on, and each round was released and paid for once."""
    shape = SHAPES[name]
    everything = [*itertools.product(range(shape.clients), range(shape.rounds))]
    for nth in range(1, happens([], name).carrier.sent + 1):
        world = happens([Killed(nth, how)], name)
        assert sorted((client, round_) for client, _, round_ in world.releases.messages) == everything, nth


@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
@pytest.mark.parametrize("nth", [6, 7])
def test_a_commit_whose_memory_is_broken_is_stepped_over(how, nth):
    """What was heard in the rounds after it is heard again; the clients' steps stand, as after a rollback."""
    world = happens([MemoryBroken(nth, how)], 1)
    assert any("broken" in text for text in world.said)


@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_commit_whose_sums_are_broken_is_stepped_over(how):
    """The sums of a server that keeps evidence lie where its memory of messages does, all in a file."""
    world = happens([MemoryBroken(6, how)], LYING)
    assert any("broken" in text for text in world.said)
    found = [one.shape for one in commits._references(world.log._kept()[0])]
    assert sum(shape[0] == SHAPES[LYING].clients for shape in found) == 1


def test_a_liar_is_expelled_and_nobody_else_notices():
    """In the second round; the others are called to another epoch, and heard in every round."""
    world = happens([], LYING)
    records = world.log.records()
    assert [[one["client"] for one in record["expelled"]] for record in records] == [[], [3], []]
    assert [record["epoch"] for record in records] == [0, 0, 1]
    assert [record["absent"] for record in records] == [[], [], []]
    assert sum(client == 3 for client, _, _ in world.releases.messages) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whose", "how"),
    [
        (-1, "torn"),
        *(
            pytest.param(whose, how, marks=pytest.mark.nightly)
            for whose, how in itertools.product((-1, 0, 3), ("before", "torn", "after"))
            if (whose, how) != (-1, "torn")
        ),
    ],
)
def test_a_crash_at_any_write_of_an_expulsion(whose, how):
    """The server's, an honest client's or the liar's: the same liar goes, once, and its marks with it."""
    for nth in range(1, happens([], LYING).disk.writes[whose] + 1):
        world = happens([Crash(whose, nth, how)], LYING)
        assert whose == 3 or world.log.last().expelled, nth


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_full_disk_at_any_write_costs_rounds_and_no_promise(more):
    """A client's, or the server's; it lives on, and goes on when there is room again."""
    for whose in (-1, 0):
        for nth in range(1, happens([], 1).disk.writes[whose] + 1):
            happens([Full(whose, nth, more)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_whatever_happens(name):
    """Lists are shrunk to the shortest that still breaks a promise."""

    many = settings().max_examples
    times = 5 if many > 100 else 1  # at night

    @settings(max_examples=many // 5 if name == LYING else times * many)
    @given(lists_of_faults(name))
    def check(faults):
        note(f"{name=}, {faults=}")
        happens(faults, name)

    check()


# --- the simulator can fail: what is sabotaged is found -----------------------------------------------------


def forgetful_journal(monkeypatch):
    """A client answers whatever it is asked as if for the first time, and overhears its ledger's no."""
    monkeypatch.setattr(rounds, "what_to_do", lambda entry, client, ask, asked: Fresh(None))
    unpaid_after_a_loss(monkeypatch)


def unpaid(monkeypatch):
    """A client speaks without writing it into its ledger."""
    monkeypatch.setattr(rounds, "pay", lambda *everything: {})
    monkeypatch.setattr(Ledger, "_append", lambda ledger, record: None)


def unpaid_after_a_loss(monkeypatch):
    """A client whose journal is lost does not look into its ledger before it answers again."""
    honest = spending.pay

    def pay(*everything):
        try:
            return honest(*everything)
        except Refused:
            return {}

    monkeypatch.setattr(rounds, "pay", pay)


def stubborn_steps(monkeypatch):
    """A client that was not heard keeps its step."""
    honest = journal.what_to_do

    def what_to_do(entry, client, ask, asked):
        todo = honest(entry, client, ask, asked)
        return Fresh(entry.after) if entry is not None and isinstance(todo, Fresh) else todo

    monkeypatch.setattr(rounds, "what_to_do", what_to_do)


def changing_questions(monkeypatch):
    """The server asks again with other numbers."""
    honest, asked = hearing.Hearing._question, itertools.count(1)

    def question(self, commit, turn):
        return honest(self, replace(commit, heard={0: -next(asked)}), turn)

    monkeypatch.setattr(hearing.Hearing, "_question", question)


def applied_before_it_is_written(monkeypatch):
    """The server's step changes what it has before the commit is on disk, as a server with a memory would."""
    honest = NextCommit.after
    kept = {}

    def apply(self, commit, turn, heard):
        done = honest(self, replace(commit, server=kept.get("state", commit.server)), turn, heard)
        kept["state"] = done.server
        return done

    monkeypatch.setattr(NextCommit, "after", apply)


def remembered_before_it_is_written(monkeypatch):
    """The server's memory of clients runs ahead of its commits."""
    honest = NextCommit.after
    kept = {}

    def apply(self, commit, turn, heard):
        kept.update(heard.remembered)
        return honest(self, commit, turn, heard)

    def hear(self, commit, turn, clients):
        return honest_hear(self, replace(commit, remembered={**commit.remembered, **kept}), turn, clients)

    honest_hear = hearing.Hearing.hear
    monkeypatch.setattr(NextCommit, "after", apply)
    monkeypatch.setattr(hearing.Hearing, "hear", hear)


def one_file_for_all_rounds(monkeypatch):
    """The server's sums are changed where they lie: an older commit then finds those of a newer one."""
    honest, only = Memory.keep_rows, {}

    def keep_rows(self, rows):
        if rows.any() and self.folder not in only:
            only[self.folder] = honest(self, rows)
        return only[self.folder].copy_(rows) if rows.any() else honest(self, rows)

    monkeypatch.setattr(Memory, "keep_rows", keep_rows)
    monkeypatch.setattr(Memory, "check", lambda self, references: None)


def forgotten_expulsions(monkeypatch):
    """The server's commits do not say whom it expelled."""
    honest = Commit.parts
    monkeypatch.setattr(Commit, "parts", lambda self, memory: honest(replace(self, expelled=()), memory))


@pytest.mark.parametrize(
    ("sabotage", "tolerate", "faults", "complaint"),
    [
        (forgetful_journal, 0, [Carried(0, 4, "repeat")], "two different answers"),
        (unpaid, 0, [], "not in the ledger"),
        (unpaid_after_a_loss, 0, [Carried(0, 4, "lose reply"), SetBack(0, 5, "journal", 1)], "two different"),
        (stubborn_steps, 1, [Carried(0, 4, "lose reply"), Jump(5, 5.0)], "did not take steps back"),
        (changing_questions, 0, [Killed(4, "after")], "changed"),
        (applied_before_it_is_written, 0, [Crash(-1, 6, "before")], "the model is not what was released"),
        (remembered_before_it_is_written, 1, [Crash(-1, 9, "before")], "what is remembered of client"),
        (one_file_for_all_rounds, LYING, [Crash(-1, 18, "before")], "the model is not what was released"),
        (forgotten_expulsions, LYING, [Killed(7, "after")], "the run does not end"),
    ],
)
def test_a_sabotaged_federation_is_found_out(monkeypatch, sabotage, tolerate, faults, complaint):
    happens(faults, tolerate)
    sabotage(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        happens(faults, tolerate)


@pytest.mark.slow
def test_a_sabotage_is_found_among_generated_lists_and_shrunk_to_the_shortest(monkeypatch):
    def breaks(faults):
        with monkeypatch.context() as patch:  # afresh: this sabotage remembers
            applied_before_it_is_written(patch)
            try:
                happens(faults, 0)
            except AssertionError:
                return True
            return False

    looked_for = settings(max_examples=2000, deadline=None, database=None)
    shortest = find(lists_of_faults(0), breaks, settings=looked_for, random=Random(3))
    assert len(shortest) == 1, shortest
