"""The tape as an engine: models built from `trilemma.models.layers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines import groups
from trilemma.models.engines.clipping import PER_CLIENT, Lengths
from trilemma.models.engines.engine import PassRequest
from trilemma.models.engines.tape import Tape
from trilemma.models.engines.terms import Term
from trilemma.models.flat import unflatten
from trilemma.models.types import Buffers, Examples, Inputs, Model


@dataclass(frozen=True)
class TapePass:
    """The layers' inputs and the gradients at their outputs."""

    loss: Tensor
    tape: Tape
    grads: tuple[Tensor, ...]

    @property
    def updated(self) -> Buffers:
        """New running statistics."""
        return self.tape.updated

    @cached_property
    def examples(self) -> dict[str, Term]:
        """Every parameter's gradients of single examples, formed or not."""
        found: dict[str, Term] = {}
        for tap, grad in zip(self.tape.taps, self.grads, strict=True):
            found |= tap.examples(grad)
        return found

    def lengths(self) -> Lengths:
        """See `Pass`."""
        return Lengths.together([term.lengths() for term in self.examples.values()])

    def write(self, out: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """See `Pass`."""
        if factor is not None:
            for name, term in self.examples.items():
                out[name].copy_(term.summed(factor).view(out[name].shape))
        else:
            for tap, grad in zip(self.tape.taps, self.grads, strict=True):
                tap.write(grad, out)


class TapeEngine:
    """Gradients by book-keeping of the layers' inputs and outputs."""

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """Refuse features in columns, labels with axes of their own, and layers that are not on the tape."""
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
        groups.require_tape(model, tuple(x.shape[2:]))

    def groups(
        self, model: Model, batch: Examples, memory: int, personal: bool
    ) -> Iterator[tuple[slice, slice]]:
        """See `Engine`."""
        return groups.groups(model, batch, memory)

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """See `Engine`."""
        assert isinstance(x, Tensor)
        return groups.footprint(model, tuple(x.shape[lead:]))

    def run(self, model: Model, request: PassRequest) -> TapePass:
        """See `Engine`."""
        assert isinstance(request.x, Tensor)
        present = (request.share > 0).to(request.params.dtype) if model.buffers and request.padded else None
        tape = Tape(record=True, train=True, buffers=request.buffers, present=present)
        with torch.enable_grad():
            logits = model.forward(unflatten(model, request.params), request.x, tape)
            losses = model.loss(logits, request.y) * request.share
            grads = torch.autograd.grad(losses.sum(), [tap.output for tap in tape.taps])
        return TapePass(losses.detach().sum(1), tape, grads)


TAPE = TapeEngine()
