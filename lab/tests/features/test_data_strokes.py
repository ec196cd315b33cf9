"""Whitened scattering: invented images, and features that are white on them and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma_lab.features.strokes import CALMED, StrokesOptions, strokes, telling

SMALL = StrokesOptions(components=12, J=1, L=2, paper=0.0, ink=1.0)


def test_features_of_other_strokes_are_nearly_white() -> None:
    """Mean 0 and variance 1 in every coordinate, measured on images that were not used to find them."""
    features = SMALL.build((1, 16, 16))(strokes(600, (16, 16), Key(5))[:, None])
    assert features.mean(0).abs().max() < 0.25
    assert torch.allclose(features.var(0), torch.ones(12), atol=0.35)
    correlation = torch.corrcoef(features.T) - torch.eye(12)
    assert correlation.abs().max() < 0.3


def test_features_of_strokes_drawn_several_times_are_nearly_white_too() -> None:
    again = SMALL.model_copy(update={"components": 6, "drawn": 2})
    features = again.build((1, 16, 16))(strokes(600, (16, 16), Key(5))[:, None])
    assert features.mean(0).abs().max() < 0.25
    assert torch.allclose(features.var(0), torch.ones(6), atol=0.35)


def test_components_that_tell_strokes_apart_are_those_of_the_generalised_eigenproblem() -> None:
    """Against the two covariances in a loop, and scipy's solution for the pair of them."""
    generator = Key(8).torch()
    drawings = torch.randn(40, 1, 5, generator=generator) + torch.randn(40, 3, 5, generator=generator)
    drawings, groups = drawings.double(), drawings.double().numpy()
    within, between = np.zeros((5, 5)), np.zeros((5, 5))
    middle = groups.reshape(-1, 5).mean(0)
    for group in groups:
        mean = group.mean(0)
        between += np.outer(mean - middle, mean - middle) / 40
        for one in group:
            within += np.outer(one - mean, one - mean) / (40 * 2)
    between -= within / 3
    calmed = within + CALMED * np.trace(within) / 5 * np.eye(5)
    slow = scipy.linalg.eigh(between, calmed)[1][:, ::-1][:, :2]
    found = telling(drawings, 2).numpy()
    assert np.allclose(np.abs((slow * found).sum(0)), (slow**2).sum(0))  # the same but for their signs
    assert np.allclose(np.abs(slow), np.abs(found))


def test_a_stroke_drawn_again_is_more_like_itself_than_like_others() -> None:
    first, again = (strokes(40, (28, 28), Key(9), 20.0, number).flatten(1) for number in (0, 3))
    assert not torch.equal(first, again)
    nearest = torch.cdist(first, again).argmin(1)
    assert int((nearest == torch.arange(40)).sum()) >= 15  # by chance one


def test_the_map_knows_no_data_and_treats_examples_alone() -> None:
    images = strokes(3, (16, 16), Key(6))[:, None]
    together, alone = SMALL.build((1, 16, 16))(images), SMALL.build((1, 16, 16))(images[:1])
    assert torch.allclose(together[:1], alone, atol=1e-5)


def test_more_components_than_features_are_refused() -> None:
    with pytest.raises(UserError, match="allowed: at most as many"):
        StrokesOptions(components=400, J=1, L=1).build((1, 8, 8))


def test_strokes_fill_a_box_where_one_is_given() -> None:
    drawn = strokes(40, (28, 28), Key(7), box=20.0) > 0.5
    places = [[image.any(axis).nonzero().flatten() for axis in (0, 1)] for image in drawn]
    longer = torch.tensor([[int(where[-1] - where[0]) + 1 for where in both] for both in places]).amax(1)
    assert bool(((longer >= 18) & (longer <= 22)).all())
