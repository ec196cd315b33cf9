"""A real federation with two adaptive liars: expelled, re-keyed, undone, finished; it is the simulation."""

from __future__ import annotations

import sys

import pytest
import torch
from deployed_harness import LIAR, real

from federation_harness import result_of, share_seeds
from federation_liars import (
    CARELESS,
    CLIENTS,
    LIARS,
    careless_from,
    check_against_lying_simulation,
    expelling,
    secrets_by_client,
)
from trilemma.federation.client.sessions import Session, _SessionHeader
from trilemma.federation.party import sealed_files
from trilemma.federation.protocol.reasons import Reason
from trilemma.federation.server.replay import replay
from trilemma.privacy.secrets import SecretNoise

pytestmark = [pytest.mark.federation, pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]


def noted(parties, run):
    """Everybody's secrets by epoch: the last epoch's are in the folders, earlier ones a liar has seen."""
    found: dict[int, dict[int, SecretNoise]] = {}
    for liar in parties[-LIARS:]:
        for path in (liar.folder / "noted").iterdir():
            epoch, client = map(int, path.name.split("-"))
            header, _ = sealed_files.read(path, _SessionHeader)
            pairs = {int(other): bytes.fromhex(key) for other, key in header.pairs.items()}
            noise = SecretNoise(client, pairs, parties[1 + client].reproducible.noise)
            found.setdefault(epoch, {})[client] = noise
    for epoch, noise in secrets_by_client(parties, run):
        found.setdefault(epoch, {})[noise.index] = noise
    return found


def test_two_adaptive_liars_are_expelled_and_the_run_is_the_simulation(tmp_path):
    config = expelling()
    with real(tmp_path / "federation", CLIENTS, config, budget=1e9, transcript=True) as running:
        parties = running.parties
        share_seeds(parties, config)
        for party in parties[-LIARS:]:
            program = (sys.executable, str(LIAR), str(party.folder), "adaptive", str(LIARS), str(CARELESS))
            running.restart(party, program)
        records = running.go("expulsion", limit=240.0)
        said = running.said()
    assert [[one["client"] for one in record["expelled"]] for record in records] == [[], [], [3], [4], []]
    assert [record["epoch"] for record in records] == [0, 0, 0, 1, 2]
    assert "client 3 expelled for good" in said
    secrets, attack = noted(parties, "expulsion"), careless_from(CARELESS)
    gone = check_against_lying_simulation(parties, config, "expulsion", LIARS, attack, secrets)
    assert gone == [3, 4]
    replayed = replay(parties[0], "expulsion")
    assert torch.equal(replayed.broadcast["params"], result_of(parties, "expulsion")["params"])
    assert [one.client for one in replayed.expelled] == [3, 4]
    for party in parties[-LIARS:]:
        assert Session(party, "expulsion").expelled in replayed.expelled, Reason.EXPELLED.told
        assert not (party.run_folder("expulsion") / "result").exists()
    for party in parties[1 : 1 + CLIENTS - LIARS]:
        assert Session(party, "expulsion").secrets.expelled == replayed.expelled
        assert (party.run_folder("expulsion") / "result").exists()
