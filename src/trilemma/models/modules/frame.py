"""Where the clients' and examples' axes are hidden while a module runs under `torch.func.vmap`.

The module sees one example (a batch of one) or one client's batch at a time; the axes (k, b) are carried
along by vmap. What a layer read and wrote is wanted for all of them at once, as plain tensors (k, b, …): this
file takes vmap's wrapping off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch._C import _functorch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class Watched:
    """Where the gradient of an output is on the way back, and what makes (k, b, …) of it."""

    edge: GradientEdge
    apart: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CallFrame:
    """The axes that are hidden.

    `anchor` is a zero for every hidden unit that requires a gradient: added to an output it makes it one of
    each unit's own, and part of the backward pass. `shape` is (k, b), or (k,) where the module sees a
    client's whole batch, and `levels` are vmap's numbers for these axes.
    """

    anchor: Tensor
    shape: tuple[int, ...]

    @property
    def levels(self) -> list[int]:
        """Vmap's level of every hidden axis, clients first."""
        return sorted(_axes(self.anchor)[1])

    def plain(self, tensor: Tensor) -> Tensor:
        """Return all units' values as one tensor (k, b, …) without history; b is 1 for whole clients."""
        inside, axes = _axes(tensor.detach())
        moved = self._mover(axes)(inside)
        for position, (level, size) in enumerate(zip(self.levels, self.shape, strict=True)):
            if level not in axes:
                moved = moved.unsqueeze(position)
                moved = moved.expand(*moved.shape[:position], size, *moved.shape[position + 1 :])
        return moved if len(self.shape) == 2 else moved.unsqueeze(1)

    def watch(self, output: Tensor, copy: bool) -> tuple[Tensor, Watched]:
        """Return `output` and where its gradient will be.

        A `copy` is needed where the module changes it in place: a view would lose its place in the graph.
        """
        inside, axes = _axes(output)
        if copy or not inside.requires_grad or len(axes) < len(self.shape):
            output = output + self.anchor.to(output.dtype)
            inside, axes = _axes(output)
        mover = self._mover(axes)
        one_by_one = len(self.shape) == 2
        apart = mover if one_by_one else lambda grad: mover(grad).unsqueeze(1)
        return output, Watched(get_gradient_edge(inside), apart)

    def _mover(self, axes: dict[int, int]) -> Callable[[Tensor], Tensor]:
        """Return what moves the hidden axes of a plain tensor to the front."""
        present = [axes[level] for level in self.levels if level in axes]

        def move(inside: Tensor) -> Tensor:
            for position, axis in enumerate(present):
                inside = inside.movedim(axis + position, position)
            return inside

        return move


def _axes(tensor: Tensor) -> tuple[Tensor, dict[int, int]]:
    """Return the plain tensor inside and, for every level, where its axis lies once outer ones are gone."""
    axes: dict[int, int] = {}
    while _functorch.is_batchedtensor(tensor):
        axes[_functorch.maybe_get_level(tensor)] = _functorch.maybe_get_bdim(tensor)
        tensor = _functorch.get_unwrapped(tensor)
    return tensor, axes
