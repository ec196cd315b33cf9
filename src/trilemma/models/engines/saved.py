"""Saved activations: how one forward and one backward pass give every client's, or every example's, gradient.

A layer with parameters computes z = W ∗ a. Its gradient for any set of examples is a sum over them of
products of the input a and the gradient of the loss at the output z. So a forward pass over the examples of
all clients together saves (a, z) of every parametrised layer, one backward pass finds ∂loss/∂z for all layers
and all examples without forming a single weight gradient, and then

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

from torch import Tensor

from trilemma.models.engines.terms import Term

Terms = Callable[[Tensor], Mapping[str, Term]]
"""∂loss/∂z -> every parameter's gradients by name."""


@dataclass(frozen=True)
class SavedOutput:
    """The output z (k, b, …) of a layer, and the terms of its parameters' gradients."""

    name: str
    output: Tensor
    terms: Terms


@dataclass
class SavedActivations:
    """What a forward pass reads and writes besides parameters and examples.

    `train` decides whether batch normalisation uses the batch's statistics or the running ones in `buffers`;
    `present` (k, b) in {0, 1} marks the examples that are not padding (None: all). `narrow` says what of a
    layer is trained: other terms in the place of its own, or None for nothing (without it: everything). After
    the pass, `outputs` holds those of the parametrised layers, where `record` asked for them, and `updated`
    the new running statistics; `floats` is how many numbers layers needed in both passes, `products` how many
    more where examples are clipped.
    """

    record: bool = False
    train: bool = False
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    present: Tensor | None = None
    narrow: Callable[[str, Terms], Terms | None] | None = None
    floats: int = 0
    products: int = 0
    outputs: list[SavedOutput] = field(default_factory=list)
    updated: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, output: Tensor, terms: Terms, floats: int, products: int = 0) -> Tensor:
        """Save a layer's output and return it; from here on it is part of the backward pass."""
        self.floats += floats
        kept = terms if self.narrow is None else self.narrow(name, terms)
        if kept is None:
            return output
        self.products += products
        if not output.requires_grad:
            output.requires_grad_()
        self.outputs.append(SavedOutput(name, output, kept))
        return output
