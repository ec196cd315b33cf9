"""A federation changes while it runs, with real processes: a client comes, one gets new keys, one goes.

`tests/federation/party/test_federation_renewal.py` has all of it without processes, every day.
"""

from __future__ import annotations

import pytest
from deployed_harness import real, wait_for

from federation_harness import PRIVATE, command, small_config
from trilemma.base.records import Record
from trilemma.federation.operations import deployment
from trilemma.federation.party.layout import parties
from trilemma.federation.processes.door import ask
from trilemma.privacy.ledger.lines import read_entries

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly]

CLIENTS = 4


def test_a_client_comes_one_gets_new_keys_and_one_goes(tmp_path):
    """One run, never stopped: each change is a new epoch, and nobody else notices more than that."""
    noise = ("privacy.sigma_ind=20.0", "privacy.sigma_cor=20.0")  # so that budgets reach to the end
    config = small_config(CLIENTS, *PRIVATE, *noise, rounds=5000)  # more than there is time for
    folder = tmp_path / "federation"
    with real(folder, CLIENTS, config, budget=1e9) as running:

        def rounds() -> list[dict]:
            return running.log("renewed").records()

        def heard_in_last_round(*clients: int) -> bool:
            last = Record.read(rounds()[-1])
            return set(clients) <= last.weights.keys() - last.unheard

        running.start("renewed")
        wait_for(lambda: len(rounds()) >= 2, 240.0)

        assert "client 4 (client-4) is on it" in command("add-client", folder)
        command("up", folder)
        wait_for(lambda: heard_in_last_round(0, 1, 2, 3, 4), 240.0)

        assert "client-1 was started anew" in command("rotate", folder, 1)
        before = len(rounds())
        wait_for(lambda: len(rounds()) > before and heard_in_last_round(0, 1, 2, 3, 4), 240.0)

        command("remove-client", folder, 0)
        wait_for(lambda: "0" not in rounds()[-1]["weights"], 240.0)
        spent = len(read_entries(parties(folder)[1].ledger))
        assert set(running.status()["there"]) == {"1", "2", "3", "4"}
        list(ask(running.server, ask="stop"))
        assert running.wait("renewed") == "stopped"
        epochs = sorted({record["epoch"] for record in rounds()})
        assert len(epochs) >= 4
        assert len(read_entries(parties(folder)[1].ledger)) == spent, "who was removed is asked nothing"
        assert "client-0: not started, it was removed" in command("up", folder)
        deployment.down(folder / "client-0")
