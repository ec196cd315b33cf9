"""What liars know beside the messages of a round, against computing it the long way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trilemma import config, models, privacy, simulate
from trilemma.simulate import ahead, engine, liars
from trilemma.simulate.ahead import Ahead

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


def looking_ahead(*changes: str) -> Ahead:
    """Where the third round of a run leads if nobody lies."""
    experiment, progress = third_round(ALGORITHMS[0], *changes)
    client, key = experiment.resolved.algorithm.client, experiment.key.fold("round", 2)
    sent = client(progress.broadcast, progress.clients, experiment.clients, 2, key).messages
    return Ahead(experiment, progress, sent, tuple(range(10)))


def test_the_loss_rises_most_where_the_mean_of_the_clients_gradients_points() -> None:
    """All their examples as one client's, against every client's gradient."""
    seen = looking_ahead()
    honest, params = seen.honest, seen.start + seen.lengthened * (seen.after - seen.start)
    size = min(ahead.LOOKED_AT, int(honest.data.sizes[:8].min()))
    batch = honest.sample(size, seen.experiment.key.fold("round", 2, "uphill"))
    expected = -models.gradients(honest.model, params, batch).value.mean(0)
    assert float((seen.uphill() - expected).norm()) < 1e-4 * float(expected.norm())


def test_a_push_towards_errors_makes_more_of_them_than_one_uphill() -> None:
    """Of the same length, by the probability that the model gives the truth."""
    seen = looking_ahead()
    model, batch, step = seen.honest.model, seen.batch, seen.trace.step(2)

    def mistaken(way: torch.Tensor, far: float) -> float:
        pushed = seen.after + step * far * way / way.norm()
        outputs = models.outputs(model, seen.start + seen.lengthened * (pushed - seen.start), batch.x[0])
        return float((1 - torch.exp(-model.loss(outputs[None], batch.y))).mean())

    far = 0.7 * float((seen.after - seen.start).norm()) / abs(step)
    none = mistaken(seen.uphill(), 0.0)
    assert mistaken(seen.errors(far), far) > mistaken(seen.uphill(), far) > none


def test_where_the_model_that_moves_is_another_liars_do_without_its_loss() -> None:
    experiment = simulate.assemble(
        config.parse(RUN, ["algorithm={name='lp-proj', batch_size=5}", "attack.direction=loss"]), 1
    )
    progress, record = engine.step(experiment, engine.start(experiment))
    assert progress.round == 1
    assert record.attack_strength is not None
