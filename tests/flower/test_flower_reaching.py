"""A client at a guard's door: whatever is wrong between the two is named within seconds, by the client."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from federation_harness import make, small_config
from free_ports import free_ports
from trilemma.errors import UserError
from trilemma.federation import certificates, doctor, reaching
from trilemma.federation.layout import Party
from trilemma.federation.provisioning import install_certificate
from trilemma.flower import conversation
from trilemma.flower.guard import Guard
from trilemma.flower.handshake import listen
from trilemma.flower.limits import Limits, Settings

CLIENTS = 2


@pytest.fixture
def parties(tmp_path, monkeypatch) -> list[Party]:
    monkeypatch.setattr(reaching, "PATIENCE", 60.0)  # the guard is here: it answers when it gets its turn
    config = small_config(CLIENTS, tolerate=0)
    return make(tmp_path / "federation", CLIENTS, config, port=free_ports(CLIENTS))


@contextlib.contextmanager
def guarded(server: Party) -> Iterator[None]:
    """Put a guard at the server's door; there is no SuperLink behind it."""
    facts = server.federation
    settings = Settings(
        *("127.0.0.1", facts.port, facts.superlink_port),
        *(str(one) for one in (server.authority, server.certificate, server.certificate_key)),
        peers={f"client-{client}": "key" for client in range(CLIENTS)},
        limits=Limits(message=1000),
        folder=str(server.folder),
    )
    loop = asyncio.new_event_loop()
    with listen(settings) as listener:
        task = loop.create_task(Guard(settings).serve(listener))
        serving = asyncio.wait([task])
        thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()


def authority(folder: Path) -> certificates.Issued:
    files = (folder / "authority" / "ca.crt", folder / "authority" / "ca.key")
    return certificates.Issued(*(path.read_bytes() for path in files))


def found(client: Party) -> list[tuple[str, str, bool]]:
    return [(one.check, one.what, one.stops) for one in reaching.findings(client)]


def clock_of(what: str) -> float:
    """By how many seconds a finding says that this machine's clock is ahead."""
    seconds, way = re.search(r"this machine's clock is (\d+) s (ahead of|behind) the server's", what).groups()
    return float(seconds) * (1 if way == "ahead of" else -1)


def test_who_agrees_with_the_server_finds_nothing(parties):
    with guarded(parties[0]):
        assert found(parties[1]) == []
        assert [one.findings for one in doctor.examine(parties[2].folder)] == [()]


def test_another_configuration_is_found_by_both_fingerprints(parties):
    parties[1].config.write_text(parties[1].config.read_text() + "# more")
    with guarded(parties[0]):
        ((check, what, stops),) = found(parties[1])
    assert (check, stops) == ("agreement", False)
    assert what.startswith("config.toml differs from that of the server: ")


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_a_wrong_clock_is_named_by_the_client_that_starts(parties, monkeypatch, ahead):
    """The server's clock is moved; to the client it is the same as if its own were.

    How far it is off is known to half the time that the answer took.
    """
    monkeypatch.setattr(conversation, "time", SimpleNamespace(time=lambda: time.time() + ahead))
    with guarded(parties[0]):
        told = found(parties[1])
        if ahead > 0:  # requests may be old for five minutes
            assert told == []
            monkeypatch.setattr(conversation, "time", SimpleNamespace(time=lambda: time.time() + 400))
            ahead, told = 400.0, found(parties[1])
        assert [(check, stops) for check, _, stops in told] == [("clock", True)]
        assert clock_of(told[0][1]) == pytest.approx(-ahead, abs=30)
        with pytest.raises(UserError, match="client-0 cannot start: clock"):
            doctor.check_start(parties[1])


def test_a_clock_that_makes_certificates_run_out_is_called_a_clock(parties, monkeypatch):
    """The server's certificate seems to have expired, and the server's time says otherwise."""
    ended = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=2)
    issued = certificates.issue_server(authority(parties[0].folder.parent), ("127.0.0.1",), ended)
    install_certificate(parties[0], issued)
    with guarded(parties[0]):
        ((check, what, _),) = found(parties[1])
        assert (check, "certificate has expired" in what) == ("certificate", True)
        past = SimpleNamespace(time=lambda: time.time() - 600)
        monkeypatch.setattr(conversation, "time", past)
        ((check, what, _),) = found(parties[1])
        assert check == "clock"
        assert clock_of(what) == pytest.approx(600, abs=30)


def test_certificates_that_the_other_side_does_not_take(parties, tmp_path):
    home = parties[0].folder.parent
    other = make(tmp_path / "other", CLIENTS, small_config(CLIENTS, tolerate=0))
    with guarded(parties[0]):
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


def test_whoever_else_answers_is_no_guard(parties):
    with socket.create_server(("127.0.0.1", parties[0].federation.port)) as listener:
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        ((check, what, stops),) = found(parties[1])
    assert (check, stops) == ("connection", False), "a proxy whose server is not there yet does the same"
    assert str(parties[0].federation.port) in what
