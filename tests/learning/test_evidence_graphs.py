"""Evidence where each client shares secrets with a few others: the law on a graph, and who is expelled."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma import aggregation, config, privacy, simulate
from trilemma.base.keys import Key
from trilemma.base.records import Record
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.evidence import hidden_shift
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.learning.defences.stage import staged
from trilemma.models import build
from trilemma.privacy.threats.covariance import agreed_graph, covariance
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.simulate import engine
from trilemma.simulate.runner import _most_expelled

LAW = NoiseLaw(sigma_ind=0.7, sigma_cor=0.5)
CPU = torch.device("cpu")
RUN = {
    "federation": {"clients": 20, "byzantine": 3},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "aggregation": {"rule": "evidence+mean"},
    "attack": {"name": "foe", "strength": 30.0},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 20.0, "delta": 1e-4, "neighbours": 4},
    "run": {"rounds": 6},
}


def history_of(
    sharing: list[tuple[int, ...]], heard: list[tuple[int, ...]], c: np.ndarray, dim: int = 1
) -> ClientHistory:
    """The history of rounds in which some share secrets and some of these are heard, with coefficients c."""
    clients, rounds = c.shape
    among = torch.zeros(clients, rounds, dtype=torch.bool)
    coefficients = torch.zeros(clients, rounds, dtype=torch.float64)
    for round_, (who, said) in enumerate(zip(sharing, heard, strict=True)):
        among[list(who), round_] = True
        coefficients[list(said), round_] = torch.from_numpy(c[list(said), round_])
    level = torch.ones(rounds, dtype=torch.float64)
    return replace(
        ClientHistory.empty(clients, rounds, torch.zeros(dim)),
        own=LAW.sigma_ind**2 * level,
        shared=LAW.sigma_cor**2 * level,
        sharing=among,
        coefficients=coefficients,
    )


SHARING = [tuple(range(12)), tuple(range(12)), (0, 1, 2, 4, 5, 6, 7, 9, 10, 11)]
"""Two of twelve leave after the second of three rounds."""
HEARD = [tuple(range(12)), tuple(range(0, 12, 2)), SHARING[2]]
"""In the second, every other one is heard."""


@pytest.mark.parametrize("neighbours", [3, 4, 9, 30, None])
def test_the_law_on_graphs_is_the_covariance_that_certifies_privacy_added_up(neighbours: int | None) -> None:
    c = np.random.default_rng(1).normal(size=(12, 3))
    expected = np.zeros((12, 12))
    for round_, (members, who) in enumerate(zip(SHARING, HEARD, strict=True)):
        places = [members.index(client) for client in who]
        sigma = covariance(agreed_graph(len(members), neighbours), LAW, places)
        expected[np.ix_(who, who)] += np.outer(c[who, round_], c[who, round_]) * sigma
    history = history_of(SHARING, HEARD, c)
    found = history.law(history.coefficients, np.arange(12), neighbours)
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-12, atol=1e-12)
    few = np.array([6, 1, 5])
    some = history.law(history.coefficients, few, neighbours)
    np.testing.assert_allclose(some.covariance, expected[np.ix_(few, few)], rtol=1e-12, atol=1e-12)
    last = np.arange(12)[::-1]
    turned = history.law(history.coefficients, last, neighbours)
    np.testing.assert_allclose(turned.covariance, expected[np.ix_(last, last)], rtol=1e-12, atol=1e-12)


def test_drawn_noise_has_that_law_over_rounds_in_which_members_leave() -> None:
    dim, source, sums = 200_000, privacy.SimulatedNoise(Key(5), 12, 4), torch.zeros(12, 200_000)
    for round_, members in enumerate(SHARING):
        drawn = source.among(members).draw(LAW, members, dim, round_, CPU)
        sums[list(members)] += (round_ + 1) * drawn
    history = history_of(SHARING, SHARING, np.arange(1.0, 4.0) * np.ones((12, 1)))
    law = history.law(history.coefficients, np.arange(12), 4).covariance
    measured = (sums.double() @ sums.double().T / dim).numpy()
    scale = np.sqrt(np.outer(law.diagonal(), law.diagonal()))
    assert np.abs((measured - law) / scale).max() < 6 / np.sqrt(dim)
    apart = history.law(history.coefficients, np.arange(12)).covariance
    assert np.abs((measured - apart) / scale).max() > 0.1, "secrets with all give another law"


def one_round(neighbours: int | None, told: int | None, sharing: tuple[int, ...] = tuple(range(20))) -> int:
    """How many are expelled for honest noise on a graph; the server reckons with `told` neighbours each."""
    release = Release(clip=0.1, law=NoiseLaw(0.1, 1.0))
    rule = aggregation.parse("evidence+mean", f=2)
    algorithm = staged(
        algorithms["byz-clip-sgd"](momentum=0.0).build, Setup(20, 2, 1, rule, release, neighbours=told)
    )
    model = build("logistic", (4000,), 2)
    source = privacy.SimulatedNoise(Key(2), 20, neighbours).among(sharing)
    drawn = source.draw(release.law, sharing[:-1], model.dim, 0, CPU)
    state = algorithm.init(model, tuple(range(20)), Key(1)).server
    messages = Messages(drawn, senders=sharing[:-1], sharing=sharing)
    return len(algorithm.server(messages, state, 0, Key(3)).report["expelled"])


def test_honest_noise_on_a_graph_is_judged_by_that_graph() -> None:
    assert one_round(4, told=4) == 0
    assert one_round(4, told=None) > 0
    assert one_round(4, told=5) > 0
    assert one_round(4, told=4, sharing=(1, 2, 3, 5, 7, 8, 11, 12, 13, 16, 19)) == 0


def run(*changes: str) -> tuple[list[list[int]], list[float], simulate.Experiment]:
    """Who is expelled in every round of a run, its ε after each, and the experiment."""
    ready = simulate.assemble(config.parse(RUN, changes), 1)
    progress, expelled, spent = engine.start(ready), [], []
    for _ in range(ready.config.run.rounds):
        progress, record = engine.step(ready, progress)
        expelled.append([int(one["client"]) for one in record.expelled])
        spent.append(record.epsilon)
    return expelled, spent, ready


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("aggregation.rule=evidence+caf", "privacy.threat=byzldp", "federation.sampled=15"),
        ("algorithm={name='byz-clip21-sgd2m', lr=0.1, batch_size=5}", "privacy.neighbours=7"),
        (
            "algorithm={name='safe-dshb', lr=0.1, batch_size=1}",
            "data.partition={name='dirichlet', alpha=0.1}",
        ),
    ],
)
def test_gross_liars_on_a_graph_are_expelled_and_nobody_else(changes: tuple[str, ...]) -> None:
    expelled, spent, ready = run(*changes)
    assert sorted(client for some in expelled for client in some) == [17, 18, 19]
    assert spent == sorted(spent)
    assert spent[-1] <= 20.0
    assert ready.resolved.threat is not None
    assert (ready.resolved.threat.clients, ready.resolved.threat.most) == (17, 20)


@pytest.mark.parametrize("noise", ["protocol", "rotated"])
def test_liars_who_know_the_graph_hide_from_a_server_that_knows_it(noise: str) -> None:
    expelled, _, _ = run(f"attack={{name='adaptive', noise='{noise}', points=6}}")
    assert not any(expelled)


def test_the_noise_test_knows_how_many_share_noise_with_a_client() -> None:
    ready = simulate.assemble(config.parse(RUN, ["aggregation.rule=noise-test+mean"]), 1)
    _, record = engine.step(ready, engine.start(ready))
    assert all(record.weights[client] > 0 for client in range(17))
    assert all(record.weights[client] == 0 for client in (17, 18, 19))


def test_epsilon_holds_for_every_number_of_members_between_least_and_most() -> None:
    """A graph of more members may be connected less well: here that of 24, and not that of 23."""
    law = NoiseLaw(0.1, 1.0)
    each = [privacy.Threat("secldp", members, 2, neighbours=5) for members in range(23, 31)]
    alone = [one.model.multiplier(law, 1.0, one) for one in each]
    assert min(alone) < alone[0], "otherwise this test shows nothing"
    together = privacy.Threat("secldp", 23, 2, neighbours=5, most=30)
    assert together.model.multiplier(law, 1.0, together) == min(alone)


def test_more_can_be_hidden_from_pairs_that_share_nothing_and_the_bound_says_so() -> None:
    """Among all, the formula of the graph is that of before; on a graph it counts the noise that is there."""
    law = NoiseLaw(1.19, 0.64)
    whole = hidden_shift(law, 0.01, clients=100, byzantine=10, dim=100_000, rounds=30)
    assert hidden_shift(law, 0.01, 100, 10, 100_000, 30, neighbours=99) == whole
    few = hidden_shift(law, 0.01, 100, 10, 100_000, 30, neighbours=10)
    own = np.sqrt(law.sigma_ind**2 + 10 * law.sigma_cor**2)
    limit = np.sqrt(10 * 100_000) * own / (100 * np.sqrt(30))
    assert limit < few.most < 1.3 * limit
    assert few.most < whole.most


ALL = "privacy={threat='secldp', clip=1.0, epsilon=20.0, delta=1e-4}"
"""Everybody shares secrets with everybody."""
FEW = ("federation.clients=22", "federation.byzantine=1")


@pytest.mark.parametrize(
    ("changes", "guaranteed"),
    [
        (("attack={name='mimic'}", *FEW, "privacy.neighbours=5"), True),
        (("attack={name='mimic'}", "federation.clients=15", ALL), True),
        (("attack={name='nan'}", "federation.byzantine=19", "federation.tolerate=3"), False),
    ],
    ids=["on a graph", "among all", "nearly all gone"],
)
def test_a_run_that_expelled_more_than_may_lie_says_what_it_spent(
    changes: tuple[str, ...], guaranteed: bool, tmp_path: Path
) -> None:
    """An honest client is set aside with a liar that copies it, and n − f are not left: its summary knows."""
    summary = simulate.run(config.parse(RUN, changes), tmp_path / "run")
    records = simulate.RunDirectory.open(tmp_path / "run").seed(1).records()
    last = records[-1].epsilon
    assert last > 20.0
    if guaranteed:
        assert summary.epsilon[summary.accountant] == pytest.approx(last)
        assert summary.verdict["guarantee"]["epsilon"] == pytest.approx(last)
        assert any("more clients were expelled" in note for note in summary.notes)
    else:
        assert last == math.inf
        assert (summary.epsilon, summary.printed, summary.accountant) == ({}, {}, "")
        assert "clients were left" in summary.verdict["no_guarantee"]["reason"]
        assert summary.verdict["no_guarantee"]["figure"] is None
        assert any("clients were left" in note for note in summary.notes)


@pytest.mark.parametrize("assume", ["guaranteed", "published"])
def test_liars_that_are_expelled_and_no_more_change_no_figure(assume: str, tmp_path: Path) -> None:
    few = (f"privacy={ALL.partition('=')[2][:-1]}, assume='{assume}'}}",)
    gone = simulate.run(config.parse(RUN, few), tmp_path / "gone")
    quiet = simulate.run(config.parse(RUN, (*few, "attack={name='none'}")), tmp_path / "quiet")
    records = simulate.RunDirectory.open(tmp_path / "gone").seed(1).records()
    assert sum(len(record.expelled) for record in records) == 3
    assert (gone.epsilon, gone.printed, gone.verdict) == (quiet.epsilon, quiet.printed, quiet.verdict)
    assert gone.notes == quiet.notes


def test_a_seed_that_diverged_released_once_more_than_it_recorded() -> None:
    expelled = Record(1, expelled=({"client": 4},))
    assert _most_expelled([[Record(1), expelled]], rounds=2) == 0
    assert _most_expelled([[Record(1), expelled], []], rounds=3) == 1
