"""Who asks the guard for work and is kept waiting: until the server has sent something to somebody.

A client's question is kept only where its last one found nothing and the bell has not rung since, so nothing
that was sent is overlooked; and it is passed on after a while all the same.
"""

from __future__ import annotations

import asyncio
import contextlib

from trilemma.flower.bell import LOOK, Bell


class Waiting:
    """Clients that wait for the `bell`; without one nobody is kept."""

    def __init__(self, bell: Bell | None) -> None:
        self._bell, self.heard = bell, 0 if bell is None else bell.heard
        self._rung = asyncio.Event()
        self._found_nothing: dict[str, int] = {}

    async def listen(self) -> None:
        """Wake those who wait whenever the bell rings."""
        while self._bell is not None:
            if self._bell.heard != self.heard:
                self.heard = self._bell.heard
                self._rung.set()
                self._rung = asyncio.Event()
            await asyncio.sleep(LOOK)

    async def keep(self, name: str, limit: float) -> None:
        """Keep a client that asks for work for at most `limit` seconds, where it need not ask."""
        if self._bell is None or self._found_nothing.get(name) != self.heard:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._rung.wait()

    def answered(self, name: str, heard: int, length: int) -> None:
        """Note how long the answer was to a client that asked when the bell had been `heard`."""
        if length:
            self._found_nothing.pop(name, None)
        else:
            self._found_nothing[name] = heard
