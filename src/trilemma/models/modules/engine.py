"""The engine for modules: finds out which path gives right gradients for a module, and takes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models.engines.clipping import PER_CLIENT
from trilemma.models.engines.engine import Pass, PassRequest
from trilemma.models.engines.groups import cut
from trilemma.models.engines.precision import exactly
from trilemma.models.flat import unflatten
from trilemma.models.modules.flat import FlatLayout
from trilemma.models.modules.normalisations import MixesExamples
from trilemma.models.modules.owners import NotFlat
from trilemma.models.modules.passes import PassPlan, PassSource, Way, mixed, record, said, take
from trilemma.models.modules.recorder import Log
from trilemma.models.types import Examples, Inputs, Model, Stacked, each_column

if TYPE_CHECKING:
    from trilemma.models.modules.reference import Reference

logger = logging.getLogger("trilemma.models")


@dataclass(frozen=True)
class Structure:
    """How examples of one shape go through a module.

    `operations` names, for every trained parameter, the operations that use it; `formed` those whose
    gradients autograd forms. `bytes` is what one example needs. `note` says why no better way was possible.
    """

    way: Way
    layouts: tuple[FlatLayout, ...]
    operations: Mapping[str, tuple[str, ...]]
    formed: frozenset[str]
    bytes: int
    inplace: bool
    sizes: frozenset[int] = frozenset()
    """Of how many examples the batches were that have been recorded."""
    apart: bool = False
    """Whether a batch of examples gives each what it gives it alone."""
    note: str = ""


@dataclass(eq=False)
class ModuleEngine:
    """See `trilemma.models.engines.engine.Engine`."""

    source: PassSource
    found: dict[Any, Structure] = field(default_factory=dict, repr=False)
    sources: dict[torch.device, PassSource] = field(default_factory=dict, repr=False)
    apart: bool = False
    """Whether the examples of a batch are known not to be coupled."""
    place: Callable[[PassSource, torch.device], PassSource] | None = None

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """Refuse clipping per example where no example has a gradient of its own."""
        self.structure(model, batch)
        if not self.source.coupled and not self.apart and len(batch.y[0]) > 1:
            self._require_apart(model, batch)
        if not by_example:
            return
        if model.buffers:
            layers = sorted({name.rpartition(".")[0] for name, _ in model.buffers})
            raise MixesExamples(
                f"no clipping per example for {model.name!r}: batch normalisation ({', '.join(layers)}) "
                "mixes the examples of a batch, so no example has a gradient of its own. Use "
                f"nn.GroupNorm instead, put these layers in eval mode, or {PER_CLIENT}"
            )
        if self.source.coupled:
            raise MixesExamples(
                f"no clipping per example for {model.name!r}: its loss couples the examples of a "
                f"batch, so no example has a gradient of its own: {PER_CLIENT}, or use a loss that is a mean "
                "over examples"
            )

    def _require_apart(self, model: Model, batch: Examples) -> None:
        """Refuse a loss that couples the examples of a batch and does not say so: once for every model."""
        from trilemma.models.modules.checks import couples, sound

        found = "" if model.buffers else couples(model, self._probed(model, batch.y.device), batch)
        if found:
            raise MixesExamples(
                f"{found} of {model.name!r} couples the examples of a batch: their loss together is no "
                "mean of their own. Say coupled=True in from_module: then every client's batch is taken as a "
                f"whole, and you can {PER_CLIENT}, not per example. For that, use a loss that is a mean "
                "over examples"
            )
        self.apart = bool((sound(batch).sum(1) > 1).any())  # otherwise the next batch will tell

    def _probed(self, model: Model, device: torch.device) -> Tensor:
        """Return parameters without accidental zeros."""
        noise = torch.randn(model.dim, generator=Key(0).fold("probe").torch())
        return (model.init(Key(0)) + 0.02 * noise).to(device)

    def structure(self, model: Model, batch: Examples) -> Structure:
        """Send a few examples through and see; the same for all batches of these shapes."""
        signature = _signature(batch)
        if signature not in self.found:
            self.found[signature] = self._probe(model, batch, WAYS[1:] if self.whole(model) else WAYS)
        return self.found[signature]

    def avoid(self, model: Model, batch: Examples, error: float) -> bool:
        """Give up the way that is taken for batches of these shapes; tell whether there is another."""
        given_up = self.structure(model, batch)
        left = WAYS[WAYS.index(given_up.way) + 1 :]
        if left:
            note = f"not {given_up.way}: off by {error:.1e} from a plain loop"
            logger.warning("%s: %s", model.name, note)
            found = self._probe(model, batch, left)
            notes = [given_up.note, note, found.note]
            self.found[_signature(batch)] = replace(found, note="; ".join(filter(None, notes)))
        return bool(left)

    def groups(
        self, model: Model, batch: Examples, memory: int, personal: bool
    ) -> Iterator[tuple[slice, slice]]:
        """See `Engine`."""
        structure = self.structure(model, batch)
        parts = cut(batch, structure.bytes, 4 * model.dim, memory, whole=self.whole(model))
        if personal and structure.way == "flat":
            # One batch has one model: clients with models of their own go one by one.
            parts = (
                (slice(row, row + 1), columns)
                for rows, columns in parts
                for row in range(rows.start, rows.stop)
            )
        return parts

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """See `Engine`; of the largest example seen so far."""
        columns = [x] if isinstance(x, Tensor) else list(x.values())
        size = sum(4 * part[(0,) * lead].numel() for part in columns)
        return max([64 * size, *(found.bytes for found in self.found.values())])

    def whole(self, model: Model) -> bool:
        """Tell whether the module must see a client's batch at once."""
        return bool(model.buffers) or self.source.coupled

    def run(self, model: Model, request: PassRequest) -> Pass:
        """See `Engine`."""
        batch = Stacked(request.x, request.y)
        structure = self.structure(model, batch)
        request, empty = _without_padding(request)
        way = structure.way
        if self.source.coupled and request.padded:
            way = "looped"
        whole, log = self.whole(model), Log(guarded=structure.inplace)
        try:
            if way == "flat" and request.share.numel() not in structure.sizes:
                self._record(model, request, batch)
            done = self._take(model, request, PassPlan(way, whole, structure.layouts, structure.apart), log)
        except NotFlat:
            done = self._again(model, request, batch)
        return (
            replace(done, empty=empty, loss=torch.where(empty, 0.0, done.loss)) if empty is not None else done
        )

    def _record(self, model: Model, request: PassRequest, batch: Examples) -> None:
        """Record a batch of another length: a module may do something else for so many examples."""
        structure = self.structure(model, batch)
        record(self.at(request.y.device), _named(model, request), request, structure.layouts)
        self.found[_signature(batch)] = replace(structure, sizes=structure.sizes | {request.share.numel()})

    def _again(self, model: Model, request: PassRequest, batch: Examples) -> Pass:
        """Take a batch that does not do what was recorded: record it again, as it is, or leave this way."""
        try:
            return self._take(model, request, PassPlan("flat"), Log())
        except NotFlat as error:
            left = self._probe(model, batch, WAYS[1:])
            self.found[_signature(batch)] = replace(left, note=f"not flat: {error}")
            return self._take(model, request, PassPlan(left.way, apart=left.apart), Log())

    def at(self, device: torch.device) -> PassSource:
        """Return the source on a device."""
        if device not in self.sources:
            assert self.place is not None
            self.sources[device] = self.place(self.source, device)
        return self.sources[device]

    def _take(self, model: Model, request: PassRequest, plan: PassPlan, log: Log) -> Pass:
        return take(self.at(request.params.device), _named(model, request), request, plan, log)

    def _probe(self, model: Model, batch: Examples, ways: Sequence[Way]) -> Structure:
        """Take the first way whose gradients are the plain loop's: at parameters without accidental zeros."""
        from trilemma.models.modules.checks import few
        from trilemma.models.modules.reference import COMPARED, Reference

        theta, (x, y) = self._probed(model, batch.y.device), few(batch, COMPARED)
        columns = [x] if isinstance(x, Tensor) else [*x.values()]
        sizes = {size for column in (*columns, y) for size in column.shape}
        probed = next(number for number in PROBED if number not in sizes)
        index = torch.arange(probed, device=y.device) % len(y)
        request = PassRequest(
            params=theta,
            x=each_column(x, lambda column: column[index][None]),
            y=y[index][None],
            share=torch.full((1, probed), 1.0 / probed, device=y.device),
            padded=False,
            by_example=not self.whole(model),
            buffers=model.initial_buffers(1, y.device),
            dropout=False,
        )
        notes: list[str] = []
        with exactly():
            loop = Reference(model, theta, x, y)
            for way in ways:
                found = self._try(model, request, way, loop, notes)
                if found is not None:
                    return replace(found, note="; ".join(notes))
        raise UserError(
            f"no way of computing gradients of {model.name!r} agrees with a plain loop over examples "
            f"({'; '.join(notes)}): does its forward pass draw or remember anything that is not torch's?"
        )

    def _try(
        self, model: Model, request: PassRequest, way: Way, loop: Reference, notes: list[str]
    ) -> Structure | None:
        """Take a few examples one way, and see what it does; None, with a note, where it will not do."""
        log, saved, plan = Log(), _Saved(), PassPlan(way, self.whole(model))
        if way != "flat" and not plan.whole:
            x = each_column(request.x, lambda column: column[0])
            why = mixed(
                self.at(request.y.device), unflatten(model, request.params[None]), x, request.y.shape[1]
            )
            plan = replace(plan, apart=not why)
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                self._take(model, request, plan, log)
            plan = replace(plan, layouts=log.layouts)
            found = loop.compare(lambda asked: self._take(model, asked, plan, Log()))
        except UserError:
            raise
        except Exception as error:  # whatever a module does that this way does not know
            if way == "looped":
                raise
            notes.append(f"not {way}: {said(error)}")
            return None
        if not found.right:
            notes.append(f"not {way}: off by {found.error:.1e} from a plain loop")
            logger.warning("%s: %s", model.name, notes[-1])
            return None
        return replace(_structure(model, way, log, saved, request.y.shape[1]), apart=plan.apart)


WAYS: tuple[Way, ...] = ("flat", "mapped", "looped")
"""The ways, the quickest first."""

PROBED = (7, *range(11, 1000, 2))
"""How many examples are recorded first: the first number that no axis of theirs has.

What is nobody's has a row for each example, if it has as many: nothing would be wrong, but nothing fit.
"""


def _named(model: Model, request: PassRequest) -> dict[str, Tensor]:
    """Return the parameters, with an axis for clients first."""
    return unflatten(model, request.params if request.params.dim() == 2 else request.params[None])


def _signature(batch: Examples) -> Any:
    """Return what batches share whose examples have the same shapes."""
    columns = {"": batch.x} if isinstance(batch.x, Tensor) else batch.x
    shapes = tuple((name, tuple(part.shape[2:]), part.dtype) for name, part in columns.items())
    return shapes, tuple(batch.y.shape[2:]), batch.y.dtype, batch.y.device


def _structure(model: Model, way: Way, log: Log, saved: _Saved, size: int) -> Structure:
    operations: dict[str, list[str]] = {}
    for use in log.records:
        for name, _ in use.blocks:
            operations.setdefault(name, []).append(use.operation)
    for name, operation in log.formed.items():
        operations.setdefault(name, []).append(operation)
    formed = sum(4 * segment.size for segment in model.tensors if segment.name in log.formed)
    written = 4 * (log.floats + sum(use.grad.numel() for use in log.records if use.grad is not None))
    used = {name: tuple(dict.fromkeys(found)) for name, found in operations.items()}
    each = (saved.bytes + written) // size + formed + 1
    return Structure(way, log.layouts, used, frozenset(log.formed), each, log.inplace)


@dataclass
class _Saved:
    """Counts what a forward pass keeps for the backward pass."""

    seen: set[int] = field(default_factory=set)
    bytes: int = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def _without_padding(request: PassRequest) -> tuple[PassRequest, Tensor | None]:
    """Put the client's first real example in the place of padding, whose content may have no loss at all.

    Its weight stays 0. Returned beside it: which clients have no real example.
    """
    if not request.padded:
        return request, None
    real = request.share > 0
    if bool(real.all()):
        return replace(request, padded=False), None
    numbers = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    first = real.to(torch.int8).argmax(1, keepdim=True)
    index = torch.where(real, numbers, first)
    rows = torch.arange(real.shape[0], device=real.device)[:, None]
    filled = each_column(request.x, lambda column: column[rows, index])
    empty = ~real.any(1)
    return replace(request, x=filled, y=request.y[rows, index]), empty if bool(empty.any()) else None
