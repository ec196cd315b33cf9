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
import json
import logging
import socket
import ssl
import sys
import time
from pathlib import Path

import h11

from trilemma.errors import UserError
from trilemma.federation import events
from trilemma.federation.event_fields import without_quotes
from trilemma.federation.event_log import EventLog, events_file
from trilemma.federation.facts import FACTS, Facts
from trilemma.federation.peers import door_file
from trilemma.flower.bell import Bell
from trilemma.flower.handshake import certified_name, listen, server_context, why_refused
from trilemma.flower.heads import CLOCK, Refusal, check_announcement, check_head
from trilemma.flower.limits import ANNOUNCES, ASKS_AGAIN, PATHS, PULLS, Settings, version_of
from trilemma.flower.lines import CHUNK, HOP_BY_HOP, LARGEST_HEAD, Line, Upstream, UpstreamGone
from trilemma.flower.lost_answers import Heads, LostAnswers
from trilemma.flower.meters import Full, Seats, Tokens
from trilemma.flower.presence import EVERY, Presence
from trilemma.flower.waiting import Waiting

log = logging.getLogger("trilemma.guard")

PAUSE = 0.1
"""Seconds to wait when the system has nothing left to take a connection with."""
LONGEST_WAIT = 5.0
"""Seconds for which a peer that asks too often is kept waiting, before it is sent away."""
LINGER = 1.0
"""Seconds in which who was refused amid a body is listened to: closing at once takes the answer away."""


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
        self._peers = Seats(self.limits.connections, self.limits.connections * len(settings.peers))
        self._tokens = Tokens(self.limits.rate, self.limits.burst)
        self._lines = Tokens(1.0, 100)  # of the log: strangers do not fill the disk either
        self._tls = server_context(settings)
        self._upstream_tls = ssl.create_default_context(cafile=settings.authority)
        self._running: set[asyncio.Task[None]] = set()
        self._say, self._seen, self.presence = say, seen, Presence(settings.peers)
        self._waiting, self._lost = Waiting(bell), LostAnswers()

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
        self.presence.know(settings.peers)

    async def serve(self, listener: socket.socket) -> None:
        """Take connections until cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._running |= {loop.create_task(self._remember()), loop.create_task(self._waiting.listen())}
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listener)
                except OSError as error:  # it went away again, or there are no descriptors left just now
                    self._tell(events.STRANGER_REFUSED(address="somewhere", error=type(error).__name__))
                    await asyncio.sleep(PAUSE)
                    continue
                self.look()
                if not self._strangers.free(address[0]):
                    accepted.close()
                    self._stranger(address[0], "too many strangers")
                    continue
                task = loop.create_task(self._welcome(accepted, address[0]))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        finally:
            for task in self._running:
                task.cancel()

    async def _remember(self) -> None:
        """Write down what was seen, now and then."""
        while True:
            self.presence.write(self._seen)
            await asyncio.sleep(EVERY)

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
            with self._strangers.taken(address):
                line = await self._shake_hands(accepted)
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
            with self._peers.taken(name):
                self.presence.connected(name, self._peers.count(name))
                await self._converse(line, name)
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

    async def _converse(self, line: Line, name: str) -> None:
        """Answer a peer's requests, one after the other, until it or something else ends it."""
        upstream = Upstream(self.settings.upstream, self._upstream_tls)
        try:
            while (request := await self._head(line)) is not None:
                try:
                    await self._one(line, upstream, name, request)
                except Refusal as refusal:
                    self._refused(name, request, refusal)
                    await self._refuse(line, refusal)
                    return
                if line.state.our_state is not h11.DONE or line.state.their_state is not h11.DONE:
                    return
                line.state.start_next_cycle()
        finally:
            upstream.close()

    async def _head(self, line: Line) -> h11.Request | None:
        """Return the next request's head; None where the peer is done."""
        if not line.state.trailing_data[0]:
            async with asyncio.timeout(self.limits.idle_seconds):
                first = await line.reader.read(CHUNK)
            if not first:
                return None
            line.state.receive_data(first)
        async with asyncio.timeout(self.limits.head_seconds):
            event = await line.event()
        return event if isinstance(event, h11.Request) else None

    def _refused(self, name: str, request: h11.Request, refusal: Refusal) -> None:
        """Note a refusal: of what, if that is something there is."""
        self.presence.refused(name, refusal.status)
        path = request.target.decode("ascii", "replace")
        why = without_quotes(str(refusal))
        known = path if path in PATHS or path == FACTS else "other"
        self._tell(events.REQUEST_REFUSED(peer=name, path=known, status=refusal.status, reason=why))

    async def _refuse(self, line: Line, refusal: Refusal) -> None:
        """Say no, and that this was all."""
        if line.state.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        text = str(refusal).encode()
        head = [("content-length", str(len(text))), ("content-type", "text/plain"), ("connection", "close")]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                await line.send(h11.Response(status_code=refusal.status, headers=head))
                await line.send(h11.Data(data=text))
                await line.send(h11.EndOfMessage())
                while await line.reader.read(CHUNK):
                    pass

    # --- one request ------------------------------------------------------------------------------------

    async def _one(self, line: Line, upstream: Upstream, name: str, request: h11.Request) -> None:
        """Check a request, pass it on, and pass the answer back."""
        self.look()
        path, length = check_head(name, request, self.settings)
        waiting = self._tokens.wait(name)
        if waiting > LONGEST_WAIT:
            raise Refusal(503, "too many requests")
        await asyncio.sleep(waiting)
        if path == FACTS:
            await self._exchange_facts(line, name, length)
            return
        clock = dict(request.headers).get(CLOCK, b"").decode("ascii", "replace")
        self.presence.asked(name, path, clock, length)
        if (lost := self._lost.asked(name, path)) is not None:
            await self._read(line, length)
            await self._give(line, name, lost.heads, lost.body)
            return
        if path == PULLS:
            await self._waiting.keep(name, self.limits.keeps_waiting(len(self.settings.peers)))
            if line.writer.is_closing():
                raise ConnectionResetError("it went away")  # the message it asks for would be lost
        whole, heard = None, self._waiting.heard
        try:
            async with asyncio.timeout(self.limits.body_seconds(length)):
                if path == ANNOUNCES:
                    whole = b"".join([piece async for piece in line.body()])
                    check_announcement(whole, self.limits)
                await upstream.ask(request)
                if whole is not None:
                    await upstream.send(h11.Data(data=whole))
                else:
                    async for piece in line.body():
                        await upstream.send(h11.Data(data=piece))
                await upstream.send(h11.EndOfMessage())
        except TimeoutError:
            raise Refusal(408, "too slow") from None
        except UpstreamGone as error:
            raise Refusal(503, f"the SuperLink is away: {error}") from None
        answered = await self._answer(line, upstream, name, path)
        if path == PULLS:
            self._waiting.answered(name, heard, answered)

    async def _exchange_facts(self, line: Line, name: str, length: int) -> None:
        """Hear what a client has, and say what the server has and what time it is."""
        try:
            self.presence.told(name, Facts.read(json.loads(await self._read(line, length))))
        except (ValueError, RecursionError, UserError):
            raise Refusal(400, "these are no facts") from None
        told = json.dumps(
            {"time": time.time(), "facts": Facts.in_folder(Path(self.settings.folder)).plain()}
        ).encode()
        heads = [(b"content-length", str(len(told)).encode()), (b"content-type", b"application/json")]
        await self._whole(line, heads, told)

    async def _read(self, line: Line, length: int) -> bytes:
        """Return the whole body of a request that is answered here."""
        try:
            async with asyncio.timeout(self.limits.body_seconds(length)):
                return b"".join([piece async for piece in line.body()])
        except TimeoutError:
            raise Refusal(408, "too slow") from None

    async def _give(self, line: Line, name: str, heads: Heads, body: bytes) -> None:
        """Answer a client that asked for work; should that be lost, it gets it when it asks again."""
        self._lost.answered(name, heads, body)
        self.presence.answered(name, len(body))
        await self._whole(line, heads, body)

    async def _whole(self, line: Line, heads: Heads, body: bytes) -> None:
        for event in (h11.Response(status_code=200, headers=heads), h11.Data(data=body), h11.EndOfMessage()):
            await self._deliver(line, event)

    async def _answer(self, line: Line, upstream: Upstream, name: str, path: str) -> int:
        """Pass the answer back; return how long it was."""
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                response = await upstream.answer()
        except (TimeoutError, UpstreamGone) as error:
            raise Refusal(503, f"the SuperLink does not answer: {error}") from None
        if response.status_code == 500 and path in ASKS_AGAIN:
            # A SuperNode gives up for ever on 500, which may mean no more than a database that is busy.
            raise Refusal(503, "the SuperLink failed")
        if response.status_code in (401, 403):
            self.presence.refused(name, response.status_code)
        heads = [(head, value) for head, value in response.headers if head not in HOP_BY_HOP]
        if path == PULLS and response.status_code == 200:
            body = b"".join([piece async for piece in upstream.body()])
            await self._give(line, name, heads, body)
            return len(body)
        await self._deliver(line, h11.Response(status_code=response.status_code, headers=heads))
        length = 0
        async for piece in upstream.body():
            length += len(piece)
            self.presence.answered(name, len(piece))
            await self._deliver(line, h11.Data(data=piece))
        await self._deliver(line, h11.EndOfMessage())
        return length

    async def _deliver(self, line: Line, event: h11.Event) -> None:
        """Send a piece of an answer; a peer that does not take it has gone."""
        async with asyncio.timeout(self.limits.head_seconds):
            await line.send(event)


def main(path: str) -> None:
    """Guard until stopped."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    settings, running = Settings.load(Path(path)), Path(path).parent
    say = EventLog(events_file(running, "guard"), "server", "guard")
    with listen(settings) as listener:
        address = f"{settings.listen}:{settings.port}"
        started = events.GUARD_STARTED(address=address, clients=len(settings.peers))
        log.info("%s", started.text)
        say(started)
        with contextlib.suppress(KeyboardInterrupt):
            guard = Guard(settings, Path(path), say, door_file(running), Bell.of_this_party())
            asyncio.run(guard.serve(listener))


if __name__ == "__main__":
    main(sys.argv[1])
