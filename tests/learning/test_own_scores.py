"""Clients' own scores: what one example or one client moves, what liars move, and what it costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trilemma.base.errors import ConfigError, PrivacyError
from trilemma.experiment import parse
from trilemma.experiment.resolve import resolve
from trilemma.learning import algorithms
from trilemma.learning.steps.own_scores import OwnScores, release_of
from trilemma.privacy import Guarantee, Noiseless
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.mechanism import mechanism
from trilemma.privacy.types import NoiseLaw
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble


def private(unit, adjacency, held, arithmetic="grid", sigma=2.0):
    law = NoiseLaw(sigma_ind=sigma * release_of(unit, adjacency, held).sensitivity)
    return OwnScores.noised((1,), 0, release_of(unit, adjacency, held, law), 5, arithmetic)


@given(data=st.data())
def test_no_neighbour_moves_a_share_by_more_than_is_declared(data):
    """Without its noise, in the very steps that leave: an example replaced, one more, or all of the data."""
    unit, adjacency = data.draw(
        st.sampled_from([("user", "replace"), ("example", "replace"), ("example", "add-remove")])
    )
    least = data.draw(st.integers(1, 40))
    scores = private(unit, adjacency, least)
    held = data.draw(st.integers(least, 60))
    right = data.draw(st.integers(0, held))
    if unit == "user":
        other = (data.draw(st.integers(0, 60)), 60)
    elif adjacency == "replace":
        other = (data.draw(st.sampled_from([max(0, right - 1), right, min(held, right + 1)])), held)
    else:
        other = (right + data.draw(st.integers(0, 1)), held + 1)
    shares = torch.tensor([right / held, other[0] / other[1]], dtype=torch.float64)
    told = scores.told(shares, Noiseless(), (0, 1), 0)
    declared = scores.release.sensitivity / (2 if adjacency == "add-remove" else 1)
    room = scores.grid.clip / scores.grid.bound
    assert float((told[0] - told[1]).abs()) * room <= declared * (1 + 1e-12)
    assert torch.allclose(told, shares, atol=2 * scores.grid.step / room)


@given(
    honest=st.lists(st.floats(0, 1), min_size=3, max_size=9),
    lies=st.lists(st.floats(allow_nan=False), max_size=4),
)
def test_liars_bring_a_score_no_further_than_it_says(honest, lies):
    """Among the honest shares, and between the two numbers beside it whatever the liars say instead."""
    f = min(len(lies), (len(honest) - 1) // 2)
    scores = OwnScores((1,), f)
    found = scores.combined([*honest, *lies[:f]])
    assert min(honest) - 1e-6 <= found["own_accuracy"] <= max(honest) + 1e-6
    for other in itertools.combinations_with_replacement((-1e9, 0.5, 1e9), f):
        moved = scores.combined([*honest, *other])["own_accuracy"]
        assert found["own_accuracy_low"] - 1e-6 <= moved <= found["own_accuracy_high"] + 1e-6


@pytest.mark.parametrize(("clients", "f"), [(5, 0), (3, 1), (7, 2), (40, 4)])
@pytest.mark.parametrize("lie", [-1e9, 0.4, 1e9])
def test_the_honest_mean_lies_between_the_two_numbers_whatever_the_noise(clients, f, lie):
    """In 19 evaluations of 20 and more, liars or none."""
    scores = replace(private("example", "replace", 20, "float"), tolerated=f)
    generator = torch.Generator().manual_seed(5)
    true = torch.linspace(0.3, 0.7, clients - f, dtype=torch.float64)
    missed = 0
    for _ in range(400):
        noise = torch.randn(clients - f, generator=generator, dtype=torch.float64)
        told = true + scores.release.law.sigma_ind * noise
        found = scores.combined([*told.tolist(), *[lie] * f])
        missed += not found["own_accuracy_low"] <= float(true.mean()) <= found["own_accuracy_high"]
    assert missed <= 20


def test_noise_widens_what_is_said_of_equal_shares():
    """Everybody tells the same: without noise that is the score, with noise nobody knows it so well."""
    scores = private("example", "replace", 20, "float")
    found = scores.combined([0.5] * 16)
    assert found["own_accuracy"] == 0.5
    assert found["own_accuracy_high"] - 0.5 == pytest.approx(0.1 * math.sqrt(2 * math.log(40) / 16), rel=1e-3)
    assert OwnScores((1,), 0).combined([0.5] * 16)["own_accuracy_high"] == 0.5


def test_noise_is_what_the_release_says():
    scores = private("example", "replace", 20, "float")
    shares = torch.full((400,), 0.75)

    class Drawn(Noiseless):
        def draw(self, law, ids, dim, round_, device):
            torch.manual_seed(3)
            return torch.randn(len(ids), dim) * law.sigma_ind

    told = scores.told(shares, Drawn(), tuple(range(400)), 0)
    assert float(told.mean()) == pytest.approx(0.75, abs=0.02)
    assert float(told.std()) == pytest.approx(2.0 / 20, rel=0.1)


EVALUATED = ("evaluation.clients=true", "evaluation.every=4", "federation.clients=5", "run.rounds=10")
STEPS = ("algorithm.lr=1", "algorithm.momentum=0.9")
USER = ("algorithm.name=cafcor", *STEPS, "aggregation.rule=caf", "privacy.threat=secldp", "privacy.clip=0.1")
EXAMPLE = (
    *("algorithm.name=safe-dshb", *STEPS, "algorithm.batch_size=20"),
    *("privacy.threat=ldp", "privacy.clip=1"),
)


@pytest.mark.parametrize(
    "kind", [USER, pytest.param(EXAMPLE, marks=pytest.mark.slow)], ids=["user", "example"]
)
def test_an_epsilon_that_is_aimed_at_holds_with_the_evaluations(kind):
    """Messages get more noise, both together keep to the target, and the figure is every accountant's."""
    aimed = parse({}, [*EVALUATED, *kind, "privacy.epsilon=8", "evaluation.epsilon=3"])
    found, without = resolve(aimed, 400), resolve(aimed.with_("evaluation={}"), 400)
    assert found.release.law.sigma_ind > 1.01 * without.release.law.sigma_ind
    verdict = found.verdict(10, 1e-5)
    assert isinstance(verdict, Guarantee)
    assert 7.8 < verdict.epsilon <= 8.0
    own = found.own_scores
    assert own.turns == (4, 8, 10)
    past = ((mechanism(found.release, found.threat), 10), (mechanism(own.release, own.threat), 3))
    assert accountants[verdict.accountant].epsilon(past, 1e-5) == pytest.approx(verdict.epsilon)
    alone = accountants["exact"].epsilon(past[1:], 1e-5)
    assert alone == pytest.approx(3.0, rel=1e-3)
    assert "clients evaluate 3 times" in found.notes[-1]


@pytest.mark.parametrize("name", sorted(algorithms))
def test_algorithms_say_whether_clients_end_with_models_of_their_own(name):
    asked = parse({"data": {"name": "synthetic", "size": 300}, "model": {"name": "multinomial"}}, [])
    experiment = assemble(asked.with_("federation.clients=100", f"algorithm={{name='{name}'}}"), seed=1)
    assert experiment.personal == experiment.resolved.algorithm.own_models


@pytest.mark.parametrize("name", ["fedavg", "dsgd"])
def test_whoever_has_one_model_for_all_may_evaluate_it(name):
    asked = parse({}, [*EVALUATED, f"algorithm.name={name}"])
    assert resolve(asked, 400).own_scores is not None


def test_what_evaluations_need_is_said():
    for complaint, assignments in {
        "noise where messages have none": ("evaluation.epsilon=1",),
        "how much noise": (*USER, "privacy.sigma_ind=1"),
        "noise is given twice": ("evaluation.epsilon=1", "evaluation.noise_multiplier=2"),
        "are the clients' own": ("algorithm.name=ditto",),
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            resolve(parse({}, [*EVALUATED, *assignments]), 400)
    with pytest.raises(PrivacyError, match="no noise in the rounds makes up"):
        resolve(parse({}, [*EVALUATED, *USER, "privacy.epsilon=2", "evaluation.epsilon=2.5"]), 400)
    plain = parse({}, ["federation.clients=5"])
    assert "evaluation" not in plain.dump(), "configurations that do not ask for it stay as they were"
    asked = parse({}, [*EVALUATED])
    assert parse(asked.dump()).evaluation == asked.evaluation


def test_in_a_simulation_examples_are_set_aside_and_the_cost_is_in_every_record():
    noise = ("privacy.sigma_ind=2", "evaluation.noise_multiplier=20")
    config = parse({}, [*EVALUATED, *USER, *noise, "evaluation.hold_out=0.2", "federation.byzantine=1"])
    experiment, plain = assemble(config, 1), assemble(config.with_("evaluation={}"), 1)
    data, before = experiment.clients.data, plain.clients.data
    for client in range(4):
        trained, kept = data.holdings.train[client], data.holdings.valid[client]
        assert not set(trained) & set(kept)
        assert set(trained) | set(kept) == set(before.holdings.train[client])
        assert len(kept) == len(before.holdings.train[client]) // 5
    curve, less = experiment.spending.figure, plain.spending.figure
    assert curve[2] == pytest.approx(less[2])
    assert (curve[3:] > less[3:]).all()
    assert curve[-1] == pytest.approx(experiment.resolved.verdict(10, 1e-5).epsilon)


def test_a_simulated_liar_is_put_aside():
    lying = ("federation.byzantine=1", "attack.name=sf", "aggregation.rule=cwmed", "run.rounds=8")
    config = parse({}, [*EVALUATED, *lying, "algorithm.lr=1", "federation.clients=6"])
    experiment = assemble(config, 1)
    progress = engine.start(experiment)
    records = []
    for _ in range(8):
        progress, record = engine.step(experiment, progress)
        records.append(record)
    assert [bool(record.metrics) for record in records] == [False] * 3 + [True] + [False] * 3 + [True]
    found = records[-1].metrics
    assert 0.4 < found["own_accuracy"] < 0.8
    assert found["own_accuracy_low"] <= found["own_accuracy"] <= found["own_accuracy_high"]
    believed = replace(experiment.resolved.own_scores, tolerated=0)
    assert believed.combined([0.5, 0.5, 1e9])["own_accuracy"] > 0.6, "who believes everybody is moved"


def test_where_an_example_may_come_or_go_none_are_drawn_to_be_set_aside():
    """One more example would draw others: many would change sides, and training would not cover that."""
    wanted = ["evaluation.clients=true", "evaluation.noise_multiplier=2", "algorithm.name=safe-dshb"]
    wanted += ["algorithm.sampling=poisson", "privacy.threat=ldp", "privacy.clip=0.1"]
    wanted += ["privacy.sigma_ind=0.05"]
    assemble(parse({}, wanted), seed=1)
    with pytest.raises(ConfigError, match="comes or goes"):
        assemble(parse({}, [*wanted, "privacy.adjacency=add-remove"]), seed=1)
