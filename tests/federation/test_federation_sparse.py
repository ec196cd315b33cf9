"""Clients that share secrets with a few others only: the simulation's run, paid for as certified."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from malicious_server import entries

from federation_harness import (
    PRIVATE,
    Direct,
    asks,
    coordinator,
    make,
    result_of,
    secrets_of,
    seeded,
    simulation,
    small_config,
    transcript,
)
from trilemma.base.errors import UserError
from trilemma.federation.party.task import load_task
from trilemma.learning import Messages
from trilemma.privacy.threats.covariance import agreed_graph, bound_multiplier, complete_multiplier, partners
from trilemma.simulate import engine


@pytest.mark.slow
def test_fifty_clients_with_eight_neighbours_each_and_two_absent_equal_the_simulation(tmp_path):
    clients, rounds, gone = 50, 2, {3, 17}
    options = (*PRIVATE, "privacy.neighbours=8", "data.holders=all")
    parties, config = seeded(tmp_path / "federation", clients, *options, tolerate=2, rounds=rounds)

    def absent_in_the_end(client, asked, answer):
        return None if client in gone and asks(asked, 1) else answer

    runner, _ = coordinator(parties, Direct(parties, tamper=absent_in_the_end))
    runner.go()
    assert [record["absent"] for record in runner.log.records()] == [[], sorted(gone)]
    for noise in secrets_of(parties, "run"):
        assert len(noise.pairs) == 8
        assert set(noise.pairs) == set(partners(noise.index, range(clients), 8))

    experiment = simulation(parties, config, "run")
    algorithm, progress = experiment.resolved.algorithm, engine.start(experiment)
    near = 4 * algorithm.message(experiment.clients.model).codec.grid.step
    broadcast, states, server = progress.broadcast, progress.clients, progress.server
    for round_ in range(rounds):
        key = experiment.key.fold("round", round_)
        step = algorithm.client(broadcast, states, experiment.clients, round_, key)
        rows = step.messages.vectors.clone()
        for client in gone if round_ == 1 else ():
            rows[client] = torch.nan
        travelled = transcript(parties, "run", round_, absent=gone if round_ == 1 else ())
        torch.testing.assert_close(travelled, rows, rtol=1e-6, atol=near, equal_nan=True)
        done = algorithm.server(Messages(rows), server, round_, key.fold("server"))
        broadcast, server, states = done.broadcast, done.state, step.state
    torch.testing.assert_close(result_of(parties, "run")["params"], broadcast["params"], rtol=1e-6, atol=near)


def test_a_round_is_paid_for_on_the_epochs_own_graph(tmp_path):
    """Seven of nine clients in the epoch: the price is that of seven with three neighbours, whoever lies."""
    config = small_config(9, *PRIVATE, "privacy.neighbours=3", "privacy.collusion=1", tolerate=2, rounds=1)
    parties = make(tmp_path / "federation", 9, config, budget=1e9)
    coordinator(parties, Direct(parties, gone={7, 8}))[0].go()
    release = load_task(parties[0]).resolved.release
    law, move = release.law, release.sensitivity
    graph = agreed_graph(7, 3)
    assert set(graph.degrees) == {4}, "seven clients cannot have three neighbours each"
    z = entries(parties[1])[0].mechanism.z
    assert z == bound_multiplier(graph, law, move, 1, 1)
    assert z < complete_multiplier(law, move, 7, 1, 1), "fewer secrets protect less"


def test_where_nobody_shares_secrets_neighbours_are_refused(tmp_path):
    alone = ("privacy.threat=ldp", "privacy.clip=1", "privacy.sigma_ind=1", "privacy.neighbours=4")
    with pytest.raises(UserError, match="neighbours"):
        make(tmp_path / "federation", 9, small_config(9, *alone), budget=1e9)


def test_neighbours_are_mutual_and_noise_still_cancels(tmp_path):
    options = (*PRIVATE, "privacy.neighbours=4", "data.holders=all")
    parties, _ = seeded(tmp_path / "federation", 10, *options, rounds=1)
    coordinator(parties, Direct(parties))[0].go()
    noise = secrets_of(parties, "run")
    law = dataclasses.replace(load_task(parties[0]).resolved.release.law, sigma_ind=0.0)
    drawn = [one.steps(law, 2.0**-12, (one.index,), 100, 0, torch.device("cpu")) for one in noise]
    assert all(one.any() for one in drawn)
    assert not sum(drawn).any()
