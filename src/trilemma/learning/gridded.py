"""Messages of which only the fresh release travels, as integers; the rest is worked out by both ends alike.

A private client's message is a function of what it releases in this round, of its last message, and of what
it was asked: a momentum averages releases, a model is the broadcast plus a move. An algorithm states that
function once, `follow(fresh, before, asked) -> parts`, with the client axis first. Its clients apply it to
make their message, and whoever receives the integers of the release applies it to understand them:

    travels       ⌊contribution/g⌉ + noise, integers of 2 to 4 bytes
    follows       everything the rule aggregates

So the message is a function of integers whose law is certified, and a server may do with the integers alone.
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
    Lengths,
    MessageLayout,
    Part,
    Parts,
)
from trilemma.learning.settings import Setup
from trilemma.models.types import Model
from trilemma.privacy.grid import Grid

TOGETHER = 1 << 22
"""Columns of a long message that are read together."""

Follow = Callable[[Tensor, Parts, Asked], Parts]
"""(release (k, d), what is remembered (k, …), what was asked) -> the parts of k messages."""


@dataclass(frozen=True)
class GridCodec:
    """Integers of `grid` on the wire, and what `follows` from them.

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

    def lengths(self, parts: Parts) -> Lengths:
        """See `Codec`."""
        return Lengths.of(len(next(iter(parts.values()))), self.longest)

    def encode(self, parts: Parts) -> bytearray:
        """See `Codec`."""
        return self.grid.encode(parts[STEPS])

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """See `Codec`."""
        steps = self.grid.decode(data)
        stacked = {name: part[None] for name, part in before.items()}
        parts = self.follow(self.grid.numbers(steps)[None], stacked, asked)
        return {STEPS: steps, **{name: part[0] for name, part in parts.items()}}


class ColumnGridCodec(GridCodec):
    """Integers of `grid` on the wire, where each column of what `follows` needs that column only.

    >>> import torch
    >>> grid = Grid(step=0.5, width=2, dim=2, bound=1.0, unit="user")
    >>> codec = ColumnGridCodec(grid, lambda fresh, before, asked: {"sum": before["sum"] + fresh})
    >>> sent = codec.encode({"steps": torch.tensor([3, -1])})
    >>> list(codec.decode_columns(memoryview(sent), {"sum": torch.ones(2)}, NOTHING_ASKED))
    [{'sum': tensor([2.5000, 0.5000])}]
    """

    def decode_columns(self, data: memoryview, before: Parts, asked: Asked) -> Iterator[Parts]:
        """See `ColumnCodec`."""
        grid = self.grid
        grid.check_length(len(data))
        for start in range(0, grid.dim, TOGETHER):
            columns = slice(start, min(start + TOGETHER, grid.dim))
            fresh = grid.numbers(grid.integers(data[columns.start * grid.width : columns.stop * grid.width]))
            known = {name: part[None, columns] for name, part in before.items()}
            parts = self.follow(fresh[None], known, _columns_of(asked, columns, grid.dim))
            yield {name: part[0] for name, part in parts.items()}


def _columns_of(asked: Asked, columns: slice, dim: int) -> Asked:
    """Return what was asked, of the broadcast's vectors as long as a release these columns only."""
    vectors = {name: one[columns] for name, one in asked.broadcast.items() if one.shape == (dim,)}
    return Asked(asked.round, {**asked.broadcast, **vectors})


def followed(follow: Follow, fresh: Tensor, before: Parts, asked: Asked) -> Parts:
    """Return the one vector that follows from releases (k, d), column by column.

    Of long releases it stands in their place: there is no room for both, and nobody needs them any more.
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
    """Declare that messages look like `plain`; on a grid, that the release travels and they follow from it.

    `remembered` names what `follow` needs of the last message: vectors as long as the release. `columnwise`
    says that it makes each column of one vector from that column of the release, of what is remembered and of
    the broadcast's vectors.
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
    """Declare messages that are the broadcast's parts of the same names plus the release (`publish`)."""

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
