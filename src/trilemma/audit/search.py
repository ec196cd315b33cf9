"""The directed search: which record, under which broadcast, moves a release farther than is declared?

One client, neighbouring batches, the noise off; its step is taken as a client takes it that has paid
(`trilemma.learning.steps.total`). Under every broadcast all records take their turn in the same company, so
that the distances of their releases are the moves of all pairs. Three things are looked for:

* a **move** over the declaration, 2C/b or 2C;
* an **answer** that depends on a record: an exception, a number that is not finite, another shape or type;
* a **gradient** that is not autograd's own (`audit/own_gradients.py`).

Records and broadcasts come from a catalogue (`audit/catalogue.py`), and from gradient ascent towards what
cancels (`audit/ascent.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from trilemma.audit.ascent import ascend
from trilemma.audit.canaries import WholeBatch
from trilemma.audit.catalogue import ORDINARY, REST, Pool, broadcasts, records
from trilemma.audit.outcomes import AuditOutcome, Value
from trilemma.audit.sensitivity import SINGLE
from trilemma.audit.subject import Subject
from trilemma.audit.trials import CanaryReading
from trilemma.base.keys import Key
from trilemma.data.own.declared import Declaration
from trilemma.data.types import each
from trilemma.learning import Algorithm, Messages
from trilemma.learning.messages import one_vector
from trilemma.learning.protocol import Clients, ClientStep, State
from trilemma.learning.steps import total
from trilemma.learning.steps.privatise import client_keys
from trilemma.models import Clip, Model
from trilemma.models.engines.clipping import MARGIN
from trilemma.models.engines.layered import LAYERS
from trilemma.privacy import NoiseLaw, Noiseless
from trilemma.privacy.types import Release, Unit

STARTS = 3
"""Records that gradient ascent starts from."""

CLASSES, SCALES = 4, (1.0, 1e3, 1e5)
"""Targets that a record of an ascent is tried with, and by how much the last layer is scaled."""

ROOM, FEWEST = 1 << 24, 12
"""Bytes that records under one broadcast may take, and the fewest of them; others take part under another."""


@dataclass(frozen=True)
class SearchTarget:
    """What is searched: one client's release, of broadcast parameters and of what it holds.

    `step` maps parameters (d,) and k clients to their releases (k, d), in double precision, and to how much
    of each counted as zero. `size` examples make a batch; with `light` the first weighs so little, and the
    second all the rest. `slack` is the share by which rounding may move a release farther.
    """

    name: str
    model: Model
    unit: Unit
    size: int
    clip: float
    declared: float
    bound: float
    step: Callable[[Tensor, Clients], tuple[Tensor, Tensor]]
    light: float = 0.0
    slack: float = SINGLE
    device: str = "cpu"


def of_model(
    model: Model, unit: Unit, size: int = 5, clip: float = 1.0, light: float = 0.0, device: str = "cpu"
) -> SearchTarget:
    """Return a model whose gradients are released, clipped per example or per client."""
    limit = Clip.client(clip) if unit == "user" else Clip.example(clip, careful=True)

    def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
        keys = client_keys(clients, key)
        found = total.gradients(model, broadcast["params"], clients.everything(), clip=limit, keys=keys)
        return ClientStep(Messages(found.value), {})

    nothing: Any = None
    release = Release(clip, NoiseLaw(), unit, size)
    bare = Algorithm("gradients", nothing, client, nothing, one_vector("params"), release)

    def step(theta: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
        sent, failed = _paid(bare, {"params": theta}, {}, clients)
        return sent.vectors.double(), failed

    declared = 2 * clip * (1.0 if unit == "user" else light or 1 / size)
    kind = f"{model.name}, {unit}" + (", a million" if light else "")
    slack = SINGLE if unit == "user" else MARGIN
    return SearchTarget(
        kind, model, unit, 2 if light else size, clip, declared, 1e6, step, light, slack, device
    )


def of_subject(subject: Subject, model: Model, size: int, key: Key) -> SearchTarget:
    """Return what an algorithm releases in its first round, its clients holding `size` examples each."""
    algorithm, release = subject.algorithm, subject.release
    start = algorithm.init(model, (0,), key.fold("init"))
    reading: list[CanaryReading] = []

    def step(theta: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
        sent = {
            name: theta.to(part.dtype) if part.shape == theta.shape else part
            for name, part in start.broadcast.items()
        }
        if not reading:
            assert isinstance(clients, WholeBatch)
            one = replace(clients, ids=(0,), x=each(clients.x, lambda part: part[:1]), y=clients.y[:1])
            reading.append(CanaryReading.of(algorithm, one, release.law, [sent], key))
        state = {
            name: part.expand(len(clients.ids), *part.shape[1:]).clone()
            for name, part in start.clients.items()
        }
        answer, failed = _paid(algorithm, sent, state, clients)
        return reading[0].releases([answer])[0], failed

    name = f"{model.name}, {release.unit}"
    return SearchTarget(name, model, release.unit, size, release.clip, subject.declared, subject.bound, step)


def _paid(algorithm: Algorithm, broadcast: State, state: State, clients: Clients) -> tuple[Messages, Tensor]:
    """Return what clients send that have paid, and how much of each counts as zero, because it fails."""
    done, failures = total.step(algorithm, broadcast, state, clients, 0, Key(0), again=Noiseless)
    return done.messages, failures.counts


@dataclass
class AuditSearch:
    """A search under way: the worst move so far over its declaration, and where; answers that were none.

    `failed` counts how often a record counted as zero: once is enough.
    """

    target: SearchTarget
    move: float = 0.0
    where: Mapping[str, Value] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    failed: Counter[int] = field(default_factory=Counter)
    tried: int = 0

    def under(self, name: str, theta: Tensor, pool: Pool) -> None:
        """Let all records take their turn in the company of ordinary ones, and then of the loudest."""
        target = self.target
        rows = [row for row in range(len(pool)) if not self.failed[row]]
        one = each(pool.x, lambda part: part[None, :1])
        bytes_each = target.size * (target.model.engine or LAYERS).footprint(target.model, one, 2)
        most = max(FEWEST, ROOM // (bytes_each + 8 * target.model.dim))
        if len(rows) > most:
            rows = random.Random(self.tried).sample(rows, most)
        company = [1 + place % (len(pool) - 1) for place in range(target.size - 1)]
        for _ in range(1 if target.unit == "user" else 2):
            held = [[row] * target.size if target.unit == "user" else [row, *company] for row in rows]
            releases = self.released(theta, pool, held)
            if releases is None:
                return
            moves = torch.cdist(releases, releases, compute_mode="donot_use_mm_for_euclid_dist")
            worst = float(moves.max()) / target.declared
            if worst > self.move:
                one, other = (pool.names[rows[place]] for place in divmod(int(moves.argmax()), len(rows)))
                self.move, self.where = worst, {"between": f"{one} / {other}", "broadcast": name}
            loudest = int((releases - releases.mean(0)).norm(dim=1).argmax())
            company = [rows[loudest]] * len(company)

    def released(self, theta: Tensor, pool: Pool, held: list[list[int]]) -> Tensor | None:
        """Return the releases (k, d) of clients who hold these records; None: some do not answer."""
        with suppress(Exception):
            releases = self._asked(theta, pool, held)
            if bool(torch.isfinite(releases).all()):
                return releases
        for one in held:
            try:
                said = "" if bool(torch.isfinite(self._asked(theta, pool, [one])).all()) else "not finite"
            except (Exception, SystemExit) as error:
                said = f"{type(error).__name__}: {error}"
            self.answers += [f"{pool.names[one[0]]}: {said}"] if said else []
        return None

    def _asked(self, theta: Tensor, pool: Pool, held: list[list[int]]) -> Tensor:
        target, index = self.target, torch.tensor(held)
        weight = (
            torch.tensor([target.light, 1 - target.light]).expand(len(held), -1) if target.light else None
        )
        x, y = each(pool.x, lambda part: part[index].to(target.device)), pool.y[index].to(target.device)
        weight = None if weight is None else weight.to(target.device)
        clients = WholeBatch(tuple(range(len(held))), target.model, Noiseless(), x, y, weight)
        self.tried += len(held)
        releases, counts = target.step(theta.to(target.device), clients)
        self.failed.update(one[0] for one, count in zip(held, counts.tolist(), strict=True) if count)
        return releases.cpu()


def search(
    target: SearchTarget, declaration: Declaration, key: Key, ascents: int = STARTS
) -> list[AuditOutcome]:
    """Look for moves and answers until one is wrong; return what was found beside what is declared."""
    found, pool = AuditSearch(target), records(declaration, key.fold("records"))
    # Twins first: whoever infers the structure of a batch from its first one sees equally long examples.
    start, twins = target.model.init(key), [[0] * target.size]
    before = found.released(start, pool, twins)
    refused = bool(found.failed)  # as models are whose examples have no gradients of their own
    for name, theta, more in () if refused else _places(target, pool, key, ascents):
        found.under(name, theta, more)
        if found.move > 1 + target.slack or found.answers:
            break
    after = found.released(start, pool, twins)
    if before is not None and after is not None and not torch.equal(before, after):
        found.answers.append("a release depends on what others were asked before")
    facts = {**found.where, "releases": found.tried, **({"refused": "everything"} if refused else {})}
    said = {"first": found.answers[0]} if found.answers else {}
    name, moved = f"search, {target.name}", found.move * target.declared
    return [
        AuditOutcome(name, "move", moved, target.declared, facts=facts, slack=target.slack),
        AuditOutcome(name, "answers", float(len(found.answers)), 0.0, facts=said),
    ]


def _places(target: SearchTarget, pool: Pool, key: Key, ascents: int) -> Iterator[tuple[str, Tensor, Pool]]:
    """Yield broadcasts, each with records to try: the catalogue's, then where ascent leads."""
    model, first = target.model, target.model.init(key)
    for name, theta in broadcasts(model, target.bound, key):
        yield name, theta, pool
    if target.unit == "user":
        return  # a client's gradient is formed: nothing cancels in its norm
    generator, head = key.fold("rest").torch(), model.last(1)
    for start in range(ascents):
        place = (ORDINARY + start) % pool.tame  # what is repeated comes after what is ordinary
        only = itemgetter(slice(place, place + 1))
        with suppress(RuntimeError, ValueError):  # what has no second derivative, or none in double precision
            theta, x = ascend(model, first, each(pool.x, only), only(pool.y))
            more = pool.first(CLASSES)
            for row in range(CLASSES):
                more = more.with_("ascended", x, pool.y[row : row + 1])
            for rest, scale in product(REST[:2], SCALES):
                off = theta * (1 + rest * torch.randn(theta.shape, generator=generator))
                off[head.slice] *= scale
                yield (
                    f"ascent {start}, off by {rest:g}, ×{scale:g}",
                    off.clamp(-target.bound, target.bound),
                    more,
                )
