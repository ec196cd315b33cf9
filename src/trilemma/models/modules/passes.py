"""Forward and backward passes of some clients' examples through a module: flat, under vmap, or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import is_
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map_only

from trilemma.base.errors import UserError
from trilemma.models.engines.clipping import PER_CLIENT
from trilemma.models.engines.engine import Pass, PassRequest, Rows, collect
from trilemma.models.engines.terms import Term, Whole
from trilemma.models.modules.flat import FlatFrame, FlatLayout
from trilemma.models.modules.frame import CallFrame
from trilemma.models.modules.normalisations import MixesExamples
from trilemma.models.modules.owners import NormalisedTogether, NotFlat, Owners
from trilemma.models.modules.randomness import Draws, seeds_of
from trilemma.models.modules.recorder import Log, Recorder, Slot, functions_seen
from trilemma.models.modules.statistics import Statistics
from trilemma.models.modules.watch import Watch
from trilemma.models.types import Inputs, each_column


@dataclass(frozen=True)
class PassSource:
    """A module and what is trained of it.

    `trained` maps names, in flat order, to the module's own parameters; `statistics` the ids of the buffers
    of batch normalisation to the names under which they are kept per client. `loss` takes outputs and
    targets of a batch of one, or of a client's batch where `coupled`.
    """

    module: nn.Module
    trained: Mapping[str, nn.Parameter]
    given: Callable[[Any, Tensor], Tensor]
    """The loss as it was given."""
    loss: Callable[[Any, Tensor], Tensor]
    statistics: Mapping[int, str]
    coupled: bool = False
    many: Callable[[Any, Tensor], Tensor] | None = None
    """The loss of every example of a batch by torch's own code; None: they are taken one by one."""

    def call(self, x: Inputs) -> Any:
        """Run the module on a batch: a tensor is its argument, columns are passed by name.

        What it left on itself is put back: else one record would be in what others contribute.
        """
        before = self._contents()
        versions = [buffer._version for _, buffer, _ in self.pristine]
        try:
            outputs = self.module(x) if isinstance(x, Tensor) else self.module(**x)
        finally:  # a change may be why the way forward failed: it is what has to be said then
            now = dict(self.module.named_buffers()) if self.pristine else {}
            after = self._contents()
            if len(after) != len(before) or not all(map(is_, after, before)):
                self._put_back(before)
            self._refuse_changes(now, versions)
        return getattr(outputs, "logits", outputs)

    def _contents(self) -> list[Any]:
        """Return how much is in every place, under which names, and what it is."""
        values = map(dict.values, self.places)
        return [*map(len, self.places), *chain.from_iterable(self.places), *chain.from_iterable(values)]

    def _put_back(self, contents: list[Any]) -> None:
        sizes, rest = contents[: len(self.places)], iter(contents[len(self.places) :])
        names = [[*islice(rest, size)] for size in sizes]
        for own, keys in zip(self.places, names, strict=True):
            own.clear()
            own.update(zip(keys, rest, strict=False))

    def _refuse_changes(self, now: Mapping[str, Tensor], versions: list[int]) -> None:
        """Refuse a forward pass that changed buffers, and give them their values again."""
        changed = []
        for (name, buffer, value), version in zip(self.pristine, versions, strict=True):
            if now.get(name) is not buffer or buffer._version != version:
                changed.append(name)
                with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    buffer.copy_(value)
        if changed:
            raise UserError(
                f"the module's forward pass changes its buffers {changed}: clients that step side by side "
                "would change them for each other. Put these parts in eval mode, or take the statistics out "
                "of forward"
            )

    @cached_property
    def places(self) -> list[dict[str, Any]]:
        """Where parts of the module may leave something."""
        return [own for part in self.module.modules() for own in (vars(part), part._buffers)]

    @cached_property
    def pristine(self) -> list[tuple[str, Tensor, Tensor]]:
        """Every buffer and a copy of it; those of batch normalisation are kept per client."""
        norms = [part for part in self.module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        skip = {id(buffer) for part in norms for buffer in part.buffers()}
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return [
                (name, buffer, buffer.detach().clone())
                for name, buffer in self.module.named_buffers()
                if id(buffer) not in skip
            ]

    def slots(self, values: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[int, Slot]:
        """Return what stands for every trained parameter."""
        slots = {}
        for name, parameter in self.trained.items():
            value = values[name].to(parameter.dtype)
            same = own[name] is values[name]
            slots[id(parameter)] = Slot(name, value, value if same else own[name].to(parameter.dtype))
        return slots


@dataclass(frozen=True)
class PassPlan:
    """How a group goes through.

    `whole` shows the module a client's batch at a time, else it sees one example; the other axes are hidden
    under vmap ("mapped"), or gone through one by one ("looped"). "flat" shows it all examples as one batch;
    `layouts` then says where they lie. A loop takes a client's batch at a time if the module keeps its
    examples `apart`, or sees whole clients.
    """

    way: Way
    whole: bool = False
    layouts: tuple[FlatLayout, ...] | None = None
    apart: bool = False


Way = Literal["flat", "mapped", "looped"]


def take(
    source: PassSource, params: Mapping[str, Tensor], request: PassRequest, plan: PassPlan, log: Log
) -> Pass:
    """Take a group through a forward and a backward pass."""
    seeds = None
    if request.keys is not None:
        seeds = seeds_of(request.keys, request.first, request.y.shape[1], request.y.device)
    through = {"flat": _flat, "mapped": _mapped, "looped": _looped}[plan.way]
    with torch.enable_grad(), plainly(plan.way != "looped"), functions_seen():
        return through(source, params, request, plan, seeds, log)


def _mapped(
    source: PassSource,
    params: Mapping[str, Tensor],
    request: PassRequest,
    plan: PassPlan,
    seeds: Tensor | None,
    log: Log,
) -> Pass:
    """Hide clients, and examples unless the module sees whole clients, under vmap."""
    clients, size = request.share.shape
    personal = request.params.dim() == 2
    axes = (clients,) if plan.whole else (clients, size)
    lead = axes if request.by_example else (clients,)
    own = {name: _copies(value, lead, personal) for name, value in params.items()}
    # The first axis of shared parameters is not the clients'.
    values = dict(params) if personal else {name: value[0] for name, value in params.items()}
    anchor = torch.zeros(axes, device=request.share.device, requires_grad=True)
    present = (request.share > 0).to(anchor.dtype) if request.padded else None
    updated: dict[str, Tensor] = {}

    def unit(
        values: dict[str, Tensor],
        own: dict[str, Tensor],
        x: Inputs,
        y: Tensor,
        share: Tensor,
        anchor: Tensor,
        seeds: Tensor | None,
        present: Tensor | None,
        buffers: dict[str, Tensor],
    ) -> Tensor:
        frame = CallFrame(anchor, axes)
        statistics = Statistics(source.statistics, buffers, present) if plan.whole else None
        slots = source.slots(values, own)
        with Recorder(slots, frame, log, Draws(seeds, not request.dropout), statistics):
            if plan.whole:
                loss = losses(source, source.call(x), y, share).sum()
            else:
                loss = source.loss(source.call(each_column(x, lambda column: column[None])), y[None]) * share
        if statistics is not None:
            updated.update({name: frame.plain(each)[:, 0] for name, each in statistics.updated.items()})
        return loss.float()

    dims = (
        0 if personal else None,
        0,
        0,
        0,
        0,
        0,
        *(0 if part is not None else None for part in (seeds, present)),
    )
    inner = (None, 0 if request.by_example else None, 0, 0, 0, 0, dims[6], dims[7], None)
    run = unit if plan.whole else vmap(unit, in_dims=inner)
    arguments = (
        *(values, own, request.x, request.y, request.share, anchor, seeds, present),
        dict(request.buffers),
    )
    found = vmap(run, in_dims=(*dims, 0 if request.buffers else None))(*arguments)
    parts, grads = log.back(found.sum(), own)
    for name, grad in grads.items():
        parts.append(((name, None), Whole(grad if lead == (clients, size) else grad[:, None])))
    shapes = {name: value.shape[1:] for name, value in params.items()}
    loss = found.detach() if plan.whole else found.detach().sum(1)
    return Pass(loss, collect(parts, shapes), (clients, size), updated)


def _flat(
    source: PassSource,
    params: Mapping[str, Tensor],
    request: PassRequest,
    plan: PassPlan,
    seeds: Tensor | None,
    log: Log,
) -> Pass:
    """Show the module all examples as one batch; the parameters are shared."""
    layouts = record(source, params, request) if plan.layouts is None else plan.layouts
    batch = _Flat(source, params, request)
    frame = FlatFrame(batch.anchor, batch.shape, layouts)
    draws = Draws(None if seeds is None else seeds.flatten(), not request.dropout)
    y, share = request.y.flatten(0, 1), request.share.flatten()
    with Recorder(batch.slots, frame, log, draws):
        outputs = source.call(batch.x)
    with Watch() if source.many is None else nullcontext():  # torch's own code lets no number out
        found = losses(source, outputs, y, share)
    found = found.view(batch.shape)
    log.layouts = tuple(frame.layouts)
    parts, grads = log.back(found.sum(), batch.own)
    for name, grad in grads.items():
        parts.append(((name, None), Whole(grad.view(*batch.shape, 1, *grad.shape[1:]))))
    shapes = {name: value.shape[1:] for name, value in params.items()}
    return Pass(found.detach().sum(1), collect(parts, shapes), batch.shape)


class _Flat:
    """What a module gets to see when all examples are one batch."""

    def __init__(self, source: PassSource, params: Mapping[str, Tensor], request: PassRequest) -> None:
        clients, size = request.share.shape
        self.shape = clients, size
        self.anchor = torch.zeros(clients, size, device=request.share.device, requires_grad=True)
        self.values = {name: value[0] for name, value in params.items()}
        self.x = each_column(request.x, lambda column: column.flatten(0, 1))
        # A parameter with a first axis of length one is broadcast along the examples: each can have its own.
        self.own = {
            name: value.expand(clients * size, *value.shape[1:]).detach().requires_grad_()
            for name, value in self.values.items()
            if value.dim() > 1 and len(value) == 1
        }
        self.slots = source.slots(self.values, {**self.values, **self.own})


def record(
    source: PassSource,
    params: Mapping[str, Tensor],
    request: PassRequest,
    known: tuple[FlatLayout, ...] | None = None,
) -> tuple[FlatLayout, ...]:
    """Find out whose every number is on the way forward, and so where examples lie: where it is `known`.

    Nothing is kept for the way back.
    """
    batch, owners = _Flat(source, params, request), Owners()
    frame = FlatFrame(batch.anchor, batch.shape, known, owners)
    batch.x = each_column(batch.x, torch.clone)
    own = {name: value.detach().clone().requires_grad_() for name, value in batch.own.items()}
    slots = source.slots(batch.values, {**batch.values, **own})
    owners.begin(
        frame.numbers, batch.values.values(), _columns(batch.x), own.values(), [batch.anchor.view(-1)]
    )
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept)
    recorder = Recorder(slots, frame, Log(), Draws(None, off=True))
    with torch.enable_grad(), plainly(True), functions_seen(), nothing, owners, recorder:
        outputs = source.call(batch.x)
    owners.rows(outputs, frame.examples)
    alone = tree_map_only(Tensor, _leaf, outputs)
    with torch.enable_grad(), Watch():
        found = losses(source, alone, request.y.flatten(0, 1), request.share.flatten())
    if any(leaf is batch.anchor for leaf in leaves(found)):
        raise NotFlat("the loss reads what the module has computed besides its outputs")
    return tuple(frame.layouts)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to which the way back from a tensor leads."""
    ahead, seen = [tensor.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable


def mixed(source: PassSource, params: Mapping[str, Tensor], x: Inputs, count: int) -> str:
    """Say how a module mixes the examples of a batch (n, …), or may for all that is known; else nothing."""
    owners, x = Owners(), each_column(x, torch.clone)
    numbers = owners.numbers(count, next(iter(params.values())).device)
    values = {name: value[0] for name, value in params.items()}
    owners.begin(numbers, values.values(), _columns(x))
    draws, statistics = Draws(None, off=True), Statistics({}, {})
    try:
        recorder = Recorder(source.slots(values, values), None, Log(), draws, statistics)
        with torch.enable_grad(), plainly(), functions_seen(), owners, recorder:
            outputs = source.call(x)
        owners.rows(outputs, count)
    except NormalisedTogether:
        raise MixesExamples(
            "batch normalisation mixes the examples of a batch, so no example has a gradient of its own: "
            f"{PER_CLIENT}, or use nn.GroupNorm"
        ) from None
    except UserError:
        raise
    except Exception as error:  # whatever a module does that is not known
        return said(error)
    return ""


def said(error: Exception) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _columns(x: Inputs) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [*x.values()]


def _copies(value: Tensor, lead: tuple[int, ...], personal: bool) -> Tensor:
    """Return a copy of a parameter (k or 1, …) for each of `lead`, without taking memory, to be followed."""
    wide = value.unsqueeze(1) if len(lead) == 2 else value
    return wide.expand(*lead, *value.shape[1:]).detach().requires_grad_()


def _looped(
    source: PassSource,
    params: Mapping[str, Tensor],
    request: PassRequest,
    plan: PassPlan,
    seeds: Tensor | None,
    log: Log,
) -> Pass:
    """Take clients, or examples, forward one by one, by autograd alone, and all of them back at once.

    Every unit has parameters of its own that autograd follows, which keeps the units apart on the way back.
    """
    clients, size = request.share.shape
    width = size if (plan.whole or plan.apart) and not request.by_example else 1
    x = {"": request.x} if isinstance(request.x, Tensor) else request.x
    units: list[Unit] = []
    updated: dict[str, list[Tensor]] = {}
    shared = all(len(value) == 1 for value in params.values())
    for row in range(clients):
        if row == 0 or not shared:
            values = {name: value[row if len(value) > 1 else 0] for name, value in params.items()}
        buffers = {name: part[row] for name, part in request.buffers.items()}
        for start in range(0, size, width):
            columns = slice(start, start + width)
            share, targets = request.share[row, columns], request.y[row, columns]
            mine = {name: column[row, columns] for name, column in x.items()}
            drawn = None if seeds is None else seeds[row, columns]
            present = share > 0 if request.padded else None
            if present is not None and bool(present.any()):
                targets, mine = targets[present], {name: column[present] for name, column in mine.items()}
                drawn = None if drawn is None else drawn[present]
                share = share[present]
            own = {name: value.detach().requires_grad_() for name, value in values.items()}
            statistics = Statistics(source.statistics, buffers)
            with Recorder(
                source.slots(values, own), None, log, Draws(drawn, not request.dropout), statistics
            ):
                outputs = source.call(mine[""] if isinstance(request.x, Tensor) else mine)
            units.append(Unit(own, outputs, targets, share))
            for name, fresh in statistics.updated.items():
                updated.setdefault(name, []).append(fresh.detach())
    found = _losses_of(source, units, width == 1)
    leaves = [value for unit in units for value in unit.own.values()]
    grads = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
    lead = (clients, len(units) // clients)
    terms: dict[str, dict[Rows, list[Term]]] = {}
    for number, name in enumerate(params):
        grown = [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves[number :: len(params)], grads[number :: len(params)], strict=True)
        ]
        terms[name] = {None: [Whole(torch.stack(grown).view(*lead, *params[name].shape[1:]))]}
    total = found.detach().to(request.share.dtype).view(clients, -1).sum(1)
    statistics_ = {name: torch.stack(parts) for name, parts in updated.items()}
    return Pass(total, terms, (clients, size), statistics_)


@dataclass(frozen=True)
class Unit:
    """What went through a module alone: an example, or a client's batch."""

    own: Mapping[str, Tensor]
    """The parameters, this unit's own to autograd."""
    outputs: Any
    targets: Tensor
    share: Tensor


def _losses_of(source: PassSource, units: list[Unit], by_example: bool) -> Tensor:
    """Return every unit's Σ_i w_i ℓ_i: in one go where their outputs are alike, else one by one."""
    first = units[0].outputs
    alike = isinstance(first, Tensor) and all(
        isinstance(unit.outputs, Tensor)
        and unit.outputs.shape[1:] == first.shape[1:]
        and unit.outputs.dim() > 0
        and len(unit.outputs) == len(unit.targets)
        for unit in units
    )
    if source.many is not None and alike:
        outputs, targets = (
            torch.cat([getattr(unit, part) for unit in units]) for part in ("outputs", "targets")
        )
        weighted = source.many(outputs, targets) * torch.cat([unit.share for unit in units])
        sizes = [len(unit.targets) for unit in units]
        if len(set(sizes)) == 1:
            return weighted.view(len(units), -1).sum(1)
        return torch.stack([part.sum() for part in torch.split(weighted, sizes)])
    if by_example:
        return torch.stack([source.loss(unit.outputs, unit.targets) * unit.share.sum() for unit in units])
    return torch.stack([losses(source, unit.outputs, unit.targets, unit.share).sum() for unit in units])


def losses(source: PassSource, outputs: Any, y: Tensor, share: Tensor) -> Tensor:
    """Return every example's w_i ℓ_i; of a coupled loss the batch's, weighted by all of the w_i."""
    if source.coupled:
        return source.loss(outputs, y) * share.sum()
    if source.many is not None:
        return source.many(outputs, y) * share
    rows = tree_map_only(Tensor, lambda part: part.unsqueeze(1), (outputs, y))
    return vmap(source.loss)(*rows) * share


class _Straight:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _straight(*arguments: Any, **options: Any) -> Iterator[None]:
    yield


_STRAIGHT = {"CheckpointFunction": _Straight, "_checkpoint_without_reentrant_generator": _straight}


@contextmanager
def plainly(one_for_many: bool = False) -> Iterator[None]:
    """Switch activation checkpointing off: what it would compute twice is kept anyway.

    If `one_for_many`, say so, as a compiler does: code that asks, as transformers' do, whether a batch needs
    its mask, then takes the way that is right for every batch.
    """
    module = torch.utils.checkpoint
    before = {name: getattr(module, name) for name in _STRAIGHT}
    for name, function in _STRAIGHT.items():
        setattr(module, name, function)
    compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = one_for_many or compiling
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = compiling
        for name, function in before.items():
            setattr(module, name, function)
