"""Strangers at a federation's door, from addresses of loopback: many, slow, loud and wrong, all bounded.

    python flower_mob.py HOST PORT FOLDER SECONDS SOURCE…

FOLDER has `authority.crt` and certificates that must not get in (`expired`, `foreign`: .crt and .key). There
are no more connections than the numbers below say, and after SECONDS all of it ends. What came of it is
printed as JSON: connections by kind, and how many of them were ever given an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

SILENT = 300
"""Connections that are held and say nothing; who is sent away comes again, up to ten times as often."""
AT_ONCE, EACH = 8, 400
"""Of every other kind: connections at a time, and in all."""
REQUEST = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: server\r\ncontent-length: 0\r\n\r\n"
HELLO = b"\x16\x03\x01"
"""How a record of a TLS handshake begins; two bytes of length follow."""


@dataclass
class Mob:
    """Strangers with somewhere to go and certificates that should not help them."""

    host: str
    port: int
    folder: Path
    sources: itertools.cycle[str]
    came: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)

    async def connect(self, kind: str, tls: ssl.SSLContext | None = None):
        self.came[kind] += 1
        return await asyncio.open_connection(
            *(self.host, self.port),
            ssl=tls,
            server_hostname="localhost" if tls else None,
            local_addr=(next(self.sources), 0),
        )

    async def say(
        self, kind: str, *pieces: bytes, pause: float = 0.0, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connect, say something, and listen until the door closes; TLS's own words are no answer."""
        with contextlib.suppress(OSError):
            reader, writer = await self.connect(kind, tls)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)
                heard = await reader.read(1000)
                self.answered[kind] += heard.startswith(b"HTTP")
            finally:
                writer.transport.abort()

    def context(self, who: str | None) -> ssl.SSLContext:
        found = ssl.create_default_context(cafile=self.folder / "authority.crt")
        if who is not None:
            found.load_cert_chain(self.folder / f"{who}.crt", self.folder / f"{who}.key")
        return found

    async def silent(self) -> None:
        """Hold a connection, and another when that is closed."""
        for _ in range(10):
            await self.say("half-open")

    async def come_and_go(self) -> None:
        """Connect, and be gone."""
        with contextlib.suppress(OSError):
            _, writer = await self.connect("come and go")
            writer.transport.abort()

    async def keep_on(self, one: Callable[[], Awaitable[None]]) -> None:
        for _ in range(EACH // AT_ONCE):
            await one()

    async def rage(self, seconds: float) -> None:
        nobody, expired, foreign = map(self.context, (None, "expired", "foreign"))
        kinds: list[Callable[[], Awaitable[None]]] = [
            lambda: self.say("no certificate", REQUEST, tls=nobody),
            lambda: self.say("expired", REQUEST, tls=expired),
            lambda: self.say("foreign", REQUEST, tls=foreign),
            lambda: self.say("garbage", bytes(range(256)) * 64),
            lambda: self.say("plain HTTP", REQUEST),
            lambda: self.say("oversized", HELLO + b"\xff\xff", *[bytes(1 << 16)] * 16),
            lambda: self.say("slow", HELLO + b"\x01\x00", *[b"\x01"] * 1000, pause=0.2),
            self.come_and_go,
        ]
        tasks = [asyncio.create_task(self.silent()) for _ in range(SILENT)]
        tasks += [asyncio.create_task(self.keep_on(one)) for one in kinds for _ in range(AT_ONCE)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main(host: str, port: str, folder: str, seconds: str, *sources: str) -> None:
    """Rage, and say what came of it."""
    mob = Mob(host, int(port), Path(folder), itertools.cycle(sources))
    asyncio.run(mob.rage(float(seconds)))
    print(json.dumps({"came": mob.came, "answered": mob.answered}))


if __name__ == "__main__":
    main(*sys.argv[1:])
