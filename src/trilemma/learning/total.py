"""A step that is paid for ends in a message, whatever data and code do.

Whether a client answers, with which status and in which shape would be a release that no ε covers. So in a
private step (`step`) every algorithm gets its gradients from one function (`gradients`), and that is total:

* where examples are clipped, one that fails counts as zero, and no other one changes: the client's examples
  are taken again in halves, down to the one that fails;
* where clients are clipped, a client that fails counts as zero.

To fail is to raise anything at all, or not to be finite. A client's own state is kept where its new one is
not finite. What else goes wrong in a step of a real client makes the whole of its contribution
zero (`_Nobody`).

In a simulation the same code runs, but what is a mistake of its user (`SURFACING`), or comes from outside of
models and losses, is raised. Without privacy nothing here changes anything.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from trilemma import models
from trilemma.data.types import Batch, each
from trilemma.errors import UserError
from trilemma.keys import Key
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, State
from trilemma.models import replay
from trilemma.models.clipping import NO_CLIP
from trilemma.models.types import Buffers, Model
from trilemma.privacy.types import NoiseSource

SURFACING = (UserError, MemoryError, torch.OutOfMemoryError)
"""What a simulation raises: mistakes in a configuration or a task, and memory that cannot hold it."""

FAILED = "failed"
"""The name under which a step reports how many examples (clients) counted as zero; absent where none did."""


@dataclass
class Failures:
    """What counted as zero in a step: how often for each client, and what was raised first."""

    counts: Tensor
    why: str = ""

    def note(self, row: int, error: BaseException | None) -> None:
        """Count a failure of the client in `row`, and keep the first reason."""
        self.counts[row] += 1
        if not self.why:
            said = "" if error is None else "".join(traceback.format_exception(error))
            self.why = said or "a loss or a gradient is not finite"


@dataclass
class _Paid:
    """The private step under way. `deployed`: by a real client; `nothing`: of which all counts as zero."""

    failures: Failures
    deployed: bool
    nothing: bool = False

    def tried(self, compute: Callable[[], models.Gradients]) -> models.Gradients | BaseException | None:
        """Return gradients that are finite, else what was raised, or None where nothing was."""
        try:
            found = compute()
            return found if _finite(found) else None
        except BaseException as error:
            mistake = isinstance(error, SURFACING) or not isinstance(error, Exception)
            if mistake and not self.deployed:
                raise
            return error


_PAID: ContextVar[_Paid | None] = ContextVar("paid", default=None)


def step(
    algorithm: Algorithm,
    broadcast: State,
    state: State,
    clients: Clients,
    round_: int,
    key: Key,
    again: Callable[[], NoiseSource] | None = None,
) -> tuple[ClientStep, Failures]:
    """Let k clients take a step of an algorithm; return beside it what counted as zero.

    Args:
        algorithm: The algorithm; without a release its step is taken as it is.
        broadcast: What the server sent.
        state: The clients' state.
        clients: The clients.
        round_: The round.
        key: What the step draws from.
        again: Of a real client: the source of the same noise, as if none of it had been drawn.
    """
    failures = Failures(torch.zeros(len(clients.ids), dtype=torch.int64))
    if algorithm.release is None:
        return algorithm.client(broadcast, state, clients, round_, key), failures
    with _paid(_Paid(failures, deployed=again is not None)) as paid:
        try:
            done = algorithm.client(broadcast, state, clients, round_, key)
        except BaseException as error:
            if again is None:
                raise
            failures.note(0, error)
            done = None
        if done is None:
            assert again is not None
            paid.nothing = True
            done = algorithm.client(broadcast, state, _Nobody(clients, again()), round_, key)
    report = {**done.report, FAILED: failures.counts} if bool(failures.counts.any()) else done.report
    return replace(done, state=_kept(done.state, state), report=report), failures


@contextmanager
def _paid(paid: _Paid) -> Iterator[_Paid]:
    token = _PAID.set(paid)
    try:
        yield paid
    finally:
        _PAID.reset(token)


def gradients(
    model: Model,
    params: Tensor,
    batch: Batch,
    *,
    clip: models.Clip = NO_CLIP,
    weight_decay: float = 0.0,
    buffers: Buffers | None = None,
    keys: Sequence[Key] | None = None,
) -> models.Gradients:
    """Return the gradients of k clients, as `models.gradients` does: total in a private step.

    Of what failed the loss is left out; of a client of whom all failed it is NaN.
    """
    paid = _PAID.get()
    if paid is None:
        return replay.gradients(
            model, params, batch, clip=clip, weight_decay=weight_decay, buffers=buffers, keys=keys
        )
    clients, found = len(batch.y), None
    if not paid.nothing:
        found = paid.tried(
            lambda: replay.gradients(
                model, params, batch, clip=clip, weight_decay=weight_decay, buffers=buffers, keys=keys
            )
        )
        if isinstance(found, models.Gradients):
            return found
    rows = []
    for row in range(clients):
        asked = _Row(
            paid,
            row,
            model,
            params[row] if params.dim() == 2 else params,
            _part(batch, row),
            clip,
            None if buffers is None else {name: part[row : row + 1] for name, part in buffers.items()},
            None if keys is None else keys[row],
        )
        rows.append(asked.gradients(found if clients == 1 else None))
    kept = {name: torch.cat([one.buffers[name] for one in rows]) for name in rows[0].buffers}
    value = torch.cat([one.value for one in rows])
    if weight_decay:
        value = value + weight_decay * params
    loss, clipped = (torch.cat([getattr(one, name) for one in rows]) for name in ("loss", "clipped"))
    return models.Gradients(value, loss, clipped, buffers=kept)


@dataclass(frozen=True)
class _Row:
    """One client's part of a batch that failed. Weight decay is not its business."""

    paid: _Paid
    row: int
    model: Model
    params: Tensor
    batch: Batch
    clip: models.Clip
    buffers: Buffers | None
    key: Key | None

    def gradients(self, before: BaseException | models.Gradients | None) -> models.Gradients:
        """Return its gradients; `before` is what was raised where it is the only client and was tried."""
        if self.paid.nothing:
            return self._nothing()
        if self.clip.unit == "example" and not self.model.buffers:
            return self._by_example()
        found = before or self._computed(slice(0, self.batch.y.shape[1]))
        if isinstance(found, models.Gradients):
            return found
        self.paid.failures.note(self.row, found)
        return self._nothing()

    def _computed(self, columns: slice) -> models.Gradients | BaseException | None:
        key = None if self.key is None else [self.key.fold("from", columns.start)]
        batch = _part(self.batch, 0, columns)
        return self.paid.tried(
            lambda: models.gradients(
                self.model, self.params, batch, clip=self.clip, buffers=self.buffers, keys=key
            )
        )

    def _nothing(self) -> models.Gradients:
        """Return a gradient of zero, without a look at the data; running statistics stay as they are."""
        like = self.params
        one, empty = like.new_zeros(1), like.new_zeros(1, self.model.dim)
        return models.Gradients(empty, one * math.nan, one, buffers=self.buffers or {})

    def _by_example(self) -> models.Gradients:
        """Add up what the examples contribute that do not fail, each with its weight in the whole batch."""
        assert self.batch.weight is not None
        weight = self.batch.weight[0]
        present = weight > 0
        value = torch.zeros(1, self.model.dim, dtype=torch.float64, device=self.params.device)
        loss, mass, clipped, counted = 0.0, 0.0, 0.0, 0
        waiting, dtype = [slice(0, len(weight))], self.params.dtype
        while waiting:
            columns = waiting.pop()
            size = int(present[columns].sum())
            if not size:
                continue
            found = self._computed(columns)
            if isinstance(found, models.Gradients):
                value += found.value
                loss, mass = loss + float(found.loss), mass + float(weight[columns].sum())
                clipped, counted = clipped + float(found.clipped) * size, counted + size
                dtype = found.value.dtype
            elif size == 1:
                self.paid.failures.note(self.row, found)
            else:
                middle = (columns.start + columns.stop) // 2
                waiting += [slice(middle, columns.stop), slice(columns.start, middle)]
        one = self.params.new_ones(1)
        return models.Gradients(
            value.to(dtype), one * (loss / mass if mass else math.nan), one * (clipped / max(1, counted))
        )


def _part(batch: Batch, row: int, columns: slice = slice(None)) -> Batch:
    """Return some examples of one client, with the weights they have in its whole batch."""
    where = (slice(row, row + 1), columns)
    size = batch.y.shape[1]
    if batch.weight is None:
        weight = torch.full(batch.y.shape[:2], 1.0 / size, device=batch.y.device)
    else:
        weight = batch.weight
    return Batch(each(batch.x, itemgetter(where)), batch.y[where], weight[where])


def _finite(found: models.Gradients) -> bool:
    parts = (found.value, found.loss, *found.buffers.values())
    sums = [part.sum().double() for part in parts]
    return math.isfinite(torch.stack(sums).sum()) or all(map(all_finite, parts))


def all_finite(vectors: Tensor) -> bool:
    """Tell whether all numbers are finite.

    A finite sum has finite terms only, so one pass nearly always answers. The sum may overflow: then every
    number is tested.

    >>> all_finite(torch.tensor([1.0, torch.inf])), all_finite(torch.tensor([3e38, 3e38]))
    (False, True)
    """
    return math.isfinite(vectors.sum()) or bool(torch.isfinite(vectors).all())


def _kept(after: State, before: State) -> State:
    """Return the state after a step, with a client's part of before where that of after is not finite."""
    kept = dict(after)
    for name, part in after.items():
        if not part.is_floating_point() or all_finite(part):
            continue
        finite = torch.isfinite(part.flatten(1)).all(1).view(-1, *[1] * (part.dim() - 1))
        kept[name] = torch.where(finite, part, before[name].to(part))
    return kept


@dataclass(frozen=True)
class _Nobody:
    """The same clients without their data: whatever is drawn is blank, and its gradient is zero."""

    clients: Clients
    noise: NoiseSource

    @property
    def ids(self) -> tuple[int, ...]:
        """See `Clients`."""
        return self.clients.ids

    @property
    def model(self) -> Model:
        """See `Clients`."""
        return self.clients.model

    def everything(self) -> Batch:
        """See `Clients`."""
        return Batch(torch.zeros(len(self.ids), 1), torch.zeros(len(self.ids), 1))

    def sample(self, size: int, key: Key) -> Batch:
        """See `Clients`."""
        return self.everything()

    def poisson(self, rate: float, size: int, key: Key) -> Batch:
        """See `Clients`."""
        return self.everything()

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """See `Clients`."""
        return iter([self.everything()] * steps)
