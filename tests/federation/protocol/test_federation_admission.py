"""Every way a reply can be wrong has its reason; a wrong reply never costs the others theirs."""

from __future__ import annotations

import re
from dataclasses import replace
from mmap import ACCESS_READ, mmap

import pytest
import torch

from trilemma import models
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.admission import Expected, admit
from trilemma.federation.protocol.transport import Reply
from trilemma.learning import MessageLayout, Messages, Part
from trilemma_lab.compressed.dgc import sparse_message

DIM = 5
LAYOUT = MessageLayout((Part("momentum", (DIM,)),), ("momentum",))
EXPECTED = Expected("run", epoch=1, round=7, layout=LAYOUT, clients={100: 0, 101: 1, 102: 2})


def answer(tensors=None, **changes):
    fields = {"client": 1, "run": "run", "epoch": 1, "round": 7} | changes
    return wire.dumps(kinds.Answer(**fields), {"vector": torch.ones(DIM)} if tensors is None else tensors)


GOOD = [Reply(100, answer(client=0)), Reply(102, answer(client=2))]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (answer(round=6), "round 6 where 7"),
        (answer(round=8), "round 8 where 7"),
        (answer(epoch=0), "epoch 0 where"),
        (answer(run="other"), "run 'other'"),
        (answer(client=2), "claims to be client 2"),
        (answer({"vector": torch.ones(DIM + 1)}), r"shape \(6,\)"),
        (answer({"vector": torch.ones(1, DIM)}), r"shape \(1, 5\)"),
        (answer({"vector": torch.ones(DIM, dtype=torch.float64)}), "float64"),
        (answer({"vector": torch.tensor([1.0, 2, 3, 4, torch.nan])}), "not finite"),
        (answer({"vector": torch.tensor([1.0, 2, 3, 4, -torch.inf])}), "not finite"),
        (answer({"vector": torch.ones(DIM), "more": torch.ones(1)}), "only .vector. was declared"),
        (answer({}), "only .vector. was declared"),
        (answer({"vector": torch.ones(10_000)}), "bytes where at most"),
        (b"", "version"),
        (wire.dumps(kinds.Noted(client=1, run="run")), "'noted' where 'answer'"),
        (None, "unreached: crashed"),
    ],
)
def test_a_wrong_reply_is_rejected_and_the_round_goes_on(block, reason):
    outcome = admit(EXPECTED, [GOOD[0], Reply(101, block, error="crashed"), GOOD[1]])
    assert sorted(outcome.vectors) == [0, 2]
    (rejection,) = outcome.rejected
    assert (rejection.node, rejection.client) == (101, 1)
    assert re.search(reason, rejection.reason)


@pytest.mark.parametrize("together", [True, False])
def test_a_node_that_says_two_things_counts_as_byzantine(together):
    """Whether both come in one call or in two: neither is used, the others' are."""
    first, second = answer(client=0), answer({"vector": torch.zeros(DIM)}, client=0)
    one, other = Reply(100, first, question="q1"), Reply(100, second, question="q2")
    if together:
        outcome = admit(EXPECTED, [one, GOOD[1], other])
    else:
        outcome = admit(EXPECTED, [other], admit(EXPECTED, [one, GOOD[1]]))
    assert sorted(outcome.vectors) == [2]
    assert [(one.client, one.reason) for one in outcome.rejected] == [(0, "a second reply in one round")]


def test_asked_twice_an_honest_client_says_the_same_twice():
    replies = [Reply(100, answer(client=0), question=question) for question in ("q1", "q2")]
    outcome = admit(EXPECTED, [*replies, Reply(100, error="gone", question="q3")])
    assert sorted(outcome.vectors) == [0]
    assert not outcome.rejected


def test_a_long_reply_that_comes_twice_is_one_reply(tmp_path):
    """Those lie in mapped files: two of them are the same where their bytes are."""
    (tmp_path / "reply").write_bytes(answer(client=0))
    replies = []
    for question in ("q1", "q2"):
        with (tmp_path / "reply").open("rb") as file:
            replies.append(Reply(100, mmap(file.fileno(), 0, access=ACCESS_READ), question=question))
    outcome = admit(EXPECTED, replies)
    assert sorted(outcome.vectors) == [0]
    assert not outcome.rejected


def test_the_same_question_is_answered_once():
    outcome = admit(EXPECTED, [Reply(100, answer(client=0), question="q1")] * 2)
    assert not outcome.vectors
    assert outcome.rejected[0].reason == "a second reply in one round"


def test_an_error_is_no_reply():
    """Flower could not reach the client at first, or it refused at first: what it says then counts."""
    outcome = admit(EXPECTED, [Reply(100, error="unavailable"), GOOD[0]])
    assert sorted(outcome.vectors) == [0]
    assert len(outcome.rejected) == 1


def test_a_bad_first_reply_cannot_be_mended_by_a_second():
    outcome = admit(EXPECTED, [Reply(100, answer(client=0, round=6)), Reply(100, answer(client=0))])
    assert not outcome.vectors
    assert len(outcome.rejected) == 2


def test_strangers_are_rejected():
    (rejection,) = admit(EXPECTED, [Reply(555, answer())]).rejected
    assert (rejection.client, rejection.reason) == (None, "the node was not asked")


def test_absent_clients_are_rows_of_nan():
    stack = admit(EXPECTED, GOOD).stack((0, 1, 2), DIM)
    assert torch.isfinite(stack).all(1).tolist() == [True, False, True]
    assert torch.isnan(stack[1]).all()


def test_encoded_messages_are_read_or_turned_away():
    """Bytes that no encoder wrote cost their sender its say, and nobody else's."""
    layout = sparse_message(models.build("logistic", (19,), 2))
    expected = replace(EXPECTED, layout=layout)
    sent = torch.arange(20) % 5 == 0
    good = layout.encode(Messages(sent[None].float(), {"sent": sent[None]}))
    bad = [
        {"encoded": torch.zeros(3, dtype=torch.uint8)},
        {"encoded": torch.full((80,), 255, dtype=torch.uint8)},
        {"encoded": torch.zeros(layout.longest.bytes + 1, dtype=torch.uint8)},
        {"encoded": torch.zeros(8, dtype=torch.float32)},
        {"vector": torch.ones(20)},
        {"encoded": torch.tensor([*good["encoded"][:-1].tolist(), 255], dtype=torch.uint8)[:-1]},
    ]
    for wrong in bad:
        replies = [Reply(100, answer(good, client=0)), Reply(101, answer(wrong))]
        outcome = admit(expected, replies)
        assert sorted(outcome.vectors) == [0]
        assert torch.equal(outcome.vectors[0], sent.float())
        assert outcome.rejected[0].client == 1
