"""Inner products that a GPU computes while its host does something else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trilemma.aggregation.passes import inputs
from trilemma.aggregation.passes.gram import Geometry, geometry, gram
from trilemma.aggregation.steps.types import Vectors
from trilemma.base.transfers import to_the_host


def gram_later(X: Tensor) -> Callable[[], Tensor]:
    """Start to compute X Xᵀ; call what is returned for `trilemma.aggregation.passes.gram(X, single=True)`.

    On a CPU nothing is started early: the call itself does the work.

    >>> gram_later(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))()
    tensor([[ 5., 11.],
            [11., 25.]], dtype=torch.float64)
    """
    if not _measured_elsewhere(X):
        return lambda: gram(X, single=True)
    from trilemma.aggregation.kernels import cuda

    begun = to_the_host(cuda.products(X))

    def waited() -> Tensor:
        found = begun()
        return found if cuda.in_range(X, found) else gram(X, single=True)

    return waited


def geometry_later(X: Vectors, *, single: bool = False) -> Callable[[], Geometry]:
    """Start to measure the rows of X; call what is returned for their `trilemma.aggregation.geometry`.

    >>> geometry_later(torch.tensor([[0.0, 3.0], [4.0, 0.0]]))().distances[0, 1].item()
    25.0
    """
    messages = inputs.messages(X).X
    if not (single and _measured_elsewhere(messages)):
        return lambda: geometry(X, single=single)
    from trilemma.aggregation.kernels import cuda

    begun = to_the_host(cuda.products(messages))

    def waited() -> Geometry:
        around = cuda.around_origin(begun().numpy())
        return geometry(X, single=True) if around is None else around

    return waited


def _measured_elsewhere(X: Tensor) -> bool:
    return X.is_cuda and X.dtype == torch.float32
