"""Many programs, imported once: a fork is what a process of its own would be."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from trilemma.federation import processes
from trilemma.federation.processes import Command
from trilemma.flower import host as hosts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

PROGRAM = """
import json, os, random, sys, time
import numpy as np

told = {
    "pid": os.getpid(),
    "session": os.getsid(0),
    "arguments": sys.argv[1:],
    "own": os.environ["OWN"],
    "common": os.environ["COMMON"],
    "name": __name__,
    "drawn": [random.random(), float(np.random.random())],
    "stdin": sys.stdin.read(),
}
print(json.dumps(told), flush=True)
print("complaint", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program of ours that says what it finds, and stays."""
    (tmp_path / "telling_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setitem(hosts.PROGRAMS, "telling_program", ("numpy",))
    return "telling_program"


def order(program, number):
    argv = (sys.executable, "-m", program, "--number", str(number))
    return Command(f"one-{number}", argv, {"COMMON": "all", "OWN": str(number)})


def told(running):
    """What the program wrote, once it is all there."""
    deadline = time.monotonic() + 240.0
    while "complaint" not in (text := processes.Path(running.log).read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return json.loads(text.splitlines()[0])


def test_a_fork_is_what_a_process_of_its_own_would_be(program, tmp_path):
    orders = [order(program, number) for number in range(hosts.MANY)]
    folders = [tmp_path / one.name for one in orders]
    try:
        with hosts.host(orders) as forking:
            started = [forking.start(one, folder) for one, folder in zip(orders, folders, strict=True)]
        found = [told(one) for one in started]
        for number, (one, it) in enumerate(zip(started, found, strict=True)):
            assert it["pid"] == it["session"] == one.pid
            assert (it["arguments"], it["own"], it["common"]) == (
                ["--number", str(number)],
                str(number),
                "all",
            )
            assert (it["name"], it["stdin"]) == ("__main__", "")
            assert processes.leads(one), "it stays when the host is gone"
            assert processes.recorded(folders[number]) == [one]
        assert len({str(it["drawn"]) for it in found}) == len(found), "each draws its own numbers"
        processes.stop([started[0]], folders[0], grace=5.0)
        assert [processes.leads(one) for one in started] == [False] + [True] * (hosts.MANY - 1)
    finally:
        for folder in folders:
            processes.stop(processes.recorded(folder), folder, grace=1.0)


def test_where_the_host_ended_programs_start_alone(program, tmp_path):
    orders = [order(program, number) for number in range(hosts.MANY)]
    with hosts.host(orders) as forking:
        for process in forking._hosting.values():
            process.kill()
            process.wait()
        one = forking.start(orders[0], tmp_path / "one")
        try:
            assert told(one)["session"] == one.pid
        finally:
            processes.stop([one], tmp_path / "one", grace=1.0)


def test_a_party_alone_has_no_host(program):
    with hosts.host([order(program, number) for number in range(hosts.MANY - 1)]) as forking:
        assert forking is None
    with hosts.host([Command("sleeper", ("sleep", "60"))] * 9) as forking:
        assert forking is None


def test_a_process_with_threads_is_not_forked(monkeypatch):
    class Crowded:
        def num_threads(self):
            return 2

    monkeypatch.setattr(hosts.psutil, "Process", Crowded)
    monkeypatch.setattr(hosts.os, "fork", lambda: pytest.fail("it forked"))
    orders = iter([hosts.Order((), "trilemma.flower.supernode", (), {}, "log").line + "\n"])

    class Lines:
        def readline(self):
            return next(orders, "")

    with pytest.raises(RuntimeError, match="started threads"):
        hosts.serve(Lines(), sys.stdout)


SECRETS = """
import json, os, sys, time
from trilemma.privacy.secrets import Handshake, Identity, Roster, SecretNoise
from trilemma.privacy.types import NoiseLaw
import torch

opened = sorted(os.readlink(one.path) for one in os.scandir("/proc/self/fd") if os.path.islink(one.path))
identity = Identity(bytes(32))
told = {
    "opened": opened,
    "drawn": [
        Handshake(identity, Roster((identity.public,)), "run").offer.encode().hex(),
        Identity.generate().public.hex(),
        SecretNoise(0, {}).draw(NoiseLaw(1.0), (0,), 4, 0, torch.device("cpu")).tolist(),
        float(torch.rand(())),
    ],
}
print(json.dumps(told), flush=True)
print("complaint", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_forks_share_neither_secrets_nor_files(tmp_path, monkeypatch):
    """What a client draws for its handshake, its identity and its noise is its own; so are its files."""
    (tmp_path / "drawing_program.py").write_text(SECRETS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setitem(hosts.PROGRAMS, "drawing_program", hosts.PROGRAMS["trilemma.flower.worker"])
    orders = [order("drawing_program", number) for number in range(hosts.MANY)]
    folders = [tmp_path / one.name for one in orders]
    try:
        with hosts.host(orders) as forking:
            started = [forking.start(one, folder) for one, folder in zip(orders, folders, strict=True)]
        found = [told(one) for one in started]
        for drawn in zip(*(it["drawn"] for it in found), strict=True):
            assert len({json.dumps(one) for one in drawn}) == len(found)
        for number, it in enumerate(found):
            others = [one for place, one in enumerate(folders) if place != number]
            assert not any(str(other) in path for other in others for path in it["opened"])
            assert not any(path.startswith(("pipe:", "socket:")) for path in it["opened"])
    finally:
        for folder in folders:
            processes.stop(processes.recorded(folder), folder, grace=1.0)
