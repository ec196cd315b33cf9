"""A client at the server's door: whatever is wrong between the two is named within seconds, by the client."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from federation_harness import make, small_config
from free_ports import free_ports
from trilemma.base.errors import UserError
from trilemma.base.version import VERSION
from trilemma.federation.carriers.grpc import client as carrier
from trilemma.federation.carriers.grpc.credentials import Tls
from trilemma.federation.carriers.grpc.server import GrpcServer
from trilemma.federation.identity import certificates
from trilemma.federation.operations import doctor, reaching
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import Party
from trilemma.federation.party.provisioning import install_certificate

CLIENTS = 2


@pytest.fixture
def parties(tmp_path, monkeypatch) -> list[Party]:
    monkeypatch.setattr(reaching, "PATIENCE", 30.0)  # the server is here: it answers when it gets its turn
    config = small_config(CLIENTS, tolerate=0)
    return make(tmp_path / "federation", CLIENTS, config, port=free_ports(1))


@contextlib.contextmanager
def listening(server: Party) -> Iterator[GrpcServer]:
    """Be the server's end of the carrier, and nothing else."""
    tls = Tls(server.certificate, server.certificate_key, server.authority)
    roster, spool = server.signed_roster.tls, server.state / "arriving"
    listen, facts = ("127.0.0.1", server.federation.port), Facts.of(server).text
    with GrpcServer.open(listen, tls, lambda: roster, spool, facts=lambda: facts) as carrier:
        yield carrier


def authority(folder: Path) -> certificates.Issued:
    files = (folder / "authority" / "ca.crt", folder / "authority" / "ca.key")
    return certificates.Issued(*(path.read_bytes() for path in files))


def found(client: Party) -> list[tuple[str, str, bool]]:
    return [(one.check, one.what, one.stops) for one in reaching.findings(client)]


def test_who_agrees_with_the_server_finds_nothing(parties):
    with listening(parties[0]):
        assert found(parties[1]) == []
        assert [one.findings for one in doctor.examine(parties[2].folder)] == [()]


def test_another_configuration_is_found_by_both_fingerprints(parties):
    parties[1].config.write_text(parties[1].config.read_text() + "# more")
    with listening(parties[0]):
        ((check, what, stops),) = found(parties[1])
    assert (check, stops) == ("agreement", False)
    assert what.startswith("config.toml differs from that of the server: ")


def test_certificates_that_the_other_side_does_not_take(parties, tmp_path):
    home = parties[0].folder.parent
    other = make(tmp_path / "other", CLIENTS, small_config(CLIENTS, tolerate=0))
    with listening(parties[0]):
        stranger = other[1]
        facts = replace(stranger.federation, port=parties[0].federation.port)
        (stranger.folder / "federation.toml").write_text(facts.toml())
        ((check, what, stops),) = found(stranger)
        assert (check, stops) == ("certificate", True)
        assert "shows a certificate that is not accepted" in what

        ended = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
        install_certificate(parties[1], certificates.issue_client(authority(home), "client-0", ended))
        ((check, what, stops),) = found(parties[1])
        assert (check, stops) == ("certificate", True)
        assert "does not take this client's certificate" in what


def hang_up(listener: socket.socket) -> None:
    """Close every connection at once, for as long as somebody listens."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_whoever_else_answers_is_no_server(parties):
    with socket.create_server(("127.0.0.1", parties[0].federation.port)) as listener:
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        ((check, what, stops),) = found(parties[1])
    assert (check, stops) == ("connection", False), "a proxy whose server is not there yet does the same"
    assert str(parties[0].federation.port) in what


def test_another_version_is_named_by_both_and_does_not_start(parties, monkeypatch):
    with listening(parties[0]) as server:
        monkeypatch.setattr(carrier, "VERSION", "0.0.7")
        ((check, what, stops),) = found(parties[1])
        assert (check, stops) == ("connection", True)
        assert f"version {VERSION} of trilemma, this client 0.0.7" in what
        with pytest.raises(UserError, match=r"client-0 cannot start: connection.* 0\.0\.7"):
            doctor.check_start(parties[1])
        assert "0.0.7" in server.turned_away()[0]


def test_who_looks_leaves_the_line_that_is_there_alone(parties):
    with listening(parties[0]) as server:
        stop = threading.Event()
        tls = Tls(parties[1].certificate, parties[1].certificate_key, parties[1].authority)
        line = threading.Thread(target=carrier.serve, args=(bytes, parties[1].federation.address, tls, stop))
        line.start()
        try:
            while not server.presence():
                server.wait(1.0)
            before = server.presence()[0]
            assert found(parties[1]) == []
            assert server.presence()[0].since == before.since
        finally:
            stop.set()
            line.join(30.0)
