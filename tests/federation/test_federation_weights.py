"""Clients of unequal, public weight between parties: one roster, one sum, a ledger each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import federation_harness
from federation_harness import (
    PRIVATE,
    Direct,
    asks,
    check_against_simulation,
    command,
    coordinator,
    dropped_out,
    seeded,
    simulation,
    small_config,
)
from trilemma.base.errors import ConfigError, UserError
from trilemma.cli.federation import federation_app
from trilemma.federation.client.sessions import Session
from trilemma.federation.client.spending import own_statement
from trilemma.federation.identity.rosters import RosterError, SignedRoster, check_follows
from trilemma.federation.operations import membership
from trilemma.federation.party import layout
from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import load_task
from trilemma.learning.messages import STEPS
from trilemma.privacy import Threat, judge
from trilemma.privacy.secrets import SecretNoise
from trilemma.privacy.threats.covariance import weighed_multiplier
from trilemma.privacy.types import NoiseLaw

SIZES = (29, 29, 20, 20, 12)
SAID = f"federation.weights={list(SIZES)}"
CLIENTS, ROUNDS = len(SIZES), 3


@dataclass(frozen=True)
class Secrets:
    """The noise of all clients from their own folders, each with its scale."""

    parties: list[Party]
    scales: tuple[float, ...]

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> torch.Tensor:
        noise = [self._of(self.parties[1 + i]).steps(law, step, (i,), dim, round_, device) for i in ids]
        return torch.cat(noise)

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> torch.Tensor:
        raise NotImplementedError

    def _of(self, party: Party) -> SecretNoise:
        assert party.client is not None
        assert party.reproducible is not None
        secrets = Session(party, "run").secrets
        assert secrets is not None
        return SecretNoise(
            party.client, secrets.pairs, party.reproducible.noise, scale=self.scales[party.client]
        )


def weighed_simulation(parties: list[Party], config: str, run: str, task: object = None) -> object:
    found = simulation(parties, config, run)
    noise = Secrets(parties, found.config.federation.scales)
    return replace(found, clients=replace(found.clients, noise=noise))


def federation(folder: Path, *assignments: str) -> tuple[list[Party], str]:
    return seeded(folder, CLIENTS, *PRIVATE, SAID, *assignments, rounds=ROUNDS)


def test_deployed_equals_simulated_and_every_ledger_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, config = federation(tmp_path / "fed")
    coordinator(parties, Direct(parties))[0].go()
    monkeypatch.setattr(federation_harness, "simulation", weighed_simulation)
    experiment = check_against_simulation(parties, config, "run")

    release, threat = experiment.resolved.release, experiment.resolved.threat
    assert release is not None
    assert threat is not None
    told = []
    for client, scale in enumerate(threat.scales):
        entries = own_statement(parties[1 + client]).entries
        assert len(entries) == ROUNDS
        held = judge(release, replace(threat, own=scale), ROUNDS, 1e-5)
        told.append(min(entries[-1].epsilon.values()))
        assert told[-1] == pytest.approx(held.epsilon, rel=1e-9)
    assert told[0] == told[1] > told[2] == told[3] > told[4]
    assert max(told) == pytest.approx(judge(release, threat, ROUNDS, 1e-5).epsilon, rel=1e-9)


def test_the_sum_of_the_integers_that_travel_is_free_of_what_pairs_share(tmp_path: Path) -> None:
    """With another client's own noise taken off, what is left is the weighted sum of contributions."""
    parties, config = federation(tmp_path / "fed")
    coordinator(parties, Direct(parties))[0].go()
    experiment = weighed_simulation(parties, config, "run")
    scales, law = experiment.config.federation.scales, experiment.resolved.release.law
    noise, dim = Secrets(parties, scales), experiment.clients.model.dim
    setup_grid = experiment.resolved.algorithm.message(experiment.clients.model).codec.grid
    own = NoiseLaw(law.sigma_ind)
    cpu = torch.device("cpu")
    everybody = tuple(range(CLIENTS))
    together = noise.steps(law, setup_grid.step, everybody, dim, 0, cpu).sum(0)
    alone = noise.steps(own, setup_grid.step, everybody, dim, 0, cpu).sum(0)
    assert torch.equal(together, alone)
    assert STEPS in {
        part.name for part in experiment.resolved.algorithm.message(experiment.clients.model).parts
    }


def test_who_drops_out_leaves_noise_and_takes_no_privacy(tmp_path: Path) -> None:
    """The heaviest is silent in a round: the round counts, and costs everybody what it cost before."""
    parties, _ = federation(tmp_path / "fed")
    silent = Direct(
        parties, tamper=lambda client, asked, said: None if client == 0 and asks(asked, 1) else said
    )
    run, _ = coordinator(parties, silent)
    run.go()
    records = run.log.records()
    assert 2 in dropped_out(records)
    assert records[1]["weights"]["0"] == 0
    costs = [entry.mechanism.z for entry in own_statement(parties[3]).entries]
    assert len(set(costs)) == 1


def test_weights_are_on_the_signed_roster_and_nowhere_else(tmp_path: Path) -> None:
    parties, _ = federation(tmp_path / "fed")
    roster = parties[1].signed_roster
    assert [one.weight for one in roster.clients] == list(SIZES)
    text = parties[1].roster.read_text().replace('"weight": 12', '"weight": 30')
    with pytest.raises(RosterError, match="not signed"):
        SignedRoster.read(text, parties[1].authority.read_bytes())
    heavier = tuple(one.model_copy(update={"weight": 30.0}) for one in roster.clients)
    with pytest.raises(RosterError, match="another weight than before"):
        check_follows(replace(roster, serial=roster.serial + 1, clients=heavier), roster)


@pytest.mark.parametrize("said", ["", "weights = [29, 29, 20, 12, 20]", "weights = [12, 29, 20, 20, 29]"])
def test_a_configuration_with_other_weights_than_signed_is_refused(tmp_path: Path, said: str) -> None:
    """By the client itself, before it pays: a server cannot hand out other weights."""
    parties, _ = federation(tmp_path / "fed")
    text = parties[1].config.read_text()
    line = next(line for line in text.splitlines() if line.startswith("weights"))
    rest = text.split(line)[1].split("]", 1)[1] if "]" not in line else text.split(line)[1]
    parties[1].config.write_text(text.split(line)[0] + said + rest)
    with pytest.raises(ConfigError, match="the signed roster has"):
        load_task(parties[1])


def test_a_federation_with_weights_keeps_its_members(tmp_path: Path) -> None:
    _parties, _ = federation(tmp_path / "fed")
    folder = tmp_path / "fed"
    with pytest.raises(UserError, match="5 weights, and the roster would have 6 places"):
        membership.add(folder, None)
    assert {party.name for party in layout.parties(folder)} == {"server", *(f"client-{i}" for i in range(5))}
    membership.leave(folder, "client-4")
    with pytest.raises(ConfigError, match="a client was removed"):
        load_task(layout.parties(folder)[0])


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("[1, 2]", "2 weights for 5 clients"),
        ("[1, 1, 1, 1, -1]", "weight -1"),
        ("[1, 1, 1, 1, nan]", "nan|number"),
        ("[0.5, 0.5, 0.5, 0.5, 0.5]", r"sum to 2\.5"),
        ("[90, 10, 10, 10, 10]", r"the cap is .* allowed, for instance"),
        ("[20, 20, 20, 20, 1]", r"20 times as much as the lightest"),
    ],
)
def test_bad_weights_leave_nothing_behind(tmp_path: Path, weights: str, said: str) -> None:
    folder, config = tmp_path / "fed", tmp_path / "run.toml"
    config.write_text(small_config(CLIENTS, *PRIVATE).replace("weights = []", f"weights = {weights}"))
    outcome = CliRunner().invoke(federation_app, ["init", str(folder), "--config", str(config)])
    assert isinstance(outcome.exception, UserError)
    assert re.search(said, str(outcome.exception)), str(outcome.exception)
    assert not folder.exists()


def test_a_threat_for_members_is_that_of_their_scales() -> None:
    everybody = Threat("secldp", 5, 1, 1, scales=(1.3, 1.3, 0.9, 0.9, 0.6))
    fewer = replace(everybody, clients=4, most=4, scales=everybody.scales[1:], own=0.9)
    assert fewer.scales == (1.3, 0.9, 0.9, 0.6)
    with pytest.raises(UserError, match="5 weights for 4 clients"):
        replace(everybody, clients=4, most=4)


def test_status_says_what_everybody_weighs(tmp_path: Path) -> None:
    federation(tmp_path / "fed")
    told = json.loads(command("status", tmp_path / "fed", "--json"))["parties"]
    assert [one["account"]["weight"] for one in told if "account" in one] == list(SIZES)
    assert "weight 12" in " ".join(command("status", tmp_path / "fed").split())


def test_an_epoch_of_fewer_is_priced_with_their_weights(tmp_path: Path) -> None:
    """The heaviest is away: its own noise is missing, which everybody else pays for."""
    parties, _ = federation(tmp_path / "fed")
    transport = Direct(parties)
    transport.gone = {0}
    coordinator(parties, transport)[0].go()
    threat, release = (getattr(load_task(parties[1]).resolved, name) for name in ("threat", "release"))
    for client in range(1, CLIENTS):
        paid = own_statement(parties[1 + client]).entries[0].mechanism.z
        own = threat.scales[client]
        assert paid == weighed_multiplier(release.law, release.sensitivity, threat.scales[1:], 0, own)
        assert paid < weighed_multiplier(release.law, release.sensitivity, threat.scales, 0, own)
