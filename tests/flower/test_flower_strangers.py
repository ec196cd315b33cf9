"""Strangers on the port of a real server with TLS, while an honest federation runs and finishes."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from flower_harness import Real, real, wait_for

from federation_harness import small_config
from trilemma.federation import certificates
from trilemma.federation.peers import Door, door_file

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

MOB = Path(__file__).with_name("flower_mob.py")
SECONDS = 60
ROUNDS = 25
MEGABYTE = 1 << 20
ELSEWHERE = [f"127.0.0.{number}" for number in range(2, 42)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory):
    config = small_config(2, tolerate=0, rounds=ROUNDS)
    with real(tmp_path_factory.mktemp("strangers") / "federation", 2, config) as running:
        running.go("warm-up")
        yield running


def outfit(federation: Real, folder: Path) -> None:
    """Give strangers what they may have got hold of: an old certificate, and one of another authority."""
    server = federation.server
    own = certificates.Issued(
        server.authority.read_bytes(), (federation.folder / "authority" / "ca.key").read_bytes()
    )
    yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    issued = {
        "expired": certificates.issue_client(own, "client-0", yesterday),
        "foreign": certificates.issue_client(certificates.new_authority("test"), "client-0"),
    }
    (folder / "authority.crt").write_bytes(own.certificate)
    for name, one in issued.items():
        (folder / f"{name}.crt").write_bytes(one.certificate)
        (folder / f"{name}.key").write_bytes(one.key)


def test_a_mob_at_the_door_keeps_no_client_out_and_gets_nothing(federation: Real, tmp_path: Path) -> None:
    """Half-open connections, handshakes that fail, garbage, records that are too long, slow and many ones.

    They take every seat for strangers there is, for a minute. Clients go on, nobody gets an answer, and the
    guard keeps no memory of it.
    """
    outfit(federation, tmp_path)
    facts, server = federation.server.federation, federation.server
    guard = psutil.Process(federation.process(server, "guard").pid)
    before, refused = guard.memory_info().rss, Door.load(door_file(server.running)).strangers
    with subprocess.Popen(
        [sys.executable, str(MOB), facts.host, str(facts.port), str(tmp_path), str(SECONDS), *ELSEWHERE],
        stdout=subprocess.PIPE,
        text=True,
    ) as mob:
        try:
            records = federation.go("besieged")
            said = json.loads(mob.communicate(timeout=SECONDS + 120)[0])
        finally:
            mob.kill()
    assert [record["round"] for record in records] == list(range(1, ROUNDS + 1))
    assert not any(record["absent"] or record["rejected"] for record in records)
    assert not any(said["answered"].values())
    assert min(said["came"].values()) > 8, said["came"]
    assert sum(said["came"].values()) > 600
    assert Door.load(door_file(server.running)).strangers - refused > 300
    # While it lasts they have what their seats may have, and more on a busy machine; then all is given back.
    wait_for(lambda: guard.memory_info().rss - before < 25 * MEGABYTE, 120.0)
    assert federation.go("afterwards")
