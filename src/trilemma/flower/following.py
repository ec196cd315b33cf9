"""Follow a run from outside, through moments in which the SuperLink or the server's worker is away.

Whoever attends the server starts again what ended and continues the run. Meanwhile nobody answers: that is
said, and the run is followed on; after a while it is taken for the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trilemma.federation.layout import Party
from trilemma.federation.under_way import run_under_way
from trilemma.flower.control import Control, SuperLinkAway, connect

BROKEN = ("finished:failed", "finished:stopped")
CONTINUED = 60.0
"""Seconds after which a run that broke off without a word is taken for one that nobody continues."""
AWAY = 120.0
"""Seconds after which a SuperLink that does not answer is not waited for any longer."""


@dataclass
class Following:
    """The run `name`, which Flower knows as number `run`, as the server's operator sees it."""

    server: Party
    name: str
    run: int
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    reason: str = ""
    _broken_since: float | None = field(default=None, init=False)

    def states(self) -> Iterator[str]:
        """Return its state again and again, `finished:…` last: each look is now, so take your time between.

        Raises:
            SuperLinkAway: nobody answered for a long time.
        """
        since: float | None = None
        while True:
            try:
                with connect(self.server) as control:
                    while True:
                        state = self._look(control)
                        if since is not None:
                            self.say("the SuperLink is back")
                            since = None
                        yield state
                        if state.startswith("finished"):
                            return
            except SuperLinkAway as error:
                if since is None:
                    since = self.now()
                    self.say(f"{error}; run {self.name!r} is watched on")
                elif self.now() - since > AWAY:
                    raise
                yield "away"

    def _look(self, control: Control) -> str:
        """Return the state of the newest run of this name, and why it ended where it did."""
        same = [run for run, name in control.active().items() if name == self.name]
        self.run = same[-1] if same else self.run
        state = control.status(self.run)
        if state in BROKEN and run_under_way(self.server) == self.name:
            self._broken_since = self._broken_since or self.now()
            if self.now() - self._broken_since < CONTINUED:
                return "broken off"  # the server's worker ended: whoever attends it continues the run
        else:
            self._broken_since = None
        if state.startswith("finished"):
            self.reason = control.reason(self.run)
        return state
