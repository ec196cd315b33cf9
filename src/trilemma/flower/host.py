"""Several parties' programs on one machine, imported once: a process that forks what it is told to, and ends.

    python -m trilemma.flower.host MODULE …   (started by `up`: orders on stdin, pids on stdout, a line each)

Twenty clients are forty Pythons, which would import Flower forty times and torch twenty times. This one
imports what its program needs and then forks copies of it, which share that memory until they write to it.
A copy is what the same program is that was started alone: it leads a session of its own, has its own
environment, log, arguments and secrets, and is known by its pid. Nothing is left that would have to be
watched: the host ends when no more is ordered, and what of its programs ends later is started alone.

A process may be forked only while it has one thread, and nothing that a thread or another process holds: so
nothing is connected to, opened or computed here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from trilemma.federation import processes
from trilemma.federation.processes import Command, Running
from trilemma.flower import REST

PROGRAMS = {
    "trilemma.flower.supernode": ("trilemma.flower.supernode_internals",),
    "trilemma.flower.worker": (
        "trilemma.flower.client_app",
        "trilemma.flower.server_app",
        "trilemma.federation.node",
        "trilemma.privacy.secrets.kernels",  # and numba: compiled, or read from disk, once for all
        "trilemma.plugins:installed",  # which asks every installed package what it declares
        "torch.fx.experimental.symbolic_shapes",  # and sympy, for gradients of modules of one's own
    ),
}
"""The programs that are forked, and what is imported before, or called where it is a function."""

MANY = 3
"""From how many programs on a host is worth its own start."""


@dataclass(frozen=True)
class Order:
    """A program to run in a process of its own, as `python -m program arguments` would, after `imports`."""

    imports: tuple[str, ...]
    program: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: str

    @classmethod
    def read(cls, line: str) -> Order:
        """Read what `line` wrote."""
        facts = json.loads(line)
        lists = {name: tuple(facts[name]) for name in ("imports", "arguments")}
        return cls(**{**facts, **lists})

    @property
    def line(self) -> str:
        """The order as a line of text.

        >>> order = Order(("torch",), "trilemma.flower.worker", ("pilot/client-0",), {}, "worker.log")
        >>> Order.read(order.line) == order
        True
        """
        return json.dumps(asdict(self))


# --- who orders -------------------------------------------------------------------------------------------


def forkable(command: Command) -> bool:
    """Tell whether a host can run a command.

    >>> forkable(Command("worker", (sys.executable, "-m", "trilemma.flower.worker", "pilot/client-0")))
    True
    >>> forkable(Command("sleeper", ("sleep", "60")))
    False
    """
    return command.argv[:2] == (sys.executable, "-m") and command.argv[2] in PROGRAMS


class Host:
    """Hosts as `up` sees them, one for each program: they start processes as `processes.start` does."""

    def __init__(self, hosting: Mapping[str, subprocess.Popen[str]]) -> None:
        self._hosting = hosting

    def start(self, command: Command, folder: Path) -> Running:
        """Start `command` in its own process group, remember it and its log in `folder`; alone if need be."""
        # Its memory is shared with others of its kind: were it to start itself anew it would have its own.
        environment = {**command.environment, REST: "inf"}
        log = processes.log_of(command, folder)
        program = command.argv[2]
        order = Order(PROGRAMS[program], program, command.argv[3:], environment, str(log.resolve()))
        orders, answers = self._hosting[program].stdin, self._hosting[program].stdout
        assert orders is not None
        assert answers is not None
        try:
            print(order.line, file=orders, flush=True)
            return processes.remember(command, int(answers.readline()), folder)
        except (OSError, ValueError):  # the host ended: it may not fork here, or somebody killed it
            return processes.start(command, folder)


@contextlib.contextmanager
def host(commands: list[Command]) -> Iterator[Host | None]:
    """Start a host for each program among these commands; None where they are too few for one.

    Hosts begin to import at once, beside each other: to import torch takes longer than to start the
    SuperNodes, which do without it. What all commands have in common in their environment is the hosts':
    Flower reads some of it when it is imported.
    """
    programs = [one.argv[2] for one in commands if forkable(one)]
    if len(programs) < MANY or sys.platform != "linux":
        yield None
        return
    common = set.intersection(*(set(one.environment.items()) for one in commands))
    with contextlib.ExitStack() as until_all_ended:
        hosting = {}
        for program in sorted(set(programs), key=list(PROGRAMS).index):
            hosting[program] = subprocess.Popen(
                (sys.executable, "-m", "trilemma.flower.host", *PROGRAMS[program]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **dict(common)},
                text=True,
            )
            until_all_ended.callback(_end, hosting[program])
        yield Host(hosting)


def _end(process: subprocess.Popen[str]) -> None:
    """Close a host's stdin, which ends it if it has not ended before."""
    with contextlib.suppress(BrokenPipeError), process:
        pass
    process.wait()


# --- the host ---------------------------------------------------------------------------------------------


def serve(orders: IO[str], answers: IO[str]) -> Order | None:
    """Fork for every order and answer with the pid; in a fork, return the order, in the host None at the end.

    A fork leaves this function, so that nothing of the host is on its stack.
    """
    for line in iter(orders.readline, ""):
        order = Order.read(line)
        for name in order.imports:
            prepare(name)
        if psutil.Process().num_threads() > 1:
            raise RuntimeError("a library has started threads: a fork would not have them")
        gc.freeze()  # collecting would write to what is shared
        pid = fork()
        if pid == 0:
            return order
        print(pid, file=answers, flush=True)
    return None


def prepare(name: str) -> None:
    """Import a module, or call a function that remembers what it found; the second time that costs nothing.

    >>> prepare("json"); prepare("trilemma.plugins:installed")
    """
    found = pkgutil.resolve_name(name)
    if ":" in name:
        found()


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


def become(order: Order) -> None:
    """Make of a fork what a process is that was started alone: log, environment, arguments, seeds."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.update(order.environment)
    sys.argv = [order.program, *order.arguments]
    reseed()


def reseed() -> None:
    """Draw new seeds for the generators that a user's own code may use: forks have their parent's."""
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed()
    if "torch" in sys.modules:
        importlib.import_module("torch").seed()


def main() -> None:
    """Import what will be needed first, serve, and in a fork run what was ordered."""
    for name in sys.argv[1:]:
        prepare(name)
    order = serve(sys.stdin, sys.stdout)
    if order is not None:
        become(order)
        runpy.run_module(order.program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
