"""Messages or sums that liars change in many ways, seen in a Gram matrix that is measured once.

The messages are rows X of a basis V of Gram matrix G = V Vᵀ. Liars add ΔV to theirs: of a hundred vectors of
millions of coordinates only the few numbers Δ differ from one lie to the next, and

    (X + ΔV)(X + ΔV)ᵀ = X Xᵀ + (ΔG)_X + (ΔG)_Xᵀ + ΔGΔᵀ,    (ΔG)_X the columns of ΔG that belong to X.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Changed:
    """`count` rows of a basis with Gram matrix `gram` (p, p), from `start` on, changed in B ways.

    `changes` (B, r, p), combinations of the basis, are added to the rows `which` (r,) of them; all of it lies
    on one device.

    >>> import torch
    >>> one = Changed(torch.eye(3), 0, 2, torch.tensor([1]), torch.tensor([[[0.0, 0.0, 5.0]]]))
    >>> one.grams().tolist(), one.grams(torch.tensor([1])).tolist()
    ([[[1.0, 0.0], [0.0, 26.0]]], [[[26.0]]])
    >>> one.combined(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0, 10.0]]
    """

    gram: Tensor
    start: int
    count: int
    which: Tensor
    changes: Tensor

    def only(self, some: Tensor) -> Changed:
        """Return some of the B."""
        return replace(self, changes=self.changes[some])

    def grams(self, rows: Tensor | None = None) -> Tensor:
        """Return Gram matrices (B, m, m) of some of the rows; None: of all."""
        here, which = slice(self.start, self.start + self.count), self.which
        across = self.changes @ self.gram
        found = self.gram[here, here].repeat(len(across), 1, 1)
        found[:, which] += across[..., here]
        found[:, :, which] += across[..., here].mT
        found[:, which[:, None], which] += across @ self.changes.mT
        return found if rows is None else found[:, rows[:, None], rows]

    def combined(self, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return y @ some of the rows, y (B, m), in the basis (B, p)."""
        found = y.new_zeros(len(y), len(self.gram))
        if rows is None:
            found[:, self.start : self.start + self.count] = y
        else:
            found[:, self.start + rows] = y
        return found + (found[:, None, self.start + self.which] @ self.changes)[:, 0]

    def beside(self, vectors: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return inner products (B, m) of some of the rows with combinations (B, p) of the basis."""
        products = vectors @ self.gram
        found = products[:, self.start : self.start + self.count]
        found[:, self.which] += (self.changes @ products[..., None])[..., 0]
        return found if rows is None else found[:, rows]
