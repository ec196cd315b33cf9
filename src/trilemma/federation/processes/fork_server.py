"""Several parties' programs, imported once: a process that forks what it is told to, and ends.

    python -m trilemma.federation.processes.fork_server     (by `up`: orders on stdin, pids on stdout, a line
    each)

Twenty parties would import torch twenty times. This process imports what they need and then forks copies of
itself, which share that memory until they write to it. A copy is what the same program is that was started
alone: it leads a session of its own, has its own environment, log and secrets, and is known by its pid.
Nothing is left that would have to be watched: this ends when no more is ordered, and what of its programs
ends later is started alone.

A process may be forked only while it has one thread, and nothing that a thread or another process holds: so
nothing is connected to, opened or computed here, and no object of gRPC's is made.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.groups import Command, Running

IMPORTED = (
    "trilemma.federation.processes.party_process",
    "trilemma.federation.processes.client_process",
    "trilemma.federation.processes.server_process",
    "trilemma.federation.client.node",
    "trilemma.federation.server.coordinator",
    "grpc.experimental",
    "numpy.random",
    "scipy.special",
)
"""What every party needs, torch before all; numba comes with the first noise, and is not weighed before."""

MANY = 3
"""From how many programs on a process of this kind is worth its own start."""

PROGRAM = "trilemma.federation.processes.party_process"


class ForkServer:
    """It as `up` sees it: it starts processes as `processes.spawn` does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def spawn(self, command: Command, folder: Path) -> Running:
        """Start a party's process; alone if need be."""
        log = processes.log_of(command.name, folder).resolve()
        order = {"folder": command.argv[-1], "environment": dict(command.environment), "log": str(log)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return processes.seen(command.name, int(self._process.stdout.readline()), folder)
        except (OSError, ValueError):  # it ended: it may not fork here, or somebody killed it
            return processes.spawn(command, folder)


@contextlib.contextmanager
def fork_server(count: int, environment: Mapping[str, str]) -> Iterator[ForkServer | None]:
    """Start a fork server for so many programs, which begins to import at once; None where they are too few.

    Only Linux forks: elsewhere libraries do not bear it, and each program starts alone.
    """
    if count < MANY or sys.platform != "linux":
        yield None
        return
    process = subprocess.Popen(
        (sys.executable, "-m", "trilemma.federation.processes.fork_server"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
        text=True,
    )
    try:
        yield ForkServer(process)
    finally:
        with contextlib.suppress(BrokenPipeError), process:
            pass


# --- the process itself -----------------------------------------------------------------------------------


def serve(orders: IO[str], answers: IO[str]) -> Mapping[str, Any] | None:
    """Fork for every order and answer with the pid; in a fork, return the order, here None at the end.

    A fork leaves this function, so that nothing of this process is on its stack.
    """
    for line in iter(orders.readline, ""):
        if psutil.Process().num_threads() > 1:
            raise RuntimeError("a library has started threads: a fork would not have them")
        gc.freeze()  # collecting would write to what is shared
        pid = fork()
        if pid == 0:
            order: Mapping[str, Any] = json.loads(line)
            return order
        print(pid, file=answers, flush=True)
    return None


def fork() -> int:
    """Fork into a session of its own; whoever hears the pid finds the group that it leads."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(ready)
    os.close(done)
    if pid:
        os.read(ready, 1)  # ends when the fork has closed its end, or is gone
        os.close(ready)
    return pid


def become(log: str, environment: Mapping[str, str]) -> None:
    """Make of a fork what a process is that was started alone: log, environment, seeds."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.update(environment)
    reseed()


def reseed() -> None:
    """Draw new seeds for the generators that a user's own code may use: forks have their parent's."""
    for name, function in (("random", "seed"), ("numpy.random", "seed"), ("torch", "seed")):
        if name in sys.modules:
            getattr(importlib.import_module(name), function)()


def main() -> None:
    """Import what will be needed first, serve, and in a fork be the party that was ordered."""
    for name in IMPORTED:
        importlib.import_module(name)
    from trilemma.base.plugins import installed

    installed()  # which asks every installed package what it declares
    order = serve(sys.stdin, sys.stdout)
    if order is not None:
        from trilemma.federation.processes import party_process

        become(order["log"], order["environment"])
        sys.argv = [PROGRAM, order["folder"]]
        party_process.main()


if __name__ == "__main__":
    main()
