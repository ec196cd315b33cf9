"""Stay with a federation's processes: what ends is started again, what is taken down stays so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from trilemma.errors import UserError
from trilemma.federation import processes
from trilemma.federation.layout import Party, parties
from trilemma.federation.processes import ProcessFailed
from trilemma.flower import deployment

ENOUGH = 6
"""How often a process may end within a minute and be started again."""


def attend(folder: Path, interval: float = 1.0, say: Callable[[str], None] = lambda _: None) -> None:
    """Stay, and start again what ends of the parties in `folder`, until told to stop; then take all down.

    For supervisors that expect a process to stay in the foreground, such as systemd and Docker. A party that
    somebody takes down meanwhile stays down. What ends `ENOUGH` times in a minute does not mend by being
    started again: then this ends too, and says what it saw last.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    ends: list[tuple[float, str]] = []
    try:
        while attended := [party for party in parties(folder) if _attended(party)]:
            ends = revive(attended, ends, say)
            time.sleep(interval)
    finally:
        deployment.down(folder)


def _attended(party: Party) -> bool:
    return not party.removed and not deployment.taken_down(party).exists()


def revive(
    every: list[Party], ends: list[tuple[float, str]], say: Callable[[str], None]
) -> list[tuple[float, str]]:
    """Start again what ended of these parties; return what has ended in the last minute, and when.

    The server first, then all clients at once: where many were killed they are imported for once, and the
    last does not wait until the others have started. A server that cannot start keeps no client waiting.
    """
    now = time.monotonic()
    ends = [(when, what) for when, what in ends if now - when < 60.0]
    lacking: list[Party] = []
    for party in every:
        known = processes.recorded(party.running)
        dead = [one for one in known if not processes.leads(one)]
        if len(known) < len(deployment.commands(party)) or dead or deployment.to_continue(party).is_file():
            lacking.append(party)
        ends += [(now, f"{party.name}: {one.name}") for one in dead]
        for one in dead:
            say(f"{party.name}: {one.name} (pid {one.pid}) ended and is started again")
            if sum(what == f"{party.name}: {one.name}" for _, what in ends) >= ENOUGH:
                last = processes.tail(one.log)
                raise ProcessFailed(f"{party.name}: {one.name} keeps ending; its log:\n{last}")
    clients = [party for party in lacking if party.client is not None]
    for together in ([party for party in lacking if party.client is None], clients):
        try:
            deployment.bring_up(together, say)
        except UserError as error:  # something ended meanwhile: the next look finds it
            say(f"{', '.join(party.name for party in together)}: {error}")
    return ends
