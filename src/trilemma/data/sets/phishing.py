"""Phishing websites: 11,055 sites, 68 binary features (LIBSVM's encoding), inside the package.

Rows are those of LIBSVM's `phishing` in its order; a set feature has the value 0.18257, LIBSVM's scaling to
rows of unit length. Only 5,785 rows are distinct, so every split has equal rows on both sides.

There is no canonical split, and the papers on this data (Allouah et al. 2023) do not print theirs.
`first`, the default, is that of their group's public code base, whose name for the data set the paper's
figures carry: the first 8,400 rows train, the other 2,655 test. Their printed privacy budgets, however,
divide all 11,055 rows among the honest workers; `all` trains and tests on all of them.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from trilemma.base.keys import Key
from trilemma.data.catalogue import DatasetOptions, datasets
from trilemma.data.storage import Storage, read_npz
from trilemma.data.types import Dataset

SCALE = 0.18257
FIRST = 8400


@datasets.register("phishing")
class Phishing(DatasetOptions):
    """Phishing websites: 11,055 × 68 binary features, 2 classes; part of the package.

    >>> Phishing(split="random", test_fraction=0.2).load(Key(1), Storage.from_environment()).x_test.shape
    torch.Size([2211, 68])
    """

    split: Literal["first", "random", "all"] = "first"
    """`first`: 8,400 rows in file order train, 2,655 test; `random`: drawn from the key; `all`: both."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the rows that test, for the random split."""

    def origin(self, storage: Storage) -> str | None:
        """The package, unless the split is random."""
        return None if self.split == "random" else "trilemma"

    def load(self, key: Key, storage: Storage) -> Dataset:
        """Return the data set; only the random split depends on `key`, and nothing on `storage`."""
        with resources.as_file(resources.files("trilemma.data.sets") / "phishing.npz") as path:
            arrays = read_npz(Path(path), ("x", "y"))
        x = torch.from_numpy(np.ascontiguousarray(arrays["x"], dtype=np.float32)) * SCALE
        y = torch.from_numpy(arrays["y"].astype(np.int64))
        train, test = (torch.from_numpy(rows) for rows in self._rows(len(y), key))
        return Dataset(
            name="phishing",
            x_train=x[train],
            y_train=y[train],
            x_test=x[test],
            y_test=y[test],
            classes=2,
            description=f"Phishing websites, LIBSVM encoding, split {self.split}",
        )

    def _rows(self, count: int, key: Key) -> tuple[np.ndarray, np.ndarray]:
        if self.split == "all":
            return np.arange(count), np.arange(count)
        if self.split == "first":
            return np.arange(FIRST), np.arange(FIRST, count)
        order = key.fold("phishing", "split").numpy().permutation(count)
        test = round(self.test_fraction * count)
        return np.sort(order[test:]), np.sort(order[:test])
