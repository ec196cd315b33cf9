"""Scattering agrees with its definition, moves little with the image, and adds no energy."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch

from trilemma.base.errors import UserError
from trilemma_lab.features.scattering import ScatteringOptions


def wave(size: tuple[int, int], scale: int, angle: int, angles: int) -> np.ndarray:
    """ψ of the module's docstring, number by number, summed over the copies of the torus."""
    sigma, xi, slant = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale, 4 / angles
    turn = cmath.exp(-1j * math.pi * angle / angles)
    gabor, bell = np.zeros(size, complex), np.zeros(size)
    for row in range(-size[0], 2 * size[0]):
        for column in range(-size[1], 2 * size[1]):
            v = complex(column, row) * turn
            weight = math.exp(-(v.real**2 + slant**2 * v.imag**2) / (2 * sigma**2))
            gabor[row % size[0], column % size[1]] += weight * cmath.exp(1j * xi * v.real)
            bell[row % size[0], column % size[1]] += weight
    beta = gabor.sum() / bell.sum()
    return (gabor - beta * bell) * slant / (2 * math.pi * sigma**2)


def bell(size: tuple[int, int], scales: int) -> np.ndarray:
    out = np.zeros(size)
    for row in range(-size[0], 2 * size[0]):
        for column in range(-size[1], 2 * size[1]):
            square = row**2 + column**2
            out[row % size[0], column % size[1]] += math.exp(-square / (2 * (0.8 * 2 ** (scales - 1)) ** 2))
    return out / out.sum()


def convolve(x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Circular convolution, term by term."""
    out = np.zeros(x.shape, complex)
    for row in range(h.shape[0]):
        for column in range(h.shape[1]):
            out += h[row, column] * np.roll(x, (row, column), (0, 1))
    return out


def reference(image: np.ndarray, scales: int, angles: int) -> np.ndarray:
    """Scattering of one image by its definition: convolve, take every 2^j-th pixel, modulus, smooth."""
    step = 2**scales
    size = tuple(step * (2 + math.ceil(length / step)) for length in image.shape)
    after = [size[axis] - image.shape[axis] - step for axis in (0, 1)]
    x = np.pad(image, ((step, after[0]), (step, after[1])), mode="reflect")
    phi = bell(size, scales)
    psi = [[wave(size, j, angle, angles) for angle in range(angles)] for j in range(scales)]

    def smooth(u: np.ndarray, resolution: int) -> np.ndarray:
        grid = 2**resolution
        blurred = convolve(u, phi[::grid, ::grid] * grid**2).real
        every = step // grid
        return blurred[::every, ::every][1:-1, 1:-1]

    first, second = [], []
    for j in range(scales):
        for angle in range(angles):
            u = abs(convolve(x, psi[j][angle]))[:: 2**j, :: 2**j]
            first.append(smooth(u, j))
    for j in range(scales):
        for wider in range(j + 1, scales):
            for angle in range(angles):
                u = abs(convolve(x, psi[j][angle]))[:: 2**j, :: 2**j]
                for other in range(angles):
                    again = abs(convolve(u, psi[wider][other][:: 2**j, :: 2**j] * 4**j))
                    coarse = 2 ** (wider - j)
                    second.append(smooth(again[::coarse, ::coarse], wider))
    return np.stack([smooth(x, 0), *first, *second])


@pytest.mark.parametrize(("scales", "angles", "shape"), [(2, 3, (8, 9)), (1, 2, (5, 4)), (3, 1, (13, 16))])
def test_it_agrees_with_its_definition(scales: int, angles: int, shape: tuple[int, int]) -> None:
    images = np.random.default_rng(1).normal(size=(2, 2, *shape)).astype(np.float32)
    scatter = ScatteringOptions(J=scales, L=angles, groups=0).build((2, *shape))
    expected = [np.concatenate([reference(channel, scales, angles) for channel in image]) for image in images]
    found = scatter(torch.from_numpy(images))
    torch.testing.assert_close(
        found, torch.tensor(np.stack(expected), dtype=torch.float32).flatten(1), rtol=1e-4, atol=1e-5
    )


def strokes(count: int) -> torch.Tensor:
    """Smooth random strokes in the middle of dark images."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(count, 1, 6, 6, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (20, 20), mode="bicubic").relu().clamp(max=1)
    return torch.nn.functional.pad(images, (4, 4, 4, 4))


def test_mnist_has_3969_features_normalised_in_groups_of_each_image() -> None:
    features = ScatteringOptions().build((1, 28, 28))(strokes(5))
    assert features.shape == (5, 3969)
    groups = features.view(5, 27, -1)
    assert groups.mean(-1).abs().max() < 1e-4
    assert (groups.var(-1, unbiased=False) - 1).abs().max() < 0.05
    assert ScatteringOptions().build((3, 32, 32))(torch.rand(1, 3, 32, 32)).shape == (1, 3 * 81 * 64)


def test_a_moved_image_moves_its_features_less_than_its_pixels() -> None:
    images = strokes(20)
    scatter = ScatteringOptions(groups=0).build((1, 28, 28))

    def change(values: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        values, moved = values.flatten(1), moved.flatten(1)
        return torch.linalg.vector_norm(moved - values, dim=1) / torch.linalg.vector_norm(values, dim=1)

    moved = images.roll((1, 1), (-2, -1))
    assert bool((change(scatter(images), scatter(moved)) < 0.6 * change(images, moved)).all())
    assert bool((change(scatter(images), scatter(images.roll(3, -1))) > 0.05).all())


def test_no_energy_is_added() -> None:
    """|φ̂|² and the wavelets' |ψ̂|² add up to at most 1.02, so all orders have at most the image's energy."""
    scatter = ScatteringOptions(groups=0).build((1, 28, 28))
    noise = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    for images in (strokes(10), noise):
        padded = torch.nn.functional.pad(images, scatter.around, mode="reflect")  # type: ignore[attr-defined]
        energy = padded.square().flatten(1).sum(1)
        assert bool((16 * scatter(images).square().sum(1) < 1.05 * energy).all())


def test_images_that_do_not_fit_are_refused() -> None:
    for options, shape, message in (
        ({}, (784,), "need images"),
        ({"J": 5}, (1, 28, 28), "too small"),
        ({"groups": 7}, (1, 28, 28), "does not divide the 81 channels"),
    ):
        with pytest.raises(UserError, match=message):
            ScatteringOptions(**options).build(shape)
