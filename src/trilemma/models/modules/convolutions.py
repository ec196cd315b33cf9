"""A convolution of one, two or three dimensions as products over output positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.models.engines.clipping import Lengths
from trilemma.models.engines.terms import Product, Term, total
from trilemma.models.layers.convolution import TINY, KernelGradients, Stencil


@dataclass(frozen=True)
class ConvolutionWindow:
    """How a kernel moves: its shape (out, in / groups, *kernel), strides, paddings, dilations, groups."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @cached_property
    def stencil(self) -> Stencil | None:
        """The same as the package's layers know it, if they do: square, without dilation and groups."""
        kernel = self.shape[2:]
        each = {(*move, size) for *move, size in zip(self.stride, self.padding, kernel, strict=True)}
        plain = len(kernel) == 2 and set(self.dilation) == {1} and self.groups == 1
        return Stencil(kernel[0], self.stride[0], self.padding[0]) if plain and len(each) == 1 else None

    def columns(self, x: Tensor) -> Tensor:
        """Return the patches of x (u, c, *size): (u, groups, positions, c / groups · kernel)."""
        x = F.pad(x, [amount for amount in reversed(self.padding) for _ in range(2)])
        kernel = self.shape[2:]
        for axis, (size, stride, dilation) in enumerate(zip(kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        axes = len(kernel)
        x = x.view(len(x), self.groups, -1, *x.shape[2:])
        # (u, groups, c, *positions, *kernel) -> (u, groups, *positions, c, *kernel)
        order = [0, 1, *range(3, 3 + axes), 2, *range(3 + axes, 3 + 2 * axes)]
        return x.permute(order).reshape(len(x), self.groups, -1, self.shape[1] * math.prod(kernel))


def kernel_gradients(input: Tensor, grad: Tensor, window: ConvolutionWindow) -> Term:
    """Return the use of a kernel: of input (k, b, u, c, *size) and ∂loss/∂output (k, b, u, out, *size').

    On a CPU as for the layers of the package, if gradients of examples take no more room than their factors.
    """
    outputs, unfolded, positions = window.shape[0], math.prod(window.shape[1:]), grad.shape[4:].numel()
    small = outputs * unfolded <= positions * (outputs + unfolded)
    if window.stencil and small and input.shape[2] == 1 and not input.is_cuda:
        return KernelGradients(input[:, :, 0], grad[:, :, 0], window.stencil)
    return Convolved(input, grad, window)


@dataclass(frozen=True)
class Convolved(Term):
    """The use of a kernel: `input` (k, b, u, c, *size), `grad` of the output (k, b, u, out, *size')."""

    input: Tensor
    grad: Tensor
    window: ConvolutionWindow
    cache: list[Tensor] = field(default_factory=list, repr=False)

    @cached_property
    def product(self) -> Product:
        """The same as outer products over positions; for one group."""
        units = self.input.shape[:3]
        columns = self.window.columns(self.input.flatten(0, 2)).squeeze(1)
        columns = columns.view(*units[:2], -1, columns.shape[-1])
        left = self.grad.flatten(4).movedim(3, 4).flatten(2, 3)
        return Product(left, columns)

    def lengths(self) -> Lengths:
        """See `Term`; with several groups gradients are formed, and summed as they are."""
        return self.product.lengths() if self.window.groups == 1 else Lengths.formed(self.formed())

    def formed(self) -> Tensor:
        """See `Term`."""
        if self.window.groups == 1:
            return self.product.formed().view(*self.input.shape[:2], *self.window.shape)
        if not self.cache:
            units, groups = self.input.shape[:3], self.window.groups
            columns = self.window.columns(self.input.flatten(0, 2)).flatten(0, 1)
            grad = self.grad.flatten(0, 2).flatten(2)
            grad = grad.reshape(len(grad) * groups, -1, grad.shape[2])
            value = torch.bmm(grad, columns).view(*units, *self.window.shape)
            self.cache.append(value.sum(2))
        return self.cache[0]

    def error(self) -> Tensor | float:
        """See `Term`."""
        return self.product.error() if self.window.groups == 1 else 0.0

    def summed(self, factor: Tensor | None) -> Tensor:
        """Add up what was formed; else client by client by the library on a CPU, in one product on CUDA."""
        if self.cache:
            return total(self.cache[0], factor)
        known = self.grad.is_cuda or self.product_known or self.tiny
        if self.window.groups == 1 and (known or factor is not None):
            return self.product.summed(factor).view(len(self.input), *self.window.shape)
        if self.tiny or factor is not None:
            return total(self.formed(), factor)
        return torch.stack([self._library(x, g) for x, g in zip(self.input, self.grad, strict=True)])

    @property
    def tiny(self) -> bool:
        """Whether a client's columns are so few that a call for every client costs more than they do."""
        positions = self.input.shape[1:3].numel() * self.grad.shape[4:].numel()
        return positions * math.prod(self.window.shape[1:]) < TINY

    @property
    def product_known(self) -> bool:
        """Whether the columns have been computed already."""
        return "product" in self.__dict__

    def _library(self, x: Tensor, grad: Tensor) -> Tensor:
        window = self.window
        weight = grad.new_empty(1).expand(window.shape)
        arguments = (window.stride, window.padding, window.dilation, False, [0], window.groups)
        mask = (False, True, False)
        found = torch.ops.aten.convolution_backward(
            grad.flatten(0, 1), x.flatten(0, 1), weight, [0], *arguments, mask
        )
        result: Tensor = found[1]
        return result
