"""The server's end of long blocks: a transport over a transport, which carries them piece by piece.

Whoever asks over it need not know: a question has one name and one reply, however many messages it takes. A
reply that was long is in a file, and so is what has come of it when the server dies: the client announces the
same reply again, and only what is missing is fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.long_blocks import Arriving, check_announcement, described, only, piece_of
from trilemma.federation.protocol.transport import Reply, Transport

PATIENCE = 2
"""How many exchanges a transfer may take for each of its pieces, before its client counts as unwilling."""


@dataclass
class _Transfer:
    """A question under way: what is asked of the carrier now, and how far the pieces have come."""

    node: int
    question: bytes
    expires: float
    asked: str = ""
    announced: kinds.Long | None = None
    arriving: Arriving | None = None
    exchanges: int = 0


@dataclass
class Piecewise:
    """Carries blocks of any length over `transport`; replies of at most `longest` bytes, into `folder`."""

    transport: Transport
    folder: Path
    longest: int
    now: Callable[[], float] = time.monotonic
    _transfers: dict[str, _Transfer] = field(default_factory=dict)

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes and the clients they are."""
        return self.transport.nodes()

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        """Send short blocks as they are, and of long ones the announcement."""
        different = {id(block): block for block in blocks.values() if len(block) > wire.PIECE}
        announced = {key: described(block) for key, block in different.items()}
        first = {
            node: wire.dumps(announced[id(block)]) if id(block) in announced else block
            for node, block in blocks.items()
        }
        sent = self.transport.send(first, lifetime)
        expires = self.now() + lifetime
        for name, node in sent.items():
            long = announced.get(id(blocks[node]))
            self._transfers[name] = _Transfer(node, blocks[node], expires, name, long)
        return sent

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Return the replies that are complete; ask for the next piece of the others."""
        self._transfers = {name: one for name, one in self._transfers.items() if name in set(questions)}
        names = {transfer.asked: name for name, transfer in self._transfers.items()}
        complete: list[Reply] = []
        for reply in self.transport.fetch(list(names)):
            name = names[reply.question]
            transfer = self._transfers.get(name)
            if transfer is None or transfer.asked != reply.question:
                continue  # the carrier brought it twice
            try:
                done = self._advance(transfer, reply)
            except wire.WireError as error:
                done = Reply(reply.node, error=str(error), refused=True)
            if done is not None:
                complete.append(replace(done, question=name))
                del self._transfers[name]
        return complete

    def _advance(self, transfer: _Transfer, reply: Reply) -> Reply | None:
        """Return a reply that is complete; otherwise ask for what comes next."""
        if reply.block is None:
            return reply
        try:
            kind = wire.kind_of(reply.block)
        except wire.WireError:
            return reply  # whoever asked says what is wrong with it
        if kind == kinds.Have.kind and transfer.announced is not None:
            return self._hand_over(transfer, transfer.announced, reply.block)
        if kind == kinds.Long.kind:
            long, _ = wire.loads(reply.block, kinds.Long, limit=wire.LARGEST_HEADER)
            check_announcement(long, self.longest)
            folder = self.folder / str(transfer.node)
            only(folder, {long.digest})
            transfer.arriving = Arriving(long, folder / long.digest)
            transfer.arriving.compare()
            return self._take_over(transfer, transfer.arriving)
        if kind == kinds.Piece.kind and transfer.arriving is not None:
            transfer.arriving.take(reply.block)
            return self._take_over(transfer, transfer.arriving)
        return reply

    def _hand_over(self, transfer: _Transfer, long: kinds.Long, block: wire.Block) -> Reply | None:
        """Send the first piece that the client does not have; when it has all, the question once more."""
        have, _ = wire.loads(block, kinds.Have, limit=wire.LARGEST_HEADER)
        if have.digest != long.digest or not 0 <= have.pieces <= len(long.checksums):
            raise wire.WireError(f"it has {have.pieces} pieces of another block")
        if have.pieces == len(long.checksums):
            return self._ask(transfer, wire.dumps(long), len(long.checksums))
        return self._ask(transfer, piece_of(transfer.question, long.digest, have.pieces), len(long.checksums))

    def _take_over(self, transfer: _Transfer, arriving: Arriving) -> Reply | None:
        """Ask for the next piece of a reply, or return it."""
        if arriving.complete:
            return Reply(transfer.node, arriving.mapped())
        fetch = kinds.Fetch(digest=arriving.long.digest, place=arriving.have)
        handed = 0 if transfer.announced is None else len(transfer.announced.checksums)
        return self._ask(transfer, wire.dumps(fetch), handed + len(arriving.long.checksums))

    def _ask(self, transfer: _Transfer, block: bytes, pieces: int) -> Reply | None:
        transfer.exchanges += 1
        left = transfer.expires - self.now()
        if transfer.exchanges > PATIENCE * (pieces + 2):
            raise wire.WireError(f"{transfer.exchanges} exchanges for {pieces} pieces")
        sent = self.transport.send({transfer.node: block}, left) if left > 0 else {}
        if not sent:
            return Reply(transfer.node, error="a piece could not be sent")
        (transfer.asked,) = sent
        return None
