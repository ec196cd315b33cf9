"""Rows of a basis, changed in many ways, in the Gram matrix of the basis alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Changed:
    """`count` rows of a basis with Gram matrix `gram` (p, p), from `start` on, changed in B ways.

    `changes` (B, r, p), combinations of the basis, are added to the rows `which` (r,) of them.

    >>> one = Changed(torch.eye(3), 0, 2, np.array([1]), torch.tensor([[[0.0, 0.0, 5.0]]]))
    >>> one.grams(np.arange(2)).tolist()
    [[[1.0, 0.0], [0.0, 26.0]]]
    >>> one.combined(np.arange(2), torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0, 10.0]]
    """

    gram: Tensor
    start: int
    count: int
    which: Places
    changes: Tensor

    def only(self, some: Tensor) -> Changed:
        """Return some of the B."""
        return replace(self, changes=self.changes[some])

    def grams(self, rows: Places) -> Tensor:
        """Return Gram matrices (B, m, m) of some of the rows."""
        here, which = slice(self.start, self.start + self.count), self._which
        across = self.changes @ self.gram
        found = self.gram[here, here].repeat(len(across), 1, 1)
        found[:, which] += across[..., here]
        found[:, :, which] += across[..., here].mT
        found[:, which[:, None], which] += across @ self.changes.mT
        if len(rows) == self.count:
            return found
        kept = torch.from_numpy(rows).to(found.device)
        return found[:, kept[:, None], kept]

    def combined(self, rows: Places, y: Tensor) -> Tensor:
        """Return y @ some of the rows, y (B, m), in the basis (B, p)."""
        found = y.new_zeros(len(y), len(self.gram))
        found[:, self._place(rows)] = y
        return found + (found[:, None, self.start + self._which] @ self.changes)[:, 0]

    def beside(self, rows: Places, vectors: Tensor) -> Tensor:
        """Return inner products (B, m) of some of the rows with combinations (B, p) of the basis."""
        found = vectors @ self.gram
        found[:, self.start + self._which] += (self.changes @ found[..., None])[..., 0]
        return found[:, self._place(rows)]

    def _place(self, rows: Places) -> Tensor:
        return torch.from_numpy(rows).to(self.gram.device) + self.start

    @property
    def _which(self) -> Tensor:
        return torch.from_numpy(self.which).to(self.gram.device)
