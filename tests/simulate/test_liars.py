"""What liars know beside the messages of a round, against computing it the long way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trilemma import config, models, privacy, simulate
from trilemma.simulate import engine, liars

RUN = {
    "federation": {"clients": 10, "byzantine": 2},
    "aggregation": {"rule": "evidence+mean"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 30.0, "delta": 1e-4},
    "attack": {"name": "adaptive", "points": 4},
    "run": {"rounds": 3},
}
ALGORITHMS = [
    "algorithm={name='cafcor', lr=0.1, batch_size=5}",
    "algorithm={name='byz-clip-sgd', lr=0.1, batch_size=5}",
    "algorithm={name='byz-clip21-sgd2m', lr=0.1, batch_size=5}",
    "algorithm={name='fedavg', batch_size=5}",
]


def third_round(*changes: str) -> tuple[simulate.Experiment, engine.Progress]:
    experiment = simulate.assemble(config.parse(RUN, changes), 1)
    progress = engine.start(experiment)
    for _ in range(2):
        progress, _ = engine.step(experiment, progress)
    return experiment, progress


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_truth_is_what_honest_clients_would_send_without_noise(algorithm: str) -> None:
    experiment, progress = third_round(algorithm)
    everyone, honest, key = tuple(range(10)), tuple(range(8)), experiment.key.fold("round", 2)
    client, trace = experiment.resolved.algorithm.client, experiment.resolved.algorithm.trace
    sent = client(progress.broadcast, progress.clients, experiment.clients, 2, key).messages.vectors
    state = {name: part[:8] for name, part in progress.clients.items()}
    if "momentum" in state:
        state["momentum"] = torch.zeros_like(state["momentum"])
    quiet = replace(experiment.clients.only(*honest), noise=privacy.Noiseless())
    alone = client(progress.broadcast, state, quiet, 2, key).messages.vectors
    expected = trace.vectors(alone, progress.broadcast[trace.model]).mean(0) / trace.adds(2)
    found = liars._truth(experiment, progress, everyone, sent[:8])
    assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


def test_the_loss_rises_most_where_the_mean_of_the_clients_gradients_points(monkeypatch) -> None:
    """All their examples as one client's, against every client's gradient."""
    experiment, progress = third_round(ALGORITHMS[0])
    everyone, key = tuple(range(10)), experiment.key.fold("round", 2)
    algorithm, honest = experiment.resolved.algorithm, experiment.clients.only(*range(8))
    sent = algorithm.client(progress.broadcast, progress.clients, experiment.clients, 2, key).messages
    monkeypatch.setattr(liars, "LENGTHENED", (4.0,))
    after = algorithm.server(sent, progress.server, 2, key).broadcast["params"]
    start = progress.server["evidence.origin"]
    size = min(liars.LOOKED_AT, int(honest.data.sizes[:8].min()))
    batch = honest.sample(size, key.fold("uphill"))
    expected = -models.gradients(honest.model, start + 4 * (after - start), batch).value.mean(0)
    found = liars._uphill(experiment, progress, sent, everyone)
    assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


def test_where_the_model_that_moves_is_another_liars_do_without_its_loss() -> None:
    experiment = simulate.assemble(
        config.parse(RUN, ["algorithm={name='lp-proj', batch_size=5}", "attack.direction=loss"]), 1
    )
    progress, record = engine.step(experiment, engine.start(experiment))
    assert progress.round == 1
    assert record.attack_strength is not None
