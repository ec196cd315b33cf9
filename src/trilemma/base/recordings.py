"""What a GPU is asked to do again and again: launched once, recorded, and replayed.

Launching hundreds of small kernels one by one from Python takes longer than they run; a CUDA graph of them is
one launch. The first time that something is asked for it is computed as everywhere; the second time what is
launched is recorded, and from then on replayed on whatever the arguments are. These are the same kernels in
the same order, so the same bits.

A recording keeps the memory that its kernels work in. Recordings that are kept together share it, for no two
of them run at a time, and only the latest few are kept. A process that goes on to something of other shapes
gives all of it back with `forget`, as a worker of a sweep does between cells that differ in them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")
Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]
"""What can be recorded: tensors by name to tensors by name, on one GPU, which is asked nothing on the way."""


class Recording:
    """What a function launched, the places it reads, and the places it writes."""

    def __init__(self, function: Function, arguments: Tensors, pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.arguments = {name: part.clone() for name, part in arguments.items()}
        stream = torch.cuda.current_stream(device_of(arguments))
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                self.found = function(self.arguments)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a recording that fails leaves us on its own
            raise

    def replay(self, arguments: Tensors) -> Tensors:
        """Do it with these arguments."""
        for name, part in arguments.items():
            self.arguments[name].copy_(part)
        self.graph.replay()
        return {name: part.clone() for name, part in self.found.items()}


class Recordings:
    """The latest recordings, at most `most` of them.

    None stands for what was computed once and is to be recorded next time, False for what cannot be recorded
    because it asks the GPU something on the way.

    >>> sums = Recordings(most=2)
    >>> sums.run("sum", lambda of: {"sum": of["x"] + of["y"]}, {"x": torch.ones(1), "y": torch.ones(1)})
    {'sum': tensor([2.])}
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[Hashable, Recording | Literal[False] | None] = OrderedDict()
        self._one_at_a_time = threading.Lock()
        _everywhere.add(self)

    def run(self, name: Hashable, function: Function, arguments: Tensors) -> Tensors:
        """Compute, or replay what was recorded under the same name for arguments of the same shapes.

        The name has to tell apart whatever else the function depends on. Nothing is recorded on a CPU.
        """
        if device_of(arguments).type != "cuda":
            return function(arguments)
        shapes = tuple((key, part.shape, part.dtype, part.device) for key, part in arguments.items())
        with self._one_at_a_time:
            return self._run((name, shapes), function, arguments)

    def forget(self) -> None:
        """Keep nothing of what was recorded so far."""
        with self._one_at_a_time:
            self.kept.clear()

    def _run(self, signature: Hashable, function: Function, arguments: Tensors) -> Tensors:
        if signature not in self.kept:
            found = function(arguments)
            self.kept[signature] = None
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)
            return found
        self.kept.move_to_end(signature)
        recording = self.kept[signature]
        if recording is None:
            try:
                recording = Recording(function, arguments, self._pool(device_of(arguments)))
            except RuntimeError:
                recording = False
            self.kept[signature] = recording
        return recording.replay(arguments) if recording else function(arguments)

    def _pool(self, device: torch.device) -> Any:
        """Return the memory of recordings that are kept; None where there are none: it went with the last."""
        kept = (one for one in self.kept.values() if isinstance(one, Recording))
        return next((one.graph.pool() for one in kept if device_of(one.arguments) == device), None)


@dataclass(frozen=True)
class Hurried:
    """How loops run that ask nothing on the way: for so many `steps`, whatever they find.

    On the list is put how many steps each problem would have taken (B,), loop by loop; `steps` + 1 where it
    would have gone on.
    """

    steps: int
    needed: list[Tensor] = field(default_factory=list)


@contextmanager
def unasked(steps: int) -> Iterator[list[Tensor]]:
    """Inside, a GPU is asked nothing and nothing is replayed: for what is recorded as a whole.

    Yields where `Hurried` loops tell how many steps were needed.

    >>> with unasked(3):
    ...     nobody_asks().steps
    3
    """
    hurried = Hurried(steps)
    kept = _hurried.set(hurried)
    try:
        yield hurried.needed
    finally:
        _hurried.reset(kept)


def nobody_asks() -> Hurried | None:
    """Return how loops run here; None: for as long as it takes."""
    return _hurried.get()


def at_least(numbers: Sequence[int], needed: float) -> list[int]:
    """Return those of rising numbers of steps that are at least what is needed.

    >>> at_least((2, 5, 9), 3)
    [5, 9]
    """
    return [steps for steps in numbers if steps >= needed]


def aside(work: Callable[[], Found]) -> Callable[[], Found]:
    """Do some work, and return a function that returns its result.

    While a GPU is recorded, the work is put on a stream of its own, beside what is recorded after it; the
    returned function has to be called before the recording ends, and waits for it. The small kernels of a
    recording leave most of a GPU idle, so two chains of them take as long as the longer one.

    >>> aside(lambda: 3)()
    3
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        found = work()
        return lambda: found
    here, there = torch.cuda.current_stream(), next(_streams(torch.cuda.current_device()))
    there.wait_stream(here)
    with torch.cuda.stream(there):
        found = work()
    # Holds what the work reads: memory that is given up would be used again on `here`, which does not wait.
    held = [work]

    def joined() -> Found:
        here.wait_stream(there)
        held.clear()
        return found

    return joined


SIDES = 3
"""How many streams there are for work that is done aside."""


@cache
def _streams(device: int) -> Iterator[torch.cuda.Stream]:
    return cycle([torch.cuda.Stream(device) for _ in range(SIDES)])  # type: ignore[no-untyped-call]


_hurried: ContextVar[Hurried | None] = ContextVar("hurried", default=None)

TOGETHER = 32
"""On a GPU problems are filled up to so many, 1.5 times that, or doubles of these: few sizes are recorded."""


def filled_up(problems: Tensor) -> Tensor:
    """Return problems (B, …) and, on a GPU, copies of the first: see `TOGETHER`."""
    size = max(TOGETHER, 1 << max(len(problems) - 1, 0).bit_length())
    size = 3 * size // 4 if TOGETHER < len(problems) <= 3 * size // 4 else size
    missing = size - len(problems) if problems.is_cuda else 0
    return torch.cat([problems, problems[:1].expand(missing, *problems.shape[1:])]) if missing else problems


_everywhere: weakref.WeakSet[Recordings] = weakref.WeakSet()
"""All that is kept in this process, whoever keeps it."""


def forget() -> None:
    """Give the memory of everything that was recorded in this process back to whoever needs it next."""
    for recordings in [*_everywhere]:
        recordings.forget()


def device_of(tensors: Tensors) -> torch.device:
    """Return where tensors are."""
    return next(iter(tensors.values())).device
