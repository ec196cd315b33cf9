"""Follow a run from outside, through moments in which the server's process is away.

Whoever attends the server starts again what ended, and the run goes on. Meanwhile nobody answers: that is
said, and the run is followed on; after a while it is taken for the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from trilemma.federation.party.layout import Party
from trilemma.federation.processes.door import ServerAwayError, ask

AWAY = 60.0
"""Seconds after which a server that does not answer is not waited for any longer."""

LOOK = 0.5
"""Seconds between two tries to reach a server that is away."""


def follow(
    server: Party, run: str, replace: bool, say: Callable[[str], None], limit: float
) -> Iterator[dict[str, Any]]:
    """Begin a run, or go on with it, and return what the server tells until its end: records, and states.

    After `limit` seconds this ends, the run does not.

    Raises:
        ServerAwayError: nobody is there, or nobody came back.
        UserError: the server refuses.
    """
    deadline, shown, away = time.monotonic() + limit, -1, 0.0
    while True:
        try:
            left = None if math.isinf(limit) else max(0.0, deadline - time.monotonic())
            for told in ask(server, left, ask="run", run=run, replace=replace, shown=shown):
                if away:
                    say("the server is back")
                away, replace, shown = 0.0, False, told.get("shown", shown)
                yield told
                if time.monotonic() > deadline:
                    return
            return
        except TimeoutError:
            return
        except ServerAwayError as error:
            if shown < 0 or (away and time.monotonic() - away > AWAY):
                raise
            if not away:
                away = time.monotonic()
                say(f"{error}; run {run!r} is watched on")
            time.sleep(LOOK)
