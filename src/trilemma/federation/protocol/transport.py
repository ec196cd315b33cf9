"""The boundary to whatever carries messages: three functions, and nothing else a carrier has to know.

A transport moves blocks of bytes between the server and the nodes of clients. It may be slow, lose
questions and deliver late; `exchange` deals with that. What it must be sure of is who sits at a node: by the
key that node authenticated with, never by what it says. `carriers` has two.

At the other end a transport hands every block to `Node.answer` and carries back what that returns, or the
text of the `Refused` it raises; of its own failures it tells what `reasons.what_travels` allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trilemma.federation.protocol.reasons import heard, shortened

if TYPE_CHECKING:
    from trilemma.federation.protocol.wire import Block

FIRST_NODE = 100
"""Nodes have numbers of their own: who takes one for a client finds nobody."""


@dataclass(frozen=True)
class Reply:
    """What came from a node: a block, or an error in its place.

    `refused` tells a client that said no from one that the carrier could not reach; `question` names what is
    answered, where a node may have been asked the same twice. An error is what somebody else wrote: `why` is
    what is believed of it.
    """

    node: int
    block: Block | None = None
    error: str = ""
    refused: bool = False
    question: str = ""

    @property
    def unreached(self) -> bool:
        """Whether the carrier did not get through, so that nobody said anything."""
        return self.block is None and not self.refused

    @property
    def why(self) -> str:
        """The reason given, in the catalogue's words where a client refused."""
        return heard(self.error) if self.refused else shortened(f"unreached: {self.error}")


class Transport(Protocol):
    """What carries questions to clients and their answers back, as the server sees it."""

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes and, by their authenticated keys, the clients they are."""

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        """Send each node its block, to be forgotten after `lifetime` seconds.

        Return the question names of those that were taken, and their nodes.
        """

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Return the replies to these questions that are there now; it does not wait."""
