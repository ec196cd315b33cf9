"""What a guard says to a client it has let in: each request is checked, passed on, and answered.

Bodies pass through in pieces. Three requests are not simply passed on: an announcement is read whole, its
records are counted, and compared with what was announced before; who asks for work is kept waiting while
there is none, and gets an answer that it lost once more; and what both sides have is exchanged with the guard
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h11

from trilemma.errors import UserError
from trilemma.federation import events
from trilemma.federation.event_fields import without_quotes
from trilemma.federation.facts import FACTS, Facts
from trilemma.flower.heads import CLOCK, Refusal, check_announcement, check_head, check_replies
from trilemma.flower.limits import ANNOUNCES, ASKS_AGAIN, PATHS, PULLS, Limits, Settings
from trilemma.flower.lines import CHUNK, HOP_BY_HOP, Line, Upstream, UpstreamGone
from trilemma.flower.lost_answers import Heads, LostAnswers
from trilemma.flower.meters import Tokens
from trilemma.flower.presence import Presence
from trilemma.flower.replies import Replies
from trilemma.flower.waiting import Waiting

LONGEST_WAIT = 5.0
"""Seconds for which a peer that asks too often is kept waiting, before it is sent away."""
LINGER = 1.0
"""Seconds in which who was refused amid a body is listened to: closing at once takes the answer away."""


@dataclass(frozen=True)
class Desk:
    """What all conversations share.

    `settings` returns those that are in force now; `tell` writes an event down.
    """

    settings: Callable[[], Settings]
    tell: Callable[[events.Event], None]
    presence: Presence
    tokens: Tokens
    waiting: Waiting
    lost: LostAnswers
    replies: Replies
    upstream_tls: ssl.SSLContext


class Conversation:
    """With the client whose certificate has this `name`, over one connection."""

    def __init__(self, desk: Desk, line: Line, name: str) -> None:
        self._desk, self._line, self._name = desk, line, name
        self._settings = desk.settings()
        self._upstream = Upstream(self._settings.upstream, desk.upstream_tls)

    @property
    def _limits(self) -> Limits:
        return self._settings.limits

    async def hold(self) -> None:
        """Answer requests, one after the other, until the client or something else ends it."""
        state = self._line.state
        try:
            while (request := await self._head()) is not None:
                try:
                    await self._one(request)
                except Refusal as refusal:
                    self._note(request, refusal)
                    await self._refuse(refusal)
                    return
                if state.our_state is not h11.DONE or state.their_state is not h11.DONE:
                    return
                state.start_next_cycle()
        finally:
            self._upstream.close()

    async def _head(self) -> h11.Request | None:
        """Return the next request's head; None where the client is done."""
        if not self._line.state.trailing_data[0]:
            async with asyncio.timeout(self._limits.idle_seconds):
                first = await self._line.reader.read(CHUNK)
            if not first:
                return None
            self._line.state.receive_data(first)
        async with asyncio.timeout(self._limits.head_seconds):
            event = await self._line.event()
        return event if isinstance(event, h11.Request) else None

    async def _one(self, request: h11.Request) -> None:
        """Check a request, and answer it here or pass it on."""
        self._settings = self._desk.settings()
        path, length = check_head(self._name, request, self._settings)
        waiting = self._desk.tokens.wait(self._name)
        if waiting > LONGEST_WAIT:
            raise Refusal(503, "too many requests")
        await asyncio.sleep(waiting)
        if path == FACTS:
            await self._exchange_facts(length)
            return
        clock = dict(request.headers).get(CLOCK, b"").decode("ascii", "replace")
        self._desk.presence.asked(self._name, path, clock, length)
        if (lost := self._desk.lost.asked(self._name, path)) is not None:
            await self._read(length)
            await self._give(lost.heads, lost.body)
            return
        if path == PULLS:
            await self._desk.waiting.keep(self._name, self._limits.keeps_waiting(len(self._settings.peers)))
            if self._line.writer.is_closing():
                raise ConnectionResetError("it went away")  # the message it asks for would be lost
        heard = self._desk.waiting.heard
        await self._pass_on(request, path, length)
        answered = await self._answer(path)
        if path == PULLS:
            self._desk.waiting.answered(self._name, heard, answered)

    # --- a request on its way in ------------------------------------------------------------------------

    async def _pass_on(self, request: h11.Request, path: str, length: int) -> None:
        """Pass a request on to the SuperLink; an announcement only once it has been counted."""
        try:
            async with asyncio.timeout(self._limits.body_seconds(length)):
                counted = None
                if path == ANNOUNCES:
                    counted = await self._whole_body()
                    announcement = check_announcement(counted, self._limits)
                    check_replies(self._name, announcement, self._desk.replies)
                await self._upstream.ask(request)
                if counted is not None:
                    await self._upstream.send(h11.Data(data=counted))
                else:
                    async for piece in self._line.body():
                        await self._upstream.send(h11.Data(data=piece))
                await self._upstream.send(h11.EndOfMessage())
        except TimeoutError:
            raise Refusal(408, "too slow") from None
        except UpstreamGone as error:
            raise Refusal(503, f"the SuperLink is away: {error}") from None

    async def _read(self, length: int) -> bytes:
        """Return the whole body of a request that is answered here."""
        try:
            async with asyncio.timeout(self._limits.body_seconds(length)):
                return await self._whole_body()
        except TimeoutError:
            raise Refusal(408, "too slow") from None

    async def _whole_body(self) -> bytes:
        return b"".join([piece async for piece in self._line.body()])

    # --- an answer on its way back ----------------------------------------------------------------------

    async def _answer(self, path: str) -> int:
        """Pass the SuperLink's answer back; return how long it was."""
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                response = await self._upstream.answer()
        except (TimeoutError, UpstreamGone) as error:
            raise Refusal(503, f"the SuperLink does not answer: {error}") from None
        if response.status_code == 500 and path in ASKS_AGAIN:
            # A SuperNode gives up for ever on 500, which may mean no more than a database that is busy.
            raise Refusal(503, "the SuperLink failed")
        if response.status_code in (401, 403):
            self._desk.presence.refused(self._name, response.status_code)
        heads = [(head, value) for head, value in response.headers if head not in HOP_BY_HOP]
        if path == PULLS and response.status_code == 200:
            body = b"".join([piece async for piece in self._upstream.body()])
            if body:
                self._desk.replies.asked(self._name)
            await self._give(heads, body)
            return len(body)
        await self._deliver(h11.Response(status_code=response.status_code, headers=heads))
        length = 0
        async for piece in self._upstream.body():
            length += len(piece)
            self._desk.presence.answered(self._name, len(piece))
            await self._deliver(h11.Data(data=piece))
        await self._deliver(h11.EndOfMessage())
        return length

    async def _exchange_facts(self, length: int) -> None:
        """Hear what the client has, and say what the server has and what time it is."""
        try:
            self._desk.presence.told(self._name, Facts.read(json.loads(await self._read(length))))
        except (ValueError, RecursionError, UserError):
            raise Refusal(400, "these are no facts") from None
        facts = Facts.in_folder(Path(self._settings.folder)).plain()
        told = json.dumps({"time": time.time(), "facts": facts}).encode()
        heads = [(b"content-length", str(len(told)).encode()), (b"content-type", b"application/json")]
        await self._deliver_whole(heads, told)

    async def _give(self, heads: Heads, body: bytes) -> None:
        """Answer a client that asked for work; should that be lost, it gets it when it asks again."""
        self._desk.lost.answered(self._name, heads, body)
        self._desk.presence.answered(self._name, len(body))
        await self._deliver_whole(heads, body)

    async def _deliver_whole(self, heads: Heads, body: bytes) -> None:
        for event in (h11.Response(status_code=200, headers=heads), h11.Data(data=body), h11.EndOfMessage()):
            await self._deliver(event)

    async def _deliver(self, event: h11.Event) -> None:
        """Send a piece of an answer; a client that does not take it has gone."""
        async with asyncio.timeout(self._limits.head_seconds):
            await self._line.send(event)

    # --- no ---------------------------------------------------------------------------------------------

    def _note(self, request: h11.Request, refusal: Refusal) -> None:
        """Note a refusal: of what, if that is something there is."""
        self._desk.presence.refused(self._name, refusal.status)
        path = request.target.decode("ascii", "replace")
        why = without_quotes(str(refusal))
        known = path if path in PATHS or path == FACTS else "other"
        self._desk.tell(
            events.REQUEST_REFUSED(peer=self._name, path=known, status=refusal.status, reason=why)
        )

    async def _refuse(self, refusal: Refusal) -> None:
        """Say no, and that this was all."""
        line = self._line
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
