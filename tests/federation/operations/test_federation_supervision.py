"""What keeps a party running: units that systemd accepts, a compose file of all, a run that is remembered."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from contextlib import suppress

import pytest

from federation_harness import command, make, small_config
from trilemma.base.errors import UserError
from trilemma.federation.operations import supervision
from trilemma.federation.party.layout import Party
from trilemma.federation.server.under_way import run_under_way, under_way


@pytest.fixture
def parties(tmp_path):
    return make(tmp_path / "my pilot 100%" / "federation", 3, small_config(3))


def test_units_are_what_systemd_reads_and_bring_a_party_back(parties):
    """A folder whose name has a blank and a percent sign: the worst that people do."""
    folder = parties[0].folder.parent
    written = supervision.write(folder, parties)
    assert len(written) == 5
    for party in parties:
        read = configparser.ConfigParser(interpolation=None, strict=True)
        read.optionxform = str
        read.read(supervision.unit_file(party))
        assert read["Service"]["Restart"] == "on-failure"
        assert read["Service"]["ExecStart"].endswith("--attach")
        assert str(party.folder).replace("%", "%%") in read["Service"]["ExecStart"]
        assert read["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_a_unit(parties):
    supervision.write(parties[0].folder.parent, parties)
    for party in parties[:2]:
        unit = supervision.unit_file(party)
        verdict = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
        )
        complaints = [line for line in verdict.stderr.splitlines() if unit.name in line]
        assert complaints == []


@pytest.mark.parametrize("host", ["127.0.0.1", "server"])
def test_the_compose_file_has_every_party_and_restarts_it(tmp_path, host):
    yaml = pytest.importorskip("yaml", reason="reads a compose file")
    parties = make(
        tmp_path / "federation", 4, small_config(4), host=host, listen=None if host[0] == "1" else "0.0.0.0"
    )
    supervision.write(tmp_path / "federation", parties)
    found = yaml.safe_load((tmp_path / "federation" / supervision.COMPOSE).read_text())
    assert list(found["services"]) == [party.name for party in parties]
    for party in parties:
        service = found["services"][party.name]
        assert service["restart"] == "unless-stopped"
        assert service["volumes"] == [f"./{party.name}:/party/{party.name}"]
        assert service["command"] == ["up", f"/party/{party.name}", "--attach"]
        assert ("network_mode" in service) == (host == "127.0.0.1")


def test_a_folder_whose_name_would_write_lines_of_its_own_gets_no_unit(parties, tmp_path):
    moved = tmp_path / "plain\nExecStartPre=true"
    shutil.copytree(parties[1].folder, moved)
    with pytest.raises(UserError, match="no unit can name"):
        supervision.unit(Party.open(moved))


def test_a_party_on_its_own_gets_its_unit_and_no_compose_file(parties):
    written = supervision.write(parties[2].folder, [parties[2]])
    assert written == [supervision.unit_file(parties[2])]


@pytest.mark.parametrize(
    ("ends_with", "remembered"),
    [
        (None, None),
        (UserError("too few"), None),
        (OSError("the server is away"), "monday"),
        (KeyboardInterrupt(), "monday"),
    ],
)
def test_a_run_that_broke_off_is_remembered_and_one_that_ended_is_not(tmp_path, ends_with, remembered):
    server = Party(tmp_path / "server", None)
    with suppress(BaseException), under_way(server, "monday", broken_off=(OSError,)):
        before = run_under_way(server)
        if ends_with is not None:
            raise ends_with
    assert before == "monday"
    assert run_under_way(server) == remembered


def test_kubernetes_takes_the_manifests_of_every_party(tmp_path):
    """Each keeps to the schema, without a privilege; only the server can be connected to."""
    yaml = pytest.importorskip("yaml", reason="reads manifests")
    folder = tmp_path / "federation"
    parties = make(folder, 2, small_config(2, tolerate=0), host="fl.example.org", listen="0.0.0.0")
    for path, party in zip(supervision.write_kubernetes(parties), parties, strict=True):
        found = list(yaml.safe_load_all(path.read_text()))
        kinds = [one["kind"] for one in found]
        assert kinds == ["StatefulSet", "NetworkPolicy", *(["Service"] if party.client is None else [])]
        pod = found[0]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["containers"][0]["args"] == ["up", f"/party/{party.name}", "--attach"]
        assert bool(found[1]["spec"]["ingress"]) == (party.client is None)
        try:
            import kubernetes_validate
        except ImportError:
            continue
        for one in found:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_a_pilot_on_loopback_has_no_manifests(parties):
    with pytest.raises(UserError, match="loopback"):
        supervision.write_kubernetes(parties)
    assert not list(parties[0].folder.parent.rglob("kubernetes.yaml"))


def test_init_writes_manifests_where_asked_and_refuses_them_for_a_pilot(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(small_config(2, tolerate=0))
    with pytest.raises(UserError, match="loopback"):
        command("init", tmp_path / "pilot", "--config", config, "--kubernetes")
    assert not (tmp_path / "pilot").exists()
    reached = ("--host", "fl.example.org", "--listen", "0.0.0.0")
    command("init", tmp_path / "real", "--config", config, "--kubernetes", *reached)
    assert len(list((tmp_path / "real").glob("*/kubernetes.yaml"))) == 3
