"""A Gram matrix that a GPU works out while its host does something else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trilemma.aggregation.gram import gram


def gram_later(X: Tensor) -> Callable[[], Tensor]:
    """Begin to measure X Xᵀ, and return what waits for it: `trilemma.aggregation.gram(X, single=True)`.

    Nothing is begun on a CPU, which has nobody to do it meanwhile.

    >>> gram_later(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))()
    tensor([[ 5., 11.],
            [11., 25.]], dtype=torch.float64)
    """
    if not X.is_cuda or X.dtype != torch.float32:
        return lambda: gram(X, single=True)
    from trilemma.aggregation import cuda

    begun = cuda.products(X)

    def waited() -> Tensor:
        found = begun.cpu()
        return found if cuda.in_range(X, found) else gram(X, single=True)

    return waited
