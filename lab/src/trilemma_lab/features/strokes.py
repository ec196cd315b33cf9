r"""Whitened scattering: the directions in which invented strokes differ, each of the same size.

Scattering features of different images have a large part in common and lie in few of their 3,969 dimensions.
Both cost dearly under noise: what is common multiplies whatever liars hide in the model's bias, and a random
projection spends its coordinates on directions in which no two images differ. So images are invented: one to
three curves of a pen, drawn from a fixed key, centred as digits are. With m their mean scattering vector and
λ_1 ≥ λ_2 ≥ … the eigenvalues of their covariance, v_j its eigenvectors,

    x ↦ ( ⟨v_j, S x − m⟩ / √λ_j )_{j ≤ k}

gives the invented images mean 0 and variance 1 in every coordinate. No record of anybody is looked at, so it
costs no privacy, and every party computes the same map.

**Drawn again.** Directions in which images differ most need not tell one shape from another: the same shape
is drawn with another slant, pen or hand, too. So every invented stroke may be drawn several times, its curves
bent, leaning, turned and stretched a little each time (`again`). With W the covariance of drawings around
their stroke's mean and B that of strokes' means, both among the first 400 directions above, the components
are Fisher's instead: those v for which vᵀBv is largest beside vᵀ(W + ½ tr(W)/400 · I)v. Fewer of them tell
as much, and fewer coordinates are what privacy and robustness are paid in.

Reference: every example a class of its own, known by its distortions, is Dosovitskiy, Springenberg,
Riedmiller, Brox, "Discriminative unsupervised feature learning with convolutional neural networks", NeurIPS
2014; here with Fisher's discriminant ("The use of multiple measurements in taxonomic problems", 1936) in
place of a network.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.catalogue import FeatureMap, feature_maps
from trilemma_lab.features.scattering import ScatteringOptions

INVENTED = 2048
"""Invented images: several times as many as components are kept."""

DOTS = 16
"""Places a curve is drawn through."""

AMONG = 400
"""Directions in which strokes differ most, among which components that tell them apart are looked for."""

REAL = 1e-9
"""Of the largest variance: directions with less are rounding."""

CALMED = 0.5
"""Of the mean variance of drawings of one stroke, what is added to it in every direction."""

BENT, LEANING, TURNED, STRETCHED = 1.0, 0.35, 0.2, 0.2
"""How much drawings of one stroke differ, as standard deviations: of the places that bend its curves in
pixels of 28, of the slant, of the angle, and of the logarithm of height over width (half of it)."""


@feature_maps.register("strokes")
class StrokesOptions(ScatteringOptions):
    """Scattering, centred and whitened by statistics of synthetic pen strokes, of nobody's data.

    >>> act = StrokesOptions(components=4, J=1, L=2).build((1, 16, 16))
    >>> act(torch.zeros(3, 1, 16, 16)).shape
    torch.Size([3, 4])
    """

    components: int = Field(default=64, ge=1, le=INVENTED // 4)
    """How many are kept."""
    paper: float = -0.4242
    """The value of an empty pixel; the default is that of MNIST under scaling = 'standard'."""
    ink: float = 2.8215
    """The value of a full one."""
    box: float = Field(default=0.0, ge=0, le=28)
    """The longer side of the ink, of 28; digits are usually fitted to 20. 0: as it falls."""
    drawn: int | None = Field(default=None, ge=2, le=16)
    """How often every stroke is drawn: components that tell strokes apart; default: that differ most."""

    def build(self, shape: tuple[int, ...]) -> FeatureMap:
        """Return the map for images of `shape`, (channels, height, width)."""
        scatter = super().build(shape)
        mean, matrix = _whitening(self, shape)

        def act(rows: Tensor) -> Tensor:
            return (scatter(rows) - mean.to(rows.device)) @ matrix.to(rows.device)

        return act


@lru_cache(maxsize=8)
def _whitening(options: StrokesOptions, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean (F,) and the map (F, k)."""
    scatter = ScatteringOptions(J=options.J, L=options.L, groups=options.groups).build(shape)
    key = Key(0, ("strokes",))

    def features(again: int = 0) -> Tensor:
        images = strokes(INVENTED, (shape[1], shape[2]), key, options.box, again)
        images = (options.paper + (options.ink - options.paper) * images)[:, None].repeat(1, shape[0], 1, 1)
        return torch.cat([scatter(images[start : start + 64]) for start in range(0, INVENTED, 64)]).double()

    found = features()
    width, k = found.shape[1], options.components
    if k > width:
        raise UserError(f"components = {k}: there are {width} scattering features; allowed: at most as many")
    mean = found.mean(0)
    centred = found - mean
    values, vectors = torch.linalg.eigh(centred @ centred.T)  # of the images: fewer than features
    real = int((values > REAL * values[-1]).sum())  # channels of a group add up to nothing
    some = k if options.drawn is None else max(k, min(AMONG, real))
    values, vectors = values[-some:].flip(0), vectors[:, -some:].flip(1)
    axes = centred.T @ vectors / values.sqrt()
    if options.drawn is not None:
        drawings = [centred @ axes, *((features(again) - mean) @ axes for again in range(1, options.drawn))]
        axes = axes @ telling(torch.stack(drawings, 1), k)
        values = (centred @ axes).square().sum(0)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return mean.float(), (axes * largest.sign() * math.sqrt(INVENTED) / values.sqrt()).float()


def telling(drawings: Tensor, components: int) -> Tensor:
    """Return the map (P, k) to components that tell strokes apart best, given their drawings (count, r, P).

    Strokes that differ in their first number, while drawings of one differ in the second:

    >>> strokes_, hands = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([[-5.0, 5.0]])
    >>> found = telling(torch.stack([strokes_.expand(3, 2), hands.expand(3, 2)], dim=2), 1)
    >>> bool(found[0].abs() > 0.1), bool(found[1].abs() < 1e-6)
    (True, True)
    """
    count, times, width = drawings.shape
    means = drawings.mean(1)
    around = (drawings - means[:, None]).flatten(0, 1)
    within = around.T @ around / (count * (times - 1))
    apart = means - means.mean(0)
    between = apart.T @ apart / count - within / times  # a mean of few drawings differs by itself
    calmed = within + CALMED * within.diagonal().mean() * torch.eye(width).to(within)
    inverse = torch.linalg.inv(torch.linalg.cholesky(calmed))
    vectors = torch.linalg.eigh(inverse @ between @ inverse.T).eigenvectors
    found: Tensor = inverse.T @ vectors[:, -components:].flip(1)
    return found


def strokes(count: int, size: tuple[int, int], key: Key, box: float = 0.0, again: int = 0) -> Tensor:
    """Return invented images (count, height, width) in [0, 1]: one to three curves, the ink's middle centred.

    `box` is the longer side of the ink, of 28; 0: as the curves fall. `again` is the number of a drawing of
    the same strokes by another hand; 0: as they were invented.

    >>> drawn = strokes(2, (28, 28), Key(1))
    >>> drawn.shape, float(drawn.min()), float(drawn.max())
    (torch.Size([2, 28, 28]), 0.0, 1.0)
    """
    generator, (height, width) = key.torch(), size
    scale = torch.tensor([height, width]) / 28
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([rows, columns], dim=-1).reshape(1, -1, 2).float()
    corners = 4.5 + 19.0 * torch.rand(count, 3, 3, 2, generator=generator)
    joined = torch.rand(count, 3, generator=generator) < 0.6  # a curve goes on where the last one ended
    hand = key.fold("again", again).torch()
    if again:
        corners = corners + BENT * torch.randn(corners.shape, generator=hand)
    for curve in (1, 2):
        corners[:, curve, 0] = torch.where(
            joined[:, curve, None], corners[:, curve - 1, 2], corners[:, curve, 0]
        )
    t = torch.linspace(0, 1, DOTS)[:, None]
    a, b, c = (corners[:, :, place, None] for place in range(3))
    dots = (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c
    curves = torch.randint(1, 4, (count,), generator=generator)
    pen = 1.0 + 0.5 * torch.rand(count, generator=hand if again else generator)
    if again:
        dots = dots @ _hands(count, hand)[:, None]
    out = torch.empty(count, height, width)
    for i in range(count):
        drawn = dots[i, : int(curves[i])].reshape(-1, 2)
        if box:
            longer = float((drawn.amax(0) - drawn.amin(0)).max())
            drawn = drawn * ((box - 2 * float(pen[i])) / max(longer, 1.0))
        drawn = (drawn - drawn.mean(0) + 13.5) * scale
        distance = torch.cdist(pixels[0], drawn).amin(1).reshape(height, width)
        out[i] = (pen[i] * float(scale.mean()) + 0.7 - distance).clamp(0, 1)
    return out


def _hands(count: int, generator: torch.Generator) -> Tensor:
    """Return matrices (count, 2, 2) by which rows and columns are changed: stretched, leaning and turned."""
    stretched, leaning, turned = (
        spread * torch.randn(count, generator=generator) for spread in (STRETCHED, LEANING, TURNED)
    )
    cos, sin, nothing, one = turned.cos(), turned.sin(), torch.zeros(count), torch.ones(count)
    first = torch.stack([stretched.exp(), nothing, nothing, (-stretched).exp()], 1)
    second = torch.stack([one, leaning, nothing, one], 1)
    third = torch.stack([cos, sin, -sin, cos], 1)
    return first.view(-1, 2, 2) @ second.view(-1, 2, 2) @ third.view(-1, 2, 2)
