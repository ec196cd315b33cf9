"""Gram matrices of messages or sums that liars change in many ways, from one Gram matrix measured once.

The messages are rows X of a basis V with Gram matrix G = V Vᵀ. Liars add ΔV to their rows. Only the few
numbers Δ differ from one lie to the next, whatever the length of the vectors, and

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
    """Rows `start` … `start` + `count` − 1 of a basis with Gram matrix `gram` (p, p), changed in B ways.

    `changes` (B, r, p), coefficients in the basis, are added to the rows `which` (r,), counted from `start`.
    All tensors are on one device.

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
        """Return the same rows with some of the B changes."""
        return replace(self, changes=self.changes[some])

    def grams(self, rows: Tensor | None = None) -> Tensor:
        """Return the Gram matrices (B, m, m) of the changed rows, of all of them or of `rows` (m,)."""
        here, which = slice(self.start, self.start + self.count), self.which
        across = self.changes @ self.gram
        found = self.gram[here, here].repeat(len(across), 1, 1)
        found[:, which] += across[..., here]
        found[:, :, which] += across[..., here].mT
        found[:, which[:, None], which] += across @ self.changes.mT
        return found if rows is None else found[:, rows[:, None], rows]

    def combined(self, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return y @ changed rows, with y (B, m), as coefficients in the basis (B, p)."""
        found = y.new_zeros(len(y), len(self.gram))
        if rows is None:
            found[:, self.start : self.start + self.count] = y
        else:
            found[:, self.start + rows] = y
        return found + (found[:, None, self.start + self.which] @ self.changes)[:, 0]

    def beside(self, vectors: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return inner products (B, m) of the changed rows with `vectors` (B, p), given in the basis."""
        products = vectors @ self.gram
        found = products[:, self.start : self.start + self.count]
        found[:, self.which] += (self.changes @ products[..., None])[..., 0]
        return found if rows is None else found[:, rows]
