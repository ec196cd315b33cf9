"""Where a federation stands, told by folders alone: who answered, what was spent, what cannot be read."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma.cli.federation import federation_app
from trilemma.federation import wire
from trilemma.report.federations import standing

CLIENTS = 4


def sends_nonsense(client: int, asked: bytes, answer: bytes) -> bytes:
    return b"nonsense" if client == 2 and wire.kind_of(asked) == "ask" else answer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A private run of four clients, of whom client 2 sends nonsense; none of its processes are there."""
    folder = tmp_path_factory.mktemp("standing") / "federation"
    parties = make(folder, CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6)
    coordinator(parties, Direct(parties, sends_nonsense))[0].go()
    return folder


def look(folder, *options: str):
    outcome = CliRunner().invoke(federation_app, ["status", str(folder), *options])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_the_server_knows_who_was_heard_and_a_client_what_it_spent(finished):
    told = json.loads(look(finished, "--json"))["parties"]
    server, client = told[0], told[1]
    (run,) = server["runs"]
    assert (run["name"], run["state"], run["round"], run["rounds"], run["epoch"]) == (
        "run",
        "finished",
        3,
        3,
        0,
    )
    nonsense = run["members"][2]
    assert (nonsense["now"], nonsense["heard"], nonsense["absent"], nonsense["rejected"]) == (
        "rejected",
        None,
        3,
        3,
    )
    assert nonsense["reason"].startswith("not a block")
    assert [one["now"] for one in run["members"]] == ["heard", "heard", "rejected", "heard"]
    assert sum(one["share"] for one in run["members"]) == pytest.approx(1.0, abs=1e-5)
    assert list(run["scores"]) == ["1", "2", "3"]
    assert "account" not in server
    assert "runs" not in client
    assert client["account"]["rounds"] == {"run/0": 3}
    assert 0 < client["account"]["spent"] == pytest.approx(1e6 - client["account"]["left"])


def test_what_is_shown_says_the_same_in_words(finished):
    shown = " ".join(look(finished).split())
    assert "run run: finished, 3 rounds committed of 3, epoch 0, last written" in shown
    assert "client 2 was last rejected: not a block" in shown
    assert re.search(r"round 3: .*accuracy 0\.\d+", shown)


def test_a_party_that_cannot_be_read_says_so_and_hides_no_other(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    ledger = folder / "client-1" / "state" / "ledger"
    ledger.write_bytes(ledger.read_bytes().replace(b'"round":1', b'"round":9'))
    (folder / "server" / "config.toml").write_text("no = 'configuration'")
    (folder / "client-3" / "budget.toml").write_text("epsilon = 'much'")
    (folder / "client-3" / "state" / "ledger").unlink()
    found = {one.party: one for one in standing(folder)}
    assert "cannot be read as a run" in found["server"].problem
    assert "changed or is out of place" in found["client-1"].account.problem
    assert "budget.toml" in found["client-3"].account.problem
    assert found["client-2"].account.rounds == {"run/0": 3}
    assert "changed or is out of place" in " ".join(look(folder).split())


def test_a_folder_before_its_first_round_has_nothing_to_tell(tmp_path):
    make(tmp_path / "new", 3, small_config(3))
    found = standing(tmp_path / "new")
    assert [one.problem for one in found] == [""] * 4
    assert found[0].runs == ()
    assert found[1].account.left is None
