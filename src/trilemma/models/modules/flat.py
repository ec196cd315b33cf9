"""Where the examples lie in a tensor when all examples go through a module as one plain batch.

While a way is recorded, every number's owner is known (`trilemma.models.modules.owners`), and with it where
the examples lie in what a layer reads and writes. Later batches of examples of the same shapes do the same
operations, for nothing in them depends on data; one whose tensors come out in other shapes is recorded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from trilemma.models.modules.frame import Watched
from trilemma.models.modules.owners import NotFlat, Owners, rows_of


class FlatLayout(NamedTuple):
    """Where n examples lie: on an axis of outer · n · inner numbers; `shape` is that of one example's part.

    None for `axis`: the tensor is nobody's, it is the same for every example.
    """

    axis: int | None
    outer: int
    inner: int
    shape: tuple[int, ...]

    def fits(self, tensor: Tensor, examples: int) -> bool:
        """Tell whether a tensor can lie so."""
        axis, own = self.axis, self.shape
        if axis is None:
            return tensor.shape == own
        return tensor.shape == (*own[:axis], own[axis] * examples, *own[axis + 1 :])

    def apart(self, tensor: Tensor, examples: int) -> Tensor:
        """Return (n, …): every example's part, with what it has of the axis."""
        if self.axis is None:
            return tensor.expand(examples, *tensor.shape)
        split = *tensor.shape[: self.axis], self.outer, examples, self.inner, *tensor.shape[self.axis + 1 :]
        return tensor.reshape(split).movedim(self.axis + 1, 0).reshape(examples, *self.shape)

    def together(self, parts: Tensor) -> Tensor:
        """Return what `apart` took apart; an axis of length one is broadcast."""
        if self.axis is None:
            raise NotFlat("what is dropped is the same for every example")
        if parts.shape[self.axis + 1] != self.shape[self.axis]:
            raise NotFlat("examples lie on an axis that is broadcast")
        split = *parts.shape[: self.axis + 1], self.outer, self.inner, *parts.shape[self.axis + 2 :]
        return parts.reshape(split).movedim(0, self.axis + 1).flatten(self.axis, self.axis + 2)


@dataclass
class FlatFrame:
    """See `trilemma.models.modules.frame.CallFrame`; `layouts` are what was found, `known` what is expected.

    With `owners`, what is found is whose the numbers are; without, what is expected is relied on.
    """

    anchor: Tensor
    shape: tuple[int, int]
    known: tuple[FlatLayout, ...] | None = None
    owners: Owners | None = None
    layouts: list[FlatLayout] = field(default_factory=list)

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return self.shape[0] * self.shape[1]

    @property
    def numbers(self) -> Tensor:
        """What marks the examples, (n,)."""
        return Owners.numbers(self.examples, self.anchor.device)

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the values as (k, b, …)."""
        return self._split(tensor.detach(), self.layout(tensor))

    def watch(self, output: Tensor, copy: bool) -> tuple[Tensor, Watched | None]:
        """Return `output` and where its gradient will be, if something goes back."""
        with torch._C._DisableTorchDispatch():  # what happens here mixes nothing
            return self._watch(output, self.layout(output), copy)

    def _watch(self, output: Tensor, layout: FlatLayout, copy: bool) -> tuple[Tensor, Watched | None]:
        if layout.axis is None:
            # As broadcasting does: every example has its own from here on.
            each = output if output.dim() and output.shape[0] == 1 else output.unsqueeze(0)
            output = each + self.anchor.view(-1, *[1] * (each.dim() - 1)).to(output.dtype)
            layout = FlatLayout(0, 1, 1, tuple(each.shape))
        elif copy or (self.owners is not None and not output.requires_grad):
            output = output + self.anchor.sum().to(output.dtype)
        elif not output.requires_grad:
            output.requires_grad_()
        if self.owners is not None:
            # What was nobody's is an example's now: whoever else used it would be seen.
            one = self.numbers.view(-1, *[1] * len(layout.shape)).expand(-1, *layout.shape)
            self.owners.mark(output, layout.together(one))
            return output, None
        return output, Watched(get_gradient_edge(output), lambda grad: self._split(grad, layout))

    def layout(self, tensor: Tensor) -> FlatLayout:
        """Return where the examples lie in a tensor that is read or written next."""
        place, expected = len(self.layouts), None
        if self.known is not None:
            expected = self.known[place] if place < len(self.known) else None
            if expected is None or not expected.fits(tensor, self.examples):
                raise NotFlat("the module does not do what it did when it was recorded")
        found = expected if self.owners is None else self._found(tensor, expected)
        if found is None or (expected is not None and found != expected):
            raise NotFlat("examples do not lie where they did when the module was recorded")
        self.layouts.append(found)
        return found

    def _found(self, tensor: Tensor, expected: FlatLayout | None) -> FlatLayout:
        assert self.owners is not None
        found, shape = rows_of(self.owners.of(tensor), self.examples), tuple(tensor.shape)
        if found is None and expected is not None:
            return expected
        if found is None and shape and shape[0] == self.examples:
            found = 0, 1, 1  # nobody's, as the first state of a recurrent layer: one row for everyone
        if found is None:
            return FlatLayout(None, 1, 1, shape)
        axis, outer, inner = found
        return FlatLayout(axis, outer, inner, (*shape[:axis], outer * inner, *shape[axis + 1 :]))

    def _split(self, tensor: Tensor, layout: FlatLayout) -> Tensor:
        if layout[:2] == (0, 1):
            return tensor.reshape(*self.shape, *layout.shape)
        parts = layout.apart(tensor, self.examples)
        return parts.reshape(*self.shape, *parts.shape[1:])
