"""What a layer leaves on the tape where not all of it is trained: its weight, its bias, or an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models import convolution
from trilemma.models.tape import ByExample, ConvTap, LinearTap, NormTap, Tap, along


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
class _HalfTap(_PartTap):
    """W or β alone of z = W ∗ a + β."""

    shift: Tensor
    """β, shared or per client."""


@dataclass(frozen=True)
class BiasTap(_HalfTap):
    """β alone of z = W ∗ a + β."""

    def floats(self, by_example: bool) -> int:
        """Count the output and its gradient, and what stands before it."""
        return self.tap.floats(by_example=False)

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write G_β = Σ_i ∂ℓ_i/∂z, summed over positions."""
        torch.sum(_shifts(grad), 1, out=out[f"{self.name}.bias"])

    def examples(self, grad: Tensor) -> ByExample:
        """See `Tap`."""
        _not_mixed(self.tap)
        each = _shifts(grad)

        def combine(factor: Tensor, out: Mapping[str, Tensor]) -> None:
            torch.sum(each * factor[..., None], 1, out=out[f"{self.name}.bias"])

        return ByExample(each.square().sum(-1), combine)

    def inner(self, grad: Tensor) -> Tensor:
        """See `Tap`."""
        return _inner_shift(grad, self.shift)


@dataclass(frozen=True)
class WeightTap(_HalfTap):
    """W alone of z = W ∗ a + β."""

    def floats(self, by_example: bool) -> int:
        """See `Tap`."""
        return self.tap.floats(by_example)

    def write(self, grad: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write G_W; the bias's gradient goes nowhere."""
        unused = grad.new_empty(len(grad), grad.shape[2])
        self.tap.write(grad, {**out, f"{self.name}.bias": unused})

    def examples(self, grad: Tensor) -> ByExample:
        """See `Tap`."""
        _not_mixed(self.tap)
        if isinstance(self.tap, ConvTap):
            formed = convolution.example_gradients(self.tap.input, grad, self.tap.stencil)

            def combine(factor: Tensor, out: Mapping[str, Tensor]) -> None:
                out[f"{self.name}.weight"].copy_(formed.combine(factor))

            return ByExample(formed.squared_norms(), combine)
        assert isinstance(self.tap, LinearTap)
        squares = grad.square().sum(-1) * self.tap.input.square().sum(-1)
        return ByExample(squares, lambda factor, out: self.write(grad * factor[..., None], out))

    def inner(self, grad: Tensor) -> Tensor:
        """See `Tap`."""
        return along(grad, self.output) - _inner_shift(grad, self.shift)


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

    def examples(self, grad: Tensor) -> ByExample:
        """See `Tap`."""
        pulled, pushed = self._factors(grad)
        squares = pulled.square().sum(-1) * self._input.square().sum(-1)
        squares = squares + grad.square().sum(-1) * pushed.square().sum(-1)
        return ByExample(squares, lambda factor, out: self.write(grad * factor[..., None], out))

    def inner(self, grad: Tensor) -> Tensor:
        """⟨G_A, A⟩ and ⟨G_B, B⟩ are both s ⟨∂ℓ/∂z, B A a⟩."""
        pulled, pushed = self._factors(grad)
        return 2.0 / self.scale * (pulled * pushed).sum(-1)

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


def _inner_shift(grad: Tensor, shift: Tensor) -> Tensor:
    return (_shifts(grad) * (shift if shift.dim() == 1 else shift[:, None])).sum(-1)


def _not_mixed(tap: Tap) -> None:
    if isinstance(tap, NormTap):
        raise UserError(f"layer {tap.name!r} mixes the examples of a batch: none has a gradient of its own")
