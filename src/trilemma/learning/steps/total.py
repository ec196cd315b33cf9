"""A step that is paid for ends in a message, whatever data and code do.

Whether a client answers, with which status and in which shape would be a release that no ε covers. So in a
private step (`step`) every algorithm gets its gradients from one function (`gradients`), and that is total:

* where examples are clipped, one that fails counts as zero, and no other one changes: the client's batch is
  taken again without one half, then the other, down to the example that fails;
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
from functools import partial
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.types import Batch, each
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, State
from trilemma.learning.steps import own_scores
from trilemma.learning.steps.switches import put_back
from trilemma.models.engines import replay
from trilemma.models.engines.clipping import NO_CLIP
from trilemma.models.types import Buffers, Model
from trilemma.privacy.types import NoiseSource

SURFACING = (UserError, MemoryError, torch.OutOfMemoryError)
"""What a simulation raises: mistakes in a configuration or a task, and memory that cannot hold it."""

FAILED = "failed"
"""The name under which a step reports how many examples (clients) counted as zero; absent where none did."""


Found = TypeVar("Found")

NOT_FINITE = "a loss or a gradient is not finite"


@dataclass
class Failures:
    """What counted as zero in a step: how often for each client, and what was raised first."""

    counts: Tensor
    why: str = ""

    def note(self, row: int, why: str) -> None:
        """Count a failure of the client in `row`, and keep the first reason."""
        self.counts[row] += 1
        self.why = self.why or why


@dataclass
class _Paid:
    """The private step under way. `deployed`: by a real client; `nothing`: of which all counts as zero."""

    failures: Failures
    deployed: bool
    nothing: bool = False

    def tried(self, row: int, compute: Callable[[], models.Gradients], apart: bool) -> models.Gradients | str:
        """Return gradients that are finite, else why there are none; the first client's are in `row`.

        Where examples are clipped, `models.gradients` leaves those out that are not finite. Only where they
        are known to be `apart`, the layers being the package's own, is it known that no other went with them.
        """
        found = self.caught(compute)
        if isinstance(found, str) or _finite(found.loss, found.value, *found.buffers.values()):
            return found
        if not apart or not _finite(found.value):
            return NOT_FINITE
        for lost in (~torch.isfinite(found.loss)).nonzero()[:, 0].tolist():
            self.failures.note(row + lost, NOT_FINITE)
        return found

    def caught(self, compute: Callable[[], Found]) -> Found | str:
        """Return what is computed, else why it was not."""
        try:
            with put_back():
                return compute()
        except BaseException as error:
            mistake = isinstance(error, SURFACING) or not isinstance(error, Exception)
            if mistake and not self.deployed:
                raise
            return told(error)

    def halved(
        self, row: int, batch: Batch, attempt: Callable[[Batch], Found | str]
    ) -> Iterator[tuple[Tensor, Found]]:
        """Yield parts of one client's batch that do not fail, and what is found for each.

        Every attempt is as long as the batch, each example in its own place with its own weight and draws,
        and the first of the attempt in the places of those left out, with weight 0. So what an example adds,
        and whether it fails, does not depend on which others do: not in its last bit.
        """
        weight = _weights(batch)
        waiting = [part for part in [weight[0].nonzero()[:, 0]] if len(part)]
        while waiting:
            part = waiting.pop()
            index = part[:1].repeat(weight.shape[1])
            index[part] = part
            kept = torch.zeros_like(weight)
            kept[:, part] = weight[:, part]
            x = each(batch.x, itemgetter((slice(None), index)))
            found = attempt(Batch(x, batch.y[:, index], kept))
            if not isinstance(found, str):
                yield part, found
            elif len(part) == 1:
                self.failures.note(row, found)
            else:
                waiting += reversed(part.chunk(2))


def told(error: BaseException) -> str:
    """Return a failure in words, and let go of all that it held: memory may be what was missing."""
    try:
        said = "".join(traceback.format_exception(error))
    except BaseException:  # its words are a user's code too
        said = f"{type(error).__name__}, which cannot be told"
    chain: list[BaseException | None] = [error]
    while chain:
        if (one := chain.pop()) is not None and one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            chain += [one.__cause__, one.__context__]
    return said


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
            failures.note(0, told(error))
            done = None
        if done is None:
            assert again is not None
            paid.nothing = True
            done = algorithm.client(broadcast, state, _Nobody(clients, again()), round_, key)
    report = {**done.report, FAILED: failures.counts} if bool(failures.counts.any()) else done.report
    return replace(done, state=_kept(done.state, state), report=report), failures


def right_shares(model: Model, params: Tensor, held: Batch) -> tuple[Tensor, Failures]:
    """Return a real client's share of right answers (1,): whatever fails is a wrong one."""
    paid = _Paid(Failures(torch.zeros(1, dtype=torch.int64)), deployed=True)

    def attempt(batch: Batch) -> Tensor | str:
        return paid.caught(lambda: own_scores.right_shares(model, params, batch))

    right = sum(float(found) * len(part) for part, found in paid.halved(0, held, attempt))
    return torch.tensor([right / max(1, int((_weights(held) > 0).sum()))]).double(), paid.failures


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
    whole = partial(replay.gradients, model, clip=clip, weight_decay=weight_decay)
    found: models.Gradients | str = ""
    if not paid.nothing:
        apart = model.engine is None and clip.unit == "example"
        found = paid.tried(0, lambda: whole(params, batch, buffers=buffers, keys=keys), apart)
    if isinstance(found, models.Gradients):
        return found
    rows = [
        _Row(
            paid,
            row,
            model,
            params[row : row + 1] if params.dim() == 2 else params,
            _one(batch, row),
            clip,
            None if buffers is None else {name: part[row : row + 1] for name, part in buffers.items()},
            None if keys is None else [keys[row]],
        ).gradients(found if len(batch.y) == 1 else "")
        for row in range(len(batch.y))
    ]
    kept = {name: torch.cat([one.buffers[name] for one in rows]) for name in rows[0].buffers}
    value, loss, clipped = (
        torch.cat([getattr(one, name) for one in rows]) for name in ("value", "loss", "clipped")
    )
    if weight_decay:
        value.add_(params, alpha=weight_decay)
    norms = (
        torch.cat([one.norms for one in rows if one.norms is not None]) if rows[0].norms is not None else None
    )
    return models.Gradients(value, loss, clipped, norms, kept)


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
    keys: list[Key] | None

    def gradients(self, why: str) -> models.Gradients:
        """Return its gradients; `why` says what was wrong where it is the only client and was tried."""
        if self.paid.nothing:
            return self._nothing()
        if self.clip.unit == "example" and not self.model.buffers:
            return self._by_example()
        found = why or self._of(self.batch)
        if isinstance(found, models.Gradients):
            return found
        self.paid.failures.note(self.row, found)
        return self._nothing()

    def _of(self, batch: Batch) -> models.Gradients | str:
        compute = partial(models.gradients, self.model, self.params, batch, clip=self.clip)
        return self.paid.tried(self.row, lambda: compute(buffers=self.buffers, keys=self.keys), apart=False)

    def _nothing(self) -> models.Gradients:
        """Return a gradient of zero, without a look at the data; running statistics stay as they are."""
        like = self.params
        one, empty = like.new_zeros(1), like.new_zeros(1, self.model.dim)
        return models.Gradients(empty, one * math.nan, one, self._no_lengths(), self.buffers or {})

    def _no_lengths(self) -> Tensor | None:
        """Return the lengths of examples that fail, where examples have any: longer than any other."""
        return torch.full(self.batch.y.shape[:2], math.inf) if self.clip.unit == "example" else None

    def _by_example(self) -> models.Gradients:
        """Add up what the examples contribute that do not fail."""
        weight, one = _weights(self.batch)[0], self.params.new_ones(1)
        value = torch.zeros(1, self.model.dim, dtype=torch.float64, device=self.params.device)
        loss, mass, clipped, counted, norms = 0.0, 0.0, 0.0, 0, self._no_lengths()
        for part, found in self.paid.halved(self.row, self.batch, self._of):
            value += found.value
            loss, mass = loss + float(found.loss), mass + float(weight[part].sum())
            clipped, counted = clipped + float(found.clipped) * len(part), counted + len(part)
            if norms is not None and found.norms is not None:
                norms[:, part] = found.norms[:, part].to(norms)
        loss = loss / mass if mass else math.nan
        value = value if self.clip.careful else value.to(one.dtype)
        return models.Gradients(value, one * loss, one * (clipped / max(1, counted)), norms)


def _one(batch: Batch, row: int) -> Batch:
    """Return one client's batch."""
    rows = itemgetter(slice(row, row + 1))
    return Batch(each(batch.x, rows), rows(batch.y), None if batch.weight is None else rows(batch.weight))


def _weights(batch: Batch) -> Tensor:
    """Return every example's weight."""
    if batch.weight is not None:
        return batch.weight
    size = batch.y.shape[1]
    return torch.full(batch.y.shape[:2], 1.0 / size, dtype=torch.float32, device=batch.y.device)


def _finite(*parts: Tensor) -> bool:
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
