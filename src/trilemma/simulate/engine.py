"""One round of a simulated federation, as a function from progress to progress.

    data → client (gradient, clip, noise, momentum) → [attack] → rule → server update → broadcast

If an algorithm has a second exchange (`learning.Inquiry`), the server asks after the attack, clients answer,
and liars lie again.

Over several processes (`trilemma.simulate.ranks`), each rank exchanges its clients' messages for a share of
the columns of all messages before the attack.

All randomness comes from keys, so a round depends only on the progress it starts from. An interrupted run
therefore continues exactly as it would have without the interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilemma.attacks.types import View
from trilemma.base.records import Record
from trilemma.base.stopwatch import Stopwatch
from trilemma.learning import ClientStep, MessageLayout, Messages
from trilemma.learning.defences.rehearsal import Rehearsal
from trilemma.learning.messages import Length, MessageLengths
from trilemma.learning.protocol import State
from trilemma.learning.steps import total
from trilemma.learning.steps.own_scores import OwnScores, right_shares
from trilemma.learning.steps.rounds import returned_model
from trilemma.learning.steps.total import all_finite
from trilemma.simulate.experiment import Experiment
from trilemma.simulate.state_storage import ClientRows, Collector, StateStorage


class Diverged(ArithmeticError):
    """Raised if an honest client's loss or message is not finite: the run has no result from then on."""

    def __init__(self, round_: int) -> None:
        super().__init__(f"honest training is not finite in round {round_}")
        self.round = round_


@dataclass(frozen=True)
class Progress:
    """The state of a run after `round` rounds: all that is needed to continue.

    `chosen` is the model that the run returns if it ends here: the latest, a sampled iterate, or the mean.
    """

    round: int
    broadcast: State
    clients: State
    server: State
    chosen: Tensor

    @property
    def bytes(self) -> int:
        """The size of all its tensors, in bytes."""
        parts = (*self.broadcast.values(), *self.clients.values(), *self.server.values(), self.chosen)
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True)
class Moment:
    """A round between the clients' work and the server's: what attacks may know (`Attack.informed`).

    `sent` are the messages of the clients `stepped`, as the protocol computed them; those of the clients
    `participating` reach the server.
    """

    experiment: Experiment
    progress: Progress
    sent: Messages
    stepped: tuple[int, ...]
    participating: tuple[int, ...]


def start(experiment: Experiment) -> Progress:
    """Return the progress before the first round."""
    ids, init = experiment.clients.ids, experiment.resolved.algorithm.init
    held = ClientRows(experiment.storage, len(ids))
    for part in experiment.parts(ids):
        beginning = init(experiment.clients.model, part, experiment.key.fold("init"))
        held.add(_to(beginning.clients, experiment.device), len(part))
    progress = Progress(
        round=0,
        broadcast=_to(beginning.broadcast, experiment.device),
        clients=held.kept,
        server=_to(beginning.server, experiment.device),
        chosen=torch.empty(0),
    )
    return replace(progress, chosen=latest_model(experiment, progress))


def step(experiment: Experiment, progress: Progress) -> tuple[Progress, Record]:
    """Run one round: clients, then the attack, then the server."""
    algorithm = experiment.resolved.algorithm
    key = experiment.key.fold("round", progress.round)
    members = experiment.members(progress.server)
    participating = experiment.sampled(progress.round, members)
    watch = Stopwatch(experiment.device)

    with watch.stage("clients"), experiment.precision():
        mine, own = _clients(experiment, progress, participating, members)
        stepped, sent = (mine, own) if experiment.ranks is None else experiment.ranks.together(mine, own)
        honest = [row for row, i in enumerate(stepped) if i not in experiment.byzantine]
        _check_finite(experiment, progress.round, sent, honest)
    with watch.stage("attack"):
        layout = algorithm.message(experiment.clients.model)
        received = _received(experiment, layout, progress, stepped, sent.messages, participating)
    if algorithm.inquiry is not None:
        with watch.stage("inquiry"):
            received = _inquired(experiment, progress, stepped, sent, received, participating)
    with watch.stage("server"):
        messages = replace(received.messages, senders=participating)
        done = algorithm.server(messages, progress.server, progress.round, key.fold("server"))

    state = _merged(experiment, progress.clients, mine, own.state)
    following = Progress(progress.round + 1, done.broadcast, state, done.state, progress.chosen)
    following = replace(following, chosen=_chosen(experiment, following))
    scores: dict[str, float] = {}
    told = experiment.resolved.own_scores
    if told is not None and following.round in told.turns:
        with watch.stage("own scores"):
            scores = _own_scores(experiment, following, members, told)
    facts = _facts(sent, honest) | _wire(experiment, progress.broadcast, received, len(participating))
    weights = zip(participating, done.report["weights"].tolist(), strict=True)
    record = Record(
        round=following.round,
        epsilon=experiment.spent(progress.round, len(members)),
        accountant=experiment.spending.by,
        train_loss=float(sent.report["loss"][honest].mean()) if honest else None,
        metrics=scores,
        weights={i: round(weight, 6) for i, weight in weights},
        expelled=tuple(one.plain() for one in done.report.get("expelled", ())),
        attack_strength=received.strength,
        facts=facts,
        seconds=watch.take(),
    )
    return following, record


def latest_model(experiment: Experiment, progress: Progress) -> Tensor:
    """Return the parameters that are scored: (d,), or (k, d) with one row per client that computes."""
    key = experiment.key.fold("evaluate", progress.round)
    evaluated = experiment.resolved.algorithm.evaluated
    return evaluated(progress.broadcast, progress.clients, experiment.clients, key)


def _clients(
    experiment: Experiment, progress: Progress, participating: tuple[int, ...], members: tuple[int, ...]
) -> tuple[tuple[int, ...], ClientStep]:
    """Step the clients of this process that train in this round; return their ids and their step."""
    algorithm, everyone = experiment.resolved.algorithm, experiment.clients
    if algorithm.members is not None:
        everyone = everyone.among(members)
    key = experiment.key.fold("round", progress.round)
    training = set(members if algorithm.everyone_trains else participating)
    stepped = tuple(i for i in everyone.ids if i in training)
    parts = experiment.parts(stepped)
    collector = Collector(experiment.storage, len(stepped))
    for part in parts:
        rows = [everyone.ids.index(i) for i in part]
        whole = part == everyone.ids
        state = progress.clients if whole else {name: held[rows] for name, held in progress.clients.items()}
        own = everyone.only(*part)
        step, _ = total.step(algorithm, progress.broadcast, state, own, progress.round, key)
        if len(parts) == 1 and not experiment.storage.on_disk:
            return stepped, step
        collector.add(step)
    return stepped, collector.step()


def _merged(experiment: Experiment, before: State, stepped: tuple[int, ...], after: State) -> State:
    """Return the state of all clients: new for those that were `stepped`, as `before` for the others."""
    if stepped == experiment.clients.ids:
        return after
    rows = torch.tensor([experiment.clients.ids.index(i) for i in stepped], device=experiment.device)
    merged = {}
    for name, tensor in before.items():
        merged[name] = experiment.storage.empty(tensor.shape, tensor).copy_(tensor)
        merged[name].index_copy_(0, rows, after[name])
    return merged


@dataclass(frozen=True)
class _Received:
    """What the server receives: the messages, their total length, and the attack's strength."""

    messages: Messages
    length: Length
    strength: float | None = None


def _received(
    experiment: Experiment,
    layout: MessageLayout,
    progress: Progress,
    stepped: tuple[int, ...],
    sent: Messages,
    participating: tuple[int, ...],
    exchange: tuple[str, ...] = (),
) -> _Received:
    """Return the messages of the clients `participating`, the Byzantine ones as the attack sends them.

    `sent` are the messages of the clients `stepped`. A liar's message counts as long as the longest that the
    layout allows. `exchange` is empty for the first exchange of a round and names any other.
    """
    liars = tuple(i for i in participating if i in experiment.byzantine)
    algorithm, craft = experiment.resolved.algorithm, experiment.attack.craft
    row = {i: index for index, i in enumerate(stepped)}
    if not liars or craft is None:
        messages = experiment.storage.those(sent, [row[i] for i in participating])
        return _Received(messages, layout.lengths(messages).total)
    honest = experiment.storage.those(sent, [row[i] for i in participating if i not in liars])
    own = sent.rows([row[i] for i in liars]).vectors if liars[0] in row else None
    positions = tuple(participating.index(i) for i in liars)
    last = positions == tuple(range(len(participating) - len(liars), len(participating)))
    view = View(
        honest=honest.vectors,
        own=own,
        byzantine=len(liars),
        target=experiment.resolved.rule,
        round=progress.round,
        key=experiment.key.fold("round", progress.round, "attack", *exchange),
        positions=None if last else positions,
        members=liars,
    )
    if not exchange:
        if algorithm.detector is not None or algorithm.filter:
            view = replace(view, target=Rehearsal(algorithm, progress.server, progress.round, participating))
        if experiment.attack.informed is not None:
            view = experiment.attack.informed(
                Moment(experiment, progress, sent, stepped, participating), view
            )
    crafted = craft(view)
    stack = _stacked(experiment.storage, view, crafted.messages)
    length = layout.lengths(honest).total + MessageLengths.of(len(liars), layout.longest).total
    return _Received(Messages(stack, question=sent.question), length, crafted.strength)


def _stacked(storage: StateStorage, view: View, lies: Tensor) -> Tensor:
    """Return honest messages and lies, in the order of their senders."""
    if not storage.on_disk:
        return view.stack(lies)
    stack = storage.empty((view.clients, view.honest.shape[1]), view.honest)
    lying = view.order >= len(view.honest)
    stack.index_copy_(0, (~lying).nonzero().flatten(), view.honest)
    return stack.index_copy_(0, lying.nonzero().flatten(), lies)


def _inquired(
    experiment: Experiment,
    progress: Progress,
    stepped: tuple[int, ...],
    sent: ClientStep,
    first: _Received,
    participating: tuple[int, ...],
) -> _Received:
    """Run the second exchange: the server's question after the messages `first`; return the answers."""
    inquiry, round_ = experiment.resolved.algorithm.inquiry, progress.round
    assert inquiry is not None
    key = experiment.key.fold("round", round_, "server")
    question = inquiry.question(first.messages, progress.server, round_, key)
    answers = inquiry.answer(question, sent.state)
    layout = inquiry.message(experiment.clients.model)
    second = _received(experiment, layout, progress, stepped, answers, participating, ("inquiry",))
    return replace(second, length=first.length + second.length)


def _check_finite(experiment: Experiment, round_: int, sent: ClientStep, honest: list[int]) -> None:
    finite = bool(torch.isfinite(sent.report["loss"][honest]).all())
    if finite and not experiment.resolved.algorithm.tolerates_nonfinite:
        finite = _all_finite(experiment, sent.messages.vectors, honest)
    if experiment.ranks is not None:
        finite = experiment.ranks.all_agree(finite)  # each rank sees only its columns
    if not finite:
        raise Diverged(round_ + 1)


def _all_finite(experiment: Experiment, vectors: Tensor, rows: list[int]) -> bool:
    if experiment.storage.on_disk:  # row by row: a mask of all messages may not fit into memory
        return all(all_finite(vectors[row]) for row in rows)
    return all_finite(vectors) or all_finite(Messages(vectors).rows(rows).vectors)


def _chosen(experiment: Experiment, progress: Progress) -> Tensor:
    """Return the model to keep; after the last round the tuned one, if the configuration asks for tuning."""
    latest = latest_model(experiment, progress)
    run = experiment.config.run
    kept = returned_model(run.returned, progress.chosen, latest, progress.round, run.rounds, experiment.key)
    tuned = [experiment.tuned(owner, kept).params for owner in experiment.going_on(progress.round)]
    if not tuned:
        return kept
    return torch.stack(tuned) if experiment.at_home else tuned[0]


def _own_scores(
    experiment: Experiment, progress: Progress, members: tuple[int, ...], own: OwnScores
) -> dict[str, float]:
    """Return the scores from clients' own examples; liars report the largest value that is not clamped."""
    everyone = experiment.clients
    lying = experiment.attack.craft is not None
    asked = tuple(i for i in everyone.ids if i in members and not (lying and i in experiment.byzantine))
    params, round_ = progress.broadcast["params"], progress.round - 1
    shares = [right_shares(everyone.model, params, everyone.data.everything((i,), "valid")) for i in asked]
    told = own.told(torch.cat(shares), experiment.scoring, asked, round_).tolist()
    liars = [i for i in experiment.byzantine if lying and i in members]
    return own.combined([*told, *(1 + own.reach for _ in liars)])


def _facts(sent: ClientStep, honest: list[int]) -> dict[str, float]:
    """Return the mean over honest clients of every number they report, except the loss."""
    return {
        name: float(value[honest].float().mean())
        for name, value in sent.report.items()
        if isinstance(value, Tensor) and name != "loss" and honest
    }


def _wire(
    experiment: Experiment, broadcast: State, received: _Received, participating: int
) -> dict[str, float]:
    """Count what is sent in a round, in scalars and in bytes, to and from all clients that take part."""
    algorithm = experiment.resolved.algorithm
    everyone = algorithm.everyone_trains or algorithm.everyone_listens
    listeners = experiment.config.federation.clients if everyone else participating
    numbers = sum(tensor.numel() for tensor in broadcast.values())
    down, sent = (numbers, 4 * numbers) if algorithm.downlink is None else algorithm.downlink(broadcast)
    return {
        "up_scalars": received.length.scalars,
        "up_bytes": received.length.bytes,
        "down_scalars": listeners * down,
        "down_bytes": listeners * sent,
    }


def _to(state: State, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in state.items()}
