"""Who is in a federation is on one signed roster: what is believed of it, and how it comes into force."""

from __future__ import annotations

import datetime as dt
import json
import secrets
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from federation_harness import PRIVATE, Direct, coordinator, during, make, small_config
from trilemma.base import files
from trilemma.federation.client.node import Node
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import Former, Member, RosterError, SignedRoster, succession
from trilemma.federation.party.adoption import adopt, counted_on, know, known_to, strangers, vouch
from trilemma.federation.party.provisioning import write_known
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.confirmation import Position, Witness
from trilemma.federation.protocol.reasons import Refused
from trilemma.privacy.ledger.lines import read_entries
from trilemma.privacy.secrets import Identity

CLIENTS = 5


@pytest.fixture
def parties(tmp_path):
    config = small_config(CLIENTS, *PRIVATE, rounds=4)
    return make(tmp_path / "federation", CLIENTS, config, budget=1e6)


def authority_of(parties):
    return Authority.open(parties[0].folder.parent)


def stranger(name="newcomer"):
    return Member(name=name, identity=Identity.generate().public.hex(), tls=secrets.token_hex(32))


def without(roster, place):
    gone = roster.clients[place].model_copy(update={"removed": True})
    return (*roster.clients[:place], gone, *roster.clients[place + 1 :])


def signed_anew(parties, clients):
    authority = authority_of(parties)
    return authority.enact(authority.sign(authority.roster.federation, clients))


# --- what is believed -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signed():
    authority = certificates.new_authority("demo")
    return authority, SignedRoster.sign(authority, "demo", 3, tuple(stranger(f"m{i}") for i in range(3)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: file["roster"].update(serial=4), "not signed by this federation's authority"),
        (lambda file: file["roster"]["clients"].reverse(), "not signed by"),
        (lambda file: file["roster"]["clients"][1].update(removed=True), "not signed by"),
        (lambda file: file.update(signature="00" * 70), "not signed by"),
        (lambda file: file.update(signature="xx" * 70), "signature: String should match"),
        (lambda file: file["roster"].update(version=1), "version: Input should be 2"),
        (lambda file: file["roster"].update(serial=True), "serial: Input should be a valid integer"),
        (lambda file: file["roster"].update(serial=1 << 70), "serial"),
        (lambda file: file["roster"].update(colour="red"), "colour: Extra inputs"),
        (lambda file: file["roster"]["clients"][0].update(name="../../server"), r"clients\.0\.name"),
        (lambda file: file["roster"]["clients"][0].update(name="a\nb"), r"clients\.0\.name"),
        (
            lambda file: file["roster"]["clients"][0].update(tls=file["roster"]["clients"][1]["tls"]),
            "the same TLS key",
        ),
        (
            lambda file: file["roster"]["clients"][0].update(
                identity=file["roster"]["clients"][1]["identity"]
            ),
            "the same identity",
        ),
        (lambda file: file["roster"].update(clients=[]), "clients: "),
    ],
)
def test_a_roster_that_was_changed_is_not_believed(signed, change, complaint):
    authority, roster = signed
    file = json.loads(roster.text)
    change(file)
    with pytest.raises(RosterError, match=complaint):
        SignedRoster.read(json.dumps(file), authority.certificate)


@pytest.mark.parametrize("text", ["", "null", "[]", "{" * 5000, '{"roster": 1}', "x" * 1_000_000])
def test_gibberish_is_no_roster(signed, text):
    with pytest.raises(RosterError):
        SignedRoster.read(text, signed[0].certificate)


def test_an_expired_authority_signs_nothing_and_is_not_believed(parties, monkeypatch):
    old = certificates.new_authority("old", until=dt.datetime.now(dt.UTC) - dt.timedelta(days=1))
    with pytest.raises(ValueError, match="the authority's own certificate ended on"):
        SignedRoster.sign(old, "old", 1, (stranger(),))
    server = parties[0]
    roster = signed_anew(parties, without(server.signed_roster, 4))
    monkeypatch.setattr(certificates, "valid_until", lambda _: dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
    with pytest.raises(RosterError, match="ended on 2020-01-01"):
        adopt(server, roster.text)


def test_rosters_only_go_forwards(parties):
    server, client = parties[0], parties[1]
    first = client.signed_roster
    second = signed_anew(parties, without(first, 4))
    third = signed_anew(parties, (*second.clients, stranger()))
    assert adopt(client, third.text).keys.members == (0, 1, 2, 3, 5)
    for older in (first, second):
        with pytest.raises(RosterError, match=f"roster {older.serial} is older than roster 3"):
            adopt(client, older.text)
    assert client.signed_roster == third
    assert adopt(client, third.text) == third
    assert server.signed_roster == first, "everybody decides for itself"


def test_a_roster_of_another_authority_is_refused(parties):
    first = parties[1].signed_roster
    mallory = certificates.new_authority("test")
    with pytest.raises(RosterError, match="not signed by"):
        adopt(parties[1], SignedRoster.sign(mallory, "test", 9, first.clients).text)
    assert parties[1].signed_roster == first


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda clients: clients[:-1], "lost places"),
        (lambda clients: clients[::-1], "place 0 was client-0's"),
        (lambda clients: (stranger(clients[0].name), *clients[1:]), "which identity client 0 had before"),
    ],
)
def test_nobodys_place_changes(parties, change, complaint):
    authority, first = authority_of(parties), parties[1].signed_roster
    forged = SignedRoster.sign(authority.issued, first.federation, 2, change(first.clients))
    with pytest.raises(RosterError, match=complaint):
        adopt(parties[1], forged.text)
    with pytest.raises(RosterError, match=complaint):
        signed_anew(parties, change(first.clients))
    assert authority.roster == first


def test_two_rosters_with_one_number_are_noticed(parties):
    authority, first = authority_of(parties), parties[1].signed_roster
    one, other = (
        SignedRoster.sign(authority.issued, first.federation, 2, without(first, place)) for place in (3, 4)
    )
    adopt(parties[1], one.text)
    with pytest.raises(RosterError, match="two rosters with the number 2"):
        adopt(parties[1], other.text)


def test_who_was_removed_does_not_come_back(parties):
    authority, first = authority_of(parties), parties[1].signed_roster
    adopt(parties[1], signed_anew(parties, without(first, 4)).text)
    back = SignedRoster.sign(authority.issued, first.federation, 3, first.clients)
    with pytest.raises(RosterError, match="client 4 was removed"):
        adopt(parties[1], back.text)


# --- whom a client counts on ------------------------------------------------------------------------------


def test_an_invented_client_is_not_counted_on_until_its_owner_vouches(parties):
    client = parties[1]
    adopt(client, signed_anew(parties, (*client.signed_roster.clients, stranger())).text)
    assert strangers(client) == [5]
    assert counted_on(client, range(6)) == 5
    vouch(client, [5])
    assert counted_on(client, range(6)) == 6


def test_a_client_that_lost_its_list_counts_on_nobody_until_its_owner_vouches(parties):
    client = parties[1]
    everybody = client.signed_roster.keys.members
    assert counted_on(client, everybody) == len(everybody)
    client.known.unlink()
    assert counted_on(client, everybody) == 1
    vouch(client, everybody)
    assert counted_on(client, everybody) == len(everybody)


def test_an_owners_word_waits_for_who_works_in_the_folder(parties):
    """A node that adopts a roster writes the same list: neither forgets what the other wrote."""
    client = parties[1]
    with ThreadPoolExecutor() as elsewhere, files.locked(client.lock):
        word = elsewhere.submit(know, client, ["a later one"])
        wait([word], timeout=0.3)
        assert not word.done()
        write_known(client, known_to(client) | {"adopted meanwhile"})
    word.result(60)
    assert {"a later one", "adopted meanwhile"} <= known_to(client)


@pytest.mark.parametrize("by_the_old_one", [True, False])
def test_who_signs_its_successor_stays_known(parties, by_the_old_one):
    """The authority alone cannot put somebody else into a known client's place and be counted on."""
    client, moving = parties[1], parties[3]
    old, new = Identity.load(moving.identity), Identity.generate()
    Witness(client.ledgers_seen).see({2: Position(7, "old")})
    before = client.signed_roster.clients[2]
    signature = succession(old, new.public) if by_the_old_one else None
    former = Former(identity=before.identity, signature=signature)
    after = before.model_copy(update={"identity": new.public.hex(), "former": (former,)})
    clients = client.signed_roster.clients
    adopt(client, signed_anew(parties, (*clients[:2], after, *clients[3:])).text)
    assert (new.public.hex() in known_to(client)) is by_the_old_one
    assert strangers(client) == ([] if by_the_old_one else [2])
    Witness(client.ledgers_seen).check(2, Position(7, "covered by the new key"))
    with pytest.raises(ValueError, match="6 lines, it had 7 before"):
        Witness(client.ledgers_seen).check(2, Position(6, "set back"))


def test_a_known_client_has_one_successor_for_good(parties):
    """One colluder and the authority cannot make a crowd that is counted on out of one signing key."""
    client, traitor = parties[1], Identity.load(parties[3].identity)
    first = client.signed_roster.clients
    authority = authority_of(parties)

    def heir(name, of, *former):
        signed = Former(
            identity=of.public.hex(), signature=succession(of, (new := Identity.generate()).public)
        )
        return new, stranger(name).model_copy(
            update={"identity": new.public.hex(), "former": (*former, signed)}
        )

    new, moved = heir(first[2].name, traitor)
    adopt(client, signed_anew(parties, (*first[:2], moved, *first[3:])).text)
    assert strangers(client) == []
    _, moved_on = heir(first[2].name, new)
    _, twin = heir("twin", traitor)
    for clients in (
        (*first[:2], moved_on, *first[3:], twin),
        (*first[:2], moved.model_copy(update={"former": ()}), *first[3:], twin),
    ):
        forged = SignedRoster.sign(authority.issued, "test", 3, clients)
        with pytest.raises(RosterError, match="forgotten which identities client 2 had"):
            adopt(client, forged.text)
    _, moved_on = heir(first[2].name, new, *moved.former)
    adopt(client, signed_anew(parties, (*first[:2], moved_on, *first[3:])).text)
    assert strangers(client) == []


# --- a run goes on ----------------------------------------------------------------------------------------


def test_a_removed_client_is_out_at_the_next_epoch(parties):
    """Round 1 ends under the old roster; then the others share secrets anew, without client 4."""
    server = parties[0]

    def remove():
        adopt(server, signed_anew(parties, without(server.signed_roster, 4)).text)

    transport = Direct(parties, during({1: remove}))
    runner, said = coordinator(parties, transport)
    assert runner.go().rounds == 4
    assert "roster 2: clients 0 to 3" in said
    assert [record["epoch"] for record in runner.log.records()] == [0, 0, 1, 1]
    assert runner.log.records()[-1]["absent"] == []
    assert set(runner.log.records()[-1]["weights"]) == {"0", "1", "2", "3"}
    for party in parties[1:5]:
        assert party.signed_roster.serial == 2
        assert [entry.run for entry in read_entries(party.ledger)] == ["run/0"] * 2 + ["run/1"] * 2
    gone = parties[5]
    assert gone.signed_roster.serial == 1
    assert len(read_entries(gone.ledger)) == 2, "what it released stays in its ledger"
    assert ("finished" in [kind for client, kind in transport.asked if client == 4]) is False


def test_who_was_away_when_the_epoch_was_called_is_called_when_it_comes(parties):
    transport = Direct(parties, gone={4})
    transport.tamper = during({1: transport.gone.clear})
    runner, _ = coordinator(parties, transport)
    assert runner.go().rounds == 4
    records = runner.log.records()
    assert [record["epoch"] for record in records] == [0, 0, 1, 1]
    assert [record["absent"] for record in records] == [[4], [4], [], []]


def test_messages_of_a_removed_client_are_refused(parties):
    """It knows the run, has its keys and the old roster, and pushes itself into every hello."""
    server = parties[0]
    adopt(server, signed_anew(parties, without(server.signed_roster, 4)).text)
    runner, said = coordinator(parties, Direct(parties))
    assert runner.go().rounds == 4
    assert "epoch 0: clients 0 to 3 of 4" in said
    assert read_entries(parties[5].ledger) == []
    with pytest.raises(Refused, match="terms: "):
        Node(parties[5]).answer(wire.dumps(kinds.Hello(run="run", epoch=1, terms=server.agreed.terms)))


def test_a_server_that_goes_back_to_an_old_roster_is_refused(parties):
    server, first = parties[0], parties[0].signed_roster
    adopt(server, signed_anew(parties, without(first, 4)).text)
    coordinator(parties, Direct(parties))[0].go()
    first.save(server.roster)
    hello = kinds.Hello(run="again", epoch=0, terms=server.agreed.terms, roster=first.text)
    with pytest.raises(Refused, match="roster: the roster is older"):
        Node(parties[1]).answer(wire.dumps(hello))
    assert "roster 1 is older than roster 2" in parties[1].log.read_text()
    forged = replace(first, serial=7)
    with pytest.raises(Refused, match="roster: "):
        Node(parties[1]).answer(wire.dumps(hello.model_copy(update={"roster": forged.text})))
    assert parties[1].signed_roster.serial == 2


def test_a_server_that_was_away_while_the_roster_changed_opens_another_epoch(parties):
    server = parties[0]

    class Crash(Exception):
        pass

    def crash():
        raise Crash

    runner, _ = coordinator(parties, Direct(parties, during({2: crash})))
    with pytest.raises(Crash):
        runner.go()
    adopt(server, signed_anew(parties, without(server.signed_roster, 0)).text)
    runner, said = coordinator(parties, Direct(parties))
    assert runner.go().rounds == 4
    assert "epoch 1: clients 1 to 4 of 4" in said
