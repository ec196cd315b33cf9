"""A malicious server that expels honest clients leads nobody to a weaker guarantee, and nobody comes back."""

from __future__ import annotations

import pytest
from malicious_server import Server, entries, opened, refusal

from federation_harness import PRIVATE, make, small_config
from trilemma.base.errors import UserError
from trilemma.federation.client import spending
from trilemma.federation.client.proposals import Manifest
from trilemma.federation.client.sessions import Session
from trilemma.federation.operations import membership
from trilemma.federation.party import layout
from trilemma.federation.party.adoption import adopt
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, check_announced
from trilemma.federation.protocol.reasons import Reason, Refused

CLIENTS = 6
EVIDENCE = (*PRIVATE, "aggregation.rule=evidence+mean")


def expelled(*clients, **figures):
    """What a server claims about clients: each was expelled a round after the other."""
    said = {"test": "length", "statistic": 20.0, "threshold": 12.0, **figures}
    return [
        AnnouncedExpulsion(client=client, round=1 + place, **said) for place, client in enumerate(clients)
    ]


@pytest.fixture
def parties(tmp_path):
    config = small_config(CLIENTS, *EVIDENCE, tolerate=2)
    return make(tmp_path / "federation", CLIENTS, config, budget=1e6)


def test_honest_clients_expelled_one_after_another_end_in_refusal_and_cost_nobody_more_than_allowed(parties):
    """Of six, f = 2: four are enough for what the owner allowed, three are not."""
    server, me = Server(parties), parties[1]
    manifest = Manifest.of(me, load_task(me), "run")
    assert manifest.threshold == 4
    for epoch in range(3):
        server.open(epoch, range(CLIENTS - epoch), expelled(*range(5, 5 - epoch, -1)))
        server.ask(0, epoch, epoch)
    gone = expelled(5, 4, 3)
    offers = server.hello(3, range(3), gone)
    refusal(Reason.MEMBERS, server.keys, 0, 3, offers)
    refusal(Reason.UNCONFIRMED, server.ask, 0, 3, 2)
    paid = entries(me)
    assert len(paid) == 3
    assert paid[0].mechanism.z > paid[1].mechanism.z > paid[2].mechanism.z
    assert min(paid[-1].epsilon.values()) <= manifest.epsilon


def test_a_server_that_calls_the_expelled_absent_gains_nothing(parties):
    server = Server(parties)
    offers = server.hello(0, range(3))
    refusal(Reason.MEMBERS, server.keys, 0, 0, offers)


def test_an_owner_may_accept_fewer_and_pays_for_it(parties):
    budget = parties[1].budget
    budget.write_text("least_members = 3\n" + budget.read_text())
    assert spending.least_members(parties[1], load_task(parties[1])) == 3


def test_an_expulsion_without_a_change_of_members(parties):
    """The call says that 5 is expelled, and the keys have it all the same."""
    server = Server(parties)
    offers = server.hello(0, range(5), expelled(5))
    offers[5] = server.hello(0, [5])[5]
    refusal(Reason.EXPULSIONS, server.keys, 0, 0, offers)


def test_nobody_comes_back(parties):
    server = Server(parties)
    server.open(0, range(5), expelled(5))
    refusal(Reason.EXPULSIONS, server.hello, 1, [0])
    refusal(Reason.EXPULSIONS, server.hello, 1, [0], expelled(4))
    refusal(Reason.EXPULSIONS, server.hello, 1, [0], expelled(5, statistic=21.0))
    restarted = Server(parties)
    refusal(Reason.EXPULSIONS, restarted.hello, 1, [0])
    restarted.open(1, range(4), expelled(5, 4))
    assert Session(parties[1], "run").secrets.members == (0, 1, 2, 3)


def test_new_keys_bring_nobody_back(parties):
    """Who was expelled is a place on the roster: with new keys it is the same place."""
    Server(parties).open(0, range(5), expelled(5))
    folder = parties[0].folder.parent
    before = parties[6].keys.key(5)
    membership.rotate(folder, "5", None)
    parties = layout.parties(folder)
    for party in parties[1:]:
        adopt(party, parties[0].roster.read_text())  # as with the next call
    assert parties[6].keys.key(5) != before
    server = Server(parties)
    refusal(Reason.EXPULSIONS, server.hello, 1, [0])
    refusal(Reason.EXPELLED, server.hello, 1, [5], expelled(5))
    offers = server.hello(1, range(5), expelled(5))
    own = Session(parties[6], "another").open(1, parties[6].agreed)
    refusal(Reason.EXPULSIONS, server.keys, 0, 1, {**offers, 5: own})
    server.open(2, range(5), expelled(5))


def test_an_epoch_has_one_list(parties):
    """Repeated with another list, in the same epoch or in one that is over, a call is refused."""
    server = opened(parties)
    refusal(Reason.EXPULSIONS, server.hello, 0, [0], expelled(5))
    server.open(1, range(5), expelled(5))
    refusal(Reason.EPOCH, server.hello, 0, [0], expelled(5))
    refusal(Reason.EXPULSIONS, server.hello, 1, [0], expelled(5, 4))
    assert server.hello(1, [0], expelled(5)), "the very same call is answered as before"


def test_two_members_told_of_two_lists_do_not_confirm_each_other(parties):
    server = Server(parties)
    offers = server.hello(0, [0, 1], expelled(5, 4)) | server.hello(0, [2, 3], expelled(4, 5))
    confirmations = {client: server.keys(client, 0, offers) for client in range(4)}
    refusal(Reason.UNCONFIRMED, server.confirm, 0, 0, confirmations)


def test_a_run_without_evidence_expels_nobody(tmp_path):
    parties = make(tmp_path / "federation", 5, small_config(5, *PRIVATE), budget=1e6)
    server = Server(parties)
    refusal(Reason.EXPULSIONS, server.hello, 0, [0], expelled(4))
    server.open(0, range(5))
    told = wire.dumps(kinds.Expelled(run="run", expulsion=expelled(4)[0]))
    refusal(Reason.EXPULSIONS, server.nodes[4].answer, told)


def test_who_is_told_takes_no_further_part_and_nobody_is_told_about_others(parties):
    server = opened(parties)
    (verdict,) = expelled(5)
    told = wire.dumps(kinds.Expelled(run="run", expulsion=verdict))
    refusal(Reason.EXPULSIONS, server.nodes[0].answer, told)
    assert server.ask(5, 0, 0) is not None
    for _ in range(2):
        wire.loads(server.nodes[5].answer(told), kinds.Noted)
    assert Session(parties[6], "run").expelled == verdict
    refusal(Reason.EXPELLED, server.ask, 5, 0, 1)
    refusal(Reason.EXPELLED, Server(parties).hello, 1, [5])
    refusal(
        Reason.RUN,
        Server(parties, "another").nodes[5].answer,
        wire.dumps(kinds.Expelled(run="another", expulsion=verdict)),
    )


@pytest.mark.parametrize(
    "announced",
    [
        expelled(5, 5),
        expelled(CLIENTS),
        expelled(5, statistic=11.0),
        expelled(5, low=True),
        expelled(5, statistic=None),
        expelled(5, test="not finite", statistic=1.0),
    ],
    ids=["twice", "nobody", "honest", "not below", "no figure", "figures of nothing"],
)
def test_a_list_that_cannot_be_is_refused(announced):
    with pytest.raises(Refused) as refused:
        check_announced(announced, (), CLIENTS, expels=True)
    assert refused.value.reason is Reason.EXPULSIONS


def test_figures_that_are_none_cannot_be_said():
    for nonsense in (float("nan"), float("inf"), "12"):
        with pytest.raises(ValueError, match="statistic"):
            expelled(5, statistic=nonsense)
    block = wire.dumps(kinds.Hello(run="run", epoch=0, terms="", expelled=expelled(5)))
    assert wire.loads(block, kinds.Hello)[0].expelled == expelled(5)
    with pytest.raises(UserError, match="header"):
        wire.loads(block.replace(b'"length"', b'"lenght"'), kinds.Hello)
