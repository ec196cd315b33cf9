"""The directed search: which record, under which broadcast, moves a release farther than is declared?

One client, neighbouring batches, the noise off; its step is taken as a client takes it that has paid
(`trilemma.learning.total`). Under every broadcast all records take their turn in the same company, so that
the distances of their releases are the moves of all pairs. Three things are looked for:

* a **move** over the declaration, 2C/b or 2C;
* an **answer** that depends on a record: an exception, a number that is not finite, another shape or type;
* a **gradient** that is not autograd's own, in double precision, one example after the other; parameters that
  a loss pulls at beside those that are trained count as wholly wrong.

Records and broadcasts come from a catalogue (`audit/catalogue.py`), and from gradient ascent on

    J(θ, x) = log max_u ‖∂ℓ/∂z_u‖ ‖a_u‖ − log ‖∇ℓ‖         z_u = u(a_u, W)

over the operations u that use a parameter: where J is large the parts of a gradient cancel, and whoever
computes its norm from the parts may be wrong. The last layer is scaled afterwards, and left out of ∇ℓ; the
pull of the loss at the outputs is held, so that nothing saturates.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trilemma.audit.canaries import Whole
from trilemma.audit.catalogue import ORDINARY, REST, Pool, broadcasts, features_of, records
from trilemma.audit.outcomes import Outcome, Value
from trilemma.audit.sensitivity import SINGLE
from trilemma.audit.subject import Subject
from trilemma.audit.trials import Reading
from trilemma.data.declared import Declaration
from trilemma.data.types import Batch, Features, columns_of, each
from trilemma.errors import UserError
from trilemma.keys import Key
from trilemma.learning import Algorithm, Messages, total
from trilemma.learning.messages import one_vector
from trilemma.learning.privatise import client_keys
from trilemma.learning.protocol import Clients, ClientStep, State
from trilemma.models import Clip, Model, gradients, unflatten
from trilemma.models.clipping import MARGIN
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.modules.reference import Projecting
from trilemma.models.tape import Tape
from trilemma.models.taped import TAPE
from trilemma.privacy import NoiseLaw, Noiseless
from trilemma.privacy.types import Release, Unit

MILLION = 1 << 20
"""Examples in the largest batch that is looked at: of two of unlike weight."""

TOLERANCE = 1e-3
"""How far a gradient may be from autograd's own, as a share of it."""

LOOSE = 0.06
"""How far clipped gradients may be from those clipped by their own length: what a bound on it may cost."""

FACES = 9
"""Batches of which gradients are compared, beside two fixed ones."""

STEPS, STARTS, SPEED, SLOWER = 80, 3, 0.1, 0.9
"""Gradient ascent: steps, starts, how long the first step is as a share of a tensor, and the next ones."""

CLASSES, SCALES = 4, (1.0, 1e3, 1e5)
"""Targets that a record of an ascent is tried with, and by how much the last layer is scaled."""

ROOM, FEWEST = 1 << 24, 12
"""Bytes that records under one broadcast may take, and the fewest of them; others take part under another."""


@dataclass(frozen=True)
class Target:
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
) -> Target:
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
    return Target(kind, model, unit, 2 if light else size, clip, declared, 1e6, step, light, slack, device)


def of_subject(subject: Subject, model: Model, size: int, key: Key) -> Target:
    """Return what an algorithm releases in its first round, its clients holding `size` examples each."""
    algorithm, release = subject.algorithm, subject.release
    start = algorithm.init(model, (0,), key.fold("init"))
    reading: list[Reading] = []

    def step(theta: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
        sent = {
            name: theta.to(part.dtype) if part.shape == theta.shape else part
            for name, part in start.broadcast.items()
        }
        if not reading:
            assert isinstance(clients, Whole)
            one = replace(clients, ids=(0,), x=each(clients.x, lambda part: part[:1]), y=clients.y[:1])
            reading.append(Reading.of(algorithm, one, release.law, [sent], key))
        state = {
            name: part.expand(len(clients.ids), *part.shape[1:]).clone()
            for name, part in start.clients.items()
        }
        answer, failed = _paid(algorithm, sent, state, clients)
        return reading[0].releases([answer])[0], failed

    name = f"{model.name}, {release.unit}"
    return Target(name, model, release.unit, size, release.clip, subject.declared, subject.bound, step)


def _paid(algorithm: Algorithm, broadcast: State, state: State, clients: Clients) -> tuple[Messages, Tensor]:
    """Return what clients send that have paid, and how much of each counts as zero, because it fails."""
    done, failures = total.step(algorithm, broadcast, state, clients, 0, Key(0), again=Noiseless)
    return done.messages, failures.counts


@dataclass
class Search:
    """A search under way: the worst move so far over its declaration, and where; answers that were none.

    `failed` counts how often a record counted as zero: once is enough.
    """

    target: Target
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
        bytes_each = target.size * (target.model.engine or TAPE).footprint(target.model, one, 2)
        most = max(FEWEST, ROOM // (bytes_each + 8 * target.model.dim))
        if len(rows) > most:
            rows = random.Random(self.tried).sample(rows, most)
        company = [*range(1, target.size)]
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
        clients = Whole(tuple(range(len(held))), target.model, Noiseless(), x, y, weight)
        self.tried += len(held)
        releases, counts = target.step(theta.to(target.device), clients)
        self.failed.update(one[0] for one, count in zip(held, counts.tolist(), strict=True) if count)
        return releases.cpu()


def search(target: Target, declaration: Declaration, key: Key, ascents: int = STARTS) -> list[Outcome]:
    """Look for moves and answers until one is wrong; return what was found beside what is declared."""
    found, pool = Search(target), records(declaration, key.fold("records"))
    # Twins first: whoever infers the structure of a batch from its first one sees equally long examples.
    found.released(target.model.init(key), pool, [[0] * target.size])
    refused = bool(found.failed)  # as models are whose examples have no gradients of their own
    for name, theta, more in () if refused else _places(target, pool, key, ascents):
        found.under(name, theta, more)
        if found.move > 1 + target.slack or found.answers:
            break
    facts = {**found.where, "releases": found.tried, **({"refused": "everything"} if refused else {})}
    said = {"first": found.answers[0]} if found.answers else {}
    name, moved = f"search, {target.name}", found.move * target.declared
    return [
        Outcome(name, "move", moved, target.declared, facts=facts, slack=target.slack),
        Outcome(name, "answers", float(len(found.answers)), 0.0, facts=said),
    ]


def _places(target: Target, pool: Pool, key: Key, ascents: int) -> Iterator[tuple[str, Tensor, Pool]]:
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
            theta, x = ascend(target, first, each(pool.x, only), only(pool.y))
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


# --- autograd's own ---------------------------------------------------------------------------------------


def outputs_of(model: Model, theta: Tensor, x: Features) -> list[Any]:
    """Return examples' outputs, each alone, through the model's own code in the type of `theta`.

    Beside a twin of its own: torch gets batch normalisation of a batch of one wrong.
    """
    x, rows = each(x, lambda part: _wide(part, theta.dtype)), len(next(iter(columns_of(x).values())))
    twins = [each(x, itemgetter([number, number])) for number in range(rows)]
    if not isinstance(model.engine, ModuleEngine):
        named = unflatten(model, theta)
        passed = (model.forward(named, each(two, lambda part: part[None]), Tape(train=True)) for two in twins)
        return [outputs[:, :1] for outputs in passed]
    net, found = copy.deepcopy(model.engine.source.module).to(theta.dtype), []
    for part in net.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # the same gradient, as one can add it up
    for two in twins:
        arguments = ((two,), None) if isinstance(two, Tensor) else ((), two)
        outputs = functional_call(net, unflatten(model, theta), *arguments)
        found.append(getattr(outputs, "logits", outputs)[:1])
    return found


def loss_of(model: Model, outputs: list[Any], y: Tensor) -> Tensor:
    """Return the sum of examples' losses."""
    wide = _wide(y, torch.get_default_dtype())
    targets = [wide[number : number + 1] for number in range(len(y))]
    if isinstance(model.engine, ModuleEngine):
        loss = model.engine.source.loss
        losses = [loss(one, target).sum() for one, target in zip(outputs, targets, strict=True)]
    else:
        losses = [model.loss(one, target[None]).sum() for one, target in zip(outputs, targets, strict=True)]
    return torch.stack(losses).sum()


def own_gradient(model: Model, theta: Tensor, x: Features, y: Tensor) -> tuple[Tensor, int]:
    """Return ∇ Σ ℓ_i by autograd alone, and how many parameters beside θ the loss pulls at."""
    engine: object = model.engine
    if isinstance(engine, Projecting):
        found, beside = own_gradient(engine.whole, engine.expand(theta.float()), x, y)
        return engine.project(found), beside
    flat = theta.clone().requires_grad_()
    with torch.enable_grad(), _default(theta.dtype):
        loss = loss_of(model, outputs_of(model, flat, x), y)
        beside = sum(isinstance(leaf, nn.Parameter) for leaf in _leaves(loss))
        return torch.autograd.grad(loss, flat)[0].detach(), beside


def faithful(model: Model, declaration: Declaration, key: Key) -> Outcome:
    """Compare gradients of records of different lengths and kinds with autograd's own; refusals are none."""
    pool = records(declaration, key.fold("records"))
    theta = model.init(key) + 0.02 * torch.randn(model.dim, generator=key.fold("off").torch())
    dtype = torch.float64
    try:
        own_gradient(model, theta.to(dtype), each(pool.x, lambda part: part[:1]), pool.y[:1])
    except RuntimeError:
        dtype = torch.float32  # what has a type of its own
    worst, facts = 0.0, dict[str, Value]()
    drawn = torch.randint(pool.tame, (FACES, 3), generator=key.fold("faces").torch()).tolist()
    for rows in () if model.buffers else ([0, 0, 0], [0, 1, 5], *drawn):
        x, y = each(pool.x, itemgetter(rows)), pool.y[rows]
        try:
            found = [
                own_gradient(model, theta.to(dtype), each(x, itemgetter([place])), y[[place]])
                for place in range(len(rows))
            ]
        except RuntimeError:
            continue  # records of which the model itself makes nothing
        own, beside = torch.stack([gradient.double() for gradient, _ in found]), found[0][1]
        norms = own.norm(dim=1, keepdim=True)
        threshold = 0.5 * float(norms.min()) or 1.0
        batch = Batch(each(x, lambda part: part[None]), y[None])
        for limit, costs in ((Clip.none(), 0.0), (Clip.example(threshold), LOOSE)):
            said = ""
            expected = (own * (threshold / norms).clamp(max=1.0) if costs else own).mean(0)
            try:
                value = gradients(model, theta, batch, clip=limit, keys=[key]).value[0].double()
                error = float((value - expected).norm() / expected.norm().clamp(min=1e-12)) - costs
            except UserError:
                continue
            except Exception as problem:
                error, said = math.inf, f"{type(problem).__name__}: {problem}"
            if beside or math.isnan(error):
                error = math.inf
            if error > worst:
                worst = error
                facts = {"records": str(rows), "clip": limit.unit, "pulled at beside": beside, "said": said}
    allowed = TOLERANCE if dtype == torch.float64 else 50 * TOLERANCE
    return Outcome(f"search, {model.name}", "gradients", worst, allowed, facts=facts)


# --- gradient ascent --------------------------------------------------------------------------------------


class Uses(TorchFunctionMode):
    """Writes down every operation that uses a part of `theta`: its other inputs, and its output."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = theta
        self.found: list[tuple[list[Tensor], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what goes in and out."""
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        others = [leaf for leaf in given if leaf._base is not self.theta and leaf.is_floating_point()]
        if any(leaf._base is self.theta for leaf in given):
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
            self.found += [(others, leaf) for leaf in made if leaf._base is not self.theta]
        return out


def cancelling(target: Target, theta: Tensor, x: Features, pull: Tensor) -> Tensor:
    """Return J, differentiable, where `pull` is the gradient of the loss at the outputs."""
    # Other kernels of attention have no second derivative.
    with torch.enable_grad(), _default(theta.dtype), sdpa_kernel(SDPBackend.MATH), Uses(theta) as uses:
        (outputs,) = outputs_of(target.model, theta, x)
    below = target.model.last(1).start or target.model.dim
    outs = [out for _, out in uses.found]
    whole, *pulls = torch.autograd.grad(
        (outputs * pull).sum(), [theta, *outs], create_graph=True, allow_unused=True
    )
    parts = [
        _log(found) + sum((_log(a) for a in others if bool(torch.isfinite(a).all())), 0.0)
        for (others, _), found in zip(uses.found, pulls, strict=True)
        if found is not None
    ]
    return torch.stack(parts).max() - _log(whole[:below])


def ascend(target: Target, theta: Tensor, x: Features, y: Tensor) -> tuple[Tensor, Features]:
    """Return parameters and a record (1, …) to which gradient ascent on J leads."""
    model, columns = target.model, columns_of(x)
    moving = {name: part for name, part in columns.items() if part.is_floating_point()}
    sizes = [
        part.square().mean().sqrt().clamp(min=0.1).expand(part.shape)
        for part in unflatten(model, theta).values()
    ]
    scale = [
        torch.cat([size.flatten() for size in sizes]),
        *(part.abs().mean() + 1.0 for part in moving.values()),
    ]
    base = [part.double() for part in (theta, *moving.values())]
    with _default(torch.float64):
        (outputs,) = (one.detach().requires_grad_() for one in outputs_of(model, base[0], x))
        (pull,) = torch.autograd.grad(loss_of(model, [outputs], y), outputs)
    offsets = [torch.zeros_like(part, requires_grad=True) for part in base]
    adam = torch.optim.Adam(offsets, lr=SPEED)
    for step in range(STEPS + 1):
        at = [part + size * off for part, size, off in zip(base, scale, offsets, strict=True)]
        now = features_of({**columns, **dict(zip(moving, at[1:], strict=True))})
        if step < STEPS:
            adam.param_groups[0]["lr"] = SPEED * SLOWER**step
            adam.zero_grad()
            torch.autograd.backward(-cancelling(target, at[0], now, pull))
            adam.step()
    return at[0].detach().float(), each(now, lambda part: _wide(part.detach(), torch.float32))


def _log(part: Tensor) -> Tensor:
    return (part.square().sum() + 1e-60).log() / 2


def _wide(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if part.is_floating_point() else part


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Let what a module makes be of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that a loss pulls at."""
    waiting, seen, found = [loss.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        waiting += [after for after, _ in node.next_functions]
    return found
