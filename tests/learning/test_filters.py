"""Published rivals of evidence, and the root set: what they do, against slow versions, and in whole runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from trilemma import aggregation, config, privacy, simulate
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.filter import FilteredRound
from trilemma.learning.defences.noise_test import distances
from trilemma.learning.defences.root_client import RootClient
from trilemma.learning.defences.stage import staged
from trilemma.learning.protocol import ClientStep, ServerStep
from trilemma.learning.steps.tuning import Tuned, tuned, unseen
from trilemma.models import build
from trilemma.privacy.types import NoiseLaw, Release

LAW = NoiseLaw(sigma_ind=0.7, sigma_cor=0.5)
RUN = {
    "federation": {"clients": 9, "byzantine": 2},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 20.0, "delta": 1e-4},
    "run": {"rounds": 3},
}


def assembled(*changes: str) -> simulate.Experiment:
    return simulate.assemble(config.parse(RUN, changes), 1)


def finished(*changes: str) -> tuple[simulate.Experiment, simulate.engine.Progress, list[dict[int, float]]]:
    ready = assembled(*changes)
    progress, weights = simulate.engine.start(ready), []
    for _ in range(ready.config.run.rounds):
        progress, record = simulate.engine.step(ready, progress)
        weights.append(record.weights)
    return ready, progress, weights


def served(rule: str, rounds: list[torch.Tensor], clip: float = 1e-6) -> list[ServerStep]:
    """What a server without momentum makes of rounds of messages (9, d)."""
    setup = Setup(9, 2, len(rounds), aggregation.parse(rule, f=2), Release(clip, LAW))
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)
    model = build("multinomial", (rounds[0].shape[1] // 2 - 1,), 2, start="zero")
    state, steps = algorithm.init(model, tuple(range(9)), Key(1)).server, []
    for round_, sent in enumerate(rounds):
        steps.append(algorithm.server(Messages(sent), state, round_, Key(2)))
        state = steps[-1].state
    return steps


def noise(dim: int, seed: int = 1) -> torch.Tensor:
    return privacy.SimulatedNoise(Key(seed), 9).draw(LAW, tuple(range(9)), dim, 0, torch.device("cpu"))


def kept(step: ServerStep) -> list[int]:
    return step.report["weights"].nonzero().flatten().tolist()


def test_kolmogorovs_distance_is_scipys() -> None:
    rows = torch.randn(4, 57, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = [stats.kstest(row.numpy(), "norm").statistic for row in rows]
    assert distances(rows).numpy() == pytest.approx(np.array(expected), abs=1e-12)


def test_the_noise_test_leaves_out_what_is_no_noise() -> None:
    """Noise too short, too long, of another law, not finite; a shift that hides is aggregated."""
    dim, deviation = 400, math.sqrt(0.7**2 + 8 * 0.5**2)
    sent = noise(dim)
    sent[0] *= 0.8
    sent[1] *= 1.2
    sent[2] = deviation * torch.randn(dim, generator=torch.Generator().manual_seed(4)).sign()
    sent[3, 5] = math.nan
    sent[4] += 0.1 * deviation
    [step] = served("noise-test(level=0.001)+mean", [sent])
    assert kept(step) == [4, 5, 6, 7, 8]
    assert step.broadcast["params"] == pytest.approx(-sent[4:].mean(0), abs=1e-5)


def test_the_noise_test_allows_for_contributions_as_long_as_the_clip() -> None:
    """Without the allowance a contribution five times the noise's deviation in every number fails."""
    sent = noise(200) + 8.0
    [strict], [lenient] = (served("noise-test+mean", [sent], clip) for clip in (1e-6, 8.0 * math.sqrt(200)))
    assert kept(strict) == []
    assert not strict.broadcast["params"].any(), "where nobody is left the model stays"
    assert kept(lenient) == list(range(9))


def test_the_noise_of_a_momentum_adds_up() -> None:
    """Honest clients under momentum pass; liars who leave their noise out do not."""
    _, _, weights = finished("aggregation.rule=noise-test(level=1e-4)+mean", "attack={name='sf'}")
    assert all(sum(weight > 0 for weight in row.values()) >= 6 for row in weights)
    _, _, weights = finished(
        "aggregation.rule=noise-test+mean", "attack={name='foe',strength=30.0}", "privacy.epsilon=1.0"
    )
    assert all(row[7] == row[8] == 0 for row in weights)


def slow_safeguard(rounds: list[np.ndarray], factor: float, window: int) -> list[list[int]]:
    good, sums, found = list(range(9)), np.zeros_like(rounds[0]), []
    for number, sent in enumerate(rounds):
        if window and number % window == 0:
            sums = np.zeros_like(sums)
        sums = sums + sent / len(good)
        far = {i: sorted(np.linalg.norm(sums[i] - sums[j]) for j in good) for i in good}
        centre = min(good, key=lambda i: far[i][len(good) // 2])
        radius = far[centre][len(good) // 2]
        good = [i for i in good if np.linalg.norm(sums[i] - sums[centre]) <= factor * radius]
        found.append(list(good))
    return found


@pytest.mark.parametrize("window", [0, 3])
def test_safeguard_leaves_out_for_good_whose_sums_drift_away(window: int) -> None:
    """A shift that is no outlier in a round becomes one in the sum."""
    rounds = [noise(60, seed).double() for seed in range(8)]
    for sent in rounds:
        sent[7:] += 1.0
    steps = served(f"safeguard(window={window})+mean", [sent.float() for sent in rounds])
    assert [kept(step) for step in steps] == slow_safeguard([sent.numpy() for sent in rounds], 1.5, window)
    assert kept(steps[0]) == list(range(9))
    assert kept(steps[-1]) == ([0, 1, 2, 3, 4, 5, 6] if window == 0 else kept(steps[-1]))


def test_fltrust_is_its_formula() -> None:
    """A run's first step against the formula, with the server's own message computed as a client's."""
    changes = ("aggregation.rule=fltrust+mean", "aggregation.root=50", "attack={name='none'}")
    ready = assembled(*changes)
    algorithm, root, key = ready.resolved.algorithm, ready.root, Key(5)
    assert root is not None
    progress = simulate.engine.start(ready)
    sent = algorithm.client(progress.broadcast, progress.clients, ready.clients, 0, key).messages.vectors
    state = algorithm.init(root.model, (0,), key).clients
    done = algorithm.client(progress.broadcast, state, root, 0, key.fold("screen"))
    own = done.messages.vectors[0].double()
    total, trust = torch.zeros_like(own), 0.0
    for row in sent.double():
        cosine = max(0.0, float(row @ own / row.norm() / own.norm()))
        total, trust = total + cosine * own.norm() / row.norm() * row, trust + cosine
    expected = progress.broadcast["params"].double() - 0.1 * total / trust
    step = algorithm.server(Messages(sent), progress.server, 0, key)
    assert step.broadcast["params"].double() == pytest.approx(expected, abs=1e-6)


def slow_ranks(points: list[float], cosines: list[float], honest: int) -> list[int]:
    """Add a round's points, and return who ranks among the honest: by points, then by cosine."""
    enough = sum(sorted(cosines)[-honest:]) / honest
    for i, cosine in enumerate(cosines):
        if cosine >= enough:
            points[i] += cosine
    return sorted(range(9), key=lambda i: (points[i], cosines[i]))[-honest:]


def test_the_second_stage_of_the_noise_test_is_its_description() -> None:
    """Three rounds against loops: two clients fail the first stage, one lies and passes it."""
    rule = "aggregation.rule=noise-test-rank(level=1e-9, deviations=12, momentum=0.5)+mean"
    ready = assembled(rule, "aggregation.root=50", "attack={name='none'}", "privacy.epsilon=2.0")
    algorithm, root, key = ready.resolved.algorithm, ready.root, Key(5)
    assert root is not None
    progress = simulate.engine.start(ready)
    broadcast, clients, server = progress.broadcast, progress.clients, progress.server
    state, points, direction = algorithm.init(root.model, (0,), key).clients, [0.0] * 9, 0.0
    left_out = set()
    for round_ in range(3):
        done = algorithm.client(broadcast, clients, ready.clients, round_, key)
        own = algorithm.client(broadcast, state, root, round_, key.fold("screen"))
        clients, state, sent = done.state, own.state, done.messages.vectors.clone()
        direction = 0.5 * direction + 0.5 * own.messages.vectors[0].double()
        against = -(direction / direction.norm()).float()
        sent[7] += 3 * sent[7].norm() * against * (round_ > 0)
        sent[8] += 0.5 * sent[8].norm() * against
        sent[2] *= 5.0 if round_ == 1 else 1.0
        passed = [not (round_ == 1 and i == 2) and not (round_ > 0 and i == 7) for i in range(9)]
        cosines = [
            float(row @ direction / row.norm() / direction.norm()) if fine else 0.0
            for row, fine in zip(sent.double(), passed, strict=True)
        ]
        first = slow_ranks(points, cosines, 7)
        expected = [i for i in sorted(first) if passed[i]]
        assert 8 not in expected
        left_out |= set(range(9)) - set(first)
        step = algorithm.server(Messages(sent), server, round_, key)
        assert kept(step) == expected
        moved = broadcast["params"].double() - 0.1 * sent[expected].double().mean(0)
        assert step.broadcast["params"].double() == pytest.approx(moved, abs=1e-5)
        broadcast, server = step.broadcast, step.state
    assert left_out > {8}, "n − f are kept, so somebody honest goes where nobody but f can"


def test_the_servers_own_message_is_computed_once_for_all_lies_that_are_tried() -> None:
    """Equal to what is computed anew; another model, round or key is another question."""
    ready = assembled("aggregation.rule=fltrust+mean", "aggregation.root=50", "attack={name='none'}")
    algorithm, asked = ready.resolved.algorithm, []

    def counted(*given: object) -> ClientStep:
        asked.append(given)
        return algorithm.client(*given)

    setup = Setup(9, 2, 3, aggregation.parse("mean", f=2), ready.resolved.release, root=ready.root)
    root = RootClient("fltrust", replace(algorithm, client=counted), setup)
    model = torch.zeros(ready.clients.model.dim)
    kept = root.begin(ready.clients.model, Key(1))
    questions = [(0, Key(1), model), (0, Key(1), model + 1), (1, Key(1), model), (1, Key(2), model)]
    for number, (round_, key, params) in enumerate(questions):
        heard = FilteredRound(torch.zeros(2, len(model)), (0, 1), round_, {"params": params}, key)
        first, again = root.message(heard, kept), root.message(replace(heard, x=heard.x + 1), kept)
        anew = algorithm.client({"params": params.clone()}, kept, ready.root, round_, key)
        assert torch.equal(first[0], anew.messages.vectors[0])
        assert again is first
        assert len(asked) == number + 1


def test_a_root_set_is_not_among_the_clients_examples() -> None:
    plain, rooted = (assembled("attack={name='none'}", f"aggregation.root={size}") for size in (0, 40))
    assert rooted.root is not None
    everything = plain.clients.data.dataset.x_train
    apart = torch.cat([rooted.root.data.dataset.x_train, rooted.clients.data.dataset.x_train])
    assert len(rooted.root.data.dataset.y_train) == 40
    assert torch.equal(apart.sort(0).values, everything.sort(0).values)


@pytest.mark.parametrize(
    "rule", ["noise-test+mean", "safeguard+nnm+cwmed", "fltrust+mean", "noise-test-rank+mean"]
)
@pytest.mark.parametrize("algorithm", ["fedavg", "byz-clip21-sgd2m"])
def test_rivals_face_liars_who_rehearse_them(rule: str, algorithm: str) -> None:
    said = (
        f"aggregation.rule={rule}",
        "aggregation.root=40",
        f"algorithm={{name='{algorithm}', batch_size=5}}",
    )
    liars = "attack={name='adaptive', direction='loss', points=3}"
    ready, progress, _ = finished(*said, liars, "run.rounds=2")
    assert torch.isfinite(progress.chosen).all()
    assert ready.resolved.algorithm.filter == rule.split("+")[0]


def test_liars_lean_to_what_fltrust_trusts() -> None:
    """Against the gradient alone they would have no weight; leaning to the server's message they do."""
    said = "aggregation.rule=fltrust+mean", "aggregation.root=50"
    _, _, weights = finished(*said, "attack={name='adaptive', direction='loss', points=8}")
    assert all(row[7] > 0 or row[8] > 0 for row in weights)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["aggregation.rule=fltrust+mean"], "root = 100"),
        (["aggregation.rule=noise-test-rank+mean"], "root = 100"),
        (["aggregation.tune=model"], "root = 100"),
        (["aggregation.root=100000"], "of 8400 examples"),
        (["aggregation.rule=nnm+safeguard+mean"], "before everything else"),
        (["aggregation.rule=safeguard+mean", "algorithm={name='lg-fedavg'}"], "one"),
        (["aggregation.rule=fltrust+mean", "aggregation.root=3"], "takes 5"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        simulate.engine.start(assembled(*changes))


@pytest.mark.slow
def test_the_model_goes_on_on_the_root_set_after_the_last_round() -> None:
    """Better than clients and root set alone, where the clients' noise is strong and examples are few."""
    said = "aggregation.root=100", "attack={name='none'}", "privacy.epsilon=3.0", "run.rounds=6"

    def accuracy(*changes: str) -> float:
        ready, progress, _ = finished(*said, *changes)
        return float(simulate.evaluate(ready, progress.chosen, {}).plain()["accuracy"] or 0.0)

    assert accuracy("aggregation.tune=model") > max(accuracy(), accuracy("aggregation.tune=alone")) - 0.02
    _, progress, _ = finished(*said, "aggregation.tune=model")
    assert not torch.equal(progress.chosen, progress.broadcast["params"])


def test_what_public_examples_show_is_taken_back() -> None:
    """The change of the tuned model against the inverse of the second derivative, and against tuning anew."""
    ready = assembled("aggregation.root=60", "attack={name='none'}")
    assert ready.root is not None
    origin = torch.zeros(ready.clients.model.dim)
    generator = torch.Generator().manual_seed(1)
    model = 0.1 * torch.randn(len(origin), generator=generator)
    found = tuned(ready.root, origin, model, (1.0,))
    gradient = torch.randn(len(origin), generator=generator)
    change = unseen(ready.root, found, gradient)
    whole = ready.root.everything()

    def loss(params: torch.Tensor) -> torch.Tensor:
        named = {"x": params}
        logits = whole.x[0] @ named["x"][:-1] + named["x"][-1]
        return ready.clients.model.loss(logits[:, None], whole.y[0]).mean()

    second = torch.autograd.functional.hessian(loss, found.params)
    expected = found.pull * torch.linalg.solve(second + found.pull * torch.eye(len(origin)), gradient)
    assert change == pytest.approx(expected, rel=2e-2, abs=2e-3 * float(expected.abs().max()))


def test_where_the_loss_curves_down_the_push_is_still_one() -> None:
    """A network's loss does at places; a negative pull stands for it."""
    ready = assembled("aggregation.root=60", "attack={name='none'}")
    assert ready.root is not None
    gradient = torch.randn(ready.clients.model.dim, generator=torch.Generator().manual_seed(1))
    for pull in (-0.05, -1.0, -100.0):
        change = unseen(ready.root, Tuned(torch.zeros_like(gradient), 1.0, pull), gradient)
        assert change.isfinite().all()
        assert 0 < float(change.norm()) < 1e6
