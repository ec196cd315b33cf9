"""What clients send, stated once: named parts, which of them the rule aggregates, and the bytes that travel.

An algorithm says `message(model) -> MessageLayout`. Everybody who handles messages reads that one statement:
the simulator counts sizes from it, attacks craft rows of what it says is aggregated, a client encodes by it,
and a server decodes by it and turns away what does not fit.

    parts         names and shapes of what one client's message holds
    aggregated    the parts the rule sees, flattened and joined in this order: a row of (k, d)
    codec         how the parts become bytes; without one all are aggregated and travel as float32 numbers
    remembered    parts of a client's last message that the receiver needs to understand its next one

What a message answers (`Asked`) is known to both ends too: the round and the broadcast need not travel back.

A codec leaves out what the receiver can work out: QSGD's gradient follows from scales and codes, which are
what travels. An attack in a simulation makes rows of what the rule aggregates; such a row need not have an
encoding, and counts as long as the longest message the layout admits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models.types import Model

if TYPE_CHECKING:
    from trilemma.aggregation import Geometry

Parts = Mapping[str, Tensor]
"""Named parts: of one client, or of k clients with the client axis first."""

VECTOR, ENCODED = "vector", "encoded"
"""The names under which numbers and a codec's bytes travel."""

STEPS = "steps"
"""The part that holds a release in whole steps of a grid."""


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
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Length:
    """How long a message is: in float32 numbers, as papers count, and in bytes, as it travels."""

    scalars: float
    bytes: int

    def __add__(self, other: Length) -> Length:
        """Return how long both are together."""
        return Length(self.scalars + other.scalars, self.bytes + other.bytes)


@dataclass(frozen=True)
class Lengths:
    """How long each of k messages is: both (k,)."""

    scalars: Tensor
    bytes: Tensor

    @staticmethod
    def of(count: int, each: Length) -> Lengths:
        """Return the lengths of `count` messages that are equally long."""
        scalars = torch.full((count,), float(each.scalars), dtype=torch.float64)
        return Lengths(scalars, torch.full((count,), each.bytes, dtype=torch.int64))

    @property
    def total(self) -> Length:
        """How long all k are together.

        >>> Lengths.of(3, Length(1.5, 6)).total
        Length(scalars=4.5, bytes=18)
        """
        return Length(float(self.scalars.sum(dtype=torch.float64)), int(self.bytes.sum()))


@dataclass(frozen=True)
class Asked:
    """What a message answers: the round it belongs to, and the broadcast that began it."""

    round: int = 0
    broadcast: Parts = field(default_factory=dict)


NOTHING_ASKED = Asked()


class Codec(Protocol):
    """How one client's parts become bytes, and bytes parts again.

    `decode` is given to strangers' bytes: it looks at the length before it allocates anything, checks every
    range, and raises a `UserError` where something does not fit, never anything else.
    """

    @property
    def longest(self) -> Length:
        """How long the longest message is."""

    def lengths(self, parts: Parts) -> Lengths:
        """Return how long each of k messages is, without encoding them."""

    def encode(self, parts: Parts) -> bytes | bytearray:
        """Return one client's message as it travels."""

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """Return one client's parts; `before` are the remembered ones of its last message, at first zeros."""


@runtime_checkable
class ColumnCodec(Codec, Protocol):
    """A codec that also reads messages a few columns at a time: those longer than memory should hold.

    Everything that is aggregated or remembered is then one vector each, of the same length.
    """

    def decode_columns(self, data: memoryview, before: Parts, asked: Asked) -> Iterator[Parts]:
        """Yield what `Codec.decode` returns, some columns after the others, without what only travels."""


@dataclass(frozen=True)
class Messages:
    """What k clients send in one exchange.

    `vectors` (k, d) is what the rule aggregates: the aggregated parts of the layout, flattened and joined.
    `beside` are the parts that are not aggregated, each (k, …). `question` is what the server had asked for,
    where it asked something (see `Inquiry`). `senders` says whose they are; empty: all clients', in order.
    `sharing` is how many clients shared secrets for the noise in them; 0: all who take part. `geometry` is
    that of the vectors, where somebody measured it.
    """

    vectors: Tensor
    beside: Parts = field(default_factory=dict)
    question: Parts = field(default_factory=dict)
    senders: tuple[int, ...] = ()
    sharing: int = 0
    geometry: Geometry | None = field(default=None, compare=False)

    def whose(self, everybody: Sequence[int]) -> tuple[int, ...]:
        """Return whose they are; where they do not say, those of `everybody`. Nobody's are nobody's.

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
    """Return rows that follow each other as a slice, of which nobody needs a copy.

    >>> side_by_side([2, 3, 4]), side_by_side([2, 4])
    (slice(2, 5, None), None)
    """
    if not rows or list(rows) != list(range(rows[0], rows[0] + len(rows))):
        return None
    return slice(rows[0], rows[0] + len(rows))


@dataclass(frozen=True)
class MessageLayout:
    """What an algorithm's messages look like; the module says what the attributes mean.

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
        """How long the longest message is: a receiver turns longer ones away, a liar's counts as this."""
        if self.codec is not None:
            return self.codec.longest
        return Length(self.dim, 4 * self.dim)

    def join(self, parts: Parts) -> Tensor:
        """Return the aggregated ones of k clients' parts as rows (k, d)."""
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

    def lengths(self, messages: Messages) -> Lengths:
        """Return how long each of k messages is as it travels."""
        if self.codec is None:
            return Lengths.of(len(messages.vectors), self.longest)
        return self.codec.lengths({**self.split(messages.vectors), **messages.beside})

    def encode(self, messages: Messages) -> dict[str, Tensor]:
        """Return the message of one client (k = 1) as it travels: its vector, or the codec's bytes."""
        if self.codec is None:
            return {VECTOR: messages.vectors[0]}
        data = self.codec.encode(self._one(messages))
        own = data if isinstance(data, bytearray) else bytearray(data)  # torch wants what can be written to
        return {ENCODED: torch.frombuffer(own, dtype=torch.uint8)}

    def decode(self, sent: Parts, before: Parts | None = None, asked: Asked = NOTHING_ASKED) -> Messages:
        """Read one client's message (k = 1); `before` is what was remembered of its last, None: nothing.

        >>> MessageLayout((Part("x", (3,)),), ("x",)).decode({"vector": torch.ones(2)})
        Traceback (most recent call last):
        trilemma.errors.UserError: shape (2,) where (3,) was declared
        """
        travelled = self._travelled(sent)
        if self.codec is None:
            return Messages(travelled[None])
        data = travelled.numpy().tobytes()
        parts = self.codec.decode(data, self.nothing_remembered() if before is None else before, asked)
        return self.assembled({name: tensor[None] for name, tensor in parts.items()})

    def decode_columns(self, sent: Parts, before: Parts | None, asked: Asked) -> Iterator[Parts] | None:
        """Read one client's message a few columns at a time; None where its codec does not.

        Yields what is aggregated or remembered, without the client axis.
        """
        travelled = self._travelled(sent)
        if not isinstance(self.codec, ColumnCodec):
            return None
        data = travelled.numpy().data
        return self.codec.decode_columns(data, self.nothing_remembered() if before is None else before, asked)

    def _travelled(self, sent: Parts) -> Tensor:
        """Return what travelled, where it is of the declared type and no longer than it may be."""
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
        """Return the messages of k clients that are made of these parts."""
        beside = {name: tensor for name, tensor in parts.items() if name not in self.aggregated}
        return Messages(self.join(parts), beside)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a part, without the client axis."""
        return self._by_name[name].shape

    def nothing_remembered(self) -> dict[str, Tensor]:
        """Return what a receiver remembers of a client it has not heard yet: zeros."""
        return {name: torch.zeros(self._by_name[name].shape) for name in self.remembered}

    def to_remember(self, messages: Messages) -> dict[str, Tensor]:
        """Return what a receiver remembers of one client's message (k = 1)."""
        parts = self._one(messages)
        return {name: parts[name] for name in self.remembered}

    def _one(self, messages: Messages) -> dict[str, Tensor]:
        """Return the parts of the only client."""
        if len(messages.vectors) != 1:
            raise ValueError(f"one client's message is handled at a time, got {len(messages.vectors)}")
        return {name: part[0] for name, part in {**self.split(messages.vectors), **messages.beside}.items()}


Declaration = Callable[[Model], MessageLayout]
"""What an algorithm's messages look like for a model."""


def one_vector(name: str, size: Callable[[Model], int] = lambda model: model.dim) -> Declaration:
    """Declare that clients send one vector, as long as the model or as `size` says.

    >>> from trilemma import models
    >>> one_vector("momentum")(models.build("logistic", (2,), 2)).dim
    3
    """
    return lambda model: MessageLayout((Part(name, (size(model),)),), (name,))
