"""What happens to every operation of a module that touches a trained parameter.

The module runs as its author wrote it, with parameters of its own that are never read (they are NaN, so that
a read would be seen): the recorder stands between it and torch and puts the right tensor in their place.

* An operation it knows (`trilemma.models.modules.operations`) runs with the shared tensor, and its input and
  its output's gradient are written down: one `Term` of the parameter's gradient.
* Any other gets the unit's own copy, whose gradient autograd forms.

Whichever it is, every use of every parameter is accounted for: layers used twice, tied weights, functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _autograd
from torch.autograd import Function
from torch.utils._python_dispatch import _get_current_dispatch_mode

from trilemma.base.errors import UserError
from trilemma.models.engines.engine import Block, Part
from trilemma.models.modules.flat import FlatFrame, FlatLayout
from trilemma.models.modules.frame import CallFrame, Watched
from trilemma.models.modules.owners import NotFlat, Owners
from trilemma.models.modules.randomness import Draws
from trilemma.models.modules.statistics import Statistics
from trilemma.models.modules.watch import Watch, tensors


@dataclass(frozen=True)
class Slot:
    """What stands for a trained parameter, or for some rows of one.

    `value` has the values; `own` is the unit's copy that autograd follows. `transposed` marks a parameter
    that was turned before it was used.
    """

    name: str
    value: Tensor
    own: Tensor
    rows: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def block(self) -> Block:
        """Where its gradient goes."""
        return self.name, self.rows


@dataclass
class CallRecord:
    """One operation: given the gradient of its output, it knows its terms."""

    operation: str
    blocks: tuple[Block, ...]
    terms: Callable[[Tensor], list[Part]]
    output: Watched
    grad: Tensor | None = None
    """Of the output, (k, b, …), after the way back; None if the loss does not depend on it."""


@dataclass
class Log:
    """What a pass through the module left."""

    records: list[CallRecord] = field(default_factory=list)
    formed: dict[str, str] = field(default_factory=dict)
    """Parameters whose gradients autograd forms, and the operation that asked for it."""
    layouts: tuple[FlatLayout, ...] = ()
    """Where the examples lay, in a flat pass."""
    inplace: bool = False
    """Whether the module changed a tensor in place."""
    guarded: bool = True
    """Whether outputs are copied before they are watched, as they must be where they are changed in place."""

    floats: int = 0
    """How many numbers terms keep besides inputs and outputs."""

    def back(self, loss: Tensor, own: Mapping[str, Tensor]) -> tuple[list[Part], dict[str, Tensor]]:
        """Go back from the loss; return the terms, and the gradients of `own` where there are any."""
        edges: list[Any] = [record.output.edge for record in self.records]
        grads = torch.autograd.grad(loss, [*edges, *own.values()], allow_unused=True)
        parts: list[Part] = []
        for record, grad in zip(self.records, grads[: len(edges)], strict=True):
            if grad is not None:  # in float32 at least: norms are never summed in less
                record.grad = at_least_single(record.output.apart(grad))
                found = record.terms(record.grad)
                self.floats += sum(term.floats for _, term in found)
                parts += found
        formed = zip(own, grads[len(edges) :], strict=True)
        return parts, {name: grad for name, grad in formed if grad is not None}


class Recorder(Watch):
    """Stands between a module and torch for the time of one forward pass."""

    def __init__(
        self,
        slots: dict[int, Slot],
        frame: CallFrame | FlatFrame | None,
        log: Log,
        draws: Draws,
        statistics: Statistics | None = None,
    ) -> None:
        from trilemma.models.modules.operations import OPERATIONS

        super().__init__()
        self.operations = OPERATIONS
        self.slots = dict(slots)
        self.frame = frame
        self.log = log
        self.draws = draws
        self.statistics = statistics
        self.kept: list[Tensor] = []

    def __enter__(self) -> Recorder:
        """Stand between the module and torch."""
        super().__enter__()  # type: ignore[no-untyped-call]
        _STANDING.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Step aside."""
        _STANDING.pop()
        super().__exit__(*exception)

    @property
    def watching(self) -> bool:
        """See `Watch`; or it is looked at whose every number is."""
        return self.frame is not None or isinstance(_get_current_dispatch_mode(), Owners)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        if _in_place(func, args, kwargs):
            if self.slot(args[0] if args else None) is not None:
                raise UserError(
                    f"the module changes its own parameters in its forward pass ({func.__name__}): they are "
                    "the clients' to change. Take that out of forward"
                )
            if self.frame is not None and not self.log.guarded:
                raise NotFlat("the module changes tensors in place, which it did not when it was recorded")
            self.log.inplace = True
        operation = self.operations.get(func)
        if operation is not None:
            done = operation(self, func, *args, **kwargs)
            if done is not NotImplemented:
                return done
        if not self._touched(args) and not (kwargs and self._touched(kwargs.values())):
            return func(*args, **kwargs)
        if _asks_shape(func):
            return func(*args, **kwargs)
        view = self._view(func, args, kwargs)
        if view is not None:
            return view
        name = getattr(func, "__name__", str(func))
        return func(*self.own(args, name), **self.own(kwargs, name))

    def _touched(self, values: Iterable[Any]) -> bool:
        """Tell whether trained parameters are among some arguments, or in lists among them."""
        for each in values:  # a loop: this is asked of every operation, and `any` takes twice as long
            if id(each) in self.slots or (isinstance(each, list | tuple) and self._touched(each)):
                return True
        return False

    def slot(self, tensor: Any) -> Slot | None:
        """Return what stands for a tensor, if it is a trained parameter."""
        return self.slots.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def value(self, tensor: Any) -> Any:
        """Return a tensor's values."""
        slot = self.slot(tensor)
        return tensor if slot is None else slot.value

    def own(self, tree: Any, operation: str) -> Any:
        """Replace parameters by the unit's own copies."""
        if isinstance(tree, Tensor):
            slot = self.slot(tree)
            if slot is None:
                return tree
            flat = isinstance(self.frame, FlatFrame) and torch.is_grad_enabled()
            if flat and slot.own is slot.value:
                raise NotFlat(f"{slot.name} is used by {operation}, which is not known")
            if torch.is_grad_enabled():
                self.log.formed.setdefault(slot.name, operation)
            return slot.own
        if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
            return type(tree)(self.own(part, operation) for part in tree)
        if type(tree) is dict:
            return {key: self.own(part, operation) for key, part in tree.items()}
        return tree

    def dropped(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """Return what dropout leaves of `like`, a mask of `shape`: every example's is its own."""
        if not isinstance(self.frame, FlatFrame):
            return self.draws.kept(shape, rate, like)
        layout = self.frame.layout(like)
        own = [1 if one == 1 else size for one, size in zip(shape, layout.shape, strict=True)]
        mask = self.draws.each(own, rate, like)
        return mask if mask.dim() == 0 else layout.together(mask)

    def recording(self, *slots: Slot | None) -> bool:
        """Tell whether an operation on these is to be written down."""
        return self.frame is not None and torch.is_grad_enabled() and any(slot is not None for slot in slots)

    def write(
        self, operation: str, slots: list[Slot], output: Tensor, terms: Callable[[Tensor], list[Part]]
    ) -> Tensor:
        """Write an operation down; return its output, watched."""
        assert self.frame is not None
        output, watched = self.frame.watch(output, self.log.guarded)
        if watched is not None:  # else nothing goes back, and nothing is kept for it
            blocks = tuple(slot.block for slot in slots)
            self.log.records.append(CallRecord(operation, blocks, terms, watched))
        return output

    def track(self, tensor: Tensor, slot: Slot) -> Tensor:
        """Let a view of a parameter stand for it."""
        self.kept.append(tensor)  # an id names a tensor only while it lives
        self.slots[id(tensor)] = slot
        return tensor

    def same(self, slot: Slot, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Let what has a parameter's own gradient stand for it: the parameter in another type, or moved."""
        value = change(slot.value)
        own = value if slot.own is slot.value else change(slot.own)
        return self.track(value, replace(slot, value=value, own=own))

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turned or cut along its rows, a matrix is still known: return its tracked views, else None."""
        slot = self.slot(args[0]) if args else None
        if slot is None or slot.transposed or self.frame is None:
            return None
        if func in _CASTS:
            return self.same(slot, lambda part: func(part, *args[1:], **kwargs))
        if kwargs:
            return None
        if func in _TURNS and slot.value.dim() == 2 and slot.rows is None:
            if func in _SWAPS and {axis % 2 for axis in args[1:]} != {0, 1}:
                return None
            return self.track(
                slot.value.mT, replace(slot, value=slot.value.mT, own=slot.own.mT, transposed=True)
            )
        if func in _CUTS and slot.rows is None and args[2:] in ((), (0,)):
            pieces = list(zip(func(slot.value, *args[1:]), func(slot.own, *args[1:]), strict=True))
            found, start = [], 0
            for value, own in pieces:
                rows = (start, start + value.shape[0])
                found.append(self.track(value, replace(slot, value=value, own=own, rows=rows)))
                start = rows[1]
            return tuple(found)
        return None


_STANDING: list[Recorder] = []
"""The recorders in charge, the innermost last."""


@contextmanager
def functions_seen() -> Iterator[None]:
    """Let recorders stand in the way of autograd functions too, which are no torch functions.

    And of what is done to tensors that are kept for the way back.
    """
    before, push = Function.__dict__["apply"], _autograd._push_saved_tensors_default_hooks

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _STANDING and isinstance(_STANDING[-1].frame, FlatFrame) and torch.is_grad_enabled():
            _STANDING[-1].failed = NotFlat(f"{cls.__name__} has a way back of its own")
            raise _STANDING[-1].failed
        if _STANDING:
            own, name = _STANDING[-1].own, cls.__name__
            args, kwargs = own(args, name), own(kwargs, name)
        return before.__get__(None, cls)(*args, **kwargs)

    def keep(pack: Any, unpack: Any) -> None:
        if _STANDING and _STANDING[-1].frame is not None:
            _STANDING[-1].failed = NotFlat("tensors that are kept for the way back are changed")
            raise _STANDING[-1].failed
        push(pack, unpack)

    type.__setattr__(Function, "apply", classmethod(apply))
    _autograd._push_saved_tensors_default_hooks = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        type.__setattr__(Function, "apply", before)
        _autograd._push_saved_tensors_default_hooks = push


_SWAPS = {torch.Tensor.transpose, torch.transpose}
_TURNS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT")} | {torch.Tensor.t, torch.t} | _SWAPS
_CASTS = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.type_as}
_CUTS = {torch.Tensor.chunk, torch.chunk, torch.Tensor.split, torch.split}

_SHAPES = {
    getattr(torch.Tensor, name)
    for name in (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
        *("element_size", "get_device", "is_contiguous", "__len__", "__hash__", "type", "is_signed"),
    )
}
_SHAPES |= {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_leaf")
}


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation changes a tensor that the backward pass may go through."""
    changes = (
        _named_in_place(func)
        or (kwargs and kwargs.get("inplace", False))
        or (func in _RECTIFIERS and any(each is True for each in args[1:]))
    )
    return bool(changes) and any(each.is_floating_point() for each in tensors(args[:1]))


@lru_cache(maxsize=4096)
def _named_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__int__", "__index__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_RECTIFIERS = {
    F.relu,
    F.relu6,
    F.leaky_relu,
    F.elu,
    F.selu,
    F.celu,
    F.silu,
    F.hardswish,
    F.hardsigmoid,
    F.mish,
}


def at_least_single(values: Tensor) -> Tensor:
    """Return numbers in float32, or in float64 if they are."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _asks_shape(func: Any) -> bool:
    """Tell whether an operation reads no values."""
    return func in _SHAPES
