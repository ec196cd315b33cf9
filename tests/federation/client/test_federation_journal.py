"""A client gives the same answer to the same question, and no answer to a trick."""

from __future__ import annotations

import pytest
import torch

from trilemma.federation.client.journal import Again, Fresh, Journal, JournalEntry, what_to_do
from trilemma.federation.protocol import kinds
from trilemma.federation.protocol.reasons import Reason, Refused

BEFORE, AFTER = {"m": torch.zeros(1, 2)}, {"m": torch.ones(1, 2)}
SENT = {"vector": torch.arange(2.0)}
ENTRY = JournalEntry("run", 3, 10, "digest", SENT, BEFORE, AFTER)


def ask(epoch: int, round_: int, heard: int = 10) -> kinds.Ask:
    """A question to client 0, whose answer of round `heard` was the last one that was used."""
    return kinds.Ask(run="run", epoch=epoch, round=round_, heard={"0": heard, "1": 2}, unused=[])


def test_the_first_question_starts_from_the_beginning():
    assert what_to_do(None, 0, ask(0, 0), "any") == Fresh(None)
    assert what_to_do(None, 0, ask(4, 17), "any") == Fresh(None)


@pytest.mark.parametrize(
    ("question", "digest", "state"),
    [
        (ask(3, 11), "other", AFTER),
        (ask(4, 11), "other", AFTER),
        (ask(3, 15), "other", AFTER),
        (ask(3, 11, heard=9), "other", BEFORE),  # the server did not use the last answer
        (ask(3, 15, heard=7), "other", BEFORE),  # nor did it hear from this client in the rounds between
        (ask(5, 12, heard=-1), "other", BEFORE),
        (ask(4, 10, heard=9), "other", BEFORE),  # the round was given up and is asked under fresh keys
    ],
)
def test_a_new_step_starts_from_the_right_state(question, digest, state):
    todo = what_to_do(ENTRY, 0, question, digest)
    assert isinstance(todo, Fresh)
    assert todo.state is state


def test_the_same_question_gets_the_same_bytes():
    todo = what_to_do(ENTRY, 0, ask(3, 10), "digest")
    assert isinstance(todo, Again)
    assert torch.equal(todo.sent["vector"], SENT["vector"])


@pytest.mark.parametrize(
    ("question", "digest", "reason"),
    [
        (ask(3, 10), "other", Reason.REPEATED),
        (ask(3, 9), "digest", Reason.ROUND),
        (ask(2, 11), "digest", Reason.EPOCH),
        (ask(2, 10), "digest", Reason.EPOCH),
        (ask(4, 3), "digest", Reason.ROUND),
    ],
)
def test_tricks_are_refused(question, digest, reason):
    with pytest.raises(Refused) as refusal:
        what_to_do(ENTRY, 0, question, digest)
    assert refusal.value.reason is reason


def test_the_journal_survives_its_process(tmp_path):
    assert Journal(tmp_path / "run").last() is None
    Journal(tmp_path / "run").write(ENTRY)
    last = Journal(tmp_path / "run").last()
    assert (last.run, last.epoch, last.round, last.asked) == ("run", 3, 10, "digest")
    assert torch.equal(last.sent["vector"], SENT["vector"])
    assert torch.equal(last.before["m"], BEFORE["m"])
    assert torch.equal(last.after["m"], AFTER["m"])


def test_a_journal_that_cannot_be_written_means_no_answer(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "run")
    journal.write(ENTRY)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        journal.write(JournalEntry("run", 3, 11, "x", SENT, BEFORE, AFTER))
    assert journal.last().round == 10
