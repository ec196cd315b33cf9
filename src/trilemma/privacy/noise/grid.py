"""The public grid on which contribution and noise meet: what leaves a client is integers.

A contribution x is clipped in double precision and rounded to a multiple of the step g; noise is drawn as
whole steps; the message is their sum. Nothing of floating-point arithmetic is left for an observer to read,
and noise that two clients share cancels exactly.

**Contribution.** For unit "user" the rounded contribution q is checked in integers, Σ q_i² ≤ ⌊(C/g)²⌋, and
shrunk until that holds: replacing the client moves it by at most 2C, and rounding costs no privacy. For unit
"example" the sum over a batch is rounded, which moves it by at most g√d/2: examples are clipped at
C − b g√d/2 and a margin for the sum's own rounding (`Grid.clip`, `trilemma.models.engines.clipping`), so that
the declared 2C/b holds all the same. A contribution that is not finite counts as zero.

**Noise.** Every stream, a client's own or a pair's, is a Gaussian rounded to the grid,

    ⌊N(0, σ² + ρ²g²)/g⌉,       ρ = 4,

and all messages together are an image, up to a factor 1 ± 1e-40 per coordinate, of the Gaussian mechanism
with the σ's themselves, which is what accountants account for (`docs/privacy.md` has the proof). How far
drawn numbers are from Gaussian ones is priced by `trilemma.privacy.noise.grid_price`.

**Step.** A power of two, at most σ/2¹⁰ for the smaller of the σ's, and so fine that rounding hardly moves a
contribution: g√d ≤ C/8 for unit "user", 2⁻⁸ of the declared move for unit "example".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy.types import NoiseLaw, Release, Unit

FINENESS = 2.0**10
"""Steps in the least standard deviation, at least."""

SMOOTHING = 4.0
"""ρ: what a stream's standard deviation has beside σ, in steps, in squares."""

ROUNDING, SUM = 2.0**-8, 2.0**-8
"""Shares of an example's clip given to rounding to the grid, and to adding up (`clipping.MARGIN`)."""

REACH = 10.0
"""Standard deviations of noise that a message has room for; beyond, with probability 1e-23, it saturates."""

WIDTHS = (2, 3, 4)
"""Bytes an integer may take on the wire."""

Buffer = bytes | memoryview

_TRIES, _SHORTER = 8, 1 - 2.0**-12
LONG = 1 << 20
"""Numbers of a row that are worked on together: of a longer one little more than the outcome is in memory."""

_CACHED = 1 << 16  # numbers that are rounded together: short rows share the cost of a call


def step_for(law: NoiseLaw, finest: float = math.inf) -> float:
    """Return the step for a law: a power of two, at most σ/2¹⁰ and at most `finest`.

    >>> step_for(NoiseLaw(sigma_ind=0.5)) == 2.0**-11
    True
    """
    sigmas = [sigma for sigma in (law.sigma_ind, law.sigma_cor) if sigma > 0]
    return 2.0 ** math.floor(math.log2(min([sigma / FINENESS for sigma in sigmas] + [finest])))


def in_steps(sigma: float, step: float) -> float:
    """Return the standard deviation, in steps, of the stream that stands for N(0, σ²).

    >>> in_steps(3.0, 1.0)
    5.0
    """
    return math.hypot(sigma / step, SMOOTHING)


@dataclass(frozen=True)
class Grid:
    """The grid of one release. `width` is the bytes an integer takes; `dim` how many a message has.

    >>> grid = Grid.of(Release(clip=1.0, law=NoiseLaw(sigma_ind=0.5)), dim=3, clients=10)
    >>> grid.step, grid.width
    (0.00048828125, 2)
    >>> grid.contribution(torch.tensor([[3.0, 4.0, 0.0], [torch.nan, 0.0, 0.0]]))
    tensor([[1229, 1638,    0],
            [   0,    0,    0]])
    """

    step: float
    width: int
    dim: int
    bound: float
    unit: Unit
    scale: float = 1.0
    """What one client multiplies a contribution by: its weight times their number (`scales`)."""
    scales: tuple[float, ...] = ()
    """Those of all clients, where they have weights."""

    @classmethod
    def of(cls, release: Release, dim: int, clients: int, scales: tuple[float, ...] = ()) -> Grid:
        """Return the grid of a noised release of `dim` numbers, in a federation of `clients` clients.

        With `scales` a client's integers are its scale times what it releases: what pairs share cancels in
        their sum, the weighted one. The step is fine enough for the lightest, the width for the heaviest.
        """
        law, root = release.law, math.sqrt(dim)
        low, high = (min(scales), max(scales)) if scales else (1.0, 1.0)
        if law.silent or not math.isfinite(release.clip):
            raise PrivacyError("a grid is for contributions that are clipped and noised")
        rounding = release.clip / 8 if release.unit == "user" else ROUNDING * release.sensitivity
        if scales:  # half of it for what is lost when a contribution is multiplied
            rounding *= low / 2
        step = step_for(NoiseLaw(law.sigma_ind * low, law.sigma_cor), rounding / root)
        spread = math.hypot(law.sigma_ind * high, math.sqrt(max(clients - 1, 0)) * law.sigma_cor)
        needed = (release.clip * high + REACH * spread) / step
        for width in WIDTHS:
            if needed < 2 ** (8 * width - 1):
                return cls(step, width, dim, release.clip, release.unit, scales=scales)
        raise PrivacyError(
            f"messages of this release span {needed:.1e} steps, more than 32 bits hold: sigma_ind = "
            f"{law.sigma_ind:g}, sigma_cor = {law.sigma_cor:g} and clip = {release.clip:g} are too far apart"
        )

    def among(self, clients: Sequence[int]) -> Grid:
        """Return the grid of the messages of some clients, in this order."""
        if not self.scales:
            return self
        if len(clients) == 1:
            return replace(self, scale=self.scales[clients[0]], scales=())
        return replace(self, scales=tuple(self.scales[client] for client in clients))

    @property
    def radius(self) -> float:
        """How long a contribution may be, in steps; rounded down where it is multiplied by a scale."""
        exact = self.bound / self.step
        return exact if self.scale == 1.0 else exact * self.scale * (1 - 2.0**-50)

    def _each(self) -> list[Grid]:
        return [self.among((place,)) for place in range(len(self.scales))]

    @property
    def clip(self) -> float:
        """Where gradients are clipped before they come here: examples a little below the declared bound."""
        return self.bound if self.unit == "user" else self.bound * (1 - ROUNDING - SUM)

    @property
    def length(self) -> int:
        """How long a message is, in bytes."""
        return self.width * self.dim

    @property
    def limit(self) -> int:
        """The largest integer that travels."""
        return (1 << (8 * self.width - 1)) - 1

    def contribution(self, vectors: Tensor) -> Tensor:
        """Return contributions (k, d) as whole steps, int64: bounded, or zero where they are not finite."""
        if not len(vectors):
            return vectors.to(torch.int64)
        if self.scales:
            rows = zip(self._each(), vectors, strict=True)
            return torch.cat([one.contribution(row[None]) for one, row in rows])
        if vectors.shape[1] > LONG:
            whole = torch.empty_like(vectors, dtype=torch.int64)
            for row, numbers in zip(whole, vectors, strict=True):
                bounded = self.bounded(numbers)
                for there, some in zip(_some(row), _some(numbers), strict=True):
                    there.copy_(bounded(some))
            return whole
        together = max(1, _CACHED // max(1, vectors.shape[1]))
        return torch.cat([_bounded(rows, self) for rows in torch.split(vectors, together)])

    def bounded(self, row: Tensor) -> Callable[[Tensor], Tensor]:
        """Return how any part of one long contribution (d,) becomes whole steps, as in `contribution`.

        >>> row = torch.tensor([3.0, 4.0, 0.0])
        >>> grid = Grid(step=0.25, width=2, dim=3, bound=1.0, unit="user")
        >>> bounded = grid.bounded(row)
        >>> torch.cat([bounded(row[:2]), bounded(row[2:])])
        tensor([2, 3, 0])
        """
        factor = _factor(row, self)
        return lambda some: _in_steps(some, self, factor)

    def message(self, contribution: Tensor, noise: Tensor) -> Tensor:
        """Return the integers (k, d) that leave: the sum, saturated where 32 bits or fewer cannot hold it."""
        sent = torch.empty_like(contribution, dtype=torch.int32)
        for there, some, more in zip(_some(sent), _some(contribution), _some(noise), strict=True):
            there.copy_((some + more).clamp_(-self.limit, self.limit))
        return sent

    def numbers(self, integers: Tensor) -> Tensor:
        """Return what the integers stand for, float32, for whoever goes on calculating with them."""
        if self.scales:
            rows = zip(self._each(), integers, strict=True)
            return torch.stack([one.numbers(row) for one, row in rows])
        numbers = torch.empty_like(integers, dtype=torch.float32)
        for there, some in zip(_some(numbers), _some(integers), strict=True):
            there.copy_(some.double() * (self.step / self.scale))
        return numbers

    def encode(self, integers: Tensor) -> bytearray:
        """Return the integers (d,) as they travel: little-endian, `width` bytes each."""
        whole = np.ascontiguousarray(integers.cpu().numpy(), dtype="<i4").view(np.uint8).reshape(-1, 4)
        sent = bytearray(self.width * len(whole))
        np.frombuffer(sent, np.uint8).reshape(-1, self.width)[:] = whole[:, : self.width]
        return sent

    def decode(self, data: Buffer) -> Tensor:
        """Read integers (d,), int32, from anybody; refuse another length.

        >>> grid = Grid(step=1.0, width=3, dim=2, bound=1.0, unit="user")
        >>> grid.decode(grid.encode(torch.tensor([-5, 70000])))
        tensor([   -5, 70000], dtype=torch.int32)
        """
        self.check_length(len(data))
        return self.integers(data)

    def check_length(self, length: int) -> None:
        """Refuse a message of another length than all have."""
        if length != self.length:
            raise UserError(f"{length} bytes where {self.length} were declared")

    def integers(self, data: Buffer) -> Tensor:
        """Return the integers, int32, that stand in a part of a message."""
        count = len(data) // self.width
        whole: NDArray[np.int32] = np.empty(count, np.int32)
        whole[:1] = int.from_bytes(data[: self.width], "little", signed=True)
        if count > 1:
            # Each is the upper end of four bytes, which begin in the one before it where it has fewer; an
            # arithmetic shift brings it down with its sign.
            first, strides = 2 * self.width - 4, (self.width,)
            ends: NDArray[np.int32] = np.ndarray((count - 1,), "<i4", data, first, strides)
            np.right_shift(ends, 8 * (4 - self.width), out=whole[1:])
        return torch.from_numpy(whole)


def _some(rows: Tensor) -> tuple[Tensor, ...]:
    """Return (…, d) some columns at a time."""
    return torch.split(rows, LONG, dim=-1)


def _in_steps(some: Tensor, grid: Grid, factor: float | None) -> Tensor:
    """Return a part of a contribution times `factor` as whole steps, int64; zeros where that is None."""
    if factor is None:
        return torch.zeros_like(some, dtype=torch.int64)
    steps = (some.double() / grid.step).mul_(factor * grid.scale).round_()
    return steps.clamp_(-grid.limit, grid.limit).to(torch.int64)


def _factor(row: Tensor, grid: Grid) -> float | None:
    """Return what one long contribution is multiplied by, as in `_bounded`, looking at some of it at a time.

    None: it is not finite, or cannot be bounded, and counts as zero.
    """

    def square(factor: float) -> int:
        """Return the square of the length of the row times `factor`, in steps."""
        parts = (_in_steps(some, grid, factor) for some in _some(row))
        return sum(int((part * part).sum()) for part in parts)

    if not all(bool(torch.isfinite(some.double() / grid.step * grid.scale).all()) for some in _some(row)):
        return None
    if grid.unit == "example":
        return 1.0
    radius = grid.radius
    norms = [float(torch.linalg.vector_norm(some.double() / grid.step)) * grid.scale for some in _some(row)]
    factor = min(1.0, radius / max(math.hypot(*norms), 1e-300))
    largest = math.floor(Fraction(radius) ** 2)
    for _ in range(_TRIES):
        if (found := square(factor)) <= largest:
            return factor
        factor *= math.sqrt(largest / found) * _SHORTER
    factor *= (radius - math.sqrt(len(row)) / 2) / (radius * (1 + 1e-9))
    return factor if square(factor) <= largest else None


def _bounded(rows: Tensor, grid: Grid) -> Tensor:
    """Return contributions as whole steps: for unit "user" with a norm that is checked in integers."""
    exact = rows.double() / grid.step * grid.scale
    finite = torch.isfinite(exact).all(1)  # in steps: what no number of them can say has no bound either
    exact = torch.where(finite[:, None], exact, 0.0)
    if grid.unit == "example":
        return exact.round_().clamp_(-grid.limit, grid.limit).to(torch.int64)
    radius = grid.radius
    # Norms row by row: how one is added up must not depend on the company it is in.
    norms = torch.stack([torch.linalg.vector_norm(row) for row in exact])
    exact *= (radius / norms.clamp(min=1e-300)).clamp(max=1.0)[:, None]
    largest = math.floor(Fraction(radius) ** 2)
    whole = exact.round().to(torch.int64)
    for _ in range(_TRIES):
        lengths = (whole * whole).sum(1)
        long = lengths > largest
        if not bool(long.any()):
            return whole
        exact[long] *= ((largest / lengths[long].double()).sqrt() * _SHORTER)[:, None]
        whole[long] = exact[long].round().to(torch.int64)
    # ‖⌊x⌉‖ ≤ ‖x‖ + √d/2, and √d/2 is at most a sixteenth of the radius.
    long = (whole * whole).sum(1) > largest
    exact[long] *= (radius - math.sqrt(rows.shape[1]) / 2) / (radius * (1 + 1e-9))
    whole[long] = exact[long].round().to(torch.int64)
    return torch.where(((whole * whole).sum(1) <= largest)[:, None], whole, 0)
