"""The server's end: a `Transport` whose clients hold one stream each, through which they are asked.

    with GrpcServer.open(("0.0.0.0", 9190), Tls(certificate, key, authority), roster, spool=folder) as server:
        server.nodes(); server.send({node: block}, lifetime=60); server.wait(1.0); server.fetch(questions)

`roster()` returns who is a client now: the SHA-256 of each one's TLS public key (SubjectPublicKeyInfo, hex)
and the client's number. It is asked at every arrival, at every question and once a second: whoever is not on
it any more, and whose certificate's time is over, has its stream closed.

A node is a client's place in the roster, whichever connection it has. A question to a node that is not there
waits for it until it expires; a client that comes back, the same process or a new one, is asked what is
open, and its answer goes on where it stopped. Where two programs come with one certificate the later one
wins: it is surely there. The former one is told, and comes back after a while.

What a client sends that nobody asked for is ignored up to a bound, then its stream is closed. An answer that
breaks a rule (longer than allowed, pieces of another length, not what was announced) is a reply with an
error.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from trilemma.base.errors import UserError
from trilemma.base.version import VERSION
from trilemma.federation.carriers.grpc import credentials, frames
from trilemma.federation.carriers.grpc.credentials import Limits, Peer, Tls
from trilemma.federation.carriers.grpc.frames import BadFrameError, Frame
from trilemma.federation.carriers.grpc.outbox import Outbox
from trilemma.federation.carriers.grpc.transfers import (
    GIVE_BACK,
    Arrived,
    DescribedBlock,
    Incoming,
    Outgoing,
    check_short,
    give_back,
)
from trilemma.federation.protocol.transport import FIRST_NODE, Reply

ROSTER = Callable[[], Mapping[str, int]]

LOOK = 1.0
"""Seconds between two looks at the roster while nobody asks."""

STRAY = 256
"""Frames about questions that are not open which a stream may bring: those that were on their way."""

PAUSE = 0.5
"""Seconds that who is not let in waits for the reason, and cannot ask again meanwhile but once."""


@dataclass(frozen=True)
class Presence:
    """A client that is there: since when and when it was last heard (seconds since 1970), from where."""

    since: float
    heard: float
    address: str
    facts: str = ""


@dataclass(eq=False)
class _Line:
    """One client's stream."""

    client: int
    peer: Peer
    context: grpc.ServicerContext
    facts: str = ""
    outbox: Outbox = field(default_factory=Outbox)
    since: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.time)
    stray: int = 0
    ended: float | None = None

    def end(self, code: grpc.StatusCode, why: str) -> None:
        """Close the stream, and say why."""
        if self.ended is None:
            self.ended = time.monotonic()
            self.context.set_code(code)
            self.context.set_details(why)
            self.outbox.close()

    def cut_off(self) -> None:
        """End a stream whose reader does not read, not even why."""
        if self.ended is not None and time.monotonic() - self.ended > LOOK:
            self.context.cancel()


@dataclass(eq=False)
class _Question:
    """A question that is open."""

    name: str
    client: int
    block: DescribedBlock
    expires: float
    incoming: Incoming | None = None
    turns: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by who takes of its answer: a client's former stream may still be at it."""

    def outgoing(self) -> Outgoing:
        """Return it as it is sent now."""
        return Outgoing(
            bytes.fromhex(self.name), self.block, lifetime=max(0.0, self.expires - time.monotonic())
        )


class GrpcServer:
    """The server of a federation, as gRPC carries its questions."""

    def __init__(self, roster: ROSTER, spool: Path, limits: Limits, facts: Callable[[], str]) -> None:
        self._roster, self._spool, self._limits, self._facts = roster, spool, limits, facts
        self.longest = limits.longest
        self.port = 0
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._lines: dict[int, _Line] = {}
        self._leaving: set[_Line] = set()
        self._questions: dict[str, _Question] = {}
        self._replies: dict[str, Reply] = {}
        self._arrivals: dict[int, tuple[float, float]] = {}
        self._turned_away: dict[int, str] = {}
        self._prefix, self._count = secrets.token_bytes(8), 0
        self._server: grpc.Server | None = None

    @classmethod
    def open(
        cls,
        listen: tuple[str, int],
        tls: Tls,
        roster: ROSTER,
        spool: Path,
        limits: Limits | None = None,
        facts: Callable[[], str] = lambda: "",
    ) -> GrpcServer:
        """Listen; with port 0 on a free one, which `port` tells. Whoever is let in is told `facts`.

        Without `limits` there are the usual ones, and at least two seats for each client of the roster.
        """
        usual = replace(Limits(), connections=max(Limits.connections, 2 * len(roster())))
        server = cls(roster, spool, limits or usual, facts)
        server._listen(listen, tls)
        return server

    def _listen(self, listen: tuple[str, int], tls: Tls) -> None:
        host, port = listen
        streams = 2 * self._limits.connections
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        self._server = grpc.server(
            ThreadPoolExecutor(streams, "carrier"),
            handlers=[grpc.method_handlers_generic_handler(credentials.SERVICE, {credentials.CALL: handler})],
            options=credentials.server_options(self._limits),
            maximum_concurrent_rpcs=streams,
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_secure_port(address, credentials.server_credentials(tls))
        except RuntimeError as error:
            raise UserError(
                f"{address} cannot be listened on: another program has it, or it is none of "
                f"this machine's ({error})"
            ) from None
        self._server.start()
        threading.Thread(target=self._look_after, daemon=True).start()

    def __enter__(self) -> GrpcServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and end every stream."""
        self._stopped.set()
        with self._lock:
            for line in self._lines.values():
                line.end(grpc.StatusCode.UNAVAILABLE, "the server stops")
        if self._server is not None:
            self._server.stop(LOOK).wait()

    # --- the transport ---------------------------------------------------------------------------------

    def nodes(self) -> Mapping[int, int]:
        """Return the nodes that are connected, and the clients they are by the roster as it is now."""
        self._check()
        with self._lock:
            return {FIRST_NODE + client: client for client in sorted(self._lines)}

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        """Ask; return the names of the questions. One that is open already is not asked twice: none is lost.

        A node that is on the roster and not connected is asked when it comes.
        """
        self._check()
        members = set(self._roster().values())
        described = {
            id(block): DescribedBlock.of(block)
            for block in {id(one): one for one in blocks.values()}.values()
        }
        sent: dict[str, int] = {}
        with self._lock:
            for node, block in blocks.items():
                client, whole = node - FIRST_NODE, described[id(block)]
                if client not in members or self._asked(client, whole):
                    continue
                self._count += 1
                name = (self._prefix + self._count.to_bytes(8, "big")).hex()
                question = _Question(name, client, whole, time.monotonic() + lifetime)
                self._questions[name] = question
                sent[name] = node
                if line := self._lines.get(client):
                    self._ask(line, question)
        return sent

    def _asked(self, client: int, block: DescribedBlock) -> bool:
        return any(
            one.client == client and one.block.digest == block.digest for one in self._questions.values()
        )

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Return the replies that are there; forget every other question, and tell who was asked."""
        with self._lock:
            wanted, now = set(questions), time.monotonic()
            for name, question in list(self._questions.items()):
                if name not in wanted or question.expires < now:
                    self._forget(question)
            there = [reply for name, reply in self._replies.items() if name in wanted]
            self._replies = {}
            return there

    def wait(self, seconds: float) -> None:
        """Return when something may have changed, a reply or who is there; at the latest after `seconds`."""
        if self._news.wait(seconds):
            self._news.clear()

    # --- who is there ----------------------------------------------------------------------------------

    def presence(self) -> Mapping[int, Presence]:
        """Return the clients that are there."""
        with self._lock:
            return {
                client: Presence(line.since, line.heard, line.context.peer(), line.facts)
                for client, line in sorted(self._lines.items())
            }

    def turned_away(self) -> Mapping[int, str]:
        """Return why clients on the roster were not let in, who have not come since."""
        with self._lock:
            return dict(self._turned_away)

    def _check(self) -> None:
        """End the streams of those who are not on the roster any more, or whose certificate is over."""
        members, now = self._roster(), dt.datetime.now(dt.UTC)
        with self._lock:
            for line in list(self._lines.values()):
                if members.get(line.peer.key) != line.client:
                    self._end(line, grpc.StatusCode.PERMISSION_DENIED, "the roster lists this key no more")
                elif line.peer.until < now:
                    self._end(line, grpc.StatusCode.UNAUTHENTICATED, "the certificate's time is over")

    def _look_after(self) -> None:
        """Once a second: the roster, certificates, and streams that were told to end and did not."""
        given_back = time.monotonic()
        while not self._stopped.wait(LOOK):
            with contextlib.suppress(Exception):  # a roster that is being written is there the next time
                self._check()
            with self._lock:
                for line in self._leaving:
                    line.cut_off()
            if time.monotonic() > given_back + GIVE_BACK:
                give_back()
                given_back = time.monotonic()

    # --- streams ---------------------------------------------------------------------------------------

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        said = {name: str(value) for name, value in context.invocation_metadata() or ()}
        client, peer = self._admit(said, context)
        looks = credentials.LOOK in said
        line = None if looks else self._arrive(client, peer, said.get(credentials.FACTS, ""), context)
        context.send_initial_metadata(((credentials.VERSION, VERSION), (credentials.FACTS, self._facts())))
        if line is None:
            return
        if not context.add_callback(line.outbox.close):
            line.outbox.close()
        threading.Thread(target=self._read, args=(line, requests), daemon=True).start()
        try:
            yield from line.outbox
        finally:
            self._left(line)

    def _admit(self, said: Mapping[str, str], context: grpc.ServicerContext) -> tuple[int, Peer]:
        """Return who it is whose key is on the roster; end anybody else's call with the reason."""
        peer = credentials.peer_of(context)
        client = None if peer is None else self._roster().get(peer.key)
        if peer is None or client is None:
            self._stopped.wait(PAUSE)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "this key is not on the federation's roster")
            raise AssertionError  # abort raises
        version, code, why = said.get(credentials.VERSION, "none")[:40], grpc.StatusCode.OK, ""
        if version != VERSION:
            code = grpc.StatusCode.FAILED_PRECONDITION
            why = f"the server has version {VERSION} of trilemma, this client {version}: both need the same"
        elif peer.until < dt.datetime.now(dt.UTC):
            code, why = grpc.StatusCode.UNAUTHENTICATED, "the certificate's time is over"
        elif not self._may_come(client):
            code, why = grpc.StatusCode.RESOURCE_EXHAUSTED, "this client comes too often"
        if why:
            with self._lock:
                self._turned_away[client] = why
            self._stopped.wait(PAUSE)
            context.abort(code, why)
        return client, peer

    def _arrive(self, client: int, peer: Peer, facts: str, context: grpc.ServicerContext) -> _Line:
        """Give a client its line, in place of the one it had, and ask what is open."""
        line = _Line(client, peer, context, facts)
        with self._lock:
            if self._stopped.is_set():
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")
            if former := self._lines.get(client):
                self._end(
                    former, grpc.StatusCode.ALREADY_EXISTS, "another program came with this certificate"
                )
            self._lines[client] = line
            self._turned_away.pop(client, None)
            now = time.monotonic()
            for question in self._questions.values():
                if question.client == client and question.expires > now:
                    self._ask(line, question)
        self._news.set()
        return line

    def _may_come(self, client: int) -> bool:
        """Count an arrival; tell whether there were too many."""
        most = self._limits.arrivals
        with self._lock:
            left, since = self._arrivals.get(client, (float(most), time.monotonic()))
            left = min(float(most), left + time.monotonic() - since)
            self._arrivals[client] = (max(0.0, left - 1), time.monotonic())
            return left >= 1

    def _end(self, line: _Line, code: grpc.StatusCode, why: str) -> None:
        line.end(code, why)
        self._leaving.add(line)
        if self._lines.get(line.client) is line:
            del self._lines[line.client]
            self._news.set()

    def _left(self, line: _Line) -> None:
        """Forget a stream that has ended; what is open is asked when the client is back."""
        with self._lock:
            self._leaving.discard(line)
            line.outbox.close()
            if self._lines.get(line.client) is line:
                del self._lines[line.client]
                self._news.set()

    def _ask(self, line: _Line, question: _Question) -> None:
        try:
            line.outbox.carry(question.outgoing())
        except BadFrameError as error:
            self._end(line, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _read(self, line: _Line, requests: Iterator[bytes]) -> None:
        """Take what a client sends until its stream ends; one that breaks the rules is shown out."""
        try:
            for message in requests:
                line.heard = time.time()
                self._take(line, frames.decode(message))
        except (BadFrameError, OSError) as error:
            with self._lock:
                self._end(line, grpc.StatusCode.INVALID_ARGUMENT, str(error)[:200])
        except grpc.RpcError:
            pass
        finally:
            line.outbox.close()

    # --- answers ---------------------------------------------------------------------------------------

    def _take(self, line: _Line, frame: Frame) -> None:
        name = frame.question.hex()
        with self._lock:
            question = self._questions.get(name) if self._lines.get(line.client) is line else None
            if question is None or question.client != line.client:
                line.stray += 1
                if line.stray > STRAY:
                    raise BadFrameError("this client sends what nobody asked for")
                if frame.kind in (frames.BEGIN, frames.REFUSED):
                    line.outbox.say(frames.FORGET, frame.question)
                return
        if frame.kind != frames.PIECE:
            question.turns += 1
            if question.turns > STRAY:
                raise BadFrameError("this client wants a question, or begins its answer, again and again")
        try:
            with question.lock:
                self._answer(line, question, frame)
        except BadFrameError as error:
            self._reply(line, question, Reply(0, error=f"block: {error}", refused=True))
        except OSError as error:
            self._reply(
                line, question, Reply(0, error=f"the server could not keep the answer: {error.strerror}")
            )

    def _answer(self, line: _Line, question: _Question, frame: Frame) -> None:
        if frame.kind == frames.HAVE:
            line.outbox.go_on(frame.question, min(frame.number, question.block.pieces))
        elif frame.kind == frames.PIECE:
            self._piece(line, question, frame)
        elif frame.kind in (frames.BEGIN, frames.REFUSED):
            self._begin(line, question, frame)
        else:
            raise BadFrameError("a client forgets nothing for the server")

    def _begin(self, line: _Line, question: _Question, frame: Frame) -> None:
        """Take the beginning of an answer; of a long one what came before is not asked for again."""
        begun = frames.read_beginning(frame)
        if begun.length > (frames.PIECE_BYTES if frame.kind == frames.REFUSED else self.longest):
            raise BadFrameError(f"an answer of {begun.length} bytes where at most {self.longest} are allowed")
        if begun.length <= frames.PIECE_BYTES:
            self._answered(line, question, check_short(begun), frame.kind == frames.REFUSED)
            return
        incoming = question.incoming
        if incoming is None or (incoming.length, incoming.digest) != (begun.length, begun.digest):
            incoming = question.incoming = Incoming.of(begun, self._spool / str(question.client))
        if incoming.complete:
            self._answered(line, question, incoming.whole())
        else:
            line.outbox.say(frames.HAVE, frame.question, incoming.have)

    def _piece(self, line: _Line, question: _Question, frame: Frame) -> None:
        if question.incoming is None:
            raise BadFrameError("a piece of an answer that was not begun")
        again = question.incoming.take(frame)
        if again is not None:
            line.outbox.say(frames.HAVE, frame.question, again)
        elif question.incoming.complete:
            self._answered(line, question, question.incoming.whole())

    def _answered(self, line: _Line, question: _Question, block: Arrived, refused: bool = False) -> None:
        if refused:
            text = bytes(block[:400]).decode(errors="replace")
            self._reply(line, question, Reply(0, error=text, refused=True))
        else:
            self._reply(line, question, Reply(0, block))

    def _reply(self, line: _Line, question: _Question, reply: Reply) -> None:
        """Keep a reply until it is fetched; its client need not keep it any longer."""
        node = FIRST_NODE + question.client
        with self._lock:
            if self._questions.pop(question.name, None) is None:
                return
            self._replies[question.name] = Reply(node, reply.block, reply.error, reply.refused, question.name)
            line.outbox.forget(bytes.fromhex(question.name))
            with contextlib.suppress(BadFrameError):
                line.outbox.say(frames.FORGET, bytes.fromhex(question.name))
        self._news.set()

    def _forget(self, question: _Question) -> None:
        """Let a question go; whoever works on it is told."""
        del self._questions[question.name]
        if line := self._lines.get(question.client):
            line.outbox.forget(bytes.fromhex(question.name))
            try:
                line.outbox.say(frames.FORGET, bytes.fromhex(question.name))
            except BadFrameError as error:
                self._end(line, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
