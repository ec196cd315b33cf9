"""The tape: how one forward and one backward pass give every client's, or every example's, gradient.

A layer with parameters computes z = W ∗ a. Its gradient for any set of examples is a sum over them of
products of the input a and the gradient of the loss at the output z. So a forward pass over the examples of
all clients together writes down (a, z) of every parametrised layer, one backward pass finds ∂loss/∂z for all
layers and all examples without forming a single weight gradient, and then

    client gradient     G_c = Σ_{i of c} (∂ℓ_i/∂z) ⊗ a_i              one batched product per layer,
    example norms       ‖G_i‖ = ‖∂ℓ_i/∂z‖ ‖a_i‖                        for a linear layer's weight, without
                                                                     forming the example's gradient,
    clipped sum         Σ_i s_i G_i: scale ∂ℓ_i/∂z by s_i, then as for the client gradient.

(Goodfellow 2015, "Efficient per-example gradient computations"; Li et al. 2022 call the norms "ghost
clipping".)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.terms import Product, Term, Whole
from trilemma.models.layers import convolution
from trilemma.models.layers.convolution import Stencil
from trilemma.models.layers.normalisation import AXES, BatchStatistics, parameter_gradients


class Tap(Protocol):
    """What one parametrised layer left on the tape. Everything has the axes (k clients, b examples, …)."""

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def output(self) -> Tensor:
        """The layer's output z."""

    def floats(self, by_example: bool) -> int:
        """Return how many numbers the layer needs in both passes, clipping examples or not."""

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write each client's gradient, given ∂loss/∂z, over its parameters' tensors in `out` (k, …)."""

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """Return every parameter's gradients of single examples, formed or not, given ∂loss/∂z."""


@dataclass
class Tape:
    """What a forward pass reads and writes besides parameters and examples.

    `train` decides whether batch normalisation uses the batch's statistics or the running ones in `buffers`;
    `present` (k, b) in {0, 1} marks the examples that are not padding (None: all). `narrow` says what of a
    layer is trained: another tap in the place of its own, or None for nothing (without it: everything). After
    the pass, `taps` holds the parametrised layers, where `record` asked for them, `passed` how many numbers
    layers of which nothing is trained needed, and `updated` the new running statistics.
    """

    record: bool = False
    train: bool = False
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    present: Tensor | None = None
    narrow: Callable[[Tap], Tap | None] | None = None
    passed: int = 0
    taps: list[Tap] = field(default_factory=list)
    updated: dict[str, Tensor] = field(default_factory=dict)

    def add(self, tap: Tap) -> Tensor:
        """Write down `tap` and return its output, which from here on is part of the backward pass."""
        if self.narrow is not None:
            kept = self.narrow(tap)
            if kept is None:
                self.passed += tap.floats(by_example=False)
                return tap.output
            tap = kept
        if not tap.output.requires_grad:
            tap.output.requires_grad_()
        self.taps.append(tap)
        return tap.output


@dataclass(frozen=True)
class LinearTap:
    """z = a Wᵀ + β, with a (k, b, in) and z (k, b, out)."""

    name: str
    input: Tensor
    output: Tensor

    def floats(self, by_example: bool) -> int:
        """Count input, output, and the output's gradient, plain and scaled."""
        return self.input.numel() + 3 * self.output.numel()

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write G_W = Σ_i ∂ℓ_i/∂z ⊗ a_i and G_β = Σ_i ∂ℓ_i/∂z."""
        weight = out[f"{self.name}.weight"]
        if grad.is_cuda:
            torch.bmm(grad.mT, self.input, out=weight)
        else:  # batched products run in parallel only where the result is contiguous
            weight.copy_(torch.bmm(grad.mT, self.input))
        torch.sum(grad, 1, out=out[f"{self.name}.bias"])

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """One outer product each."""
        weight = Product(grad[:, :, None], self.input[:, :, None])
        return {f"{self.name}.weight": weight, f"{self.name}.bias": Whole(grad)}


@dataclass(frozen=True)
class ConvTap:
    """z = W ∗ a + β, with a (k, b, c, h, w) and z (k, b, out, h', w')."""

    name: str
    input: Tensor
    output: Tensor
    stencil: Stencil
    columns: Tensor | None = None

    def floats(self, by_example: bool) -> int:
        """Count as for a linear layer, the columns, and the products of every example."""
        unfolded, outputs = self.input.shape[2] * self.stencil.kernel**2, self.output.shape[2]
        columns = unfolded * self.output.numel() // outputs
        products = self.output.shape[:2].numel() * outputs * unfolded if by_example else 0
        return self.input.numel() + 3 * self.output.numel() + columns + products

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write the weight gradient of every client's examples."""
        weight = out[f"{self.name}.weight"]
        convolution.write_client_gradients(self.input, grad, self.stencil, self.columns, weight)
        torch.sum(grad, AXES, out=out[f"{self.name}.bias"])

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """Form every example's gradient: kernels are small, and the sum over positions must precede the norm.

        Summing formed gradients is cheaper than the second product over positions that ghost norms need.
        """
        weight = convolution.example_gradients(self.input, grad, self.stencil)
        return {f"{self.name}.weight": weight, f"{self.name}.bias": Whole(grad.sum((-2, -1)))}


@dataclass(frozen=True)
class NormTap:
    """z = γ x̂ + β with x̂ = (x − μ)/√(σ² + ε), x and z (k, b, c, h, w)."""

    name: str
    input: Tensor
    statistics: BatchStatistics
    output: Tensor

    def floats(self, by_example: bool) -> int:
        """Count input and output, their gradients, and what comes in between."""
        return 6 * self.output.numel()

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write G_γ = Σ ∂ℓ/∂z · x̂ and G_β = Σ ∂ℓ/∂z."""
        scaled, summed = parameter_gradients(self.input, grad, self.statistics)
        out[f"{self.name}.weight"].copy_(scaled)
        out[f"{self.name}.bias"].copy_(summed)

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """Refuse: with batch normalisation an example's loss depends on the whole batch."""
        raise UserError(f"layer {self.name!r} mixes the examples of a batch: none has a gradient of its own")
