"""Where the examples' axis lies in a tensor when all examples go through a module as one plain batch.

Nothing is hidden, so nothing tells an axis of examples from any other but its length. It is found out once,
with a number of examples that hardly anything else has, and the answer is checked against single examples
before it is used (`trilemma.models.modules.engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Layout = Literal["first", "second", "none"]
"""Examples lie on the first axis (in blocks of equal length, perhaps), on the second, or on none."""


class NotFlat(RuntimeError):
    """The module cannot be taken through as one batch."""


@dataclass
class FlatFrame:
    """See `trilemma.models.modules.frame.Frame`; `layouts` are found, `known` expected."""

    anchor: Tensor
    shape: tuple[int, int]
    known: tuple[Layout, ...] | None = None
    layouts: list[Layout] = field(default_factory=list)

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the values as (k, b, …)."""
        tensor = tensor.detach()
        layout = self._layout(tensor)
        if layout == "none":
            return tensor.expand(*self.shape, *tensor.shape)
        return self._apart(tensor, layout)

    def watch(self, output: Tensor, receive: Callable[[Tensor], None], copy: bool) -> Tensor:
        """Return `output`, such that the backward pass gives its gradient (k, b, …) to `receive`."""
        layout = self._layout(output)
        if layout == "none":
            if not output.dim() or output.shape[0] != 1:
                output = output.unsqueeze(0)  # as broadcasting does
            output = output + self.anchor.view(-1, *[1] * (output.dim() - 1)).to(output.dtype)
            layout = "first"
        elif copy or not output.requires_grad:
            output = output + self.anchor.sum().to(output.dtype)

        def hook(grad: Tensor) -> None:
            receive(self._apart(grad, layout))

        output.register_hook(hook)  # type: ignore[no-untyped-call]
        return output

    def _layout(self, tensor: Tensor) -> Layout:
        examples = self.shape[0] * self.shape[1]
        if self.known is None:
            first = tensor.dim() > 0 and tensor.shape[0] % examples == 0
            second = tensor.dim() > 1 and tensor.shape[1] == examples
            found: Layout = "first" if first else "second" if second else "none"
        else:
            if len(self.layouts) >= len(self.known):
                raise NotFlat("the module does not do the same for every batch")
            found = self.known[len(self.layouts)]
        self.layouts.append(found)
        return found

    def _apart(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return (k, b, …) of a tensor with the examples on its first or second axis."""
        clients, size = self.shape
        if layout == "second":
            return tensor.movedim(1, 0).reshape(clients, size, tensor.shape[0], *tensor.shape[2:])
        each = tensor.shape[0] // (clients * size)
        return tensor.reshape(clients, size, each, *tensor.shape[1:])
