"""What liars know beside the messages of a round, against computing it the long way."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from trilemma import config, models, privacy, simulate
from trilemma.base.errors import UserError
from trilemma.simulate import engine
from trilemma.simulate.evaluation import evaluate
from trilemma.task import Task
from trilemma_lab.adversary import ahead, liars
from trilemma_lab.adversary.ahead import Ahead
from trilemma_lab.adversary.lookahead import Lookahead

RUN = {
    "federation": {"clients": 10, "byzantine": 2},
    "aggregation": {"rule": "evidence+mean"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 30.0, "delta": 1e-4},
    "attack": {"name": "adaptive", "points": 4},
    "run": {"rounds": 3},
}
NEEDED = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDED])]
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


@pytest.mark.parametrize("rule", ["evidence+mean", "evidence+caf", "evidence+cwmed"])
def test_the_outlook_tells_where_a_round_leads_as_the_server_does(rule: str) -> None:
    """And measures what is beside its basis as if all were measured at once; of columns it tells nothing."""
    seen = looking_ahead(f"aggregation.rule={rule}", "privacy.epsilon=3.0")
    detector = seen.experiment.resolved.algorithm.detector
    assert detector is not None
    lookahead, other = (
        Lookahead.of(detector, seen.progress.server, seen.sent.vectors, seen.participating, 2)
        for _ in range(2)
    )
    assert (lookahead.destination() is None) == rule.endswith("cwmed")
    told = replace(seen, lookahead=lambda: lookahead).after
    assert float((told - seen.after).norm()) < 1e-5 * float((seen.after - seen.start).norm())
    beside = torch.randn(2, len(told), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = lookahead.gram(beside), other.gram(beside)
    scale = expected.diagonal().sqrt()
    assert float(((found - expected) / torch.outer(scale, scale)).abs().max()) < 1e-6


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_round_with_a_message_that_is_not_finite_leads_where_the_server_goes_without_it(
    number: float,
) -> None:
    seen = looking_ahead("privacy.epsilon=3.0")
    detector = seen.experiment.resolved.algorithm.detector
    assert detector is not None
    seen.sent.vectors[1, 3] = number
    lookahead = Lookahead.of(detector, seen.progress.server, seen.sent.vectors, seen.participating, 2)
    assert bool(seen.after.isfinite().all())
    assert torch.equal(replace(seen, lookahead=lambda: lookahead).after, seen.after)


def test_the_loss_rises_most_where_the_mean_of_the_clients_gradients_points() -> None:
    """All their examples as one client's, against every client's gradient."""
    seen = looking_ahead()
    honest, params = seen.honest, seen.start + seen.lengthened * (seen.after - seen.start)
    size = min(ahead.LOOKED_AT, int(honest.data.sizes[:8].min()))
    batch = honest.sample(size, seen.experiment.key.fold("round", 2, "uphill"))
    expected = -models.gradients(honest.model, params, batch).value.mean(0)
    assert float((seen.uphill() - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_poison_and_backdoor_push_where_the_loss_of_what_liars_want_falls_most(device: str) -> None:
    """Of flipped labels, and of marked examples: the slope by differences of the loss itself."""
    seen = looking_ahead("attack.direction=backdoor", f"run.device={device}")
    assert seen.batch.y.device.type == device
    model, x, y = seen.honest.model, seen.batch.x[0], seen.batch.y[0]
    backdoor = seen.experiment.attack.backdoor
    assert backdoor is not None
    marked = backdoor.marked(x, lead=1)
    assert bool((marked != x).any())
    wanted = {"poisoned": (x, 1 - y), "backdoored": (marked, torch.zeros_like(y))}
    for name, (inputs, labels) in wanted.items():
        params = seen.start + seen.lengthened * (seen.after - seen.start)
        found = getattr(seen, name)()  # added to messages, which are subtracted from the model

        def loss(push: torch.Tensor, params=params, inputs=inputs, labels=labels) -> float:
            return float(model.loss(models.outputs(model, params - push, inputs)[None], labels[None]).mean())

        steepest = found / found.norm()
        assert loss(0.01 * steepest) < loss(0 * steepest)
        for way in (steepest, torch.ones_like(found) / len(found) ** 0.5):
            slope = (loss(-0.1 * way) - loss(0.1 * way)) / 0.2
            assert slope == pytest.approx(float(found @ way), rel=0.01, abs=1e-4), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_backdoor_is_scored_beside_the_model_and_works(device: str) -> None:
    """Without noise or rule to stop it; accuracy says nothing of it."""
    quiet = ("aggregation.rule=mean", "privacy={}", "run.rounds=60", "algorithm={name='dsgd', lr=1.0}")
    scores = {}
    for lies, said in (("none", "attack.stop=0"), ("all", "attack.reach=2.0")):
        changes = [*quiet, "federation.byzantine=1", "attack.direction=backdoor", said]
        changes.append(f"run.device={device}")
        experiment = simulate.assemble(config.parse(RUN, changes), 1)
        progress = engine.start(experiment)
        for _ in range(60):
            progress, _ = engine.step(experiment, progress)
        scores[lies] = evaluate(experiment, progress.chosen).metrics
    assert scores["none"]["backdoor"] < 0.1 < 0.3 < scores["all"]["backdoor"]
    assert scores["all"]["accuracy"] > 0.8


def test_a_backdoor_without_test_examples_is_no_number() -> None:
    rng = torch.Generator().manual_seed(1)
    clients = [(torch.randn(30, 6, generator=rng), torch.randint(2, (30,), generator=rng)) for _ in range(10)]
    task = Task(model=lambda: torch.nn.Linear(6, 2), loss=torch.nn.CrossEntropyLoss(), clients=clients)
    experiment = simulate.assemble(config.parse(RUN, ["attack.direction=backdoor"]), 1, task=task)
    assert math.isnan(evaluate(experiment, engine.start(experiment).chosen).metrics["backdoor"])


def test_attacks_on_classes_are_refused_where_there_are_none() -> None:
    task = Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=torch.nn.MSELoss(),
        clients=[(torch.randn(20, 3), torch.randn(20, 1)) for _ in range(10)],
        test=(torch.randn(5, 3), torch.randn(5, 1)),
    )
    for direction in ("poisoned", "backdoor"):
        with pytest.raises(UserError, match="'adaptive' needs class labels"):
            simulate.assemble(config.parse(RUN, [f"attack.direction={direction}"]), 1, task=task)


def likely(seen: Ahead, pushed: torch.Tensor) -> torch.Tensor:
    """The probability (1, m) that a model (d,) gives the truth, of each of the liars' examples."""
    model, batch = seen.honest.model, seen.batch
    outputs = models.outputs(model, seen.start + seen.lengthened * (pushed - seen.start), batch.x[0])
    return torch.exp(-model.loss(outputs[None], batch.y))


def mistaken(seen: Ahead, pushed: torch.Tensor) -> float:
    return float(1 - likely(seen, pushed).mean())


def test_a_push_towards_errors_makes_as_many_as_patient_steps_and_more_than_one_uphill() -> None:
    """Pushes of the same length; the oracle follows the gradient in a hundred small steps on the sphere."""
    seen = looking_ahead()
    step = seen.trace.step(2)
    far = 0.7 * float((seen.after - seen.start).norm()) / abs(step)

    def pushed(way: torch.Tensor) -> torch.Tensor:
        return seen.after + step * far * way / way.norm()

    patient = seen.uphill()
    for _ in range(100):
        there = pushed(patient)
        params = seen.start + seen.lengthened * (there - seen.start)
        batch = replace(seen.batch, weight=likely(seen, there))
        slope = -models.gradients(seen.honest.model, params, batch).value[0]
        patient = patient / patient.norm() + 0.2 * slope / slope.norm()
    none, uphill = mistaken(seen, seen.after), mistaken(seen, pushed(seen.uphill()))
    most, found = mistaken(seen, pushed(patient)), mistaken(seen, pushed(seen.errors(far)))
    assert found > none + 0.95 * (most - none)
    assert most > uphill > none


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_and_their_slope_in_one_pass_are_those_of_two(weighted: bool) -> None:
    """How likely the truth is at every example, and then the gradient of losses that weigh so much."""
    seen = looking_ahead()
    if weighted:
        weight = torch.rand(seen.batch.y.shape, generator=torch.Generator().manual_seed(1))
        seen.__dict__["batch"] = replace(seen.batch, weight=weight / weight.sum())
    move, sharper = seen.after - seen.start, 3.0
    shares, expected = seen._mistaken(move, sharper)
    multiple = sharper * seen.lengthened
    steepest = multiple * seen.steepest(seen.start + multiple * move, shares)
    errors, slope = seen._slope(move, sharper)
    assert errors == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(slope, steepest, rtol=1e-4, atol=1e-6)
    assert float(slope.norm()) > 0


def test_messages_are_rehearsed_once_and_anew_when_they_were_changed() -> None:
    seen, asked = looking_ahead(), []
    algorithm = seen.experiment.resolved.algorithm

    def server(*given: Any) -> Any:
        asked.append(given)
        return algorithm.server(*given)

    resolved = replace(seen.experiment.resolved, algorithm=replace(algorithm, server=server))
    seen = replace(seen, experiment=replace(seen.experiment, resolved=resolved))
    lies = seen.sent.vectors.clone()
    first = seen.mistaken(lies)
    assert seen.mistaken(lies, 1.0) == first
    assert len(asked) == 2  # of nobody's lie, for the multiple by which all is counted, and of this one
    lies[-2:] += 0.5
    assert seen.mistaken(lies) != first
    assert len(asked) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fine", [0, 1, 2, 3])
def test_a_climb_towards_errors_ends_where_these_are_no_numbers(
    monkeypatch: pytest.MonkeyPatch, fine: int, bad: float
) -> None:
    """Whether the slope is a number there or not, and however many looks were fine before."""
    seen, looks = looking_ahead(), []
    slopes = torch.randn(40, seen.start.numel(), generator=torch.Generator().manual_seed(1))

    def slope(self: Ahead, move: torch.Tensor, sharper: float) -> tuple[float, torch.Tensor]:
        looks.append(move)
        number = len(looks) <= fine
        return (0.5, slopes[len(looks)]) if number else (bad, slopes[len(looks)] * (bad if fine % 2 else 1.0))

    monkeypatch.setattr(Ahead, "_slope", slope)
    assert bool(seen.errors(1.0).isfinite().all())
    assert len(looks) <= ahead.LOOKS + 25  # of one line search


def test_mistakes_are_those_of_the_model_to_which_messages_lead() -> None:
    """As the server makes of them. What a lie brings beside its push is where the next one sets out."""
    seen = looking_ahead("aggregation.rule=mean")
    assert seen.mistaken(seen.sent.vectors) == pytest.approx(mistaken(seen, seen.after), abs=1e-6)
    way = seen.errors(1.0)
    changed = seen.sent.vectors.clone()
    changed[-2:] += 3 * way
    sent, server = replace(seen.sent, vectors=changed), seen.experiment.resolved.algorithm.server
    led = server(sent, seen.progress.server, 2, seen.key).broadcast[seen.trace.model]
    assert seen.mistaken(changed) == pytest.approx(mistaken(seen, led), abs=1e-6)
    assert seen.mistaken(changed) > seen.mistaken(seen.sent.vectors)
    assert torch.allclose(seen.errors(1.0, (way, changed)), way, atol=1e-3)
    changed[-2:] += 20 * (seen.uphill() - (seen.uphill() @ way) * way)
    sent = replace(sent, vectors=changed)
    led = server(sent, seen.progress.server, 2, seen.key).broadcast[seen.trace.model]
    beside = led - ((led - seen.after) @ way) * way
    again = seen.errors(1.0, (way, changed))
    pushed = [mistaken(seen, beside + seen.trace.step(2) * one) for one in (again, way)]
    assert pushed[0] > pushed[1] + 1e-4


def test_where_the_model_that_moves_is_another_liars_do_without_its_loss() -> None:
    experiment = simulate.assemble(
        config.parse(RUN, ["algorithm={name='lp-proj', batch_size=5}", "attack.direction=loss"]), 1
    )
    progress, record = engine.step(experiment, engine.start(experiment))
    assert progress.round == 1
    assert record.attack_strength is not None
