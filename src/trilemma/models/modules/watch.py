"""Keeps code from reading past what sees whose numbers are, while several examples go through at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trilemma.models.modules.owners import NotFlat


class Watch(TorchFunctionMode):
    """Sees what lets numbers out of torch, and what fails.

    What failed has failed for all: who catches it and goes on would let one example decide about others.
    """

    failed: BaseException | None = None

    @property
    def watching(self) -> bool:
        """Whether several examples go through at once."""
        return True

    def __exit__(self, *exception: Any) -> None:
        """Raise what failed if nothing is being raised."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self.failed is not None and exception[0] is None and self.watching:
            raise self.failed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        try:
            if func in _READS and self.watching and next(tensors(args), None) is not None:
                raise NotFlat(f"{func.__name__} is out of sight")
            return self._run(func, args, kwargs or {})
        except BaseException as error:
            self.failed = error
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


_READS = {
    getattr(torch.Tensor, name)
    for name in (
        *("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "register_hook"),
        *("__dlpack__", "__deepcopy__", "__reduce_ex__", "new_tensor", "__repr__", "__format__"),
        *("apply_", "map_", "map2_"),
    )
} | {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.grad_fn.__get__}  # type: ignore[union-attr]
"""What lets numbers out of torch, where nobody sees whose they are, or changes what comes back."""


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists and dictionaries of them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors(part)
