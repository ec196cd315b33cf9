"""Messages of which only the new release is sent, as integers; both ends compute the rest from it.

A private client's message is a function of its release in this round, of its last message and of the
broadcast: momentum averages releases, a model is the broadcast plus a move. An algorithm states this function
once, `follow(fresh, before, asked) -> parts`, with the client axis first. Clients call it to make their
message, and the receiver calls it on the integers of the release:

    sent          ⌊contribution/g⌉ + noise, integers of 2 to 4 bytes
    computed      everything the rule aggregates

The message is thus a function of integers whose distribution is certified, and the server needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from trilemma.learning.messages import (
    NOTHING_ASKED,
    STEPS,
    Asked,
    Declaration,
    Length,
    MessageLayout,
    MessageLengths,
    Part,
    Parts,
)
from trilemma.learning.settings import Setup
from trilemma.models.types import Model
from trilemma.privacy.noise.grid import Grid

TOGETHER = 1 << 22
"""How many columns of a long message are read at once."""

Follow = Callable[[Tensor, Parts, Asked], Parts]
"""(release (k, d), remembered parts (k, …), what was asked) -> the parts of k messages."""


@dataclass(frozen=True)
class GridCodec:
    """Sends integers of `grid` and computes the message from them by `follow`.

    >>> grid = Grid(step=0.5, width=2, dim=2, bound=1.0, unit="user")
    >>> codec = GridCodec(grid, lambda fresh, before, asked: {"sum": before["sum"] + fresh})
    >>> import torch
    >>> sent = codec.encode({"steps": torch.tensor([3, -1])})
    >>> len(sent), codec.decode(sent, {"sum": torch.ones(2)})["sum"]
    (4, tensor([2.5000, 0.5000]))
    """

    grid: Grid
    follow: Follow

    @property
    def longest(self) -> Length:
        """All messages are equally long."""
        return Length(self.grid.length / 4, self.grid.length)

    def lengths(self, parts: Parts) -> MessageLengths:
        """See `Codec`."""
        return MessageLengths.of(len(next(iter(parts.values()))), self.longest)

    def encode(self, parts: Parts) -> bytearray:
        """See `Codec`."""
        return self.grid.encode(parts[STEPS])

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """See `Codec`."""
        steps = self.grid.decode(data)
        stacked = {name: part[None] for name, part in before.items()}
        parts = self.follow(self.grid.among((asked.client,)).numbers(steps)[None], stacked, asked)
        return {STEPS: steps, **{name: part[0] for name, part in parts.items()}}


class ColumnGridCodec(GridCodec):
    """A `GridCodec` for a `follow` that computes each column from the same column of its arguments.

    >>> import torch
    >>> grid = Grid(step=0.5, width=2, dim=2, bound=1.0, unit="user")
    >>> codec = ColumnGridCodec(grid, lambda fresh, before, asked: {"sum": before["sum"] + fresh})
    >>> sent = codec.encode({"steps": torch.tensor([3, -1])})
    >>> list(codec.decode_columns(memoryview(sent), {"sum": torch.ones(2)}, NOTHING_ASKED))
    [{'sum': tensor([2.5000, 0.5000])}]
    """

    def decode_columns(self, data: memoryview, before: Parts, asked: Asked) -> Iterator[Parts]:
        """See `ColumnCodec`."""
        grid = self.grid.among((asked.client,))
        grid.check_length(len(data))
        for start in range(0, grid.dim, TOGETHER):
            columns = slice(start, min(start + TOGETHER, grid.dim))
            fresh = grid.numbers(grid.integers(data[columns.start * grid.width : columns.stop * grid.width]))
            known = {name: part[None, columns] for name, part in before.items()}
            parts = self.follow(fresh[None], known, _columns_of(asked, columns, grid.dim))
            yield {name: part[0] for name, part in parts.items()}


def _columns_of(asked: Asked, columns: slice, dim: int) -> Asked:
    """Return `asked` with these columns only of every broadcast vector that is as long as a release."""
    vectors = {name: one[columns] for name, one in asked.broadcast.items() if one.shape == (dim,)}
    return Asked(asked.round, {**asked.broadcast, **vectors}, asked.client)


def followed(follow: Follow, fresh: Tensor, before: Parts, asked: Asked) -> Parts:
    """Return `follow(fresh, before, asked)`, a single vector, for releases `fresh` (k, d).

    Long releases are overwritten with the result, a few columns at a time, because memory may not hold both.
    """
    dim = fresh.shape[1]
    if dim <= TOGETHER:
        return follow(fresh, before, asked)
    for start in range(0, dim, TOGETHER):
        columns = slice(start, min(start + TOGETHER, dim))
        known = {part: rows[:, columns] for part, rows in before.items()}
        ((name, found),) = follow(fresh[:, columns], known, _columns_of(asked, columns, dim)).items()
        fresh[:, columns] = found
    return {name: fresh}


def declared(
    setup: Setup,
    plain: Declaration,
    follow: Follow,
    remembered: tuple[str, ...] = (),
    columnwise: bool = False,
) -> Declaration:
    """Declare messages with the layout `plain`; on a grid, the release is sent and `follow` computes them.

    `remembered` names the parts of the last message that `follow` needs: vectors as long as the release.
    `columnwise` says that `follow` returns one vector, each column of which depends only on the same column
    of the release, of the remembered parts and of the broadcast's vectors.
    """

    def message(model: Model) -> MessageLayout:
        layout = plain(model)
        grid = setup.grid(layout.dim)
        if grid is None:
            return layout
        known = {part.name for part in layout.parts}
        shape = (layout.dim,)
        beside = tuple(Part(name, shape) for name in (STEPS, *remembered) if name not in known)
        codec = (ColumnGridCodec if columnwise else GridCodec)(grid, follow)
        return MessageLayout((*layout.parts, *beside), layout.aggregated, codec, remembered)

    return message


def moved(setup: Setup, plain: Declaration) -> Declaration:
    """Declare messages that are the broadcast plus the release, as `privatise.publish` makes them."""

    def message(model: Model) -> MessageLayout:
        layout = plain(model)

        def follow(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
            origin = layout.join({name: asked.broadcast[name][None] for name in layout.aggregated})
            return layout.split(origin[0] + fresh)

        def follow_columns(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
            return {name: asked.broadcast[name] + fresh for name in layout.aggregated}

        if [part.shape for part in layout.parts] == [(layout.dim,)]:
            return declared(setup, lambda _: layout, follow_columns, columnwise=True)(model)
        return declared(setup, lambda _: layout, follow)(model)

    return message
