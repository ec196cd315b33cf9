"""What every data set must be, whoever wrote it, with its default options: finite, labelled, described.

A data set that is not there (its files are missing and may not be downloaded) is skipped, with the reason.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma import data
from trilemma.base.errors import ConfigError, DataUnavailable
from trilemma.base.keys import Key
from trilemma.base.options import description
from trilemma.data.sets.formats import Arrays
from trilemma.data.sets.images import ImageSet
from trilemma.testing import chosen

NAMES = chosen.names("dataset")


def folder_storage(folder: Path) -> data.Storage:
    """Return a storage that reads a folder and downloads nothing."""
    return data.Storage(directory=folder, cache=folder / "cache", download=False)


def write_images(path: Path, shape: tuple[int, ...], classes: int, seed: int = 0) -> Arrays:
    """Write a small file of random images, as image sets are read."""
    rng = np.random.default_rng(seed)
    arrays = Arrays(
        rng.integers(0, 256, (12, *shape), dtype=np.uint8),
        rng.integers(0, classes, 12, dtype=np.uint8),
        rng.integers(0, 256, (5, *shape), dtype=np.uint8),
        rng.integers(0, classes, 5, dtype=np.uint8),
    )
    np.savez(path, **arrays._asdict())
    return arrays


def loaded(name: str, folder: Path) -> data.Dataset:
    """Return a data set with its default options; an image set from a small file written to `folder`."""
    kind = data.datasets[name]
    storage = None
    if issubclass(kind, ImageSet):
        write_images(folder / kind.source.packed[0], kind.source.shape, kind.source.classes)
        storage = folder_storage(folder)
    try:
        return data.load(name, key=Key(1), storage=storage)
    except DataUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_is_well_formed(name: str, tmp_path: Path) -> None:
    dataset = loaded(name, tmp_path)
    for features, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        for x in data.columns_of(features).values():
            assert x.dtype in (torch.float32, torch.int64)
            assert len(x) == len(y) > 0
            assert bool(torch.isfinite(x).all())
        if dataset.classes is None:
            assert y.dtype == torch.float32
            assert bool(torch.isfinite(y).all())
        else:
            labels = y[y != data.IGNORED]
            assert y.dtype == torch.int64
            assert 0 <= int(labels.min()) <= int(labels.max()) < dataset.classes
    shapes = [
        {column: x.shape[1:] for column, x in data.columns_of(features).items()}
        for features in (dataset.x_train, dataset.x_test)
    ]
    assert shapes[0] == shapes[1]
    assert dataset.description


@pytest.mark.parametrize("name", NAMES)
def test_equal_keys_give_equal_data_and_leave_the_global_generators_alone(name: str, tmp_path: Path) -> None:
    torch_state, numpy_state = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    first, again = loaded(name, tmp_path), loaded(name, tmp_path)
    for part in ("x_train", "y_train", "x_test", "y_test"):
        one, other = (data.columns_of(getattr(each, part)) for each in (first, again))
        assert all(torch.equal(one[column], other[column]) for column in one), part
    assert torch.equal(torch_state, torch.get_rng_state())
    assert numpy_state == str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_refuses_unknown_options_and_has_a_summary(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        data.datasets[name].parse(colour="red")
    assert data.datasets.summary(name)
    for field in data.datasets[name].model_fields:
        assert description(data.datasets[name], field), f"{name}.{field} is not described"
