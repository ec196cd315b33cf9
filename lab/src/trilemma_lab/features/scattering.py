r"""Wavelet scattering of images: fixed features that a linear model learns digits from.

For an image x, Morlet wavelets ψ_{j,θ} at scales 2^j, j < J, and L angles θ, and a Gaussian φ of scale 2^J:

    S x = ( x ∗ φ,  |x ∗ ψ_{j₁,θ₁}| ∗ φ,  ||x ∗ ψ_{j₁,θ₁}| ∗ ψ_{j₂,θ₂}| ∗ φ  with j₁ < j₂ )

sampled every 2^J pixels: 1 + JL + L²J(J−1)/2 channels. J = 2 and L = 8 give 81, and an image of 28 × 28
pixels 81 × 7 × 7 = 3,969 features. Moving the image a little changes them little. Each image is then
normalised by itself: within groups of neighbouring channels to mean 0 and variance 1. Nothing here is learned
and no two records meet, so the features cost no privacy.

    ψ_{j,θ}(u) = s/(2πσ²) · (e^{iξ v₁} − β) · e^{−(v₁² + s²v₂²)/(2σ²)},  v = u turned by −θ,
    σ = 0.8 · 2^j,  ξ = 3π/4 · 2^−j,  s = 4/L,  β such that ψ sums to 0;  φ: σ = 0.8 · 2^(J−1), sum 1

Images are continued by reflection. Moduli are kept at every 2^j-th pixel only: a wavelet of scale 2^j leaves
little above that frequency. Products are taken in the Fourier domain; the last smoothing, which is separable,
is two small matrix products.

References: Bruna, Mallat, "Invariant scattering convolution networks", IEEE TPAMI 2013; with group
normalisation for private learning: Tramèr, Boneh, "Differentially private learning needs better features
(or much more data)", ICLR 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.data.catalogue import FeatureMap, FeatureOptions, feature_maps

SIGMA, XI = 0.8, 3.0 * math.pi / 4.0
EPSILON = 1e-8
"""Added to a group's variance: far below that of faint second-order features, far above rounding."""

MOST_GROUPS = 27
"""Groups of the published setting, for 81 channels; others get their largest divisor up to this."""


@feature_maps.register("scattering")
class ScatteringOptions(FeatureOptions):
    """Wavelet scattering of images, normalised in groups: J = 2, L = 8 gives MNIST 3,969 features.

    >>> scatter = ScatteringOptions().build((1, 28, 28))
    >>> scatter(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 3969])
    """

    J: int = Field(default=2, ge=1, le=6)
    """Number of scales; features are averaged over about 2^J pixels."""
    L: int = Field(default=8, ge=1, le=32)
    """Number of angles."""
    groups: int | None = Field(default=None, ge=0)
    """Groups of channels that are normalised; default: the largest divisor up to 27; 0: no normalisation."""

    def build(self, shape: tuple[int, ...]) -> FeatureMap:
        """Return the map for images of `shape`, (channels, height, width)."""
        if len(shape) != 3:
            raise UserError(
                f"features 'scattering' need images (channels, height, width), not examples of shape {shape} "
                "(image sets have them with flat = false)"
            )
        if any(_padded(length, self.J) - 2**self.J >= 2 * length for length in shape[1:]):
            raise UserError(
                f"J = {self.J}: images of {shape[1]} × {shape[2]} pixels are too small to be reflected; "
                "use a smaller J"
            )
        channels = shape[0] * (1 + self.J * self.L + self.L**2 * self.J * (self.J - 1) // 2)
        groups = self.groups
        if groups is None:
            groups = max(number for number in range(1, MOST_GROUPS + 1) if channels % number == 0)
        elif groups and channels % groups:
            raise UserError(f"groups = {groups} does not divide the {channels} channels")
        return Scattering(self.J, self.L, shape[1], shape[2], groups)


class Scattering:
    """The scattering of images of one size: (b, c, height, width) -> (b, features)."""

    def __init__(self, scales: int, angles: int, height: int, width: int, groups: int) -> None:
        self.scales, self.angles, self.groups = scales, angles, groups
        step = 2**scales
        self.size = _padded(height, scales), _padded(width, scales)
        self.around = (step, self.size[1] - width - step, step, self.size[0] - height - step)
        # What meets the image, at every pixel, and the moduli of scale r, which are at every 2^r-th.
        self.first = [self._spectrum(j, 0) for j in range(scales)]
        self.second = [{j: self._spectrum(j, r) for j in range(r + 1, scales)} for r in range(scales)]
        self.smoothing = [tuple(_smoothing(length, scales, r) for length in self.size) for r in range(scales)]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of images, one vector each."""
        channels = torch.cat([*self._channels(x.flatten(0, 1))], dim=1)
        channels = channels.view(len(x), -1, *channels.shape[2:])
        if self.groups:
            channels = torch.nn.functional.group_norm(channels, self.groups, eps=EPSILON)
        return channels.flatten(1)

    def _channels(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the orders 0, 1 and 2 of single-channel images, each (b, channels, …)."""
        padded = torch.nn.functional.pad(x[:, None], self.around, mode="reflect")
        spectrum = torch.fft.fft2(padded)
        yield self._smooth(padded, 0)
        second = []
        for j, wavelets in enumerate(self.first):
            modulus = _modulus(spectrum, wavelets.to(x.device), j)
            yield self._smooth(modulus, j)
            again = torch.fft.fft2(modulus)[:, :, None] if self.second[j] else spectrum
            for wider, others in self.second[j].items():
                twice = _modulus(again, others.to(x.device), wider - j)
                second.append(self._smooth(twice.flatten(1, 2), wider))
        yield from second

    def _smooth(self, modulus: Tensor, resolution: int) -> Tensor:
        rows, columns = (matrix.to(modulus.device) for matrix in self.smoothing[resolution])
        return rows @ modulus @ columns.mT

    def _spectrum(self, scale: int, resolution: int) -> Tensor:
        """Return the wavelets of one scale, (angles, …), in the Fourier domain, where they are real.

        Each number stands there twice, for the real and the imaginary part of what it multiplies: products of
        complex numbers with real ones are slow. They are divided by the number of frequencies that `_modulus`
        will add up.
        """
        each = [morlet(self.size, scale, angle, self.angles) for angle in range(self.angles)]
        step = 2**resolution
        sampled = np.stack(each)[:, ::step, ::step] * step**2
        twice = np.repeat(np.fft.fft2(sampled).real, 2, axis=-1) / 4 ** (scale - resolution)
        return torch.from_numpy(twice.astype(np.float32))


def _padded(length: int, scales: int) -> int:
    """Return whole steps of 2^J pixels, and one more on either side: what wraps around stays outside."""
    return int(2**scales * (2 + math.ceil(length / 2**scales)))


def morlet(size: tuple[int, ...], scale: int, angle: int, angles: int) -> np.ndarray:
    """Return ψ_{j,θ}, θ = π · angle/angles, around pixel (0, 0) of a torus of `size` pixels.

    >>> wavelet = morlet((16, 16), 1, 3, 8)
    >>> bool(abs(wavelet.sum()) < 1e-12), bool(np.allclose(np.fft.fft2(wavelet).imag, 0))
    (True, True)
    """
    sigma, xi, slant, theta = SIGMA * 2**scale, XI / 2**scale, 4.0 / angles, math.pi * angle / angles
    wave, envelope = np.zeros(size, dtype=complex), np.zeros(size)
    for down in range(-2, 3):  # what reaches beyond the torus comes back on the other side
        for right in range(-2, 3):
            rows = np.arange(size[0])[:, None] + down * size[0]
            columns = np.arange(size[1])[None] + right * size[1]
            along = columns * math.cos(theta) + rows * math.sin(theta)
            across = rows * math.cos(theta) - columns * math.sin(theta)
            gaussian = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
            wave += gaussian * np.exp(1j * xi * along)
            envelope += gaussian
    wavelet = wave - wave.sum() / envelope.sum() * envelope
    return np.asarray(wavelet * slant / (2 * math.pi * sigma**2))


def gaussian(length: int, scales: int) -> np.ndarray:
    """Return the smoothing φ along one axis, around pixel 0 of `length` pixels that wrap around; sum 1."""
    places = np.arange(length)[:, None] + length * np.arange(-2, 3)
    values = np.exp(-(places**2) / (2 * (SIGMA * 2 ** (scales - 1)) ** 2)).sum(axis=1)
    return np.asarray(values / values.sum())


def _smoothing(length: int, scales: int, resolution: int) -> Tensor:
    """Return φ as a matrix from every 2^r-th pixel of an axis to every 2^J-th one inside the picture."""
    inside = np.arange(2**scales, length - 2**scales, 2**scales)
    given = np.arange(0, length, 2**resolution)
    weights = gaussian(length, scales)[(inside[:, None] - given) % length] * 2**resolution
    return torch.from_numpy(weights.astype(np.float32))


def _modulus(spectrum: Tensor, wavelets: Tensor, coarser: int) -> Tensor:
    """Return |x ∗ ψ| at every 2^coarser-th pixel, of x's spectrum and ψ's as `_spectrum` gives it."""
    rows, columns = spectrum.shape[-2] >> coarser, spectrum.shape[-1] >> coarser
    parts = torch.view_as_real(spectrum).flatten(-2)
    # Leaving out pixels folds the spectrum: frequencies that look alike on those left are averaged.
    folded: Tensor | None = None
    for down in range(0, spectrum.shape[-2], rows):
        for right in range(0, parts.shape[-1], 2 * columns):
            block = (..., slice(down, down + rows), slice(right, right + 2 * columns))
            if folded is None:
                folded = parts[block] * wavelets[block]
            else:
                folded.addcmul_(parts[block], wavelets[block])
    assert folded is not None
    values = torch.fft.ifft2(torch.view_as_complex(folded.view(*folded.shape[:-1], columns, 2)))
    real, imaginary = torch.view_as_real(values).unbind(-1)
    return torch.addcmul(real * real, imaginary, imaginary).sqrt_()
