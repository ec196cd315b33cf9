"""Batch normalisation within a client: its batch's statistics when training, its running ones in scoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


def frozen(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """Normalise a batch (n, c, …) by given statistics.

    By hand: the backward pass of torch's own misreads the strides of a batch of one (2.13 on CPUs, and under
    vmap), where the gradient comes from a layer that has channels last.
    """
    channel = (-1, *[1] * (x.dim() - 2))
    z = (x - mean.view(channel)) * torch.rsqrt(variance + epsilon).view(channel)
    z = z if weight is None else z * weight.view(channel)
    return z if bias is None else z + bias.view(channel)


@dataclass
class Statistics:
    """One client's running statistics, known by the module's own buffers that they stand for.

    `present` (b,) in {0, 1} marks the examples that are not padding; None: all. `updated` takes what the
    running statistics become.
    """

    names: Mapping[int, str]
    """id of a module's buffer -> the name under which Trilemma keeps it"""
    values: Mapping[str, Tensor]
    present: Tensor | None = None
    updated: dict[str, Tensor] = field(default_factory=dict)

    def running(self, buffer: Tensor | None) -> Tensor | None:
        """Return the client's values of a module's buffer; the buffer itself where there are none."""
        name = self.names.get(id(buffer))
        return buffer if name is None else self.values.get(name, buffer)

    def masks(self, x: Tensor) -> bool:
        """Tell whether `x` is a batch that holds padding."""
        return self.present is not None and len(self.present) == len(x)

    def normalise(
        self,
        x: Tensor,
        buffers: tuple[Tensor | None, Tensor | None],
        affine: tuple[Tensor | None, Tensor | None],
        momentum: float,
        epsilon: float,
    ) -> Tensor:
        """Normalise a client's batch (b, c, …) by its own statistics and note the running ones."""
        axes = [0, *range(2, x.dim())]
        per_example = x[0, 0].numel()
        if self.present is None and len(x) > 1:
            count: Tensor | float = float(x.shape[0] * per_example)
            z = F.batch_norm(x, None, None, *affine, True, momentum, epsilon)
            with torch.no_grad():
                variance, mean = torch.var_mean(x, axes, correction=0)
        else:
            present = x.new_ones(1) if self.present is None else self.present
            mask = present.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
            count = (present.sum() * per_example).to(x.dtype)
            share = mask / count.clamp(min=1.0)
            mean = (x * share).sum(axes)
            centred = x - mean.view(-1, *[1] * (x.dim() - 2))
            variance = (centred.square() * share).sum(axes)
            z = frozen(x, mean, variance, *affine, epsilon)
        self._note(buffers, mean.detach(), variance.detach(), count, momentum)
        return z

    def _note(
        self,
        buffers: tuple[Tensor | None, Tensor | None],
        mean: Tensor,
        variance: Tensor,
        count: Tensor | float,
        momentum: float,
    ) -> None:
        # A client without examples keeps what it had.
        rate = momentum if isinstance(count, float) else momentum * (count > 0).to(mean.dtype)
        over = max(count - 1.0, 1.0) if isinstance(count, float) else (count - 1.0).clamp(min=1.0)
        for buffer, fresh in zip(buffers, (mean, variance * (count / over)), strict=True):
            name = self.names.get(id(buffer))
            if name is not None and name in self.values:
                old = self.values[name]
                self.updated[name] = old + rate * (fresh - old)
