"""One client against all the others: what it says while an epoch begins costs it the epoch, nobody else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma.base.errors import PrivacyError
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.confirmation import Confirmation, Position, Sighting, Witness
from trilemma.privacy.secrets import Identity, Offer

CLIENTS, SPOILER = 5, 4


@pytest.fixture
def parties(tmp_path):
    return make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE, rounds=2), budget=1e6)


def padded_key(party, joined):
    """An offer that is read as before, and takes everybody's room in the block of all offers."""
    return joined.key + " " * 60_000


def powerless_key(party, joined):
    """A point of low order, properly signed: whoever shares a secret with it shares it with all."""
    offer = replace(Offer.decode(bytes.fromhex(joined.key)), ephemeral=bytes(32))
    signature = Identity.load(party.identity).sign(offer.signed(party.keys))
    return replace(offer, signature=signature).encode().hex()


def shouted_key(party, joined):
    """The same offer in other letters: members compare texts."""
    return joined.key.upper()


def check_the_others_go_on(parties, spoil, run="run"):
    runner, said = coordinator(parties, Direct(parties, spoil), run)
    assert runner.go().rounds == 2
    assert [record["absent"] for record in runner.log.records()] == [[SPOILER]] * 2
    assert [line for line in said if "rejected" in line or "refused" in line]
    assert not any(
        f"client {other}:" in line for line in said for other in range(CLIENTS) if other != SPOILER
    )


@pytest.mark.parametrize("key", [padded_key, powerless_key, shouted_key])
def test_a_bad_key_costs_its_owner_the_epoch_and_not_everybody(parties, key):
    def spoil(client, asked, answer):
        if client != SPOILER or wire.kind_of(answer) != "joined":
            return answer
        joined, _ = wire.loads(answer, kinds.Joined)
        return wire.dumps(joined.model_copy(update={"key": key(parties[1 + client], joined)}))

    check_the_others_go_on(parties, spoil)


def test_a_bad_confirmation_costs_its_owner_the_epoch_and_not_everybody(parties):
    def spoil(client, asked, answer):
        if client != SPOILER or wire.kind_of(answer) != "ready":
            return answer
        ready, _ = wire.loads(answer, kinds.Ready)
        length, digest, signature = json.loads(ready.confirmation)
        padded = json.dumps([length, digest, signature + " " * 60_000])
        return wire.dumps(ready.model_copy(update={"confirmation": padded}))

    check_the_others_go_on(parties, spoil)


def test_a_client_that_was_set_back_does_not_stop_a_server_that_has_forgotten(parties, tmp_path):
    """The others show it what that client signed before; it goes on without it, and knows it again."""
    spoiler, seen = parties[1 + SPOILER].folder, parties[0].ledgers_seen
    shutil.copytree(spoiler, tmp_path / "image")
    coordinator(parties, Direct(parties), "first")[0].go()
    before = Witness(seen).seen()[SPOILER]
    coordinator(parties, Direct(parties), "second")[0].go()
    known = Witness(seen).seen()[SPOILER]
    assert known.length > before.length
    shutil.rmtree(spoiler)
    shutil.copytree(tmp_path / "image", spoiler)
    seen.unlink()
    check_the_others_go_on(parties, lambda client, asked, answer: answer)
    assert Witness(seen).seen()[SPOILER] == known
    check_the_others_go_on(parties, lambda client, asked, answer: answer, "later")


def forged(parties, about):
    """What client 0 never signed, by who has another key."""
    return Sighting.sign("list", 0, Position(99, "d"), Identity.load(parties[1 + SPOILER].identity))


def of_another(parties, about):
    """What another client signed, as if it were client 0's."""
    return Sighting.sign("list", 1, Position(99, "d"), Identity.load(parties[2].identity))


def not_newer(parties, about):
    """What client 0 did sign, when the epoch began."""
    return about


@pytest.mark.parametrize("show", [forged, of_another, not_newer])
def test_nobody_is_left_out_for_what_it_did_not_sign(parties, show):
    def spoil(client, asked, answer):
        if client != SPOILER or wire.kind_of(answer) != "confirmed":
            return answer
        told, _ = wire.loads(asked, kinds.Confirm)
        shown = Confirmation.decode(told.confirmations["0"])
        sighting = show(parties, Sighting("", shown.ledger, shown.signature))
        caveats = {"0": sighting.encode()}
        return wire.dumps(kinds.Doubted(client=client, run=told.run, epoch=told.epoch, shown=caveats))

    runner, said = coordinator(parties, Direct(parties, spoil))
    assert runner.go().rounds == 2
    assert not any(record["absent"] for record in runner.log.records())
    assert any("nothing that shows that the ledger of client 0 went back" in line for line in said)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([0, "", "ab" * 64 + " "]),
        json.dumps([0, "", "AB" * 64]),
        json.dumps([0, "", "ab" * 65]),
        json.dumps([10**300, "", "ab" * 64]),
    ],
)
def test_a_confirmation_is_as_long_as_confirmations_are(text):
    Confirmation.decode(json.dumps([0, "", "ab" * 64]))
    with pytest.raises(PrivacyError):
        Confirmation.decode(text)
