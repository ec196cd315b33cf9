"""The formulas that broke certificates, kept as mutants: each puts an old one back in the place of today's.

A mutant is a function of pytest's monkeypatch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import trilemma as tl
from trilemma import models
from trilemma.base.errors import UserError
from trilemma.data.types import Batch
from trilemma.federation.client.node import Node
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.learning.steps import total
from trilemma.models import Clip
from trilemma.models.engines import terms
from trilemma.models.engines.clipping import Lengths
from trilemma.models.engines.terms import Lookup, Product
from trilemma.models.modules import reference
from trilemma.models.modules.flat import FlatFrame, FlatLayout
from trilemma.models.modules.owners import Owners
from trilemma.models.modules.reference import Comparison, Reference


def _as_it_is(squares: Tensor) -> Lengths:
    """Believe what single precision says, and no bound on what it does not say."""
    squares = squares.double()
    return Lengths(squares.sign() * squares.abs().sqrt(), squares * 0.0)


def _together(parts) -> Lengths:
    """Add up squares of both signs: what is negative takes away from other parameters, too."""
    squares = sum(part.norms * part.norms.abs() for part in parts)
    masses = sum(part.masses.square() for part in parts).sqrt()
    return Lengths(squares.clamp(min=0.0).sqrt(), masses, max(part.positions for part in parts))


def ghost_norms(patch) -> None:
    """‖Σ_p l_p ⊗ r_p‖² = Σ_{p,q} ⟨l_p, l_q⟩ ⟨r_p, r_q⟩ in float32, whatever cancels."""
    bounded = Product.lengths

    def lengths(self):
        if self.left.shape[2] == 1 or self.small:
            return bounded(self)
        left, right = self.left, self.right
        return _as_it_is((torch.matmul(left, left.mT) * torch.matmul(right, right.mT)).sum((2, 3)))

    def rows_of_a_table(self):
        same = self.ids[..., :, None] == self.ids[..., None, :]
        return _as_it_is((same * torch.matmul(self.right, self.right.mT)).sum((2, 3)))

    def small(self):
        positions, m, n = *self.left.shape[2:], self.right.shape[3]
        return positions > 1 and 2 * m * n <= positions * (m + n)

    patch.setattr(Product, "small", property(small))
    patch.setattr(Lengths, "together", staticmethod(_together))
    patch.setattr(Product, "lengths", lengths)
    patch.setattr(Lookup, "lengths", rows_of_a_table)


def squares_that_underflow(patch) -> None:
    """‖l‖² ‖r‖² in float32: 0 where ‖l‖ is below 3e-23."""
    bounded = Product.lengths

    def lengths(self):
        if self.left.shape[2] > 1:
            return bounded(self)
        return _as_it_is(self.left.square().sum((2, 3)) * self.right.square().sum((2, 3)))

    patch.setattr(Product, "lengths", lengths)


def clamped_pairs(patch) -> None:
    """Uses of one matrix, ‖G‖² + ‖H‖² + 2 ⟨G, H⟩ in float32, what is negative taken for 0."""
    bounded = terms.lengths_of

    def lengths_of(parts):
        if len(parts) == 1:
            return bounded(parts)
        squares = [part.lengths().norms.square() for part in parts]
        cross = [2 * terms.pair(one, other) for i, one in enumerate(parts) for other in parts[:i]]
        return _as_it_is(torch.stack([*squares, *cross]).float().sum(0).clamp(min=0.0))

    patch.setattr("trilemma.models.engines.engine.lengths_of", lengths_of)


def single_totals(patch) -> None:
    """The sum over a batch in single precision."""
    patch.setattr(Clip, "example", staticmethod(lambda limit, careful=False: Clip("example", limit)))


def refusals_after_paying(patch) -> None:
    """What fails is raised, and what is not finite goes on."""

    def gradients(model, params, batch, **options):
        return models.gradients(model, params, batch, **options)

    def step(algorithm, broadcast, state, clients, round_, key, again=None):
        done = algorithm.client(broadcast, state, clients, round_, key)
        return done, total.Failures(torch.zeros(len(clients.ids), dtype=torch.int64))

    patch.setattr(total, "gradients", gradients)
    patch.setattr(total, "step", step)


def everything_is_zero(patch) -> None:
    """One example fails, and its client's whole contribution counts as zero."""

    def gradients(model, params, batch, *, clip, **options):
        rows = []
        for row in range(len(batch.y)):
            try:
                one = Batch(batch.x[row : row + 1], batch.y[row : row + 1])
                found = models.gradients(model, params, one, clip=clip)
                if not math.isfinite(float(found.loss)):
                    raise ValueError
            except Exception:
                zero = params.new_zeros(1, model.dim)
                found = models.Gradients(zero, zero[:, 0], zero[:, 0])
            rows.append(found)
        return models.Gradients(
            *(torch.cat([getattr(one, name) for one in rows]) for name in ("value", "loss", "clipped"))
        )

    patch.setattr(total, "gradients", gradients)


def structure_by_sizes(patch) -> None:
    """Where examples lie in a tensor is told from its sizes."""

    def layout(self, tensor):
        shape = tuple(tensor.shape)
        for axis, size in enumerate(shape):
            if size % self.examples == 0:
                each = (*shape[:axis], size // self.examples, *shape[axis + 1 :])
                self.layouts.append(FlatLayout(axis, 1, size // self.examples, each))
                break
        else:
            self.layouts.append(FlatLayout(None, 1, 1, shape))
        return self.layouts[-1]

    def dispatch(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    patch.setattr(FlatFrame, "layout", layout)
    patch.setattr(Owners, "__torch_dispatch__", dispatch)
    patch.setattr(Owners, "rows", lambda self, outputs, examples: None)


def uncompared(patch) -> None:
    """And nobody compares it with a plain loop: wrong from the first batch."""
    structure_by_sizes(patch)
    patch.setattr(Reference, "compare", lambda self, run: Comparison(0.0, 1.0))


def hidden_parameters(patch) -> None:
    """What a loss depends on beside the module's forward pass is left out silently."""
    patch.setattr(reference, "_refuse_strangers", lambda model, loss, own: None)


def refusal_at_hello(patch) -> None:
    """A client tries its model on its own first examples before it joins."""
    joins = Node._hello

    def hello(self, block, agreed):
        batch = self.task.data.everything((0,))
        model = self.task.model
        try:
            found = models.gradients(model, model.init(self.task.key), batch)
            if not bool(torch.isfinite(found.value).all()):
                raise UserError("examples are not finite")
        except UserError as error:
            raise Refused(Reason.FAILED, str(error)) from None
        return joins(self, block, agreed)

    patch.setattr(Node, "_hello", hello)


def ranked_split(rows) -> tuple[Tensor, Tensor]:
    """Train on every second record of a client, from the lowest to the highest."""
    table = torch.tensor(sorted(rows)[::2])
    return table[:, :2], (table[:, 2] > 0).long()


def split_by_hash(rows) -> tuple[Tensor, Tensor]:
    """Train on those that a hash of their own says: what is right."""
    table = torch.tensor([row for row in rows if tl.split(row) == "train"])
    return table[:, :2], (table[:, 2] > 0).long()
