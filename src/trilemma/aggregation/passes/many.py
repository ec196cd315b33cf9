"""Many small problems at once, on the device where they lie: the candidates of a search, each n × n.

A processor decomposes one matrix after the other (`trilemma.aggregation.passes.spectral`), and is best at it.
A GPU has no good way to decompose a hundred small matrices, but multiplies them in microseconds. So it finds
top eigenvectors by squaring: Mˢ for s = 2, 4, 8, … tends to a multiple of v vᵀ as (λ₂/λ₁)ˢ tends to 0, after
k squarings as far as after 2ᵏ steps of the power method. Rounding M² costs no more than rounding M, since
the gap has doubled.

Eigenvalues of noise hardly differ, and the first squarings are better spent on Chebyshev's polynomials
T₂ₛ = 2Tₛ² − 1: with [0, θ] mapped to [−1, 1] whatever is at most θ stays within 1, and what is θ(1 + δ) grows
like cosh(2s√δ), where powers have (1 + δ)ˢ. No top eigenvalue is below the mean of all, which is the trace's;
where only those above an edge are asked for, θ is the edge.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from trilemma.aggregation.passes.spectral import ROUNDING
from trilemma.base.recordings import Recordings, Tensors, nobody_asks

SHARPENED, SQUARED, SQUARED_ABOVE = 6, 8, 5
"""So often a matrix is squared by Chebyshev's way, and then plainly, without an edge and with one. Without,
eigenvalues are told apart that differ by a few ten-thousandths, and those of noise differ by thousandths.
With one, whatever is above it by a ten-thousandth is found."""

SHARPENED_ALONE = 8
"""The same where all that is asked is whether anything is above an edge."""

LEAST = 1e-300
"""What is divided by is at least this: nothing stays nothing."""

SCALED = 6
"""After so many squarings a matrix is scaled: (1/n)⁶⁴ is still a number."""


def top_eigenpairs(M: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues (B,) and unit eigenvectors (B, n) of positive semidefinite (B, n, n).

    With `least` (B,) they are looked for above that only, which is quicker: where there is none, some value
    that is not above it is returned, and the vector may be zero. All is float64: what a polynomial of degree
    64 makes of eigenvalues far apart is beyond float32.

    On a GPU it is replayed (`trilemma.base.recordings`): dozens of small launches cost more than what they
    start.

    >>> values, vectors = top_eigenpairs(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]], dtype=torch.float64))
    >>> values.tolist(), vectors.abs().tolist()
    ([2.0], [[1.0, 0.0]])
    """

    def computed(of: Tensors) -> Tensors:
        values, vectors = plain_top_eigenpairs(of["M"], of.get("least"))
        return {"values": values, "vectors": vectors}

    found = _recordings.run(
        "top eigenpairs", computed, {"M": M} if least is None else {"M": M, "least": least}
    )
    return found["values"], found["vectors"]


def plain_top_eigenpairs(M: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the same, launched one by one: for what is recorded as a whole."""
    edge = M.diagonal(dim1=1, dim2=2).mean(1)
    power = _sharpened(M, edge if least is None else torch.maximum(edge, least), SHARPENED)
    power /= power.diagonal(dim1=1, dim2=2).amax(1).clamp(min=1.0)[:, None, None]
    for done in range(SQUARED if least is None else SQUARED_ABOVE):
        power = torch.bmm(power, power)
        if done % SCALED == 0:
            power /= power.diagonal(dim1=1, dim2=2).sum(1).clamp(min=LEAST)[:, None, None]
    largest = power.diagonal(dim1=1, dim2=2).argmax(1)
    column = power.gather(1, largest[:, None, None].expand(-1, 1, M.shape[1]))[:, 0]
    length: Tensor = torch.linalg.vector_norm(column, dim=1, keepdim=True)
    vectors = column / length.clamp(min=LEAST)
    return torch.bmm(vectors[:, None], torch.bmm(M, vectors[..., None]))[:, 0, 0], vectors


def any_above(M: Tensor, least: Tensor) -> Tensor:
    """Tell (B,) whether positive semidefinite (B, n, n) have an eigenvalue above `least` (B,), all positive.

    One that is above by less than a ten-thousandth of it may be overlooked.

    >>> any_above(torch.diag_embed(torch.tensor([[2.0, 1.0]] * 2)), torch.tensor([1.9, 2.1])).tolist()
    [True, False]
    """
    length: Tensor = torch.linalg.vector_norm(_sharpened(M, least, SHARPENED_ALONE), dim=(1, 2))
    return ~(length <= 2.0 * math.sqrt(M.shape[1]))  # also where it is no number any more


def _sharpened(M: Tensor, edge: Tensor, times: int) -> Tensor:
    """Return twice Chebyshev's polynomial of degree 2^times of (B, n, n), [0, edge] mapped to [−1, 1].

    2T₂ₛ = (2Tₛ)² − 2: only what is on the diagonal changes beside the squares.
    """
    # Rounding may leave a trace below zero.
    power = M * (4.0 / torch.where(edge > 0.0, edge, 1.0))[:, None, None]
    power.diagonal(dim1=1, dim2=2).sub_(2.0)
    for _ in range(times):
        power = torch.bmm(power, power)
        power.diagonal(dim1=1, dim2=2).sub_(2.0)
    return power


def recentred(grams: Tensor) -> Tensor:
    """Return inner products (B, n, n) around a row near the majority, of messages with these Gram matrices.

    As `trilemma.aggregation.passes.gram.from_gram`: an offset common to all costs no accuracy from here on.

    >>> recentred(torch.tensor([[[4.0, 6.0, 6.0], [6.0, 9.0, 9.0], [6.0, 9.0, 9.0]]]))
    tensor([[[1., 0., 0.],
             [0., 0., 0.],
             [0., 0., 0.]]])
    """
    near = distances(grams).sort(2).values[:, :, grams.shape[2] // 2].argmin(1)
    to = grams[torch.arange(len(grams), device=grams.device), near]
    middle = to.gather(1, near[:, None])[:, :, None]
    return grams - (to[:, :, None] + to[:, None, :]) + middle


def distances(inner: Tensor) -> Tensor:
    """Return squared distances (B, n, n) between rows with these inner products.

    >>> distances(torch.tensor([[[9.0, 0.0], [0.0, 16.0]]]))
    tensor([[[ 0., 25.],
             [25.,  0.]]])
    """
    own = inner.diagonal(dim1=1, dim2=2)
    return (own[:, :, None] + own[:, None, :] - 2.0 * inner).clamp(min=0.0)


def nearest_first(squares: Tensor) -> Tensor:
    """Return squared distances with −1 to itself: a row is its own nearest, whichever duplicates it has."""
    return squares.masked_fill(torch.eye(squares.shape[1], dtype=torch.bool, device=squares.device), -1.0)


def walked(grams: Tensor, above: float) -> Tensor:
    """Take CAF's walk for messages with Gram matrices (B, n, n), until none of them goes on.

    Returned are the weights (B, n) of the step with the smallest top eigenvalue of the covariance
    (`trilemma.aggregation.passes.spectral.reweightings`). On a GPU a few steps at a time are replayed, unless
    all is recorded as a whole (`trilemma.base.recordings.unasked`).
    """
    if (hurried := nobody_asks()) is not None:
        state = _set_out({"grams": grams}, above, hurried.steps)
        hurried.needed.append(state["taken"] + state["walking"])
        return state["best"]
    state = _recordings.run(("set out", above), partial(_set_out, above=above), {"grams": grams})
    while bool(state["walking"].any()):
        state = _recordings.run(("walk", above), partial(_further, above=above), state)
    return state["best"]


WALK = "c", "best", "smallest", "walking", "taken"
"""Where B walks stand: the weights, the best so far, its variance, who goes on, and the steps taken."""

FIRST, STEPS = 4, 2
"""Steps of a walk that are taken before anybody asks who goes on, at first and then; who has arrived stays
where it is. Of a hundred walks the longest seldom takes fewer than four."""

KEPT = 12
"""Recordings that are kept: those replayed last."""

_recordings = Recordings(KEPT)


def _set_out(of: Tensors, above: float, steps: int = FIRST) -> Tensors:
    """Take the first steps of messages with Gram matrices."""
    inner = recentred(of["grams"])
    c = inner.new_ones(inner.shape[:-1])
    smallest, walking = inner.new_full((len(c),), math.inf), c.sum(1) > above
    start = (inner, c, c, smallest, walking, torch.zeros_like(smallest))
    return _further(dict(zip(("inner", *WALK), start, strict=True)), above, steps)


def _further(of: Tensors, above: float, steps: int = STEPS) -> Tensors:
    """Take the next steps of those who still walk."""
    inner, c, best, smallest, walking, taken = (of[name] for name in ("inner", *WALK))
    for _ in range(steps):
        taken = taken + walking
        variance, lighter, varies = _weighed_down(inner, c)
        better = walking & (variance <= smallest)
        best, smallest = torch.where(better[:, None], c, best), torch.where(better, variance, smallest)
        c = torch.where((walking & varies)[:, None], lighter, c)
        walking = walking & varies & (c.sum(1) > above)
    return dict(zip(("inner", *WALK), (inner, c, best, smallest, walking, taken), strict=True))


def _weighed_down(inner: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take weight from c (B, n) along the direction of largest variance of messages with inner products.

    Returned are that variance (B,), the weights after it, and whether there was anything to remove (B,).
    """
    p = c / c.sum(1, keepdim=True)
    to_mean = torch.bmm(inner, p[..., None])[..., 0]
    H = inner - to_mean[:, :, None] - to_mean[:, None, :] + (p * to_mean).sum(1)[:, None, None]
    root = p.sqrt()
    variance, u = plain_top_eigenpairs(root[:, :, None] * H * root[:, None, :])
    along = torch.bmm(H, (root * u)[..., None])[..., 0].abs() * (c > 0.0)
    most = along.amax(1, keepdim=True)
    keep = 1.0 - (along / torch.where(most > 0.0, most, 1.0)).square()
    keep = torch.where(keep < ROUNDING, 0.0, keep)
    return variance.clamp(min=0.0), c * keep, (variance > 0.0) & (most[:, 0] > 0.0)
