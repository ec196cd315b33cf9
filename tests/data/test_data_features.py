"""Features: computed once, kept whole, never mixed between records; projections keep lengths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trilemma import data
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Dataset, Storage, with_features
from trilemma.data.features.maps import UNCHANGED

FOLDER = os.environ.get("TRILEMMA_DATA")
real_data = pytest.mark.skipif(not FOLDER, reason="TRILEMMA_DATA names no folder with the image sets")


class Counted(nn.Module):
    """A body that counts the examples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.linear = nn.Linear(12, 5)
        self.dropout = nn.Dropout()

    def __deepcopy__(self, memo: object) -> Counted:
        copied = Counted()
        copied.load_state_dict(self.state_dict())
        copied.seen = self.seen
        return copied

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.dropout(self.linear(x.flatten(1)))


def pictures(count: int = 150, shape: tuple[int, ...] = (1, 3, 4)) -> Dataset:
    x = torch.randn(count, *shape, generator=Key(1).torch())
    y = torch.arange(count) % 2
    return Dataset("pictures", x, y, x[:20], y[:20], 2)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(None, tmp_path / "cache", download=False)


def test_a_frozen_module_gives_its_outputs_and_is_left_as_it_was(storage: Storage) -> None:
    dataset, body = pictures(), Counted()
    out = with_features(dataset, body, key=Key(1), storage=storage)
    expected = body.eval()(dataset.x_train)
    assert torch.allclose(out.x_train, expected, atol=1e-6)
    assert torch.equal(out.x_test, out.x_train[:20])
    assert not out.x_train.requires_grad
    assert torch.equal(out.y_train, dataset.y_train)
    assert "features Counted" in out.description
    assert with_features(dataset, key=Key(1)) is dataset


def test_what_was_computed_is_read_back(storage: Storage) -> None:
    dataset, body = pictures(), Counted()
    first = with_features(dataset, body, project=3, key=Key(1), storage=storage)
    computed = sum(body.seen)
    again = with_features(dataset, body, project=3, key=Key(1), storage=storage)
    assert torch.equal(first.x_train, again.x_train)
    assert sum(body.seen) - computed < 20
    files = sorted((storage.cache / "features").iterdir())
    assert [file.suffix for file in files] == [".npz", ".npz"]

    changed = replace(dataset, x_train=dataset.x_train + 1)
    for given, features, seed in ((changed, body, 1), (dataset, body, 2), (dataset, Counted(), 1)):
        other = with_features(given, features, project=3, key=Key(seed), storage=storage)
        assert not torch.equal(other.x_train, first.x_train)


def test_a_damaged_or_outdated_cache_is_computed_anew(storage: Storage) -> None:
    dataset, body = pictures(), Counted()
    first = with_features(dataset, body, key=Key(1), storage=storage).x_train
    files = sorted((storage.cache / "features").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:200])
    np.savez(files[1], features=np.zeros_like(np.load(files[1])["features"]))
    again = with_features(dataset, body, key=Key(1), storage=storage)
    assert torch.equal(again.x_train, first)
    assert torch.equal(again.x_test, first[:20])


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    storage = Storage(None, tmp_path / "cache", download=False)
    assert with_features(pictures(), project=3, key=Key(1), storage=storage).x_train.shape == (150, 3)


def test_projections_keep_lengths_on_average(storage: Storage) -> None:
    dataset = pictures(10, (400,))
    ratios = []
    for seed in range(30):
        projected = with_features(dataset, project=50, key=Key(seed), storage=storage).x_train
        ratios.append(projected.square().sum(1) / dataset.x_train.square().sum(1))
    ratio = torch.stack(ratios)
    assert float(ratio.mean()) == pytest.approx(1, abs=0.05)
    assert float(ratio.std()) == pytest.approx((2 / 50) ** 0.5, rel=0.2)


def test_a_norm_shortens_long_examples_only(storage: Storage) -> None:
    dataset = pictures()
    lengths = torch.linalg.vector_norm(dataset.x_train.flatten(1), dim=1)
    bounded = with_features(dataset, norm=3.0, key=Key(1), storage=storage).x_train
    assert bounded.shape == dataset.x_train.shape
    torch.testing.assert_close(torch.linalg.vector_norm(bounded.flatten(1), dim=1), lengths.clamp(max=3.0))
    assert torch.equal(bounded[lengths < 2.9], dataset.x_train[lengths < 2.9])


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


def test_what_cannot_be_a_feature_map_is_refused(storage: Storage) -> None:
    dataset = pictures()
    flipped = replace(dataset, augment=data.horizontal_flip)
    for given, features, options, message in (
        (dataset, Mixing(), {}, "depend on what is given beside it"),
        (dataset, nn.Flatten(0), {}, "a row for each example"),
        (dataset, UNCHANGED, {"project": 12}, "project = 12: examples have 12 features"),
        (dataset, UNCHANGED, {"norm": -1.0}, "norm = -1: it must be positive"),
        (flipped, UNCHANGED, {"project": 3}, "flip = true"),
    ):
        with pytest.raises(UserError, match=message):
            with_features(given, features, key=Key(1), storage=storage, **options)


def test_a_module_may_read_several_columns(storage: Storage) -> None:
    class Mean(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return (ids * attention_mask).float().sum(1, keepdim=True) / attention_mask.sum(1, keepdim=True)

    own = data.from_clients([{"ids": [[1, 2, 3], [4], [6, 8]], "label": [0, 1, 1]}])
    assert with_features(own, Mean(), key=Key(1), storage=storage).x_train.tolist() == [[2.0], [4.0], [7.0]]
    with pytest.raises(UserError, match="the columns ids, attention_mask: only a module"):
        with_features(own, project=1, key=Key(1), storage=storage)


@pytest.mark.slow
@real_data
def test_digits_are_linear_in_their_projected_scattering(storage: Storage) -> None:
    """Ridge regression on 128 numbers of 1,500 images; on projected pixels it is far worse."""
    mnist = data.load("mnist", key=Key(1))
    few = replace(
        mnist,
        x_train=mnist.x_train[:1500],
        y_train=mnist.y_train[:1500],
        x_test=mnist.x_test[:500],
        y_test=mnist.y_test[:500],
    )
    scattering = data.feature_maps["scattering"].parse()
    scores = []
    for features in (scattering, UNCHANGED):
        out = with_features(few, features, project=128, key=Key(1), storage=storage)
        x, t = (torch.cat([x, torch.ones(len(x), 1)], 1).double() for x in (out.x_train, out.x_test))
        target = nn.functional.one_hot(out.y_train, 10).double()
        w = torch.linalg.solve(x.mT @ x + 1.0 * torch.eye(129), x.mT @ target)
        scores.append(float(((t @ w).argmax(1) == out.y_test).double().mean()))
    assert scores[0] > scores[1] + 0.05
    assert scores[0] > 0.9
