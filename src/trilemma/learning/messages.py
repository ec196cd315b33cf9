"""What clients send, declared once: named parts, which of them the rule aggregates, and their bytes.

An algorithm declares `message(model) -> MessageLayout`. All code that handles messages reads this layout: the
simulator counts sizes from it, attacks make rows of the aggregated parts, clients encode with it, and the
server decodes with it and refuses what does not fit.

    parts         names and shapes of the tensors in one client's message
    aggregated    the parts the rule sees, flattened and joined in this order: a row of (k, d)
    codec         how the parts become bytes; without one, all parts are aggregated and sent as float32
    remembered    parts of a client's last message that the receiver needs to decode its next one

Both ends also know what a message answers (`Asked`), so the round and the broadcast are not sent back.

A codec leaves out what the receiver can compute: QSGD sends scales and codes, from which the gradient
follows. A simulated attack makes rows of the aggregated parts. Such a row need not have an encoding, so its
length is counted as that of the longest message the layout allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.types import Model

if TYPE_CHECKING:
    from trilemma.aggregation import Geometry

Parts = Mapping[str, Tensor]
"""Named tensors of one client, or of k clients with the client axis first."""

VECTOR, ENCODED = "vector", "encoded"
"""Names of the tensors on the wire: float32 numbers, or a codec's bytes."""

STEPS = "steps"
"""Name of the part that holds a release as integers, in steps of a grid."""


@dataclass(frozen=True)
class Part:
    """One named tensor in a client's message; `shape` is without the client axis.

    >>> Part("table", (5, 12)).numbers
    60
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many numbers the part holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Length:
    """The length of a message: in float32 numbers, as papers count it, and in bytes on the wire."""

    scalars: float
    bytes: int

    def __add__(self, other: Length) -> Length:
        """Return the length of both messages together."""
        return Length(self.scalars + other.scalars, self.bytes + other.bytes)


@dataclass(frozen=True)
class MessageLengths:
    """The length of each of k messages; both attributes have shape (k,)."""

    scalars: Tensor
    bytes: Tensor

    @staticmethod
    def of(count: int, each: Length) -> MessageLengths:
        """Return the lengths of `count` messages that are equally long."""
        scalars = torch.full((count,), float(each.scalars), dtype=torch.float64)
        return MessageLengths(scalars, torch.full((count,), each.bytes, dtype=torch.int64))

    @property
    def total(self) -> Length:
        """The length of all k messages together.

        >>> MessageLengths.of(3, Length(1.5, 6)).total
        Length(scalars=4.5, bytes=18)
        """
        return Length(float(self.scalars.sum(dtype=torch.float64)), int(self.bytes.sum()))


@dataclass(frozen=True)
class Asked:
    """What a message answers, and whose it is: its round, the broadcast that began it, the client."""

    round: int = 0
    broadcast: Parts = field(default_factory=dict)
    client: int = -1


NOTHING_ASKED = Asked()


class Codec(Protocol):
    """How one client's parts become bytes, and bytes parts again.

    `decode` reads untrusted bytes. It checks the length before it allocates anything, checks every range, and
    raises a `UserError`, never any other exception, if something does not fit.
    """

    @property
    def longest(self) -> Length:
        """The length of the longest possible message."""

    def lengths(self, parts: Parts) -> MessageLengths:
        """Return the length of each of k messages, without encoding them."""

    def encode(self, parts: Parts) -> bytes | bytearray:
        """Return the bytes of one client's message."""

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """Return one client's parts; `before` are those remembered of its last message, zeros at first."""


@runtime_checkable
class ColumnCodec(Codec, Protocol):
    """A codec that can also decode a few columns at a time, for messages too long for memory.

    Every aggregated or remembered part is then one vector, and all of them have the same length.
    """

    def decode_columns(self, data: memoryview, before: Parts, asked: Asked) -> Iterator[Parts]:
        """Yield the aggregated and remembered parts that `Codec.decode` returns, a few columns at a time."""


@dataclass(frozen=True)
class Messages:
    """What k clients send in one exchange.

    `vectors` (k, d) is what the rule aggregates: the aggregated parts of the layout, flattened and joined.
    `beside` holds the parts that are not aggregated, each (k, …). `question` is the server's question if the
    messages answer one (see `Inquiry`). `senders` are the clients that sent them; empty: all, in order.
    `sharing` are the clients that shared secrets for the noise; empty: all who take part. `geometry` is the
    geometry of `vectors` if it was already measured.
    """

    vectors: Tensor
    beside: Parts = field(default_factory=dict)
    question: Parts = field(default_factory=dict)
    senders: tuple[int, ...] = ()
    sharing: tuple[int, ...] = ()
    geometry: Geometry | None = field(default=None, compare=False)

    def whose(self, everybody: Sequence[int]) -> tuple[int, ...]:
        """Return the client that sent each message; `everybody` if `senders` is not set; () for no messages.

        >>> Messages(torch.zeros(2, 5)).whose((4, 7)), Messages(torch.zeros(0, 5)).whose((4, 7))
        ((4, 7), ())
        """
        return self.senders if len(self.senders) == len(self.vectors) else tuple(everybody)

    def rows(self, rows: Sequence[int]) -> Messages:
        """Return the messages of some of the clients.

        >>> Messages(torch.arange(6.0).view(3, 2)).rows([2]).vectors
        tensor([[4., 5.]])
        """
        if list(rows) == list(range(len(self.vectors))):
            return self
        chosen = side_by_side(rows) or list(rows)
        beside = {name: part[chosen] for name, part in self.beside.items()}
        senders = tuple(self.senders[row] for row in rows) if self.senders else ()
        geometry = None if self.geometry is None else self.geometry.select(list(rows))
        return Messages(self.vectors[chosen], beside, self.question, senders, self.sharing, geometry)


def side_by_side(rows: Sequence[int]) -> slice | None:
    """Return consecutive rows as a slice, which selects without a copy; None if they are not consecutive.

    >>> side_by_side([2, 3, 4]), side_by_side([2, 4])
    (slice(2, 5, None), None)
    """
    if not rows or list(rows) != list(range(rows[0], rows[0] + len(rows))):
        return None
    return slice(rows[0], rows[0] + len(rows))


@dataclass(frozen=True)
class MessageLayout:
    """The layout of an algorithm's messages; the module's docstring explains the attributes.

    >>> layout = MessageLayout((Part("params", (3,)), Part("mean", (2, 1))), ("params", "mean"))
    >>> joined = layout.join({"params": torch.zeros(1, 3), "mean": torch.ones(1, 2, 1)})
    >>> joined
    tensor([[0., 0., 0., 1., 1.]])
    >>> layout.split(joined)["mean"].shape, layout.longest
    (torch.Size([1, 2, 1]), Length(scalars=5, bytes=20))
    >>> torch.equal(layout.decode(layout.encode(Messages(joined))).vectors, joined)
    True
    """

    parts: tuple[Part, ...]
    aggregated: tuple[str, ...]
    codec: Codec | None = None
    remembered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = [part.name for part in self.parts]
        if len(set(known)) != len(known):
            raise ValueError(f"parts of a message need different names, got {known}")
        if unknown := {*self.aggregated, *self.remembered} - set(known):
            raise ValueError(f"no such parts: {sorted(unknown)}; there are {known}")
        if self.codec is None and list(self.aggregated) != known:
            raise ValueError("without a codec only what is aggregated can travel")

    @cached_property
    def _by_name(self) -> dict[str, Part]:
        return {part.name: part for part in self.parts}

    @cached_property
    def dim(self) -> int:
        """Length d of what the rule aggregates."""
        return sum(self._by_name[name].numbers for name in self.aggregated)

    @property
    def longest(self) -> Length:
        """The length of the longest message: receivers refuse longer ones, a simulated lie counts as this."""
        if self.codec is not None:
            return self.codec.longest
        return Length(self.dim, 4 * self.dim)

    def join(self, parts: Parts) -> Tensor:
        """Return the aggregated parts of k clients, flattened and joined, as rows (k, d)."""
        rows = [parts[name].flatten(1) for name in self.aggregated]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Undo `join`, for rows (k, d) or for one aggregate (d,)."""
        sizes = [self._by_name[name].numbers for name in self.aggregated]
        cut = torch.split_with_sizes(vectors, sizes, dim=-1)
        return {
            name: part.reshape(*vectors.shape[:-1], *self._by_name[name].shape)
            for name, part in zip(self.aggregated, cut, strict=True)
        }

    def lengths(self, messages: Messages) -> MessageLengths:
        """Return the length of each of k messages on the wire."""
        if self.codec is None:
            return MessageLengths.of(len(messages.vectors), self.longest)
        return self.codec.lengths({**self.split(messages.vectors), **messages.beside})

    def encode(self, messages: Messages) -> dict[str, Tensor]:
        """Return what is sent for one client's message (k = 1): its vector, or the codec's bytes."""
        if self.codec is None:
            return {VECTOR: messages.vectors[0]}
        data = self.codec.encode(self._one(messages))
        own = data if isinstance(data, bytearray) else bytearray(data)  # torch wants writable memory
        return {ENCODED: torch.frombuffer(own, dtype=torch.uint8)}

    def decode(self, sent: Parts, before: Parts | None = None, asked: Asked = NOTHING_ASKED) -> Messages:
        """Decode one client's message (k = 1); `before` is what is remembered of its last one; None: nothing.

        >>> MessageLayout((Part("x", (3,)),), ("x",)).decode({"vector": torch.ones(2)})
        Traceback (most recent call last):
        trilemma.base.errors.UserError: shape (2,) where (3,) was declared
        """
        travelled = self._travelled(sent)
        if self.codec is None:
            return Messages(travelled[None])
        data = travelled.numpy().tobytes()
        parts = self.codec.decode(data, self.nothing_remembered() if before is None else before, asked)
        return self.assembled({name: tensor[None] for name, tensor in parts.items()})

    def decode_columns(self, sent: Parts, before: Parts | None, asked: Asked) -> Iterator[Parts] | None:
        """Decode one client's message a few columns at a time; None if the codec cannot.

        The iterator yields the aggregated and remembered parts, without the client axis.
        """
        travelled = self._travelled(sent)
        if not isinstance(self.codec, ColumnCodec):
            return None
        data = travelled.numpy().data
        return self.codec.decode_columns(data, self.nothing_remembered() if before is None else before, asked)

    def _travelled(self, sent: Parts) -> Tensor:
        """Return the one tensor that was sent, after a check of its name, type and size."""
        name, dtype = (VECTOR, torch.float32) if self.codec is None else (ENCODED, torch.uint8)
        if set(sent) != {name}:
            raise UserError(f"tensors {sorted(sent)} where only {name!r} was declared")
        if sent[name].dtype != dtype:
            raise UserError(f"type {sent[name].dtype} where {dtype} was declared")
        shape = tuple(sent[name].shape)
        if self.codec is None and shape != (self.dim,):
            raise UserError(f"shape {shape} where ({self.dim},) was declared")
        if len(shape) != 1 or shape[0] > self.longest.bytes:
            raise UserError(f"bytes of shape {shape} where at most {self.longest.bytes} were declared")
        return sent[name]

    def assembled(self, parts: Parts) -> Messages:
        """Return k clients' messages made of these parts."""
        beside = {name: tensor for name, tensor in parts.items() if name not in self.aggregated}
        return Messages(self.join(parts), beside)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a part, without the client axis."""
        return self._by_name[name].shape

    def nothing_remembered(self) -> dict[str, Tensor]:
        """Return the remembered parts of a client that has not been heard yet: zeros."""
        return {name: torch.zeros(self._by_name[name].shape) for name in self.remembered}

    def to_remember(self, messages: Messages) -> dict[str, Tensor]:
        """Return the parts of one client's message (k = 1) that a receiver remembers."""
        parts = self._one(messages)
        return {name: parts[name] for name in self.remembered}

    def _one(self, messages: Messages) -> dict[str, Tensor]:
        """Return the parts of a message of one client, without the client axis."""
        if len(messages.vectors) != 1:
            raise ValueError(f"one client's message is handled at a time, got {len(messages.vectors)}")
        return {name: part[0] for name, part in {**self.split(messages.vectors), **messages.beside}.items()}


Declaration = Callable[[Model], MessageLayout]
"""model -> layout of the messages with which it is trained."""


def one_vector(name: str, size: Callable[[Model], int] = lambda model: model.dim) -> Declaration:
    """Declare that clients send one vector of `size(model)` numbers, by default as long as the model.

    >>> from trilemma import models
    >>> one_vector("momentum")(models.build("logistic", (2,), 2)).dim
    3
    """
    return lambda model: MessageLayout((Part(name, (size(model),)),), (name,))
