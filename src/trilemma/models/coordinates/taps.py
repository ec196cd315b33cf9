"""What a layer leaves on the tape where not all of it is trained: its weight, its bias, or an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.tape import LinearTap, NormTap, Tap
from trilemma.models.engines.terms import Product, Term, Whole


@dataclass(frozen=True)
class _PartTap:
    """A part of a layer, or what was added to it: name and output are the layer's."""

    tap: Tap

    @property
    def name(self) -> str:
        """See `Tap`."""
        return self.tap.name

    @property
    def output(self) -> Tensor:
        """See `Tap`."""
        return self.tap.output


@dataclass(frozen=True)
class BiasTap(_PartTap):
    """β alone of z = W ∗ a + β."""

    def floats(self, by_example: bool) -> int:
        """Count the output and its gradient, and what stands before it."""
        return self.tap.floats(by_example=False)

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write G_β = Σ_i ∂ℓ_i/∂z, summed over positions."""
        torch.sum(_shifts(grad), 1, out=out[f"{self.name}.bias"])

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """See `Tap`."""
        _not_mixed(self.tap)
        return {f"{self.name}.bias": Whole(_shifts(grad))}


@dataclass(frozen=True)
class WeightTap(_PartTap):
    """W alone of z = W ∗ a + β."""

    def floats(self, by_example: bool) -> int:
        """See `Tap`."""
        return self.tap.floats(by_example)

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write G_W; the bias's gradient goes nowhere."""
        unused = grad.new_empty(len(grad), grad.shape[2])
        self.tap.write(grad, {**out, f"{self.name}.bias": unused})

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """See `Tap`."""
        _not_mixed(self.tap)
        name = f"{self.name}.weight"
        return {name: self.tap.examples(grad)[name]}


@dataclass(frozen=True)
class LowRankTap(_PartTap):
    """A (r × in) and B (out × r) of z = a (W + s B A)ᵀ + β, shared or per client.

    An example's gradients are outer products again, G_A = s (Bᵀ ∂ℓ/∂z) ⊗ a and G_B = s ∂ℓ/∂z ⊗ (A a), so
    their norms need nothing formed.
    """

    a: Tensor
    b: Tensor
    scale: float

    def floats(self, by_example: bool) -> int:
        """Count as for the layer, and both products of rank r."""
        return self.tap.floats(by_example) + 4 * self.output.shape[:2].numel() * self.a.shape[-2]

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write both gradients."""
        pulled, pushed = self._factors(grad)
        out[f"{self.name}.lora_A"].copy_(torch.bmm(pulled.mT, self._input))
        out[f"{self.name}.lora_B"].copy_(torch.bmm(grad.mT, pushed))

    def examples(self, grad: Tensor) -> dict[str, Term]:
        """See `Tap`."""
        pulled, pushed = self._factors(grad)
        return {
            f"{self.name}.lora_A": Product(pulled[:, :, None], self._input[:, :, None]),
            f"{self.name}.lora_B": Product(grad[:, :, None], pushed[:, :, None]),
        }

    @property
    def _input(self) -> Tensor:
        assert isinstance(self.tap, LinearTap)
        return self.tap.input

    def _factors(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return s Bᵀ ∂ℓ/∂z and s A a, (k, b, r)."""
        return self.scale * (grad @ self.b.detach()), self.scale * (self._input @ self.a.detach().mT)


def _shifts(grad: Tensor) -> Tensor:
    """Return every example's gradient of a bias (k, b, c), given ∂ℓ/∂z (k, b, c, …)."""
    return grad.flatten(3).sum(3) if grad.dim() > 3 else grad


def _not_mixed(tap: Tap) -> None:
    if isinstance(tap, NormTap):
        raise UserError(f"layer {tap.name!r} mixes the examples of a batch: none has a gradient of its own")
