"""Many clients, imported once: a fork is what a process of its own would be."""

from __future__ import annotations

import json
import os
import sys

import pytest
from deployed_harness import wait_for

from trilemma.federation.processes import fork_server
from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.groups import Command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

SECRETS = """
import json, os, random, sys, time
from pathlib import Path
from trilemma.federation.party.layout import Party

def told(folder):
    from trilemma.privacy.secrets import Handshake, Identity, Roster, SecretNoise
    from trilemma.privacy.types import NoiseLaw
    import torch

    opened = sorted(os.readlink(one.path) for one in os.scandir("/proc/self/fd") if os.path.islink(one.path))
    identity = Identity(bytes(32))
    print(json.dumps({
        "pid": os.getpid(), "session": os.getsid(0), "folder": str(folder), "own": os.environ["OWN"],
        "stdin": sys.stdin.read(), "opened": opened,
        "drawn": [
            Handshake(identity, Roster((identity.public,)), "run").offer.encode().hex(),
            Identity.generate().public.hex(),
            SecretNoise(0, {}).draw(NoiseLaw(1.0), (0,), 4, 0, torch.device("cpu")).tolist(),
            float(torch.rand(())), random.random(),
        ],
    }), flush=True)
    print("complaint", file=sys.stderr, flush=True)
    time.sleep(600)

Party.open = told
"""


@pytest.fixture
def telling(tmp_path, monkeypatch):
    """In place of a party's work: a program that says what it finds, and stays."""
    (tmp_path / "sitecustomize.py").write_text(SECRETS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


def order(number: int, folder) -> Command:
    argv = (sys.executable, "-m", fork_server.PROGRAM, str(folder))
    return Command("process", argv, {"OWN": str(number)})


def told(running):
    """What the program wrote, once it is all there."""
    wait_for(lambda: "complaint" in processes.Path(running.log).read_text(), 60.0)
    return json.loads(processes.Path(running.log).read_text().splitlines()[0])


@pytest.mark.slow
def test_a_fork_is_a_process_of_its_own_and_shares_neither_secrets_nor_files(tmp_path, telling):
    """What a client draws for its handshake, its identity and its noise is its own; so are its files."""
    folders = [tmp_path / f"one-{number}" for number in range(fork_server.MANY)]
    started = []
    try:
        with fork_server.fork_server(len(folders), {}) as forking:
            started += [forking.spawn(order(number, one), one) for number, one in enumerate(folders)]
        found = [told(one) for one in started]
        for number, (one, it) in enumerate(zip(started, found, strict=True)):
            assert it["pid"] == it["session"] == one.pid
            assert (it["folder"], it["own"], it["stdin"]) == (str(folders[number]), str(number), "")
            assert processes.leads(one), "it stays when the fork server is gone"
            others = [path for place, path in enumerate(folders) if place != number]
            assert not any(str(other) in path for other in others for path in it["opened"])
            assert not any(path.startswith(("pipe:", "socket:")) for path in it["opened"])
        for drawn in zip(*(it["drawn"] for it in found), strict=True):
            assert len({json.dumps(one) for one in drawn}) == len(found)
        processes.stop([started[0]], folders[0], grace=5.0)
        assert [processes.leads(one) for one in started] == [False] + [True] * (len(started) - 1)
    finally:
        for one, folder in zip(started, folders, strict=False):
            processes.stop([one], folder, grace=1.0)


@pytest.mark.slow
def test_where_the_fork_server_ended_programs_start_alone(tmp_path, telling):
    with fork_server.fork_server(fork_server.MANY, {}) as forking:
        forking._process.kill()
        forking._process.wait()
        one = forking.spawn(order(0, tmp_path), tmp_path / "one")
        try:
            assert told(one)["session"] == one.pid
        finally:
            processes.stop([one], tmp_path / "one", grace=1.0)


def test_few_programs_have_no_fork_server():
    with fork_server.fork_server(fork_server.MANY - 1, {}) as forking:
        assert forking is None


def test_a_process_with_threads_is_not_forked(monkeypatch):
    class Crowded:
        def num_threads(self):
            return 2

    monkeypatch.setattr(fork_server.psutil, "Process", Crowded)
    monkeypatch.setattr(fork_server.os, "fork", lambda: pytest.fail("it forked"))
    orders = iter(["{}\n"])

    class Lines:
        def readline(self):
            return next(orders, "")

    with pytest.raises(RuntimeError, match="started threads"):
        fork_server.serve(Lines(), sys.stdout)
