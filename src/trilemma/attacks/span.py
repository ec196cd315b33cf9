"""Mean, attack direction and Gram matrix of the honest messages, in one pass.

Most attacks send m + τ u: the honest mean plus τ times a direction u, each coordinate of which depends on its
own column only (the standard deviation, minus the mean, a sign). All distances and inner products that such
an attack needs, at any τ, are quadratic forms in the (h+2) × (h+2) Gram matrix K of

    z_1 … z_h (honest messages less their mean),  u,  m.

K is a sum over blocks of columns, so one pass over the messages gives m, u and K with memory for one block.
Rows are centred before they are multiplied, so that an offset common to all clients, however large, costs no
accuracy where it cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Direction = Callable[[Tensor, Tensor], Tensor]
"""(centred block (h, c), mean of the block (c,)) -> the direction in these columns (c,)."""

BLOCK = 1 << 20
"""Numbers in a block: 4 MB of float32, which stays in cache between centring and multiplying."""

CUDA_BLOCK = 1 << 26
"""Numbers in a block on a GPU: 256 MB of float32, so that the time of launches does not matter."""

PIECE = 1 << 11
"""Columns that a GPU multiplies in one of the products of `in_pieces`."""

SQUARABLE = 1e14
"""If the longest vector's length is between 1/SQUARABLE and SQUARABLE, float32 holds the inner products."""


def deviation(centred: Tensor, mean: Tensor) -> Tensor:
    """Coordinate-wise standard deviation of the honest messages (population form, so 0 for h = 1)."""
    return centred.square().mean(dim=0).sqrt()


def minus_mean(centred: Tensor, mean: Tensor) -> Tensor:
    """Minus the honest mean."""
    return -mean


def minus_deviation(centred: Tensor, mean: Tensor) -> Tensor:
    """Minus the coordinate-wise standard deviation."""
    return -deviation(centred, mean)


def minus_sign(centred: Tensor, mean: Tensor) -> Tensor:
    """Minus the sign of the honest mean."""
    return -torch.sign(mean)


@dataclass(frozen=True)
class Line:
    """The messages m + τ u for all τ: `mean` m (d,) and `direction` u (d,), at least float32."""

    mean: Tensor
    direction: Tensor

    def at(self, tau: float) -> Tensor:
        """Return m + τ u."""
        return torch.add(self.mean, self.direction, alpha=tau)


@dataclass(frozen=True)
class Span:
    """A line, and the Gram matrix `gram` (h+2, h+2) of the centred honest messages, u and m, in that order.

    `gram` is always float64 and on the CPU.

    >>> span = measure(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), minus_mean)
    >>> span.line.at(2.0).tolist(), span.gram.tolist()[-1]
    ([-2.0, 0.0], [-2.0, 2.0, -4.0, 4.0])
    """

    line: Line
    gram: Tensor

    @property
    def honest(self) -> int:
        """Number of honest messages."""
        return self.gram.shape[0] - 2

    @property
    def spread(self) -> Tensor:
        """Gram matrix of the centred honest messages (h, h)."""
        return self.gram[: self.honest, : self.honest]

    @property
    def radius(self) -> float:
        """Root mean square distance of the honest messages from their mean."""
        return float(torch.sqrt(self.spread.diagonal().mean()))

    @property
    def reach(self) -> float:
        """Length ‖u‖ of the direction."""
        return float(torch.sqrt(self.gram[-2, -2]))


def inner_products(*parts: Tensor) -> Tensor:
    """Return the Gram matrix of the rows of all `parts`, each (k, d), computed in float64 on their device.

    Only one block of columns is copied at a time.

    >>> inner_products(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    count = sum(len(part) for part in parts)
    found = parts[0].new_zeros(count, count, dtype=torch.float64)
    for block in _in_float64(parts):
        found += in_pieces(block) if block.is_cuda else block @ block.T
    return found


def bordered(gram: Tensor, parts: Sequence[Tensor], beside: Tensor) -> Tensor:
    """Return the Gram matrix of the rows of `parts` and a few rows `beside` (q, d), given that of `parts`.

    >>> bordered(torch.tensor([[5.0]]), [torch.tensor([[1.0, 2.0]])], torch.tensor([[3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    count, q = len(gram), len(beside)
    found = gram.new_zeros(count + q, count + q)
    found[:count, :count] = gram
    for block in _in_float64((*parts, beside)):
        # A GPU multiplies piece by piece, as in `in_pieces`.
        whole = block.shape[1] // PIECE * PIECE if block.is_cuda else 0
        pieces = block[:, :whole].view(len(block), whole // PIECE, PIECE).transpose(0, 1)
        rest = block[:, whole:]
        found[count:] += rest[count:] @ rest.T + torch.bmm(pieces[:, count:], pieces.mT).sum(0)
    found[:count, count:] = found[count:, :count].T
    return found


def _in_float64(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all rows of all parts, a block of columns at a time; the next one overwrites it."""
    first, count = parts[0], sum(len(part) for part in parts)
    d = first.shape[1]
    width = min(d, max(1, (CUDA_BLOCK if first.is_cuda else BLOCK) // max(count, 1)))
    rows = first.new_empty(count, width, dtype=torch.float64)
    for start in range(0, d, max(width, 1)):
        block, place = rows[:, : d - start], 0
        for part in parts:
            block[place : place + len(part)] = part[:, start : start + width]
            place += len(part)
        yield block


def in_pieces(block: Tensor) -> Tensor:
    """Return block blockᵀ as a sum of products of `PIECE` columns: one long product would not fill a GPU.

    The result is symmetric, so one of the two off-diagonal quarters is copied from the other.

    >>> in_pieces(torch.ones(2, PIECE + 3)).tolist() == [[PIECE + 3.0] * 2] * 2
    True
    """
    whole, half = block.shape[1] // PIECE * PIECE, (len(block) + 1) // 2
    pieces = block[:, :whole].view(len(block), whole // PIECE, PIECE).transpose(0, 1)
    first, second, rest = pieces[:, :half], pieces[:, half:], block[:, whole:]
    found: Tensor = rest @ rest.T
    found[:half, :half] += torch.bmm(first, first.mT).sum(0)
    found[half:, half:] += torch.bmm(second, second.mT).sum(0)
    beside = torch.bmm(first, second.mT).sum(0)
    found[:half, half:] += beside
    found[half:, :half] += beside.T
    return found


def finite_rows(messages: Tensor) -> Tensor:
    """Return the messages that are finite: the server drops the others, and so do the attackers.

    Returns one row of zeros if none is left, or if only liars were sampled. Messages too large or too small
    to be squared in float32 are returned as float64.

    >>> finite_rows(torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])).tolist()
    [[1.0, 2.0]]
    """
    wide = torch.promote_types(messages.dtype, torch.float32)
    lengths: Tensor = torch.linalg.vector_norm(messages, dim=1, dtype=wide)
    # One quick pass in the usual case; only unusual lengths need a closer look.
    if len(lengths) and 1.0 / SQUARABLE < float(lengths.amax()) < SQUARABLE:
        return messages
    kept = messages[torch.isfinite(messages).all(dim=1)].double()
    return kept if kept.shape[0] else messages.new_zeros(1, messages.shape[1])


def draw_line(honest: Tensor, direction: Direction) -> Line:
    """Return the line of an attack, without the Gram matrix.

    >>> draw_line(torch.tensor([[1.0], [3.0]]), deviation).at(1.5).tolist()
    [3.5]
    """
    line = _empty_line(honest)
    for _ in _blocks(honest, direction, line):
        pass
    return line


def measure(honest: Tensor, direction: Direction) -> Span:
    """Return the line of an attack and its Gram matrix K, in one pass."""
    line = _empty_line(honest)
    rows = honest.shape[0] + 2
    gram = torch.zeros(rows, rows, dtype=torch.float64, device=honest.device)
    for block in _blocks(honest, direction, line):
        # Products within a block have the block's precision, sums over blocks are float64.
        gram += block @ block.T
    return Span(line, gram.cpu())


def _empty_line(honest: Tensor) -> Line:
    dtype = torch.promote_types(honest.dtype, torch.float32)
    mean, direction = honest.new_empty(2, honest.shape[1], dtype=dtype)
    return Line(mean, direction)


def _blocks(honest: Tensor, direction: Direction, line: Line) -> Iterator[Tensor]:
    """Fill `line` one block of columns after the other, and yield the rows z_1 … z_h, u, m of each block.

    The yielded tensor is overwritten by the next block.
    """
    h, d = honest.shape
    width = min(d, max(1, (BLOCK if honest.device.type == "cpu" else CUDA_BLOCK) // h))
    rows = honest.new_empty(h + 2, width, dtype=line.mean.dtype)
    for start in range(0, d, max(1, width)):
        columns = slice(start, min(start + width, d))
        block = rows[:, : columns.stop - start]
        centred, along, mean = block[:h], block[h], block[h + 1]
        centred.copy_(honest[:, columns])
        # Centred twice: the rounding error of a float32 mean may exceed the spread if the offset is large.
        torch.mean(centred, dim=0, out=mean)
        centred -= mean
        rest = centred.mean(dim=0)
        centred -= rest
        mean += rest
        along.copy_(direction(centred, mean))
        line.mean[columns] = mean
        line.direction[columns] = along
        yield block
