"""A client's end: one outgoing connection, one stream, through which the server asks.

    serve(node.answer, "fl.example.org:9190", Tls(certificate, key, authority), stop)

`answer` is called in the thread that calls `serve`, with one block at a time: bytes, or a mapped file where
the block is long. It returns a block, whole or in parts, or raises `Refused`, whose code travels; of every
other failure what `reasons.what_travels` allows. `serve` returns when `stop` is set and
`answer` has returned.

A line that breaks is made anew, after a moment that grows and is drawn at random; certificate and key are
read again each time. What the client works on it goes on with meanwhile: the server asks what is open when
the line is back, and gets the answer it waits for. Nothing a server sends can fill memory or disk: at most
`MOST` questions wait, and of one that is longer than a piece nothing is taken before `check_length` has let
its length pass.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from trilemma.base.errors import UserError
from trilemma.base.version import VERSION
from trilemma.federation.carriers.grpc import credentials, frames
from trilemma.federation.carriers.grpc.credentials import Tls
from trilemma.federation.carriers.grpc.frames import BadFrameError, Beginning, Frame
from trilemma.federation.carriers.grpc.outbox import Outbox
from trilemma.federation.carriers.grpc.transfers import (
    GIVE_BACK,
    Arrived,
    DescribedBlock,
    Incoming,
    Outgoing,
    Whole,
    check_short,
    give_back,
)
from trilemma.federation.protocol.reasons import what_travels

Answer = Callable[[Arrived], Whole]

MOST = 4
"""Questions that may be open at a client; a server has two of one node, at most three."""

SILENCE = 8.0
"""Seconds of silence after which the other end is gone."""

SOONEST, LATEST = 0.25, 3.0
"""Seconds before a line is made anew: the first time, and at most. Once and a half that is less than a
handshake may take, so that whoever a flood kept out is in soon after it."""


@dataclass(eq=False)
class _Asked:
    """A question that came: to be judged by its length, on its way, waiting, being answered, or answered."""

    expires: float
    long: Beginning | None = None
    incoming: Incoming | None = None
    block: Arrived | None = None
    taken: bool = False
    answer: Outgoing | None = None


def serve(
    answer: Answer,
    address: str,
    tls: Tls,
    stop: threading.Event,
    say: Callable[[str], None] = lambda _: None,
    *,
    spool: Path | None = None,
    check_length: Callable[[int], None] = lambda _: None,
    silence: float = SILENCE,
    facts: Callable[[], str] = lambda: "",
) -> None:
    """Answer what the server at `address` asks until `stop` is set; `say` is told when it is there, or not.

    `facts` is what the server is told on every line. Questions of more than 16 MiB lie in the folder `spool`;
    without one in memory.
    """
    client = _Client(answer, spool, check_length, stop, facts)
    line = threading.Thread(target=client.hold, args=(address, tls, say, silence), daemon=True)
    line.start()
    threading.Thread(target=client.watch, daemon=True).start()
    try:
        client.work()
    finally:
        stop.set()
        line.join(2.0)


class TurnedAwayError(UserError):
    """The server is there, and does not let this client in."""


def look(address: str, tls: Tls, seconds: float = SILENCE) -> str:
    """Return the facts that the server tells, and leave the client's line, if it has one, alone.

    Raises:
        TurnedAwayError: it says why this client is not let in.
        OSError: nobody is there, or they did not come as far as that.
    """
    options = credentials.client_options(address, seconds)
    said = ((credentials.VERSION, VERSION), (credentials.LOOK, "1"))
    with grpc.secure_channel(address, credentials.client_credentials(tls), options) as channel:
        call = _carry(channel)(iter(()), metadata=said, timeout=seconds)
        try:
            for _ in call:
                pass
            return str(dict(call.initial_metadata()).get(credentials.FACTS, ""))
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise OSError(_reason(error)) from None
            raise TurnedAwayError(_reason(error)) from None


def _carry(channel: grpc.Channel) -> grpc.StreamStreamMultiCallable:
    return channel.stream_stream(f"/{credentials.SERVICE}/{credentials.CALL}")


class _Client:
    def __init__(
        self,
        answer: Answer,
        spool: Path | None,
        check_length: Callable[[int], None],
        stop: threading.Event,
        facts: Callable[[], str],
    ) -> None:
        self._answer, self._spool, self._check_length, self._stop = answer, spool, check_length, stop
        self._facts = facts
        self._changed = threading.Condition()
        self._questions: dict[bytes, _Asked] = {}
        self._outbox: Outbox | None = None
        self._call: grpc.Call | None = None

    # --- work ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Wait until this client shall stop."""
        while not self._stop.wait(GIVE_BACK):
            give_back()
        with self._changed:
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()

    def work(self) -> None:
        """Answer one question after the other; of a long one that begins say whether it may come."""
        while (next_one := self._next()) is not None:
            question, asked = next_one
            try:
                if asked.block is None:
                    self._let_in(question, asked)
                    continue
                outgoing = Outgoing(question, DescribedBlock.of(self._answer(asked.block)))
            except BaseException as error:  # no signal comes to this thread
                text = what_travels(error).encode()
                outgoing = Outgoing(question, DescribedBlock.of(text), kind=frames.REFUSED)
            with self._changed:
                asked.block, asked.incoming, asked.long = None, None, None
                if self._questions.get(question) is asked:
                    asked.answer = outgoing
                    if self._outbox is not None:
                        self._outbox.carry(outgoing)

    def _next(self) -> tuple[bytes, _Asked] | None:
        """Wait for a question that is complete, or to be judged; None when this client shall stop."""
        with self._changed:
            while not self._stop.is_set():
                self._forget_expired()
                for question, asked in self._questions.items():
                    if asked.block is not None and not asked.taken:
                        asked.taken = True
                        return question, asked
                    if asked.long is not None and asked.incoming is None:
                        return question, asked
                self._changed.wait()
            return None

    def _forget_expired(self) -> None:
        """Let go what nobody waits for any more, answered or not: a server may die before it says so."""
        now = time.monotonic()
        self._questions = {name: one for name, one in self._questions.items() if one.expires >= now}

    def _let_in(self, question: bytes, asked: _Asked) -> None:
        """Make room for a long question, and ask for what is not here of it."""
        assert asked.long is not None
        self._check_length(asked.long.length)  # which may take its time, and refuse
        incoming = Incoming.of(asked.long, self._spool)
        with self._changed:
            asked.incoming = incoming
            self._complete(asked)
            if asked.block is None and self._outbox is not None:
                self._outbox.say(frames.HAVE, question, incoming.have)

    # --- the line --------------------------------------------------------------------------------------

    def hold(self, address: str, tls: Tls, say: Callable[[str], None], silence: float) -> None:
        """Hold a line to the server, and make it anew where it breaks."""
        tries, said = 0, ""
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._talk(address, tls, say, silence)
                why = "the server ended the stream"
            except grpc.RpcError as error:
                why = _reason(error)
            except (BadFrameError, UserError, OSError) as error:
                why = str(error)
            if self._stop.is_set():
                return
            if why != said or time.monotonic() - began > LATEST:
                say(f"not connected to {address}: {why}")
            said = why
            tries = 0 if time.monotonic() - began > LATEST else tries + 1
            pause = min(LATEST, SOONEST * 2 ** min(tries, 10))
            self._stop.wait(pause * random.uniform(0.5, 1.5))

    def _talk(self, address: str, tls: Tls, say: Callable[[str], None], silence: float) -> None:
        options = credentials.client_options(address, silence)
        with grpc.secure_channel(address, credentials.client_credentials(tls), options) as channel:
            outbox = Outbox()
            said = ((credentials.VERSION, VERSION), (credentials.FACTS, self._facts()))
            call = _carry(channel)(iter(outbox), metadata=said)
            self._call = call
            if self._stop.is_set():
                call.cancel()
            try:
                call.initial_metadata()
                with self._changed:
                    self._outbox = outbox
                    for asked in self._questions.values():
                        if asked.answer is not None:
                            asked.answer.next = None
                            outbox.carry(asked.answer)
                if call.is_active():
                    say(f"connected to {address}")
                for message in call:
                    self._take(outbox, frames.decode(message))
            finally:
                with self._changed:
                    self._outbox = None
                outbox.close()
                call.cancel()

    # --- questions -------------------------------------------------------------------------------------

    def _take(self, outbox: Outbox, frame: Frame) -> None:
        with self._changed:
            asked = self._questions.get(frame.question)
            if frame.kind == frames.BEGIN:
                self._begin(outbox, frame, asked)
            elif frame.kind == frames.FORGET:
                outbox.forget(frame.question)
                self._questions.pop(frame.question, None)
            elif asked is None:
                return
            elif frame.kind == frames.HAVE:
                outbox.go_on(frame.question, frame.number)
            elif frame.kind == frames.PIECE and asked.incoming is not None and asked.block is None:
                if (again := asked.incoming.take(frame)) is not None:
                    outbox.say(frames.HAVE, frame.question, again)
                self._complete(asked)

    def _begin(self, outbox: Outbox, frame: Frame, asked: _Asked | None) -> None:
        """Take the beginning of a question; of one that is known, say how much of it is here."""
        begun = frames.read_beginning(frame)
        self._forget_expired()
        if asked is None:
            if len(self._questions) >= MOST:
                raise BadFrameError(f"the server has more than {MOST} questions open")
            asked = self._questions[frame.question] = _Asked(time.monotonic() + begun.lifetime)
            if begun.length <= frames.PIECE_BYTES:
                asked.block = check_short(begun)
                self._changed.notify_all()
                return
            asked.long = begun
            self._changed.notify_all()
        if asked.incoming is not None and asked.block is None:
            outbox.say(frames.HAVE, frame.question, asked.incoming.have)

    def _complete(self, asked: _Asked) -> None:
        """Hand a question over when all of it is here: a copy for who writes to it, where it is in a file."""
        if asked.incoming is not None and asked.incoming.complete and not asked.taken:
            asked.block = asked.incoming.whole(mmap.ACCESS_COPY)
            self._changed.notify_all()


def _reason(error: grpc.RpcError) -> str:
    """Return why a line broke, in the words of whoever knows it."""
    with contextlib.suppress(Exception):
        return str(error.details())[:200] or str(error.code().name)
    return str(error)[:200]
