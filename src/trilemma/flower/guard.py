"""The door of a federation's server: nothing reaches the SuperLink that was not asked for.

    python -m trilemma.flower.guard SETTINGS          (written and started by `up`)

The SuperLink listens on loopback; this process listens where clients connect. Who has no certificate of the
federation's authority does not get past the handshake. Of those who have one, each is held to a number of
connections, a rate, ten requests, and a length that is known before a body is read; an announcement of
20,000 records is counted and refused here. Bodies pass through in pieces: what a connection costs in memory
does not depend on what it sends.

Flower speaks HTTP/1.1 between SuperNodes and SuperLink. Parsing is left to h11, which keeps no more than a
head in memory and does not let two readers of one request disagree about its length. No web server of the
system is used, because none is where `pip install` is: the guard comes with the package, as one process of
one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import h11

from trilemma.federation import events
from trilemma.federation.addresses import address_of
from trilemma.federation.event_fields import without_quotes
from trilemma.federation.event_log import EventLog, events_file
from trilemma.federation.peers import door_file
from trilemma.flower.bell import Bell
from trilemma.flower.conversation import Conversation, Desk
from trilemma.flower.handshake import certified_name, listen, server_context, small_buffers, why_refused
from trilemma.flower.limits import Settings, version_of
from trilemma.flower.lines import CHUNK, LARGEST_HEAD, Line
from trilemma.flower.lost_answers import LostAnswers
from trilemma.flower.meters import Acquaintances, Full, Seats, Tokens
from trilemma.flower.presence import EVERY, Presence
from trilemma.flower.replies import Replies
from trilemma.flower.short_logs import keep_short
from trilemma.flower.tidying import Tidying
from trilemma.flower.waiting import Waiting

log = logging.getLogger("trilemma.guard")

ADDRESSES = 2
"""Addresses of each client at which strangers have seats of their own: the last it was let in from."""
PAUSE = 0.1
"""Seconds to wait when the system has nothing left to take a connection with."""


class Guard:
    """Passes on what `settings` allow, and nothing else; `file` is where they are, and may change.

    It says what it refuses, and writes what it sees of each client into the file `seen`. A client that finds
    nothing to do is kept waiting until the `bell` rings, where there is one.
    """

    def __init__(
        self,
        settings: Settings,
        file: Path | None = None,
        say: events.Say = events.silent,
        seen: Path | None = None,
        bell: Bell | None = None,
    ) -> None:
        self.settings, self.limits = settings, settings.limits
        self._file, self._version = file, version_of(file)
        self._strangers = Seats(self.limits.strangers, 8 * self.limits.strangers)
        self._known = Acquaintances(ADDRESSES)
        self._at_known = Seats(self.limits.strangers, ADDRESSES * self.limits.strangers * len(settings.peers))
        self._peers = Seats(self.limits.connections, self.limits.connections * len(settings.peers))
        self._lines = Tokens(1.0, 100)  # of the log: strangers do not fill the disk either
        self._tls = server_context(settings)
        self._running: set[asyncio.Task[None]] = set()
        self._tidying = Tidying()
        self._shaking: dict[str, list[asyncio.Task[None]]] = {}
        self._say, self._seen, self.presence = say, seen, Presence(settings.peers)
        self._desk = Desk(
            settings=self._current,
            tell=self._tell,
            presence=self.presence,
            tokens=Tokens(self.limits.rate, self.limits.burst),
            waiting=Waiting(bell),
            lost=LostAnswers(),
            replies=Replies(),
            upstream_tls=ssl.create_default_context(cafile=settings.authority),
        )

    def _current(self) -> Settings:
        self.look()
        return self.settings

    def look(self) -> None:
        """Take other settings where the file has some: clients come and go, certificates are renewed."""
        if self._file is None or version_of(self._file) == self._version:
            return
        self._version = version_of(self._file)
        try:
            settings = Settings.load(self._file)
            self._tls = server_context(settings)
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._tell(events.SETTINGS_REFUSED(error=type(error).__name__))
            return
        self.settings, self.limits = settings, settings.limits
        self._peers.allow(self.limits.connections, self.limits.connections * len(settings.peers))
        self._at_known.allow(self.limits.strangers, ADDRESSES * self.limits.strangers * len(settings.peers))
        self._known.forget_all_but(settings.peers)
        self.presence.know(settings.peers)

    async def serve(self, listener: socket.socket) -> None:
        """Take connections until cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._running |= {loop.create_task(self._remember()), loop.create_task(self._desk.waiting.listen())}
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listener)
                except OSError as error:  # it went away again, or there are no descriptors left just now
                    self._tell(events.STRANGER_REFUSED(address="somewhere", error=type(error).__name__))
                    await asyncio.sleep(PAUSE)
                    continue
                self.look()
                if not self._seats(address[0]).free(address[0]) and not self._made_room(address[0]):
                    accepted.close()
                    self._stranger(address[0], "too many strangers")
                    continue
                task = loop.create_task(self._welcome(accepted, address[0]))
                self._running.add(task)
                task.add_done_callback(self._ended)
        finally:
            for task in self._running:
                task.cancel()

    def _ended(self, connection: asyncio.Task[None]) -> None:
        self._running.discard(connection)
        self._tidying.ended()

    async def _remember(self) -> None:
        """Write down what was seen, now and then, and give memory back."""
        while True:
            self.presence.write(self._seen)
            self._tidying.tidy()
            await asyncio.sleep(EVERY)

    def _seats(self, address: str) -> Seats:
        """Return where strangers from an address sit until they have shown a certificate.

        Where a client was let in there are seats that other addresses' strangers cannot take.
        """
        return self._at_known if self._known.knows(address) else self._strangers

    def _made_room(self, address: str) -> bool:
        """Send the oldest handshake of an address away that has taken all its seats; False: it has not.

        Whoever means to come in has shaken hands before as many others come. Strangers behind the address of
        a client would else keep it out by saying nothing.
        """
        shaking = self._shaking.get(address)
        if not shaking or not self._seats(address).used_up(address):
            return False
        shaking.pop(0).cancel()
        self._stranger(address, "too many strangers")
        return True

    @contextlib.contextmanager
    def _seated(self, address: str) -> Iterator[None]:
        """Take a seat while hands are shaken, which a newer one from the same address may have to have."""
        task = asyncio.current_task()
        assert task is not None
        with self._seats(address).taken(address):
            shaking = self._shaking.setdefault(address, [])
            shaking.append(task)
            try:
                yield
            finally:
                if task in shaking:
                    shaking.remove(task)
                if not shaking:
                    self._shaking.pop(address, None)  # addresses come from outside: none is kept for ever

    def _stranger(self, address: str, why: str) -> None:
        self.presence.stranger()
        self._tell(events.STRANGER_REFUSED(address=address, error=without_quotes(why)))

    def _tell(self, event: events.Event) -> None:
        if not self._lines.wait("log"):
            log.warning("%s", event.text)
            self._say(event)

    # --- one connection ---------------------------------------------------------------------------------

    async def _welcome(self, accepted: socket.socket, address: str) -> None:
        """Let a stranger show its certificate, and talk to who has one."""
        try:
            with self._seated(address):
                line = await self._shake_hands(accepted)
        except asyncio.CancelledError:
            accepted.close()
            raise
        except (OSError, ssl.SSLError, TimeoutError, Full) as error:
            accepted.close()
            self._stranger(address, why_refused(error))
            return
        name = ""
        try:
            name = certified_name(line.writer)
            if name not in self.settings.peers:
                self._stranger(address, "its certificate names no client of this federation")
                return
            self._known.met(name, address)
            with self._peers.taken(name):
                self.presence.connected(name, self._peers.count(name))
                await Conversation(self._desk, line, name).hold()
        except Exception as error:  # whatever somebody sent: it ends this connection and no other
            self._tell(events.CONNECTION_CLOSED(address=address, error=type(error).__name__))
        finally:
            if name in self.settings.peers:
                self.presence.connected(name, self._peers.count(name))
            line.close()

    async def _shake_hands(self, accepted: socket.socket) -> Line:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self.limits.head_seconds
        )
        transport.set_write_buffer_limits(high=2 * CHUNK)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return Line(reader, writer, h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD))


def main(path: str) -> None:
    """Guard until stopped."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    keep_short()
    settings, running = Settings.load(Path(path)), Path(path).parent
    say = EventLog(events_file(running, "guard"), "server", "guard")
    with listen(settings) as listener:
        address = address_of(settings.listen, settings.port)
        started = events.GUARD_STARTED(address=address, clients=len(settings.peers))
        log.info("%s", started.text)
        say(started)
        with contextlib.suppress(KeyboardInterrupt):
            small_buffers()
            gc.freeze()  # what is here stays; only what comes later is looked through
            guard = Guard(settings, Path(path), say, door_file(running), Bell.of_this_party())
            asyncio.run(guard.serve(listener))


if __name__ == "__main__":
    main(sys.argv[1])
