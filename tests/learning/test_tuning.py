"""Whoever goes on learning from the clients' model, on examples in which liars have no say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trilemma import config, models, simulate
from trilemma.base.errors import ConfigError
from trilemma.data import FederatedData
from trilemma.learning import Messages
from trilemma.learning.steps.tuning import PULLS, check_going_on, tuned, unseen
from trilemma_lab.adversary.ahead import Ahead

RUN = {
    "data": {"examples": 120},
    "federation": {"clients": 5, "byzantine": 1},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "attack": {"name": "foe"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 20.0, "delta": 1e-4},
    "run": {"rounds": 3},
}


def assembled(*changes: str) -> simulate.Experiment:
    return simulate.assemble(config.parse(RUN, changes), 1)


def origin(ready: simulate.Experiment) -> torch.Tensor:
    begin = ready.resolved.algorithm.init(ready.clients.model, (0,), ready.key.fold("init"))
    return begin.broadcast["params"]


def finished(*changes: str) -> tuple[simulate.Experiment, simulate.engine.Progress]:
    ready = assembled(*changes)
    progress = simulate.engine.start(ready)
    for _ in range(ready.config.run.rounds):
        progress, _ = simulate.engine.step(ready, progress)
    return ready, progress


@pytest.mark.slow
def test_every_client_goes_on_at_home_after_the_last_round() -> None:
    """Each from the same model, on its own examples: what its tuning gives is its row."""
    ready, progress = finished("aggregation.tune=clients")
    plain, before = finished()
    model = before.chosen
    assert torch.equal(model, progress.broadcast["params"]), "nobody hears of what is done at home"
    assert progress.chosen.shape == (len(ready.clients.ids), ready.clients.model.dim)
    for row, i in enumerate(ready.clients.ids):
        expected = tuned(plain.clients.only(i), origin(plain), model).params
        assert torch.equal(progress.chosen[row], expected)


def test_at_home_alone_the_clients_model_does_not_count() -> None:
    """Whatever liars sent: the same models as without any liars, where the examples are the same."""
    lied, honest = (
        finished("aggregation.tune=clients-alone", "data.holders=all", f"attack={{name='{name}'}}")
        for name in ("foe", "none")
    )
    assert not torch.equal(lied[1].broadcast["params"], honest[1].broadcast["params"])
    ids = lied[0].honest
    mine, theirs = (one[1].chosen[[one[0].clients.ids.index(i) for i in ids]] for one in (lied, honest))
    assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_an_average_goes_on_as_it_is_handed_out() -> None:
    _, plain = finished("run.returned=average")
    ready, home = finished("run.returned=average", "aggregation.tune=clients")
    first = tuned(ready.clients.only(ready.clients.ids[0]), origin(ready), plain.chosen)
    assert torch.equal(home.chosen[0], first.params)


@pytest.mark.slow
def test_at_home_liars_cannot_make_it_much_worse_than_alone() -> None:
    """A useless model is forgotten, a good one is not: thirty examples each."""

    def score(*changes: str) -> float:
        ready, progress = finished("run.rounds=40", *changes)
        return float(simulate.evaluate(ready, progress.chosen).metrics["accuracy"])

    alone = score("aggregation.tune=clients-alone")
    lied = score("aggregation.tune=clients", "aggregation.rule=mean", "attack={name='foe', strength=50}")
    helped = score("aggregation.tune=clients", "attack={name='none'}", "privacy.epsilon=200")
    assert score("aggregation.rule=mean", "attack={name='foe', strength=50}") < 0.6, "the lie is a lie"
    assert lied > alone - 0.03
    assert helped > alone


def test_so_few_examples_are_drawn_anew_for_every_seed() -> None:
    settings = config.parse(RUN)
    seen = [simulate.assemble(settings, seed).clients.data.dataset for seed in (1, 1, 2)]
    assert [len(one.y_train) for one in seen] == [120] * 3
    assert torch.equal(seen[0].x_train, seen[1].x_train)
    assert not torch.equal(seen[0].x_train, seen[2].x_train)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["data.examples=8844"], "examples = 8844 of 8400"),
        (["data.examples=4", "algorithm.batch_size=1", "aggregation.tune=clients"], "holds 1; allowed: 2"),
        (["aggregation.tune=model"], "root = 100"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_runs(changes: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        assembled(*changes)


@pytest.mark.parametrize("name", ["ditto", "lp-proj", "per-fedavg", "pfedme", "local"])
def test_clients_with_models_of_their_own_are_refused_before_anything_runs(name: str) -> None:
    """Not after the last round, when all of it would be lost."""
    with pytest.raises(ConfigError, match=f"clients of {name} have their own already"):
        assembled(
            f"algorithm={{name='{name}'}}", "aggregation.tune=clients", "privacy={}", "attack={name='none'}"
        )


def test_an_average_that_carries_statistics_is_one_model() -> None:
    assert assembled("algorithm={name='fedavg', batch_size=5}", "aggregation.tune=clients").personal is False


@pytest.mark.slow
@pytest.mark.parametrize("number", [1e30, 3e38, math.inf, math.nan])
def test_a_model_that_is_nowhere_is_forgotten(number: float) -> None:
    """Whatever was handed out: a client at home then ends with what it reaches alone."""
    ready = assembled()
    owner, begin = ready.clients.only(0), origin(ready)
    found = tuned(owner, begin, torch.full_like(begin, number), (0.0, 1.0))
    assert found.scale == 0
    assert torch.equal(found.params, tuned(owner, begin, begin, (0.0,)).params)


def test_running_statistics_do_not_go_on() -> None:
    model = replace(assembled().clients.model, buffers=(("mean", (3,)),))
    with pytest.raises(ConfigError, match="running statistics"):
        check_going_on(model, 100)


def test_targets_that_are_numbers_are_compared_as_they_are() -> None:
    """A multiple of the outputs is as good a classifier; it is no prediction of a number."""
    clients = assembled("attack={name='none'}").clients
    dataset = clients.data.dataset
    numbers = replace(dataset, y_train=2.0 * dataset.x_train[:, 0] + 1.0)
    seen: list[float] = []

    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not outputs.requires_grad:  # held-out examples, with models that were not shown them
            seen.append(float(outputs.abs().mean()))
        return (outputs[..., 0] - targets) ** 2

    model = replace(clients.model, loss=squared)
    owner = replace(clients.only(0), model=model, data=FederatedData(numbers, clients.data.holdings))
    begin = torch.zeros(model.dim)
    found = tuned(owner, begin, begin, (0.0,))
    whole = owner.everything()
    told = models.outputs(model, found.params, whole.x[0])[..., 0]
    assert len(seen) == len(PULLS), "each model is judged by its own outputs, and by no multiple of them"
    assert float((told - whole.y[0]).abs().mean()) < 0.5


@pytest.mark.slow
def test_liars_push_where_honest_clients_examples_do_not_show_it() -> None:
    """The mean of what each of them would not see; without anybody who goes on it is the loss's slope."""
    few = "attack={name='adaptive'}", "data.examples=20", "federation.clients=3"
    ready = assembled("aggregation.tune=clients", "run.rounds=1", *few)
    progress = simulate.engine.start(ready)
    sent = Messages(torch.zeros(3, ready.clients.model.dim))
    ahead = Ahead(ready, progress, sent, tuple(range(3)))
    pushes = []
    for i in ready.honest:
        owner = ready.clients.only(i)
        found = tuned(owner, origin(ready), ahead.after)
        pushes.append(unseen(owner, found, ahead.steepest(found.params, ahead.batch.weight)))
    assert len(pushes) == 2, "liars are not asked"
    assert ahead.unshown() == pytest.approx(ahead.sense * torch.stack(pushes).mean(0), rel=1e-5, abs=1e-7)
    plain = Ahead(assembled(*few), progress, sent, tuple(range(3)))
    assert torch.equal(plain.unshown(), plain.uphill())
