"""The engine for models built from `trilemma.models.layers`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines import groups
from trilemma.models.engines.clipping import PER_CLIENT
from trilemma.models.engines.engine import Pass, PassRequest, Rows
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.engines.terms import Term
from trilemma.models.flat import unflatten
from trilemma.models.types import Examples, Inputs, Model


class LayerEngine:
    """Gradients from the layers' saved inputs and the gradients at their outputs."""

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """Refuse features in columns, labels with axes of their own, and layers that save nothing."""
        x, y = batch.x, batch.y
        if not isinstance(x, Tensor) or y.dim() != 2:
            raise UserError(
                f"model {model.name!r} takes features (k, b, …) and labels (k, b); columns by name and "
                "labels of other shapes need a model from trilemma.models.from_module"
            )
        if model.buffers and by_example:
            raise UserError(
                f"per-example clipping is undefined for {model.name!r}: its batch normalisation mixes the "
                f"examples of a batch, so no example has a gradient of its own: {PER_CLIENT}, or use a model "
                "without batch normalisation"
            )
        groups.require_saved(model, tuple(x.shape[2:]))

    def groups(
        self, model: Model, batch: Examples, memory: int, personal: bool
    ) -> Iterator[tuple[slice, slice]]:
        """See `Engine`."""
        return groups.groups(model, batch, memory)

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """See `Engine`."""
        assert isinstance(x, Tensor)
        return groups.footprint(model, tuple(x.shape[lead:]))

    def run(self, model: Model, request: PassRequest) -> Pass:
        """See `Engine`."""
        assert isinstance(request.x, Tensor)
        present = (request.share > 0).to(request.params.dtype) if model.buffers and request.padded else None
        saved = SavedActivations(record=True, train=True, buffers=request.buffers, present=present)
        with torch.enable_grad():
            logits = model.forward(unflatten(model, request.params), request.x, saved)
            losses = model.loss(logits, request.y) * request.share
            grads = torch.autograd.grad(losses.sum(), [each.output for each in saved.outputs])
        terms: dict[str, dict[Rows, list[Term]]] = {
            name: {None: [term]}
            for each, grad in zip(saved.outputs, grads, strict=True)
            for name, term in each.terms(grad).items()
        }
        return Pass(losses.detach().sum(1), terms, request.y.shape, saved.updated)


LAYERS = LayerEngine()
"""The one there is."""
