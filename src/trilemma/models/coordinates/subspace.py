"""A random subspace: θ = θ0 + P z, with P (D × d) random, of columns of norm 1, and drawn from the key.

P is the transpose of `trilemma.models.coordinates.projection`: kept where it is small, drawn anew in blocks
where it is not. The gradient in z is Pᵀ∇_θ, and what is clipped is its norm: a client's gradient is projected
after its sum, an example's for itself. For that every example's ∇_θ is formed, so many at a time as the
memory allows. Any engine below does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.models.coordinates import projection
from trilemma.models.coordinates.parts import Placed
from trilemma.models.coordinates.projection import Seeded
from trilemma.models.engines.clipping import NO_CLIP
from trilemma.models.engines.engine import Engine, Pass, PassRequest
from trilemma.models.engines.groups import even
from trilemma.models.engines.layered import LAYERS
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.engines.stacked import Sums, Work, sums_of
from trilemma.models.engines.terms import Whole
from trilemma.models.flat import unflatten
from trilemma.models.modules import state_dict
from trilemma.models.types import Buffers, Examples, Inputs, Model, Params, Stacked, each_column

COORDINATES = "subspace.z"
"""What the coordinates are called."""

WORKSPACE = 512 << 20
"""Bytes of gradients that are gathered before a P that is not kept is gone through."""


@dataclass(eq=False)
class Lift:
    """z (d,) or (k, d) to θ = θ0 + P z; the latest is remembered, since a model is used many times over."""

    start: Placed
    size: int
    key: Key
    memory: int
    drawn: dict[torch.device, Seeded] = field(default_factory=dict, repr=False)
    latest: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def at(self, device: torch.device) -> Seeded:
        """Return Pᵀ on a device."""
        if device not in self.drawn:
            full = len(self.start.value)
            self.drawn[device] = projection.gaussian(
                self.size, full, self.key, memory=self.memory, device=device
            )
        return self.drawn[device]

    def __call__(self, z: Tensor) -> Tensor:
        """Return θ."""
        if z.is_meta:
            return z.new_empty(*z.shape[:-1], len(self.start.value))
        latest = self.latest
        if latest is None or latest[0].device != z.device or not torch.equal(latest[0], z):
            found = self.start.at(z.device) + self.at(z.device).lift(z if z.dim() == 2 else z[None])
            latest = self.latest = z.clone(), found if z.dim() == 2 else found[0]
        return latest[1]


def in_subspace(model: Model, start: Tensor, size: int, key: Key, memory: int = projection.MEMORY) -> Model:
    """Return the model of `size` coordinates through `start`; P is kept up to `memory` bytes.

    >>> from trilemma import models
    >>> model = models.build("mnist-mlp", (784,), 10)
    >>> small = in_subspace(model, model.init(Key(1)), 16, Key(2))
    >>> small.dim, small.init(Key(3)).norm()
    (16, tensor(0.))
    """
    lift = Lift(Placed(start.detach()), size, key, memory)

    def forward(params: Params, x: Inputs, saved: SavedActivations | None = None) -> Tensor:
        return model.forward(unflatten(model, lift(params[COORDINATES])), x, saved)

    def export(flat: Tensor, buffers: Buffers | None) -> dict[str, Tensor]:
        return state_dict(model, lift(flat.detach()), buffers)

    return replace(
        model,
        shapes=((COORDINATES, (size,)),),
        forward=forward,
        init=lambda _: torch.zeros(size),
        engine=SubspaceEngine(model, lift),
        export=export,
    )


@dataclass(frozen=True, eq=False)
class SubspaceEngine:
    """See `trilemma.models.engines.engine.Engine`; `whole` is the model whose parameters are θ."""

    whole: Model
    lift: Lift

    @property
    def below(self) -> Engine:
        """What computes ∇_θ."""
        return self.whole.engine or LAYERS

    def expand(self, params: Tensor) -> Tensor:
        """Return θ of z."""
        return self.lift(params)

    def project(self, gradient: Tensor) -> Tensor:
        """Return Pᵀ g, (d,) for (D,)."""
        return self.lift.at(gradient.device).apply(gradient[None])[0]

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """See `Engine`."""
        self.below.require(self.whole, batch, by_example)

    def groups(
        self, model: Model, batch: Examples, memory: int, personal: bool
    ) -> Iterator[tuple[slice, slice]]:
        """Take whole clients: of each there is a model, a gradient, and its examples' gradients in z."""
        clients, size = batch.y.shape[:2]
        each = 8 * self.whole.dim + 4 * size * model.dim
        for rows in even(clients, max(1, memory // each)):
            yield rows, slice(0, size)

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """See `Engine`."""
        return self.below.footprint(self.whole, x, lead)

    def run(self, model: Model, request: PassRequest) -> Pass:
        """See `Engine`."""
        theta, pulled = self.lift(request.params), self.lift.at(request.params.device)
        size = request.y.shape[1]
        if not request.by_example:
            found = self._through(theta, request, slice(0, size))
            return _found(found.loss, pulled.apply(found.value)[:, None], request, found.buffers)
        bytes_each = 4 * len(request.y) * self.whole.dim
        together = 1 if pulled.stored is not None else max(1, WORKSPACE // bytes_each)
        loss = request.params.new_zeros(len(request.y))
        each = []
        for columns in even(size, together):
            grads = []
            for column in range(columns.start, columns.stop):
                found = self._through(theta, request, slice(column, column + 1))
                loss += found.loss
                grads.append(found.value)
            each.append(pulled.apply(torch.cat(grads)).view(len(grads), len(loss), -1))
        return _found(loss, torch.cat(each).movedim(0, 1).contiguous(), request, {})

    def _through(self, theta: Tensor, request: PassRequest, columns: slice) -> Sums:
        """Return each client's ∇_θ of some of its examples, together."""
        share = request.share[:, columns]
        batch = Stacked(
            each_column(request.x, lambda column: column[:, columns]),
            request.y[:, columns],
            share if request.padded else None,
        )
        first = request.first + columns.start
        work = Work(NO_CLIP, request.buffers, request.keys, WORKSPACE, first, request.dropout)
        return sums_of(self.whole, theta, batch, share, work)


def _found(loss: Tensor, each: Tensor, request: PassRequest, updated: Buffers) -> Pass:
    """Return a pass with gradients in z: of clients (k, 1, d), or of examples (k, b, d)."""
    return Pass(loss, {COORDINATES: {None: [Whole(each)]}}, request.y.shape, updated)
