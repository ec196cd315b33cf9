"""Whitened scattering: invented images, and features that are white on them and the same everywhere."""

from __future__ import annotations

import pytest
import torch

from trilemma.data.strokes import StrokesOptions, strokes
from trilemma.errors import UserError
from trilemma.keys import Key

SMALL = StrokesOptions(components=12, J=1, L=2, paper=0.0, ink=1.0)


def test_features_of_other_strokes_are_nearly_white() -> None:
    """Mean 0 and variance 1 in every coordinate, measured on images that were not used to find them."""
    features = SMALL.build((1, 16, 16))(strokes(600, (16, 16), Key(5))[:, None])
    assert features.mean(0).abs().max() < 0.25
    assert torch.allclose(features.var(0), torch.ones(12), atol=0.35)
    correlation = torch.corrcoef(features.T) - torch.eye(12)
    assert correlation.abs().max() < 0.3


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
