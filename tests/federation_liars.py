"""Liars in a federation: clients who know everything but honest secrets, and the simulation they are in.

They run the attack of the simulation, with the simulation's own function, on what really travelled, and send
what comes out as the integers that a client of the protocol would send.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor

from federation_harness import PRIVATE, result_of, small_config, transcript
from stacked_noise import StackedSecretNoise
from trilemma import aggregation
from trilemma import config as configurations
from trilemma.attacks import Attack, Crafted, View
from trilemma.federation.client.journal import Journal
from trilemma.federation.client.sessions import Session
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import kinds
from trilemma.federation.server.commits import CommitLog
from trilemma.learning import Messages
from trilemma.learning.messages import Asked
from trilemma.learning.protocol import State
from trilemma.privacy.secrets import Handshake, Offer, SecretNoise
from trilemma.simulate import engine
from trilemma.simulate.experiment import Experiment, assemble
from trilemma_lab.adversary.adaptive import Adaptive
from trilemma_lab.adversary.informed import Informed

REACH = 1000.0
"""How many times the length of their noise careless liars push by."""
CLIENTS, LIARS, ROUNDS, CARELESS = 5, 2, 5, 2
"""A federation that expels two of five, who are careless from the third round on."""
EVIDENCE = (*PRIVATE, "aggregation.rule=evidence+mean", "privacy.sigma_ind=0.2", "data.holders=all")


def expelling(*changes: str) -> str:
    """Return its configuration."""
    return small_config(CLIENTS, *EVIDENCE, *changes, tolerate=LIARS, rounds=ROUNDS)


def careless_from(round_: int) -> Attack:
    """Adaptive liars who take turns, and from a round on forget that the server remembers.

    Until then they pass every test, by their own search; then they push as if there were none: by many times
    the length of their noise, so that whatever noise is drawn they are found.
    """
    built = Adaptive(role="turns", reach=REACH).build()
    craft = built.craft
    assert craft is not None

    def forgetful(view: View) -> Crafted:
        if view.round >= round_:
            mean = aggregation.parse("mean", f=0)
            view = replace(Informed.of(view), defence=None, target=mean)
        return craft(view)

    return replace(built, craft=forgetful)


@contextmanager
def repeatable_secrets() -> Iterator[None]:
    """Let every pair of clients agree on the same keys whenever it is tried: the same noise in every test."""
    with patch.object(Handshake, "_pair_key", lambda self, theirs: _pair(self.offer, theirs)):
        yield


def _pair(one: Offer, other: Offer) -> bytes:
    low, high = sorted((one.index, other.index))
    return hashlib.sha256(one.run + bytes([low, high])).digest()


def with_liars(config: str, liars: int, attack: Attack) -> Experiment:
    """The simulation of a federation's configuration in which the last clients lie."""
    changes = ["privacy.arithmetic=grid", f"federation.byzantine={liars}"]
    found = assemble(configurations.parse(tomllib.loads(config), changes), seed=1)
    computing = tuple(range(found.config.federation.clients))
    return replace(found, attack=attack, clients=replace(found.clients, ids=computing))


@dataclass
class Liars:
    """The liars of a federation; `kept` is what the server remembers of each one's last message."""

    experiment: Experiment
    task: PartyTask
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, server: Party, config: str, liars: int, attack: Attack) -> Liars:
        return cls(with_liars(config, liars, attack), load_task(server))

    @property
    def clients(self) -> tuple[int, ...]:
        return self.experiment.byzantine

    def lie(
        self, ask: kinds.Ask, broadcast: State, server: State, protocol: Mapping[int, Tensor]
    ) -> dict[int, dict[str, Tensor]]:
        """Return what each liar sends in a round, as it travels.

        `protocol` are the messages of all who are asked as the protocol has them, the liars' own included.
        """
        heard = tuple(sorted(protocol))
        ready = engine.start(self.experiment)
        progress = replace(ready, round=ask.round, broadcast=broadcast, server=server)
        messages = Messages(torch.stack([protocol[client] for client in heard]))
        layout = self.experiment.resolved.algorithm.message(self.experiment.clients.model)
        said = engine._received(self.experiment, layout, progress, heard, messages, heard).messages
        return {
            client: self._encoded(client, said.vectors[heard.index(client)], Asked(ask.round, broadcast))
            for client in heard
            if client in self.clients
        }

    def _encoded(self, client: int, message: Tensor, asked: Asked) -> dict[str, Tensor]:
        """Return the integers from which a message follows, as nearly as the grid allows."""
        layout, (name,) = self.task.message, self.task.message.aggregated
        codec, before = layout.codec, self.kept.get(client, layout.nothing_remembered())
        stacked = {part: tensor[None] for part, tensor in before.items()}
        nothing = codec.follow(torch.zeros_like(message)[None], stacked, asked)[name]
        one = codec.follow(torch.ones_like(message)[None], stacked, asked)[name]
        fresh = (message - nothing) / (one - nothing)
        steps = (fresh[0].double() / codec.grid.step).round().clamp(-codec.grid.limit, codec.grid.limit)
        sent = {
            "encoded": torch.frombuffer(
                bytearray(codec.grid.encode(steps.to(torch.int32))), dtype=torch.uint8
            )
        }
        self.kept[client] = layout.to_remember(layout.decode(sent, before, asked))
        return sent


def protocol_message(party: Party, task: PartyTask, run: str, round_: int, broadcast: State) -> Tensor | None:
    """Return what a client's journal says it answered in a round as the protocol has it; None: not yet."""
    entry = Journal(party.run_folder(run)).last()
    if entry is None or entry.round != round_:
        return None
    before = {name: entry.before[name][0] for name in task.message.remembered}
    return task.message.decode(entry.sent, before, Asked(round_, broadcast)).vectors[0]


# --- the simulation of what happened ----------------------------------------------------------------------


@dataclass(frozen=True)
class EpochNoise:
    """The noise of a federation's clients in each of its epochs; `epochs` says which epoch a round was in."""

    secrets: Mapping[int, StackedSecretNoise]
    epochs: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Mapping[int, Iterable[SecretNoise]], epochs: Iterable[int]) -> EpochNoise:
        return cls({epoch: StackedSecretNoise.of(some) for epoch, some in nodes.items()}, tuple(epochs))

    def draw(self, law, ids, dim, round_, device):
        return self.secrets[self.epochs[round_]].draw(law, ids, dim, round_, device)

    def steps(self, law, step, ids, dim, round_, device):
        return self.secrets[self.epochs[round_]].steps(law, step, ids, dim, round_, device)


def secrets_by_client(parties: Iterable[Party], run: str) -> Iterator[tuple[int, SecretNoise]]:
    """The epoch each client has keys for, and its noise in it, as its folder has them now."""
    for party in parties:
        known = None if party.client is None else Session(party, run).secrets
        if known is not None and known.pairs:
            yield known.epoch, SecretNoise(party.client, known.pairs, party.reproducible.noise)


def check_lies(told: Tensor, expected: Tensor, near: float) -> None:
    """Liars say what they would say in the simulation, to a few steps of the grid, but for a few numbers.

    They push by many times what they saw (`REACH`): where an honest number that lies half-way between two
    steps is rounded the other way, so much is a lie off there. A wrong stream or push is off everywhere.
    """
    apart = (told - expected).abs()
    assert float((apart > near + 1e-6 * expected.abs()).double().mean()) <= 0.05
    assert float(apart.max()) <= REACH * near


def check_against_lying_simulation(
    parties: list[Party],
    config: str,
    run: str,
    liars: int,
    attack: Attack,
    secrets: Mapping[int, Mapping[int, SecretNoise]],
) -> list[int]:
    """Every message that travelled, the liars' too, every expulsion, and the model: those of the simulation.

    To a few steps of the grid, as `check_against_simulation`. `secrets` are everybody's, by epoch and client.
    Return who was expelled, in order.
    """
    log = CommitLog(parties[0].run_folder(run))
    records, craft = log.records(), attack.craft
    noise = EpochNoise.of(
        {epoch: some.values() for epoch, some in secrets.items()}, [record["epoch"] for record in records]
    )
    views: list[View] = []
    seen = replace(attack, craft=lambda view: views.append(view) or craft(view))
    ready = with_liars(config, liars, seen)
    ready = replace(ready, clients=replace(ready.clients, noise=noise))
    near = 4 * ready.resolved.algorithm.message(ready.clients.model).codec.grid.step
    progress, gone, honest = engine.start(ready), [], len(parties) - 1 - liars
    for round_, record in enumerate(records):
        views.clear()
        progress, simulated = engine.step(ready, progress)
        travelled = transcript(parties, run, round_, absent=gone)
        assert len(views) == (len(gone) < liars)
        for view in views:
            torch.testing.assert_close(travelled[:honest], view.honest, rtol=1e-6, atol=near)
            check_lies(travelled[list(view.members)], craft(view).messages, near)
        for found, expected in zip(record["expelled"], simulated.expelled, strict=True):
            assert (found["client"], found["test"]) == (expected["client"], expected["test"])
            assert abs(found["statistic"] / expected["statistic"] - 1) < 1e-3
            assert abs(found["threshold"] / expected["threshold"] - 1) < 1e-6
            gone.append(found["client"])
    torch.testing.assert_close(
        result_of(parties, run)["params"], progress.broadcast["params"], rtol=1e-6, atol=near
    )
    members = ready.resolved.algorithm.members
    assert members is not None
    assert members(log.last().server) == members(progress.server)
    return gone
