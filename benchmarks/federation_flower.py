"""Seconds per round of plain Flower with the messages of `federation.py`, and nothing computed.

    python benchmarks/federation_flower.py [--clients 5] [--rounds 6] [--size 431972]

Flower's own programs (a SuperLink, a SuperNode for each client, without TLS) and the loop of its quickstart:
the server sends everybody a model of so many numbers, each client's app returns as many. Run it in an
environment that has `flwr`; compare the figure with `a round` of `federation.py` in the same minute.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trilemma.federation.party.addresses import free_port

APP = """
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server_app = ServerApp()
client_app = ClientApp()

@client_app.train()
def train(message, context):
    return Message(RecordDict(dict(message.content)), reply_to=message)

@server_app.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < {clients}:
        time.sleep(0.2)
    model = np.random.default_rng(0).normal(size={size}).astype(np.float32)
    for _ in range({rounds}):
        began = time.monotonic()
        content = RecordDict({{"model": ArrayRecord([model])}})
        asked = [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]
        heard = list(grid.send_and_receive(asked))
        assert len(heard) == {clients} and all(one.has_content() for one in heard)
        with open({notes!r}, "a") as file:
            print(time.monotonic() - began, file=file)
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "app:server_app"
clientapp = "app:client_app"
"""


def measure(folder: Path, clients: int, rounds: int, size: int, limit: float = 240.0) -> list[float]:
    """Return the seconds of each round."""
    app, home, notes = folder / "app", folder / "home", folder / "notes"
    app.mkdir()
    home.mkdir()
    (app / "app.py").write_text(APP.format(clients=clients, size=size, rounds=rounds, notes=str(notes)))
    (app / "pyproject.toml").write_text(PROJECT)
    link = free_port("127.0.0.1", 24000 + os.getpid() % 20000)
    known = (
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    (home / "config.toml").write_text(known)
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    with contextlib.ExitStack() as stack:

        def start(*command: object) -> None:
            log = stack.enter_context((folder / "log").open("ab"))
            words = [str(programs / str(command[0])), *map(str, command[1:])]
            own = {"env": environment, "stdout": log, "stderr": log, "start_new_session": True, "cwd": folder}
            process = subprocess.Popen(words, **own)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)

        start("flower-superlink", "--insecure", "--port", link, "--disable-runtime-dependency-installation")
        for number in range(clients):
            there = ("--superlink", f"127.0.0.1:{link}", "--port", link + 10 + number)
            start("flower-supernode", "--insecure", *there)
        deadline = time.monotonic() + limit
        run = [str(programs / "flwr"), "run", str(app), "here"]
        while subprocess.run(run, env=environment, cwd=folder, capture_output=True, check=False).returncode:
            time.sleep(1.0)  # the SuperLink starts
            if time.monotonic() > deadline:
                sys.exit((folder / "log").read_text()[-4000:])
        while time.monotonic() < deadline:
            if notes.exists() and len(found := notes.read_text().split()) >= rounds:
                return [float(one) for one in found]
            time.sleep(0.5)
        sys.exit((folder / "log").read_text()[-4000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", type=int, default=431_972)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        found = measure(Path(scratch), options.clients, options.rounds, options.size)
    shown = ", ".join(f"{one:.2f}" for one in found)
    print(f"a round: {statistics.median(found[1:]):.2f} s (all: {shown})")


if __name__ == "__main__":
    main()
