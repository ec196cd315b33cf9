"""One round: who is heard, what the attack replaces, what is recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from trilemma import config, privacy, simulate
from trilemma.base.errors import ConfigError
from trilemma.privacy.accounting.spending import composed_epsilon
from trilemma.privacy.threats.covariance import multipliers

BASE = {
    "federation": {"clients": 7, "byzantine": 3},
    "algorithm": {"name": "dsgd", "lr": 1.0, "momentum": 0.9, "batch_size": 25},
    "run": {"rounds": 10},
}


def experiment(*changes: str) -> simulate.Experiment:
    return simulate.assemble(config.parse(BASE, changes), 1)


def test_data_is_divided_among_the_honest_by_default() -> None:
    honest = experiment("attack.name=sf")
    assert honest.honest == (0, 1, 2, 3)
    assert honest.clients.data.sizes[:4].sum() == 8400
    everyone = experiment("attack.name=sf", "data.holders=all")
    assert everyone.clients.data.sizes.sum() == 8400


def test_sign_flip_replaces_the_byzantine_messages_by_minus_the_mean() -> None:
    """With 4 honest and 3 times −mean, the plain mean is 1/7 of the honest mean."""
    attacked, alone = (
        experiment("attack.name=sf"),
        experiment("federation.byzantine=0", "federation.clients=4"),
    )
    a, _ = simulate.step(attacked, simulate.start(attacked))
    b, _ = simulate.step(alone, simulate.start(alone))
    begin = simulate.start(alone).broadcast["params"]
    torch.testing.assert_close(a.broadcast["params"] - begin, (b.broadcast["params"] - begin) / 7)


def test_label_flip_trains_byzantine_clients_on_other_labels() -> None:
    poisoned = experiment("attack.name=lf")
    assert poisoned.clients.ids == tuple(range(7))
    mirrored, honest = poisoned.clients.data.everything([4]), poisoned.clients.data.everything([0])
    assert torch.equal(mirrored.x, honest.x)
    assert torch.equal(mirrored.y, 1 - honest.y)


def test_only_sampled_clients_are_heard_and_keep_their_state() -> None:
    settings = ("attack.name=none", "federation.byzantine=0", "federation.sampled=3")
    chosen = experiment(*settings)
    progress = simulate.start(chosen)
    for _ in range(4):
        heard = chosen.sampled(progress.round)
        before = progress.clients["momentum"]
        progress, record = simulate.step(chosen, progress)
        silent = [i for i in range(7) if i not in heard]
        assert len(heard) == 3
        assert [i for i, weight in record.weights.items() if weight] == list(heard)
        assert torch.equal(progress.clients["momentum"][silent], before[silent])
        assert not torch.equal(progress.clients["momentum"][list(heard)], before[list(heard)])


def test_random_placement_moves_the_liars_not_the_result() -> None:
    """Messages stand at their client's place: weights of liars are those of Byzantine ids."""
    chosen = experiment(
        "attack.name=nan", "federation.placement=random", "data.holders=all", "aggregation.rule=cwmed"
    )
    assert chosen.byzantine != (4, 5, 6)
    _, record = simulate.step(chosen, simulate.start(chosen))
    assert tuple(i for i, weight in record.weights.items() if weight == 0) == chosen.byzantine


@pytest.mark.parametrize("attack", ["sf", "same-value", "alie"])
def test_a_round_may_hear_liars_only(attack: str) -> None:
    chosen = experiment(
        f"attack.name={attack}",
        "federation.byzantine=6",
        "federation.tolerate=0",
        "federation.sampled=1",
        "data.holders=all",
    )
    progress = simulate.start(chosen)
    heard = set()
    for _ in range(8):
        heard.add(chosen.sampled(progress.round)[0])
        progress, _ = simulate.step(chosen, progress)
    assert heard & set(chosen.byzantine)


def test_epsilon_in_the_record_is_the_accountants() -> None:
    chosen = experiment(
        "attack.name=sf",
        "algorithm.name=cafcor",
        "privacy.threat=secldp",
        "privacy.clip=1.0",
        "privacy.sigma_cor=2.0",
        "privacy.sigma_ind=0.5",
    )
    progress = simulate.start(chosen)
    for t in range(1, 4):
        progress, record = simulate.step(chosen, progress)
        spent = privacy.spent(chosen.resolved.release, chosen.resolved.threat, t, 1e-5)
        assert record.epsilon == pytest.approx(spent.epsilon["exact"], rel=1e-6)
        assert math.isfinite(record.epsilon)


@pytest.mark.parametrize("attack", ["none", "lf", "sf"])
def test_epsilon_holds_whether_the_liars_lie_or_not(attack: str) -> None:
    """Liars that follow the protocol leave no noise behind: only the noise of everybody's own is left."""
    chosen = experiment(
        f"attack.name={attack}",
        "algorithm.name=cafcor",
        "privacy.threat=secldp",
        "privacy.clip=1.0",
        "privacy.epsilon=5.0",
    )
    release, federation = chosen.resolved.release, chosen.config.federation
    assert release is not None
    everybody = multipliers(
        privacy.SecretGraph.complete(federation.clients), release.law, release.sensitivity
    )
    past = ((privacy.Mechanism(min(everybody.values())), chosen.config.run.rounds),)
    true = composed_epsilon(past, 1e-5, "exact")
    assert chosen.spending.figure[-1] >= true * (1 - 1e-9)
    assert chosen.spending.figure[-1] <= 5.0


def test_a_figure_that_is_no_guarantee_is_in_no_record() -> None:
    chosen = experiment(
        "algorithm.name=cafcor",
        "privacy.threat=secldp",
        "privacy.assume=published",
        "privacy.clip=1.0",
        "privacy.sigma_cor=2.0",
    )
    _, record = simulate.step(chosen, simulate.start(chosen))
    assert record.epsilon == math.inf
    verdict = chosen.resolved.verdict(chosen.config.run.rounds, 1e-5)
    assert isinstance(verdict, privacy.NoGuarantee)
    assert verdict.figure is not None


def test_batch_larger_than_a_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allowed: 1 to 2100"):
        experiment("algorithm.batch_size=3000")
    assert experiment("algorithm.batch_size=2100") is not None


def test_wire_cost_counts_up_and_down() -> None:
    chosen = experiment("attack.name=sf")
    _, record = simulate.step(chosen, simulate.start(chosen))
    assert record.facts["up_scalars"] == 7 * 69
    assert record.facts["down_bytes"] == 7 * 69 * 4


@pytest.mark.parametrize(
    ("asked", "device", "inside"),
    [("tf32", "cuda", "high"), ("tf32", "cpu", "highest"), ("float32", "cuda", "highest")],
)
def test_precision_is_set_for_the_run_alone(asked: str, device: str, inside: str) -> None:
    there = replace(experiment("attack.name=sf", f"run.precision={asked}"), device=torch.device(device))
    torch.set_float32_matmul_precision("medium")
    try:
        with there.precision():
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precision_is_for_clients_and_not_for_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, seen = [False], {}

    @contextmanager
    def rounded(self: simulate.Experiment) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(simulate.Experiment, "precision", rounded)
    plain = experiment("attack.name=sf")
    algorithm = plain.resolved.algorithm

    def client(*given: Any) -> Any:
        seen["client"] = inside[0]
        return algorithm.client(*given)

    def server(*given: Any) -> Any:
        seen["server"] = inside[0]
        return algorithm.server(*given)

    watched = replace(plain.resolved, algorithm=replace(algorithm, client=client, server=server))
    spied = replace(plain, resolved=watched)
    simulate.step(spied, simulate.start(spied))
    assert seen == {"client": True, "server": False}


@pytest.mark.parametrize("name", ["dsgd", "qsgd", "dgc", "lbgm", "sketch"])
def test_a_lie_is_as_long_as_a_message_may_be(name: str) -> None:
    """Under attack the honest messages count as they travel, and every liar's as the longest there is."""
    tables = {**BASE, "algorithm": {"name": name}}
    alone, attacked = (
        simulate.assemble(config.parse(tables, changes), 1)
        for changes in (["federation.byzantine=0", "federation.clients=4"], ["attack.name=sf"])
    )
    (_, honest), (_, record) = (simulate.step(one, simulate.start(one)) for one in (alone, attacked))
    algorithm, model = attacked.resolved.algorithm, attacked.clients.model
    longest = algorithm.message(model).longest
    if algorithm.inquiry is not None:
        longest = longest + algorithm.inquiry.message(model).longest
    assert record.facts["up_bytes"] == honest.facts["up_bytes"] + 3 * longest.bytes
    assert record.facts["up_scalars"] == honest.facts["up_scalars"] + 3 * longest.scalars
