"""What is wrong with a party is named, with its cure, by the party that has it: damaged folders."""

from __future__ import annotations

import datetime as dt
import errno
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from free_ports import free_ports
from trilemma.base.errors import UserError
from trilemma.cli.federation import federation_app
from trilemma.federation.client.account import check_remembered
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.operations import checks, doctor, reaching
from trilemma.federation.party import bundles
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import METRICS, Party, parties
from trilemma.federation.party.provisioning import install_certificate
from trilemma.federation.processes import groups as processes

CLIENTS = 3
YEAR = dt.timedelta(days=365)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """A federation of three that has done a run; nothing of it is running."""
    folder = tmp_path_factory.mktemp("doctor") / "federation"
    made = make(folder, CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6, port=free_ports(1))
    coordinator(made, Direct(made))[0].go()
    return folder


@pytest.fixture
def folder(healthy, tmp_path) -> Path:
    """A copy that may be damaged."""
    copy = tmp_path / "federation"
    shutil.copytree(healthy, copy)
    return copy


def issued(folder: Path, name: str, until: dt.datetime | None = None) -> certificates.Issued:
    authority = certificates.Issued(
        (folder / "authority" / "ca.crt").read_bytes(), (folder / "authority" / "ca.key").read_bytes()
    )
    if name == "server":
        return certificates.issue_server(authority, ("127.0.0.1",), until)
    return certificates.issue_client(authority, name, until)


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def foreign(folder: Path) -> None:
    other = certificates.issue_client(certificates.new_authority("other"), "client-1")
    install_certificate(Party.open(folder / "client-1"), other)


def expired(folder: Path) -> None:
    install_certificate(
        Party.open(folder / "client-1"), issued(folder, "client-1", now() - dt.timedelta(days=2))
    )


def someone_elses(folder: Path) -> None:
    install_certificate(Party.open(folder / "client-1"), issued(folder, "client-2"))


def of_another_key(folder: Path) -> None:
    (folder / "client-1" / "tls" / "client.crt").write_bytes(issued(folder, "client-1").certificate)


def ends_soon(folder: Path) -> None:
    install_certificate(
        Party.open(folder / "client-1"), issued(folder, "client-1", now() + dt.timedelta(days=9, hours=1))
    )


def readable_key(folder: Path) -> None:
    (folder / "client-1" / "secrets" / "client.key").chmod(0o644)


def no_identity(folder: Path) -> None:
    (folder / "client-1" / "secrets" / "identity.key").unlink()


def another_identity(folder: Path) -> None:
    for name in ("identity.key",):
        shutil.copy(folder / "client-2" / "secrets" / name, folder / "client-1" / "secrets" / name)


def another_config(folder: Path) -> None:
    config = folder / "client-1" / "config.toml"
    config.write_text(config.read_text() + "\n# and a remark")


def no_config(folder: Path) -> None:
    (folder / "client-1" / "config.toml").write_text("[federation]\nclients = 'many'\n")


def changed_ledger(folder: Path) -> None:
    ledger = folder / "client-1" / "state" / "ledger"
    ledger.write_bytes(ledger.read_bytes().replace(b'"round":1', b'"round":9'))


def lost_ledger(folder: Path) -> None:
    (folder / "client-1" / "state" / "ledger").unlink()


def no_roster(folder: Path) -> None:
    (folder / "client-1" / "roster.json").write_text("{}")


def installed_in_part(folder: Path) -> None:
    bundles.write_bundle(Authority.open(folder), 1, folder).rename(parties(folder)[2].installing)


def broken_bundle(folder: Path) -> None:
    installed_in_part(folder)
    path = parties(folder)[2].installing
    path.write_text(path.read_text()[:500])


def someone_elses_bundle(folder: Path) -> None:
    bundles.write_bundle(Authority.open(folder), 2, folder).rename(parties(folder)[2].installing)


DAMAGES: dict[Callable[[Path], None], tuple[str, str, bool]] = {
    foreign: ("certificate", "foreign: not issued by the authority", True),
    expired: ("certificate", "has expired: it was valid until", True),
    someone_elses: ("certificate", "is that of client-2, not of client-1", True),
    of_another_key: ("certificate", "client.key is not the key of client.crt", True),
    ends_soon: ("certificate", "expires in 9 days", False),
    readable_key: ("keys", "can be read by others", True),
    no_identity: ("keys", "identity.key is missing", True),
    another_identity: ("keys", "identity.key is not that of client-1 on the roster", True),
    another_config: ("agreement", "config.toml differs from that of server", False),
    no_config: ("configuration", "clients", True),
    changed_ledger: ("memory", "changed or is out of place", True),
    lost_ledger: ("memory", "was deleted or set back", True),
    no_roster: ("folder", "no roster at", True),
    installed_in_part: ("bundle", "was installed in part (installing.json)", False),
    broken_bundle: ("bundle", "delete installing.json, and install the newest bundle once more", True),
    someone_elses_bundle: ("bundle", "client-2's, and this is client-1's folder; delete installing", True),
}


def findings(folder: Path, name: str) -> list[checks.Finding]:
    found = {one.party: one.findings for one in doctor.examine(folder)}
    return [one for one in found[name] if one.check != "connection"]


def test_a_healthy_federation_has_no_findings_but_that_nobody_is_there(healthy):
    found = doctor.examine(healthy)
    assert [one.party for one in found] == ["server", "client-0", "client-1", "client-2"]
    assert [[f.check for f in one.findings] for one in found] == [[], *[["connection"]] * 3]
    assert "does not answer at" in found[1].findings[0].what


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damage_is_named_with_its_cure_and_only_where_it_is(folder, damage):
    damage(folder)
    check, said, stops = DAMAGES[damage]
    found = [one for one in findings(folder, "client-1") if one.check == check]
    assert any(said in one.what for one in found), findings(folder, "client-1")
    assert all(one.cure for one in found)
    assert found[0].stops == stops
    assert findings(folder, "client-2") == findings(folder, "server") == []


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, "[]", "{}", '{"length": "many", "pid": -1, "number": []}']
)
def test_what_is_remembered_in_json_and_broken_is_named(folder, content):
    """Whichever way it is broken: the doctor tells, and whoever needs the file names it."""
    party = parties(folder)[1]
    (party.running / "supernode.json").parent.mkdir(exist_ok=True)
    (party.running / "supernode.json").write_text(content)
    with pytest.raises(UserError, match=r"supernode\.json"):
        processes.recorded(party.running)
    (party.running / "supernode.json").unlink()
    party.ledger_head.write_text(content)
    if content != "{}":  # a memory of nothing
        with pytest.raises(UserError, match="ledger-head"):
            check_remembered(party)
    assert ("ledger-head" in str(doctor.examine(folder))) == (content != "{}")


def test_the_clock_of_a_machine_shows_in_certificates_that_are_not_valid_yet(folder):
    (first, *_) = checks.certificates(Party.open(folder / "server"), now() - 2 * YEAR)
    assert "is not valid yet" in first.what
    assert first.cure.startswith("set this machine's clock")


def test_a_taken_port_is_named_before_anything_is_started(folder):
    party = Party.open(folder / "server")
    port = party.federation.port
    before = time.monotonic()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match=f"port {port} of 127"):
        doctor.check_start(party)
    assert time.monotonic() - before < 60
    assert list(checks.ports(party)) == []


@pytest.mark.parametrize("name", ["server", "client-1"])
def test_a_taken_port_for_metrics_is_named_and_stops_nobody(folder, name, monkeypatch):
    party = Party.open(folder / name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(METRICS, str(port - (0 if party.client is None else 2)))
        (finding,) = checks.ports(party)
        assert f"port {port} of 127.0.0.1, the party's, is taken" in finding.what
        assert (METRICS in finding.cure, finding.stops) == (True, False)
    assert list(checks.ports(party)) == []
    monkeypatch.setenv(METRICS, "many")
    (finding,) = checks.ports(party)
    assert "allowed is a port" in finding.what


def test_a_port_that_a_killed_process_is_about_to_let_go_is_waited_for(folder, monkeypatch):
    server = Party.open(folder / "server")
    monkeypatch.setattr(checks, "_holder", lambda port: None)
    held = socket.create_server(("127.0.0.1", server.federation.port))
    ends = threading.Timer(0.3, held.close)
    ends.start()
    assert list(checks.ports(server)) == []
    ends.join()


def test_an_address_that_is_not_this_machines_is_named(folder):
    server = Party.open(folder / "server")
    facts = replace(server.federation, listen="192.0.2.1")
    (server.folder / "federation.toml").write_text(facts.toml())
    (finding,) = checks.ports(server)
    assert "nobody can listen at 192.0.2.1" in finding.what


def test_a_full_disk_is_named_before_anything_is_started(folder, monkeypatch):
    party = Party.open(folder / "client-1")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(UserError, match=r"client-1 cannot start: disk: the disk is full: 5 MB are free"):
        doctor.check_start(party)
    monkeypatch.undo()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checks.os, "fsync", full)
    (finding,) = checks.disk(party)
    assert finding.what == "nothing can be written: No space left on device"
    assert not (party.folder / ".doctor").exists()


def test_what_the_servers_process_sees_is_the_servers_to_tell(folder, monkeypatch):
    server = Party.open(folder / "server")
    own = Facts.of(server)
    assert list(doctor.seen_by_server(server)) == [], "a process that is gone sees nothing"
    other = replace(own, roster="0123456789ab", trilemma="0.0.7").text
    there = {"0": {"facts": own.text}, "1": {"facts": other}, "3": {"facts": "gibberish"}}
    told = {"there": there, "turned_away": {"2": "the certificate's time is over"}}
    monkeypatch.setattr(doctor, "ask", lambda *_, **__: iter([told]))
    found = [(one.check, one.what) for one in doctor.seen_by_server(server)]
    assert [check for check, _ in found] == ["agreement", "versions", "connection", "versions"][: len(found)]
    assert "at client 1" in found[1][1]
    assert found[2][1] == "client 2 is not connected: the certificate's time is over"


def test_the_command_says_it_all_and_its_exit_code_counts(folder):
    """0: all is well; 1: something is wrong; 2, from the command line, for what is no folder at all."""
    run = CliRunner()
    server = str(folder / "server")
    assert run.invoke(federation_app, ["doctor", server]).exit_code == 0
    expired(folder)
    outcome = run.invoke(federation_app, ["doctor", str(folder)])
    assert outcome.exit_code == 1
    assert "server: all is well" in outcome.output
    assert "client-1: certificate: client.crt has expired" in outcome.output
    assert "Cure: " in outcome.output
    told = json.loads(run.invoke(federation_app, ["doctor", str(folder), "--json"]).output)
    assert told["parties"][2]["findings"][0]["check"] == "certificate"
    nowhere = run.invoke(federation_app, ["doctor", str(folder / "nowhere")])
    assert isinstance(nowhere.exception, UserError)


def test_parties_are_examined_beside_each_other_in_one_folder(folder):
    for party in parties(folder):
        facts = replace(party.federation, examples=40 if party.client == 1 else None)
        (party.folder / "federation.toml").write_text(facts.toml())
    assert "`examples` in federation.toml differs" in findings(folder, "client-1")[-1].what


def test_no_name_and_no_answer_are_findings_too(folder, monkeypatch):
    client = Party.open(folder / "client-1")
    facts = replace(client.federation, host="nowhere.invalid")
    (client.folder / "federation.toml").write_text(facts.toml())
    (finding,) = reaching.findings(client)
    assert (finding.check, finding.stops) == ("connection", False)
