"""What the federation tests share: small configurations, a clock, nodes without a network, the simulation."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typer.testing import CliRunner

from stacked_noise import StackedSecretNoise
from trilemma import config as configurations
from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.cli.federation import federation_app
from trilemma.federation.carriers.inprocess import InProcess
from trilemma.federation.client.sessions import Session, apart
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.operations import pilot
from trilemma.federation.party import layout, provisioning
from trilemma.federation.party.layout import Party
from trilemma.federation.party.permission import amend
from trilemma.federation.party.public_facts import Federation, Timing
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.transport import FIRST_NODE, Reply
from trilemma.federation.server.coordinator import Coordinator, open_run
from trilemma.federation.server.exchange import Clock
from trilemma.learning.steps.gridded import GridCodec
from trilemma.privacy.secrets import SecretNoise
from trilemma.simulate import engine
from trilemma.simulate.experiment import Experiment, assemble
from trilemma.task import Task

os.environ[layout.REPRODUCIBLE] = "1"  # clients whose noise is in a file work here, and nowhere else

INSTANT = Timing(round_limit=1.0, join_limit=0.3, poll=0.05)

PRIVATE = (
    "algorithm.name=cafcor",
    "aggregation.rule=caf",
    "privacy.threat=secldp",
    "privacy.clip=0.1",
    "privacy.sigma_cor=0.5",
    "privacy.sigma_ind=0.1",
)


def small_config(clients: int, *assignments: str, tolerate: int = 1, rounds: int = 3) -> str:
    """A logistic model on phishing, 69 numbers; what is left open is chosen, as `init` does."""
    config = configurations.parse(
        {},
        [
            f"federation.clients={clients}",
            f"federation.tolerate={tolerate}",
            f"run.rounds={rounds}",
            "aggregation.rule=cwmed",
            "algorithm.name=dsgd",
            *assignments,
        ],
    )
    return pilot.settled(config, None, None).toml()


def make(
    folder: Path,
    clients: int,
    config: str,
    *,
    timing: Timing = INSTANT,
    budget: float | None = None,
    partly: bool = False,
    **facts: object,
) -> list[Party]:
    """Make a federation's folders; `partly`: owners ask for "run" though the budget may not reach its end."""
    parties = provisioning.init(folder, Federation("test", clients, timing=timing, **facts), config)
    write_budgets(parties[1:], load_task(parties[0]), budget)
    for party in parties[1:] if partly else ():
        amend(party.allowed, lambda allowed: allowed.with_part("run"))
    return parties


@dataclass
class Time:
    """A clock that moves when somebody sleeps."""

    at: float = 0.0

    def pass_(self, seconds: float) -> None:
        assert seconds > 0, "who waits for nothing waits for ever"
        self.at += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.at, self.pass_)


class Direct(InProcess):
    """Nodes in this process, on a clock of their own; `tamper` may change or drop what they say.

    `pause` seconds pass whenever the server looks who is there; `asked` remembers who got which question.
    """

    def __init__(
        self,
        parties: list[Party],
        tamper: Callable[[int, bytes, bytes], bytes | None] = lambda _client, _asked, answer: answer,
        gone: Collection[int] = (),
        pause: float = 0.0,
    ) -> None:
        super().__init__(parties, gone)
        self.tamper, self.pause = tamper, pause
        self.time = Time()
        self.asked: list[tuple[int, str]] = []

    def nodes(self):
        if self.pause:
            self.time.pass_(self.pause)
        return super().nodes()

    def reply(self, node: int, block: bytes) -> Reply | None:
        client = node - FIRST_NODE
        self.asked.append((client, wire.kind_of(block)))
        reply = super().reply(node, block)
        if reply is None or reply.block is None:
            return reply
        changed = self.tamper(client, block, reply.block)
        return None if changed is None else Reply(node, changed)


def asks(block: bytes, *rounds: int) -> bool:
    """Tell whether a block asks for a step of one of these rounds; without any: of some round."""
    if wire.kind_of(block) != "ask":
        return False
    return not rounds or wire.loads(block, kinds.Ask)[0].round in rounds


def during(acts: dict[int, Callable[[], object]]) -> Callable[[int, bytes, bytes], bytes]:
    """Return a `tamper` that changes nothing, and lets each act happen once, while its round is asked for."""

    def tamper(_client: int, asked: bytes, answer: bytes) -> bytes:
        for round_ in [round_ for round_ in acts if asks(asked, round_)]:
            acts.pop(round_)()
        return answer

    return tamper


def coordinator(parties: list[Party], transport: Direct, run: str = "run") -> tuple[Coordinator, list[str]]:
    """A coordinator over `transport`, on its clock, and what it says."""
    said: list[str] = []
    clock = transport.time.clock
    return open_run(parties[0], run, transport, lambda event: said.append(event.text), clock), said


def command(*arguments: object) -> str:
    """Give a command of `trilemma federation`; return what it prints, or raise what it refuses."""
    outcome = CliRunner().invoke(federation_app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    if isinstance(outcome.exception, UserError):
        raise outcome.exception  # the command line prints it and exits with 2
    assert outcome.exit_code == 0, f"{outcome.output}\n{outcome.exception!r}"
    return outcome.output


# --- deployed and simulated -------------------------------------------------------------------------------


def share_seeds(parties: list[Party], config: str) -> None:
    """Give every client the simulation's seed for sampling, and noise that can be drawn again."""
    seed = configurations.parse(tomllib.loads(config)).run.seeds[0]
    for party in parties[1:]:
        noise = bytes([7 + party.client] * 32).hex()
        for name, text in (("reproducible-batches", f"{seed:x}"), ("reproducible-noise", noise)):
            files.write_atomically(party.folder / "secrets" / name, text.encode(), secret=True)


def seeded(
    folder: Path, clients: int, *assignments: str, rounds: int, tolerate: int = 1, **facts: object
) -> tuple[list[Party], str]:
    """Make a federation with the simulation's seeds, and budgets for any run where there is noise."""
    config = small_config(clients, *assignments, rounds=rounds, tolerate=tolerate)
    budget = 1e9 if any("sigma" in one for one in assignments) else None
    parties = make(folder, clients, config, budget=budget, **{"transcript": True, **facts})
    share_seeds(parties, config)
    return parties, config


def secrets_of(parties: list[Party], run: str) -> list[SecretNoise]:
    """Every client's noise source, rebuilt from its own folder."""
    return [
        SecretNoise(party.client, Session(party, run).secrets.pairs, party.reproducible.noise)
        for party in parties[1:]
    ]


def transcript(parties: list[Party], run: str, round_: int, absent: Collection[int] = ()) -> torch.Tensor:
    """What the server recorded of a round, one row per client; rows of NaN for those who were absent."""
    folder = parties[0].run_folder(run) / "transcript"
    rows = {
        party.client: wire.loads((folder / f"{round_}-{party.client}").read_bytes(), kinds.Answer)[1][
            "vector"
        ]
        for party in parties[1:]
        if party.client not in absent
    }
    nothing = torch.full_like(next(iter(rows.values())), torch.nan)
    return torch.stack([rows.get(party.client, nothing) for party in parties[1:]])


def dropped_out(records: list[dict]) -> list[int]:
    """The rounds in which somebody was not heard: silent, not reached, or refusing what it has lost."""
    return [record["round"] for record in records if Record.read(record).unheard]


def result_of(parties: list[Party], run: str) -> wire.Tensors:
    """The result the server wrote."""
    return wire.read_file(parties[0].run_folder(run) / "result", kinds.Finished)[1]


def simulation(parties: list[Party], config: str, run: str, task: Task | None = None) -> Experiment:
    """The experiment of `config`, with a federation's arithmetic and the noise of its secrets."""
    assigned = configurations.parse(tomllib.loads(config), ["privacy.arithmetic=grid"])
    experiment = assemble(assigned, seed=1, task=task)
    noise = StackedSecretNoise.of(secrets_of(parties, run))
    if parties[1].reproducible is not None:
        own = [SecretNoise(party.client, {}, apart(party.reproducible.noise)) for party in parties[1:]]
        experiment = replace(experiment, scoring=StackedSecretNoise.of(own))
    return replace(experiment, clients=replace(experiment.clients, noise=noise))


def check_against_simulation(
    parties: list[Party], config: str, run: str, task: Task | None = None
) -> Experiment:
    """Every message that travelled, and the model: to 1e-6 those of the stacked simulation.

    On a grid to a few steps: stacked or alone, a contribution differs in its last bits, and one that
    lies half-way between two steps is rounded to either; what follows from it moves with it. Noise is the
    same to the bit, so a wrong stream or a wrong clip is off by hundreds of steps.
    """
    experiment = simulation(parties, config, run, task)
    progress = engine.start(experiment)
    algorithm = experiment.resolved.algorithm
    codec = algorithm.message(experiment.clients.model).codec
    near = 4 * codec.grid.step if isinstance(codec, GridCodec) else 1e-6
    for round_ in range(experiment.config.run.rounds):
        key = experiment.key.fold("round", round_)
        sent = algorithm.client(progress.broadcast, progress.clients, experiment.clients, round_, key)
        travelled = transcript(parties, run, round_)
        assert travelled.abs().max() > 0
        torch.testing.assert_close(travelled, sent.messages.vectors, rtol=1e-6, atol=near)
        progress, _ = engine.step(experiment, progress)
    result = result_of(parties, run)
    assert set(result) == set(progress.broadcast)
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, progress.broadcast[name], rtol=1e-6, atol=near)
    return experiment
