"""The engine for modules: finds out how a module can be taken through, and takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.keys import Key
from trilemma.models.engine import Request
from trilemma.models.flat import unflatten
from trilemma.models.groups import cut
from trilemma.models.modules.operations import MixesExamples
from trilemma.models.modules.passed import ModulePass
from trilemma.models.modules.passes import Plan, Source, take
from trilemma.models.modules.recorder import Log
from trilemma.models.types import Examples, Inputs, Model, each_column


@dataclass(frozen=True)
class Structure:
    """How examples of one shape go through a module.

    `operations` names, for every trained parameter, the operations that use it; `formed` those whose
    gradients autograd forms. `bytes` is what one example needs. `note` says why vmap cannot be used.
    """

    mapped: bool
    operations: Mapping[str, tuple[str, ...]]
    formed: frozenset[str]
    bytes: int
    inplace: bool
    note: str = ""


@dataclass(eq=False)
class ModuleEngine:
    """See `trilemma.models.engine.Engine`."""

    source: Source
    found: dict[Any, Structure] = field(default_factory=dict, repr=False)
    sources: dict[torch.device, Source] = field(default_factory=dict, repr=False)
    place: Callable[[Source, torch.device], Source] | None = None

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """Refuse clipping per example where no example has a gradient of its own."""
        if not by_example:
            return
        if model.buffers:
            layers = sorted({name.rpartition(".")[0] for name, _ in model.buffers})
            raise MixesExamples(
                f"no clipping per example for {model.name!r}: batch normalisation ({', '.join(layers)}) "
                "mixes the examples of a batch, so no example has a gradient of its own. Use "
                "nn.GroupNorm instead, put these layers in eval mode, or clip per client (Clip.client)"
            )
        if self.source.coupled:
            raise MixesExamples(
                f"no clipping per example for {model.name!r}: its loss couples the examples of a "
                "batch, so no example has a gradient of its own. Clip per client (Clip.client), or use a "
                "loss that is a mean over examples"
            )

    def structure(self, model: Model, batch: Examples) -> Structure:
        """Send two examples through and see; the same for all batches of these shapes."""
        columns = {"": batch.x} if isinstance(batch.x, Tensor) else batch.x
        signature = (
            tuple((name, tuple(part.shape[2:]), part.dtype) for name, part in columns.items()),
            tuple(batch.y.shape[2:]),
            batch.y.dtype,
            batch.y.device,
        )
        if signature not in self.found:
            self.found[signature] = self._probe(model, batch)
        return self.found[signature]

    def groups(self, model: Model, batch: Examples, memory: int) -> Iterator[tuple[slice, slice]]:
        """See `Engine`."""
        each = self.structure(model, batch).bytes
        return cut(batch, each, 4 * model.dim, memory, whole=self.whole(model))

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """See `Engine`; of the largest example seen so far."""
        columns = [x] if isinstance(x, Tensor) else list(x.values())
        size = sum(4 * part[(0,) * lead].numel() for part in columns)
        return max([64 * size, *(found.bytes for found in self.found.values())])

    def whole(self, model: Model) -> bool:
        """Tell whether the module must see a client's batch at once."""
        return bool(model.buffers) or self.source.coupled

    def run(self, model: Model, request: Request) -> ModulePass:
        """See `Engine`."""
        batch = _Batch(request.x, request.y)
        structure = self.structure(model, batch)
        request, empty = _without_padding(request)
        whole = self.whole(model)
        mapped = structure.mapped and not (self.source.coupled and request.padded)
        plan = Plan(whole or (not mapped and not request.by_example), mapped)
        done = self._take(model, request, plan, Log(guarded=structure.inplace))
        return (
            replace(done, empty=empty, loss=torch.where(empty, 0.0, done.loss)) if empty is not None else done
        )

    def at(self, device: torch.device) -> Source:
        """Return the source on a device."""
        if device not in self.sources:
            assert self.place is not None
            self.sources[device] = self.place(self.source, device)
        return self.sources[device]

    def _take(self, model: Model, request: Request, plan: Plan, log: Log) -> ModulePass:
        named = unflatten(model, request.params if request.params.dim() == 2 else request.params[None])
        return take(self.at(request.params.device), named, request, plan, log)

    def _probe(self, model: Model, batch: Examples) -> Structure:
        size = min(2, batch.y.shape[1])
        request = Request(
            params=model.init(Key(0)).to(batch.y.device),
            x=each_column(batch.x, lambda column: column[:1, :size]),
            y=batch.y[:1, :size],
            share=torch.full((1, size), 1.0 / size, device=batch.y.device),
            padded=False,
            by_example=not self.whole(model),
            keys=[Key(0)],
        )
        log, saved = Log(), _Saved()
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                self._take(model, request, Plan(self.whole(model), True), log)
            mapped, note = True, ""
        except UserError:
            raise
        except Exception as error:
            log, mapped, note = Log(), False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._take(model, request, Plan(self.whole(model), False), log)
        operations: dict[str, list[str]] = {}
        for record in log.records:
            for name, _ in record.blocks:
                operations.setdefault(name, []).append(record.operation)
        for name, operation in log.formed.items():
            operations.setdefault(name, []).append(operation)
        formed = sum(4 * segment.size for segment in model.tensors if segment.name in log.formed)
        written = sum(4 * (record.grad.numel() if record.grad is not None else 0) for record in log.records)
        return Structure(
            mapped,
            {name: tuple(dict.fromkeys(used)) for name, used in operations.items()},
            frozenset(log.formed),
            (saved.bytes + written) // size + (formed if not self.whole(model) else 0) + 1,
            log.inplace,
            note,
        )


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


@dataclass(frozen=True)
class _Batch:
    """A batch of which only the shapes matter."""

    x: Inputs
    y: Tensor
    weight: Tensor | None = None


def _without_padding(request: Request) -> tuple[Request, Tensor | None]:
    """Put the client's first real example in the place of padding, whose content may have no loss at all.

    Its weight stays 0. Returned beside it: which clients have no real example.
    """
    real = request.share > 0
    if not request.padded or bool(real.all()):
        return replace(request, padded=False), None
    numbers = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    first = real.to(torch.int8).argmax(1, keepdim=True)
    index = torch.where(real, numbers, first)
    rows = torch.arange(real.shape[0], device=real.device)[:, None]
    filled = each_column(request.x, lambda column: column[rows, index])
    empty = ~real.any(1)
    return replace(request, x=filled, y=request.y[rows, index]), empty if bool(empty.any()) else None
