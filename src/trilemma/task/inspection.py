"""What is worth knowing of a task before anything is trained or any ε spent: `trilemma check`.

Data are checked where they are read, and the first mistake is raised with its client, row and column. What
passes is described here: shapes, labels, what is trained, how gradients are computed and whether that way
agrees with single examples one after the other, what the loss couples, time and memory of a step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Declaration, FederatedData, declaration_of, made_up
from trilemma.data.types import IGNORED, Batch, Dataset, columns_of, each
from trilemma.models.modules.reference import COMPARED
from trilemma.models.types import Model
from trilemma.task.learner import Learner
from trilemma.task.task import Task

log = logging.getLogger("trilemma.check")


@dataclass(frozen=True)
class Inspection:
    """What was found: `facts` in words, in order; `problems` are what keeps a run from being right.

    `warnings` are what a run can do with, and learns little from or goes wrong by later.
    """

    facts: Mapping[str, list[str]]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def inspect(
    task: Task,
    batch_size: int = 32,
    by_example: bool | None = None,
    device: str = "cpu",
    ready: tuple[Learner, Dataset] | None = None,
) -> Inspection:
    """Look at a task whose number of clients is known.

    Args:
        task: The task.
        batch_size: Examples per client in the step that is timed; fewer where clients hold fewer.
        by_example: Whether examples are to be clipped one by one; None: where they can be.
        device: Where the step is computed.
        ready: Learner and data as a configuration makes them of the task's; default: the task's own.
    """
    learner, dataset = ready or (task.learner(task.dataset), task.dataset)
    assert dataset.natural is not None
    federated = FederatedData(dataset, dataset.natural, device, least=task.examples)
    size = min(batch_size, federated.poorest(range(federated.clients)))
    params = learner.model.init(Key(1)).to(device)
    batch = federated.sample(range(federated.clients), size, Key(1))
    facts = {
        "data": [*_data(dataset, federated)],
        "a record": [*_records(task, dataset)],
        "model": trained(learner),
        "loss": [*_loss(task, learner, params, batch, federated.dataset)],
    }
    problems = [*left_out(dataset)]
    made = [*invented(task.expects or declaration_of(dataset, seen=True), device)]
    facts["gradients"] = [*_gradients(learner, params, batch, bool(by_example), problems, made)]
    if not problems:
        facts["a step"] = [
            *_step(learner.model, params, batch, by_example is not False and learner.coupled is None)
        ]
    warnings = (*far_from_unit(dataset), *_unnamed(task, dataset))
    return Inspection(facts, tuple(problems), warnings)


def trained(learner: Learner) -> list[str]:
    """Say what of a model is trained and what is frozen: the names, and how many numbers."""
    model = learner.model
    everything = models.state_dict(model, torch.zeros(model.dim))
    names = {name for name, _ in model.shapes}
    frozen = {name: tensor for name, tensor in everything.items() if name not in names}
    lines = [f"{model.name}: {model.dim:,} parameters are trained and travel"]
    lines += [f"  {name} {_shape(shape)}" for name, shape in model.shapes]
    if frozen:
        count = sum(tensor.numel() for tensor in frozen.values())
        lines.append(f"{count:,} numbers are not trained (frozen, buffers, or tied): {_few([*frozen])}")
    return lines


def _data(dataset: Dataset, federated: FederatedData) -> Iterator[str]:
    """Tell what the data are, and what each client holds."""
    for name, column in columns_of(dataset.x_train).items():
        kind = str(column.dtype).removeprefix("torch.")
        yield f"features{f' {name}' if name else ''}: {_shape(column.shape[1:])} {kind}, all finite"
    kind = str(dataset.y_train.dtype).removeprefix("torch.")
    what = "other numbers" if dataset.classes is None else f"{dataset.classes} classes"
    yield f"targets: {_shape(dataset.y_train.shape[1:])} {kind}, {what}"
    for client in range(federated.clients):
        rows, least = torch.from_numpy(federated.holdings.train[client]), federated.least or 0
        own, held = dataset.y_train[rows], len(rows)
        fewer = f" ({least - held:,} of its {least:,} places stay empty)" if held < least else ""
        if dataset.left_out is not None:
            own = own[~dataset.left_out[rows]]
            fewer += f", {held - len(own):,} not as `expects` says" if len(own) < held else ""
        targets = _targets(own, dataset.classes) if len(own) else "none that counts"
        yield f"client {client}: {held:,} examples{fewer}, {targets}"
    tests = len(dataset.y_test)
    own_tests = " of the clients' own" if federated.holdings.test else ""
    yield f"test: {tests:,} examples{own_tests}" if tests else "test: none, so nothing will be scored"


def far_from_unit(dataset: Dataset) -> Iterator[str]:
    """Tell which columns of numbers are far from unit size: steps, clipping and noise are the same for all.

    >>> x, y = torch.tensor([[1.0, 4254.0], [0.5, 200.0]]), torch.zeros(2)
    >>> for line in far_from_unit(Dataset("two", x, y, x, y, None, names=("age", "area"))): print(line)
    column 'area' reaches 4254: a model learns poorly from columns far from 1 in size. Divide it in data() by
    a public constant, such as the range of the instrument (never by the largest value of the records)
    """
    for name, column in columns_of(dataset.x_train).items():
        if not column.is_floating_point() or not column.numel():
            continue
        largest = column.abs().flatten(1).amax(0) if column.dim() == 2 else column.abs().max()[None]
        shown = dataset.names if len(dataset.names) == len(largest) else range(len(largest))
        odd = sorted(
            (one for one in zip(largest.tolist(), shown, strict=True) if one[0] > LARGE),
            key=lambda one: -one[0],
        )
        if odd:
            size, worst = odd[0]
            which = (
                f"column {worst!r}" if column.dim() == 2 and not name else f"column {name!r}" if name else "x"
            )
            more = f" ({len(odd)} columns reach more than {LARGE:g})" if len(odd) > 1 else ""
            yield (
                f"{which} reaches {size:.4g}{more}: a model learns poorly from columns far from 1 in size. "
                "Divide it in data() by a public constant, such as the range of the instrument (never by the "
                "largest value of the records)"
            )


def _unnamed(task: Task, dataset: Dataset) -> Iterator[str]:
    """Tell that the order of columns is not declared where data come as tables."""
    if dataset.names and task.expects is not None and not task.expects.names:
        yield (
            "these tables name their columns and `expects` does not, so a federation would refuse them: say "
            f"names={dataset.names!r} in Values"
        )


def _records(task: Task, dataset: Dataset) -> Iterator[str]:
    """Tell what a record may be, or what could be said of it."""
    if task.expects is not None:
        yield f"may be {task.expects.code()}"
        return
    yield "is not declared, which a private federation needs; these are (say the ranges without the data):"
    yield f"  expects = {declaration_of(dataset, seen=True).code()}"


def left_out(dataset: Dataset) -> Iterator[str]:
    """Tell which clients have records that count as zero."""
    if dataset.left_out is None or dataset.natural is None:
        return
    for client, rows in enumerate(dataset.natural.train):
        lost = dataset.left_out[torch.from_numpy(rows)].nonzero()[:, 0].tolist()
        if lost:
            yield (
                f"client {client}: {len(lost)} of {len(rows)} records are not what `expects` says, and count "
                f"as zero: {_few([f'row {row}' for row in lost])}"
            )


def _targets(y: Tensor, classes: int | None) -> str:
    if classes is None:
        return f"targets from {float(y.min()):.4g} to {float(y.max()):.4g}, mean {float(y.mean()):.4g}"
    counts = torch.bincount(y[y != IGNORED].flatten(), minlength=classes).tolist()
    shown = ", ".join(f"{label}: {count}" for label, count in enumerate(counts[:10]))
    return f"labels {shown}{', …' if classes > 10 else ''}"


def _loss(task: Task, learner: Learner, params: Tensor, batch: Batch, dataset: Dataset) -> Iterator[str]:
    """Tell what the loss is before training, and how it lets gradients be clipped."""
    own = task.loss
    name = "the default" if own is None else getattr(own, "__name__", type(own).__name__)
    statistics = learner.model.initial_buffers(1, params.device) or None
    scores = learner.score(params, each(batch.x, lambda column: column[0]), batch.y[0], statistics)
    yield f"{name}: {scores['loss']:.4g} on client 0 before training"
    if not math.isfinite(scores["loss"]):
        yield "  not finite: nothing can be learned from here"
    if learner.coupled is not None:
        yield "couples the examples of a batch: may be clipped per client only"
    elif learner.model.buffers:  # what that means for clipping is said of its gradients
        yield "a mean over examples, which batch normalisation couples"
    else:
        yield "a mean over examples: may be clipped per client and per example"
    if len(dataset.y_test) and not (dataset.natural and dataset.natural.test):
        found = learner.score(params, dataset.x_test, dataset.y_test, statistics)
        yield "on the test data before training: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items())


def _gradients(
    learner: Learner,
    params: Tensor,
    batch: Batch,
    by_example: bool,
    problems: list[str],
    made: Sequence[Batch],
) -> Iterator[str]:
    """Tell how gradients are computed, and compare them with autograd's; what is wrong joins `problems`.

    They are compared on the task's own examples and on `made`-up ones.
    """
    model = learner.model
    try:
        ways = models.paths(model, batch)
    except UserError as error:
        problems.append(str(error))
        return
    way = "a client's batch at a time" if learner.coupled is not None else WAYS[ways.way]
    yield f"{way}{f' ({ways.note})' if ways.note else ''}"
    yield from (f"  {name}: {used}" for name, used in ways.layers.items())
    unused = [name for name, used in ways.layers.items() if used == "not used"]
    if unused:
        problems.append(
            f"{_few(unused)} of {model.name} is trained but not used by forward: it would receive noise and "
            "nothing else; set requires_grad_(False), or use it"
        )
    if learner.coupled is not None or model.buffers:
        what = "the loss couples examples" if learner.coupled is not None else "batch normalisation"
        yield f"single examples have no gradient of their own ({what}): clip per client"
        if model.buffers:
            yield "running statistics need an algorithm that keeps them (fedavg); nn.GroupNorm needs none"
        if by_example:
            problems += _refusal(model, batch)
            return
    try:
        found = models.compared(model, params, batch)
        verify_made(model, params, made)
    except UserError as refusal:
        problems.append(str(refusal))
        return
    yield f"examples compared with autograd, one after the other: they differ by {found.error:.1e} at most"
    if found.excess > 1e-4:
        longer = f"{found.excess:.1%}"
        yield f"clipping counts with the rounding of sums: as if their gradients were up to {longer} longer"


def invented(declaration: Declaration, device: torch.device | str) -> Iterator[Batch]:
    """Yield batches of made-up examples: of different lengths, the smallest and the largest numbers."""
    x, y = made_up(declaration, 2 * COMPARED, Key(1))
    for rows in (slice(COMPARED), slice(COMPARED, None)):
        part = each(x, lambda column, rows=rows: column[None, rows].to(device))  # type: ignore[misc]
        yield Batch(part, y[None, rows].to(device))


def verify_made(model: Model, params: Tensor, made: Iterable[Batch]) -> None:
    """Compare gradients on made-up examples; what a module cannot take was a guess, and no record at all."""
    for batch in made:
        try:
            models.verify(model, params, batch)
        except UserError:
            raise
        except Exception as error:
            log.info("made-up examples are not compared: %s", error)


LARGE = 20.0
"""From what size on a column of numbers is far from unit size."""

WAYS = {
    "layers": "layer by layer, all clients at once",
    "flat": "all examples of all clients as one batch",
    "mapped": "one example at a time under vmap",
    "looped": "one after the other: slow",
}
"""How gradients are computed (`models.Paths.way`), in words."""


def _refusal(model: Model, batch: Batch) -> list[str]:
    try:
        models.gradients(model, model.init(Key(1)).to(batch.y.device), batch, clip=models.Clip.example(1.0))
    except UserError as error:
        return [str(error)]
    return []


def _step(model: Model, params: Tensor, batch: Batch, by_example: bool) -> Iterator[str]:
    """Tell what one step of all clients takes: the least time of three, and memory."""
    clip = models.Clip.example(1.0) if by_example and not model.buffers else models.Clip.client(1.0)
    keys = [Key(1).fold("client", i) for i in range(len(batch.y))]
    cuda = params.is_cuda
    seconds = math.inf
    for _ in range(3):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        found = models.gradients(model, params, batch, clip=clip, keys=keys)
        if cuda:
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - begin)
    clients, size = batch.y.shape[:2]
    where = f"{1e3 * seconds:.3g} ms on {params.device.type}"
    yield f"{clients} clients × {size} examples, clipped per {clip.unit}: {where}"
    if cuda:
        yield f"memory: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB at its peak"
    else:
        bytes_ = 4 * found.value.numel() + models.paths(model, batch).bytes * clients * size
        yield f"memory: about {max(1, round(bytes_ / 2**20)):,} MiB"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "one number"


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
