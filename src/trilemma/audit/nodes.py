"""A federation's own nodes under attack: a malicious server drives a copy of every client block by block.

What is attacked are copies in a scratch folder that is deleted afterwards: keys, configuration and data are
the parties', ledgers and journals are new and the budget has no limit there. No client's budget is spent and
nothing in the federation's folder is touched.

A coin decides for every release which of two canaries the client holds, and it trains the canary model: all
else, secrets, epochs, ledger, grid and encoding, is the node's own. The server knows both canaries and what
everybody else holds, and has the colluders' secrets; it guesses from the integers that left. What is
certified for one release is what is compared: over rounds releases compose as accountants say.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trilemma.audit.bounds import by_shape, clopper_pearson
from trilemma.audit.canaries import CanaryExamples, canary_pairs
from trilemma.audit.catalogue import features_of, records
from trilemma.audit.examine import Effort, batch_of, canary_tests, concluded, own_pairs_of
from trilemma.audit.likelihood import LikelihoodPlan, plan
from trilemma.audit.observer import AuditObserver
from trilemma.audit.outcomes import Audit, AuditOutcome, Value
from trilemma.audit.sensitivity import sensitivity
from trilemma.audit.subject import Subject
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Dataset, FederatedData, Holdings
from trilemma.data.own.declared import declaration_of
from trilemma.data.types import columns_of
from trilemma.federation.client.node import Node
from trilemma.federation.client.sessions import Session
from trilemma.federation.client.spending import planned_epsilon, write_budgets
from trilemma.federation.party import layout
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.reasons import Refused
from trilemma.learning.messages import ENCODED
from trilemma.learning.protocol import State
from trilemma.learning.steps.gridded import GridCodec
from trilemma.models.types import Model
from trilemma.privacy import Guarantee, SecretNoise, judge
from trilemma.privacy.types import NoiseLaw, Sampling

RELEASES = 1000
"""Releases that nodes are asked for, at most: each is written to a ledger and a journal."""

PAST = ("state", "memory")
"""What a client remembers of earlier runs."""

FORGOTTEN = shutil.ignore_patterns(*PAST, "run", "lock")
"""What a copy of a party does not have: its past."""


def examine_federation(folder: Path, effort: Effort | None = None) -> Audit:
    """Audit a federation of which every client's folder is on this machine, on copies of them."""
    effort = effort or Effort()
    with copied(folder) as parties:
        task = load_task(parties[1])
        config, key = task.config, Key(effort.seed).fold("audit")
        assert task.data is not None
        examples = parties[1].federation.examples or int(task.data.sizes.min())
        subject = Subject.resolved(config, task.resolved, examples, effort.rounds)
        name = f"{parties[0].federation.name}: {config.algorithm.name}, {config.privacy.threat}"
        if subject is None:
            verdict = task.resolved.verdict(config.run.rounds, config.privacy.delta)
            said = ("nothing is noised, so there is nothing to test",)
            return Audit(name, verdict, config.privacy.delta, 1, 0, effort.confidence, (), said)
        pairs = own_pairs_of(subject, task.model, task.data, batch_of(config, subject, task.data))
        outcomes = [
            *canary_tests(subject, effort, key),
            sensitivity(subject, pairs, key, task.model.name),
            *attacked(parties, task, subject, min(effort.trials, RELEASES), effort.risk, key),
            answers(parties, task, key),
        ]
    notes = ("clients were copied and forgotten: nobody's ledger, budget or journal was touched",)
    return concluded(name, subject, effort, outcomes, notes)


@contextmanager
def copied(folder: Path) -> Iterator[list[Party]]:
    """Copy every party without its past, and give the copies a budget that does not end."""
    found = [party for party in layout.parties(folder) if not party.removed]
    wanted = len(found[0].keys.members)
    if found[0].client is not None or len(found) != wanted + 1:
        raise UserError(
            f"{folder} does not hold the server and all {wanted} clients: whoever has one folder only audits "
            "its configuration, `trilemma audit config.toml --task task.py`"
        )
    with tempfile.TemporaryDirectory(prefix="trilemma-audit-") as scratch:
        for party in found:
            shutil.copytree(party.folder, Path(scratch) / party.name, symlinks=True, ignore=FORGOTTEN)
        parties = layout.parties(Path(scratch))
        task = load_task(parties[1])
        if planned_epsilon(task) is not None:
            write_budgets(parties[1:], task, 1e12)
        yield parties


def attacked(
    parties: list[Party],
    task: PartyTask,
    subject: Subject,
    releases: int,
    risk: float,
    key: Key,
) -> list[AuditOutcome]:
    """Return what the integers of many single releases show about ε of one release."""
    if subject.absent or subject.release.sampling.scheme == "poisson":
        return []  # whether a record is in a Poisson batch is the client's own secret: nothing to force
    alone = replace(subject, rounds=1, release=replace(subject.release, sampling=Sampling()))
    chosen = plan(alone, canary_pairs(alone.release, key=key), key)
    scores, coins = _guessed(parties, task, alone, chosen, releases, key)
    verdict = judge(alone.release, alone.threat, 1, alone.delta)
    certified = verdict.epsilon if isinstance(verdict, Guarantee) and subject.certified is not None else None
    facts = chosen.facts("releases", scores, coins)
    shaped = by_shape(scores, coins, alone.mechanism, 1, subject.delta, risk)
    counted = clopper_pearson(scores, coins, subject.delta, risk)
    assumed = "the trade-off between ε and δ is that of a Gaussian mechanism"
    return [
        AuditOutcome("one release of a node, counted", "ε", counted, certified, facts=facts),
        AuditOutcome("one release of a node, by shape", "ε", shaped, certified, assumed, facts),
    ]


def answers(parties: list[Party], task: PartyTask, key: Key) -> AuditOutcome:
    """Return how many records change what client 0 looks like: refusals, lengths, shapes and types."""
    data = task.data
    assert data is not None
    pool = records(declaration_of(data.dataset, seen=True), key.fold("records"))
    start = task.resolved.algorithm.init(task.model, (0,), key.fold("init")).broadcast
    server = Adversary.over(parties, dict(start), task)
    place = int(data.holdings.train[0][0])

    def looks(row: int) -> object:
        def replaced(column: Tensor, record: Tensor) -> Tensor:
            changed = column.clone()
            changed[place] = record[row]
            return changed

        columns, fresh = columns_of(data.dataset.x_train), columns_of(pool.x)
        x = features_of({name: replaced(column, fresh[name]) for name, column in columns.items()})
        dataset = replace(data.dataset, x_train=x, y_train=replaced(data.dataset.y_train, pool.y))
        held = FederatedData(dataset, data.holdings, first=data.first, least=data.least)
        holding = replace(task, assembled=replace(task.assembled, data=held))
        return server.looks(f"answers-{row}", holding)

    usual = looks(0)
    strange = [row for row, name in enumerate(pool.names) if name.startswith(("all", "length"))]
    told = [pool.names[row] for row in strange if looks(row) != usual]
    facts: dict[str, Value] = {"records": len(strange), **({"first": told[0]} if told else {})}
    return AuditOutcome("answers of a node", "answers", float(len(told)), 0.0, facts=facts)


def _guessed(
    parties: list[Party], task: PartyTask, subject: Subject, chosen: LikelihoodPlan, releases: int, key: Key
) -> tuple[np.ndarray, np.ndarray]:
    """Ask the nodes for releases, a coin each; return log-likelihood ratios and coins."""
    law, threat = subject.release.law, subject.threat
    observer = AuditObserver.of(threat, law)
    honest = threat.clients - (threat.byzantine if threat.model.central else threat.collusion)
    both = (
        _holding(task, chosen.pair.model, chosen.pair.tails),
        _holding(task, chosen.pair.model, chosen.pair.heads),
    )
    server = Adversary.over(parties, chosen.sent[0], both[0])
    contributions = torch.stack([chosen.tails[0], chosen.heads[0]])
    shift = contributions[1] - contributions[0]
    middle = contributions.mean(0)
    rng, found, coins = key.fold("coins").numpy(), [], []
    for place in range(-(-releases // honest)):
        number, round_ = divmod(place, task.config.run.rounds)
        run = f"audit-{number}"
        if round_ == 0:
            server.open(run)
        flips = (rng.random(honest) < 0.5).astype(int)
        sent = torch.stack([server.ask(client, run, round_, both[flip]) for client, flip in enumerate(flips)])
        sent -= server.colluders_shares(run, honest, law, round_)
        noise = sent - contributions[torch.from_numpy(flips)]
        others = (noise.sum(0) - noise) if observer.members > 1 else torch.zeros_like(noise)
        residual = sent + observer.weight * others
        found += ((residual - middle) @ shift / observer.variance).tolist()
        coins += (flips == 1).tolist()
    return np.array(found), np.array(coins)


def _holding(task: PartyTask, model: Model, examples: CanaryExamples) -> PartyTask:
    """Return the task of a client that holds exactly these examples, or enough alike where it holds one."""
    copies = task.config.algorithm.options.least_examples if len(examples) == 1 else 1
    x, y = examples.x.repeat(copies, 1), examples.y.repeat(copies)
    held = FederatedData(Dataset("canaries", x, y, x[:1], y[:1], None), Holdings([np.arange(len(y))], [], []))
    return replace(task, assembled=replace(task.assembled, model=model, data=held))


@dataclass(frozen=True)
class Adversary:
    """A server that says to each node whatever it likes."""

    parties: list[Party]
    nodes: Mapping[int, Node]
    broadcast: State

    @classmethod
    def over(cls, parties: list[Party], broadcast: State, holding: PartyTask) -> Adversary:
        """Stand before the nodes of these parties' clients, who all hold the same at first."""
        nodes = {party.client: Node(party) for party in parties if party.client is not None}
        for node in nodes.values():
            node.hold(holding)
        return cls(parties, nodes, broadcast)

    def open(self, run: str) -> None:
        """Open a run with an epoch of everybody, as an honest server would: nothing is answered before.

        The copies forget the run before: one ledger of thousands of releases is over every certificate.
        """
        for party in self.parties[1:]:
            for name in PAST:
                shutil.rmtree(party.folder / name, ignore_errors=True)
        hello = wire.dumps(kinds.Hello(run=run, epoch=0, terms=self.parties[0].agreed.terms))
        offers = {str(i): wire.loads(self._say(i, hello), kinds.Joined)[0].key for i in self.nodes}
        keys = wire.dumps(kinds.Keys(run=run, epoch=0, keys=offers))
        signed = {str(i): wire.loads(self._say(i, keys), kinds.Ready)[0].confirmation for i in self.nodes}
        confirm = wire.dumps(kinds.Confirm(run=run, epoch=0, confirmations=signed))
        for client in self.nodes:
            self._say(client, confirm)

    def ask(self, client: int, run: str, round_: int, holding: PartyTask) -> Tensor:
        """Ask a node that holds other data for a step; return its release (d,), float64."""
        node = self.nodes[client]
        node.hold(holding)
        ask = kinds.Ask(run=run, epoch=0, round=round_, heard={}, unused=[])
        answer = self._say(client, wire.dumps(ask, self.broadcast))
        sent = wire.loads(answer, kinds.Answer)[1]
        codec = holding.message.codec
        assert isinstance(codec, GridCodec)
        return codec.grid.decode(sent[ENCODED].numpy().tobytes()).double() * codec.grid.step

    def looks(self, run: str, holding: PartyTask) -> object:
        """Open a run with client 0 holding these data, and ask it for a step; return what that looks like."""
        node = self.nodes[0]
        node.hold(holding)
        try:
            self.open(run)
            ask = kinds.Ask(run=run, epoch=0, round=0, heard={}, unused=[])
            answer = self._say(0, wire.dumps(ask, self.broadcast))
        except UserError as refusal:
            return str(refusal)
        sent = wire.loads(answer, kinds.Answer)[1]
        return len(answer), [(name, part.shape, part.dtype) for name, part in sent.items()]

    def colluders_shares(self, run: str, honest: int, law: NoiseLaw, round_: int) -> Tensor:
        """Return what clients 0 … honest − 1 share with the others, whose secrets the server holds."""
        node = self.nodes[0]
        codec = node.task.message.codec
        assert isinstance(codec, GridCodec)
        dim, step = codec.grid.dim, codec.grid.step
        shares = torch.zeros(honest, dim, dtype=torch.float64)
        if honest == len(self.nodes) or law.sigma_cor == 0:
            return shares
        for client in range(honest):
            secrets = Session(self.parties[1 + client], run).secrets
            assert secrets is not None
            known = {other: pair for other, pair in secrets.pairs.items() if other >= honest}
            shared = SecretNoise(client, known).steps(
                NoiseLaw(0.0, law.sigma_cor), step, (client,), dim, round_, torch.device("cpu")
            )
            shares[client] = shared[0].double() * step
        return shares

    def _say(self, client: int, block: bytes) -> bytes:
        try:
            return wire.together(self.nodes[client].answer(block))
        except Refused as refusal:
            raise UserError(f"client {client} refuses to be audited: {refusal}") from None
