"""Data sets: what is embedded, what is read from a folder, what every registered one promises."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma import data
from trilemma.base.errors import ConfigError, DataUnavailable
from trilemma.base.keys import Key
from trilemma.data.sets.images import ImageSet
from trilemma.testing.test_data import folder_storage, write_images

FOLDER = os.environ.get("TRILEMMA_DATA")
real_data = pytest.mark.skipif(not FOLDER, reason="TRILEMMA_DATA names no folder with the image sets")
IMAGE_SETS = [name for name in data.datasets if issubclass(data.datasets[name], ImageSet)]
OFFLINE = data.Storage(directory=None, cache=Path("nowhere"), download=False)


def test_options_name_the_nearest_and_the_allowed() -> None:
    with pytest.raises(ConfigError, match="did you mean 'scaling'"):
        data.load("mnist", key=Key(1), scalin="unit")
    with pytest.raises(ConfigError, match="'unit', 'standard' or 'lp-proj'"):
        data.load("mnist", key=Key(1), scaling="none")
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        data.load("mnits", key=Key(1))
    with pytest.raises(ConfigError, match="flat = false only"):
        data.load("mnist", key=Key(1), flat=True, flip=True)


# ---------------------------------------------------------------------------------------------- phishing


def test_phishing_is_the_libsvm_data() -> None:
    every = data.load("phishing", key=Key(1), split="all")
    assert every.x_train.shape == (11_055, 68)
    assert torch.bincount(every.y_train).tolist() == [4_898, 6_157]
    assert every.x_train.unique().tolist() == [0.0, pytest.approx(0.18257)]
    assert len(every.x_train.unique(dim=0)) == 5_785
    assert torch.equal(every.x_train, every.x_test)


@real_data
def test_phishing_equals_the_libsvm_text() -> None:
    text = lzma.decompress((Path(str(FOLDER)) / "phishing.libsvm.txt.xz").read_bytes()).decode()
    every = data.load("phishing", key=Key(1), split="all")
    x, y = np.zeros((11_055, 68), dtype=np.float32), []
    for row, line in enumerate(text.splitlines()):
        label, *features = line.split()
        y.append(int(label))
        for feature in features:
            column, value = feature.split(":")
            x[row, int(column) - 1] = float(value)
    assert every.y_train.tolist() == y
    assert torch.equal(every.x_train, torch.from_numpy(x))


def test_phishing_splits() -> None:
    every = data.load("phishing", key=Key(1), split="all")
    first = data.load("phishing", key=Key(1))
    assert torch.equal(torch.cat([first.x_train, first.x_test]), every.x_train)
    assert len(first.y_train) == 8_400
    one = data.load("phishing", key=Key(1), split="random", test_fraction=0.25)
    again = data.load("phishing", key=Key(1), split="random", test_fraction=0.25)
    other = data.load("phishing", key=Key(2), split="random", test_fraction=0.25)
    assert len(one.y_test) == round(0.25 * 11_055)
    assert torch.equal(one.x_train, again.x_train)
    assert not torch.equal(one.x_train, other.x_train)
    both = torch.cat([one.x_train, one.x_test])
    assert torch.equal((both > 0).sum(dim=0), (every.x_train > 0).sum(dim=0))


# ------------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_image_layout_and_scaling(name: str, tmp_path: Path) -> None:
    source = data.datasets[name].source  # type: ignore[attr-defined]
    raw = write_images(tmp_path / source.packed[0], source.shape, source.classes)
    storage = folder_storage(tmp_path)
    colour = source.shape if len(source.shape) == 3 else (*source.shape, 1)
    pixels = torch.from_numpy(raw.x_train).double().reshape(-1, *colour).permute(0, 3, 1, 2) / 255
    for scaling, norm in (("standard", source.standard), ("lp-proj", source.lp_proj)):
        x = data.load(name, key=Key(1), storage=storage, scaling=scaling).x_train
        mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (norm.mean, norm.std))
        assert torch.allclose(x.double(), (pixels - mean) / std, atol=1e-6)
    unit = data.load(name, key=Key(1), storage=storage)
    assert torch.allclose(unit.x_train.double(), pixels, atol=1e-7)
    flat = data.load(name, key=Key(1), storage=storage, flat=True)
    assert torch.equal(flat.x_train, unit.x_train.flatten(1))
    assert torch.equal(unit.y_test, torch.from_numpy(raw.y_test.astype(np.int64)))


def test_lp_proj_scalings_are_those_of_its_experiments(tmp_path: Path) -> None:
    black = {"mnist": 0.0, "emnist": 0.0, "fashion-mnist": -0.1307 / 0.3081, "cifar10": -1.0}
    for name, value in black.items():
        source = data.datasets[name].source  # type: ignore[attr-defined]
        arrays = write_images(tmp_path / source.packed[0], source.shape, source.classes)
        arrays.x_train[:] = 0
        np.savez(tmp_path / source.packed[0], **arrays._asdict())
        loaded = data.load(name, key=Key(1), storage=folder_storage(tmp_path), scaling="lp-proj")
        assert loaded.x_train.unique().tolist() == [pytest.approx(value)]


def test_the_full_set_goes_before_the_subset_and_subsets_say_so(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar10_20k.npz", (32, 32, 3), 10, seed=1)
    subset = data.load("cifar10", key=Key(1), storage=folder_storage(tmp_path))
    assert subset.name == "cifar10-subset"
    assert "12/5 images, a subset of 50,000/10,000, from cifar10_20k.npz" in subset.description
    write_images(tmp_path / "cifar10.npz", (32, 32, 3), 10, seed=2)
    full = data.load("cifar10", key=Key(1), storage=folder_storage(tmp_path))
    assert "from cifar10.npz" in full.description


def test_a_folder_may_be_a_path_or_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "mnist.npz", (28, 28), 10)
    by_path = data.load("mnist", key=Key(1), storage=tmp_path)
    monkeypatch.setenv("TRILEMMA_DATA", str(tmp_path))
    assert torch.equal(by_path.x_train, data.load("mnist", key=Key(1)).x_train)


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_absent_and_offline_names_the_ways(name: str) -> None:
    with pytest.raises(DataUnavailable) as caught:
        data.load(name, key=Key(1), storage=OFFLINE)
    file = data.datasets[name].source.packed[0]
    for way in (file, "TRILEMMA_DATA", "now unset", "http", "TRILEMMA_OFFLINE", "synthetic"):
        assert way in str(caught.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match="which does not exist"):
        data.load("mnist", key=Key(1), storage=folder_storage(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda a: a._replace(x_train=a.x_train[:, :27]), "images of shape"),
        (lambda a: a._replace(x_train=a.x_train.astype(np.float32)), "float32"),
        (lambda a: a._replace(y_train=a.y_train[:-1]), "with labels"),
        (lambda a: a._replace(y_test=a.y_test + 10), "only 0 to 9 are possible"),
        (lambda a: a._replace(y_test=np.array([object()] * 5)), "not a readable npz"),
    ],
)
def test_files_that_are_not_the_data_set_are_refused(tmp_path: Path, spoil, complaint: str) -> None:  # type: ignore[no-untyped-def]
    arrays = spoil(write_images(tmp_path / "mnist.npz", (28, 28), 10))
    np.savez(tmp_path / "mnist.npz", **arrays._asdict())
    with pytest.raises(DataUnavailable, match=complaint):
        data.load("mnist", key=Key(1), storage=folder_storage(tmp_path))


def test_broken_and_incomplete_npz_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros(3))
    with pytest.raises(DataUnavailable, match="lacks y_train, x_test, y_test"):
        data.load("mnist", key=Key(1), storage=folder_storage(tmp_path))
    (tmp_path / "mnist.npz").write_bytes(b"PK\x03\x04 but not really a zip")
    with pytest.raises(DataUnavailable, match="not a readable npz"):
        data.load("mnist", key=Key(1), storage=folder_storage(tmp_path))


@real_data
@pytest.mark.parametrize(
    ("name", "shape", "mean", "std"),
    [
        ("mnist", (60_000, 1, 28, 28), 0.1307, 0.3081),
        pytest.param("fashion-mnist", (60_000, 1, 28, 28), 0.2860, 0.3530, marks=pytest.mark.slow),
        pytest.param("emnist", (100_000, 1, 28, 28), 0.1736, 0.3317, marks=pytest.mark.slow),
        pytest.param("cifar10", (20_000, 3, 32, 32), 0.4734, 0.2516, marks=pytest.mark.slow),
    ],
)
def test_real_pixels(name: str, shape: tuple[int, ...], mean: float, std: float) -> None:
    loaded = data.load(name, key=Key(1), storage=Path(str(FOLDER)))
    assert loaded.x_train.shape == shape
    # The published figures of EMNIST are of the whole set, those of CIFAR-10 of its whole training set.
    tolerance = 6e-5 if "subset" not in loaded.name else 3e-3
    assert float(loaded.x_train.mean()) == pytest.approx(mean, abs=tolerance)
    assert float(loaded.x_train.std()) == pytest.approx(std, abs=tolerance)


@real_data
def test_real_labels_of_mnist() -> None:
    counts = torch.bincount(data.load("mnist", key=Key(1), storage=Path(str(FOLDER))).y_train)
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
