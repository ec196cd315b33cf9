"""Ring and bounded: each against its stated objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trilemma import simulate
from trilemma.aggregation import caf
from trilemma.attacks.types import View
from trilemma.base.keys import Key
from trilemma.experiment import load
from trilemma.simulate.engine import Moment
from trilemma_lab.adversary.bounded import Bounded
from trilemma_lab.adversary.informed import Informed, Room
from trilemma_lab.adversary.liars import informed
from trilemma_lab.adversary.ring import Ring


def view_with(own: torch.Tensor, honest: torch.Tensor, **more) -> Informed:
    return Informed(honest, own, len(own), target=lambda x, key=None: x, round=0, key=Key(1), **more)


def drawn(rows: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(Key(seed).numpy().standard_normal((rows, 200)))


def test_ring_shares_look_like_noise_and_add_up_to_the_signal() -> None:
    own, honest, way = drawn(6, 1), drawn(9, 2), torch.eye(200, dtype=torch.float64)[3]
    crafted = Ring().build().craft(view_with(own, honest, backdoored=lambda: 7 * way))
    sent = crafted.messages
    assert sent.square().sum() == pytest.approx(float(own.square().sum()))  # as long as honest noise
    assert torch.allclose(sent.mean(0), own.mean(0).norm() * way)  # and together nothing but the signal
    weights = caf(6)(torch.cat([honest, sent])).weights
    alone = torch.cat([honest, (6 * own.mean(0).norm() * way).expand(6, -1)])
    assert weights[9:].sum() > caf(6)(alone).weights[9:].sum()  # hidden better than if each sent all of it


def test_ring_without_a_backdoor_pushes_against_the_honest_mean() -> None:
    own, honest = drawn(4, 1), drawn(5, 2)
    sent = Ring(direction="gradient", strength=2.0).build().craft(view_with(own, honest)).messages
    against = -honest.mean(0) / honest.mean(0).norm()
    assert torch.allclose(sent.mean(0), 2 * own.mean(0).norm() * against, atol=1e-5)


@pytest.mark.parametrize("direction", ["gradient", "loss"])
def test_a_bounded_contribution_is_as_long_as_the_clip_and_its_noise_is_honest(direction: str) -> None:
    truth, noise, uphill = drawn(1, 1)[0], drawn(3, 2), drawn(1, 3)[0]
    honest = drawn(5, 4)
    asked = view_with(truth + noise, honest, truth=lambda: truth, uphill=lambda: uphill)
    sent = Bounded(clip=0.5, direction=direction).build().craft(asked).messages
    contribution = sent - noise
    assert torch.linalg.vector_norm(contribution, dim=1).tolist() == pytest.approx([0.5] * 3)
    towards = -truth if direction == "gradient" else uphill
    assert torch.cosine_similarity(contribution, towards[None]).tolist() == pytest.approx([1.0] * 3)


def test_a_momentum_holds_as_much_of_a_bounded_contribution_as_rounds_have_given_it() -> None:
    truth, noise = drawn(1, 1)[0], drawn(3, 2)
    rooms = [Room(200, 0.5, held=0.2, latest=0.2), Room(200, 0.5, held=1 - 0.8**10, latest=0.2)]
    asked = view_with(noise, drawn(5, 4), truth=lambda: truth)
    attack = Bounded().build()
    first, later = (attack.craft(replace(asked, room=lambda it=it: it)).messages - noise for it in rooms)
    assert torch.allclose(later, first * (1 - 0.8**10) / (1 - 0.8))


@pytest.mark.parametrize("quantile", ["", ", quantile=0.5"])
@pytest.mark.parametrize("direction", ["gradient", "loss"])
def test_in_a_run_its_contribution_is_as_long_as_the_runs_clip(quantile: str, direction: str) -> None:
    """Without noise, what a liar adds to its message in a round is C v, also where the clip moves."""
    options = f"name='safe-dshb', unit='user', lr=0.5, momentum=0.8, batch_size=25{quantile}"
    changes = [f"algorithm={{{options}}}", "privacy={threat='none', clip=0.3}", "aggregation.rule=caf"]
    attack = f"attack={{name='bounded', direction='{direction}'}}"
    experiment = simulate.assemble(load("safe-dshb-phishing", [*changes, attack, "run.rounds=9"]), seed=1)
    seen = []

    def watched(moment: Moment, view: View) -> Informed:
        seen.append(informed(moment, view))
        return seen[-1]

    experiment = replace(experiment, attack=replace(experiment.attack, informed=watched))
    progress = simulate.start(experiment)
    for t in range(4):
        moved = "clip" in progress.broadcast and float(progress.broadcast["clip"]) != pytest.approx(0.3)
        progress, _ = simulate.step(experiment, progress)
        held = 1 - 0.8 ** (t + 1)
        assert seen[-1].room() == Room(69, 0.3, pytest.approx(held), pytest.approx(0.2))
        lie = experiment.attack.craft(seen[-1]).messages.double() - seen[-1].own
        pushed = (lie + held * seen[-1].truth())[:, :69] / held
        assert torch.linalg.vector_norm(pushed, dim=1).tolist() == pytest.approx([0.3] * 3, rel=1e-4)
    assert moved == bool(quantile)


@pytest.mark.parametrize("quantile", [(), ("algorithm.quantile=0.5",)])
@pytest.mark.parametrize("attack", ["{name='bounded'}", "{name='ring'}"])
def test_they_run_in_the_engine(attack: str, quantile: tuple[str, ...]) -> None:
    changes = [f"attack={attack}", "run.rounds=3", "run.device=cpu", *quantile]
    settings = load("safe-dshb-phishing", changes)
    experiment = simulate.assemble(settings, seed=1)
    progress = simulate.start(experiment)
    for _ in range(3):
        progress, record = simulate.step(experiment, progress)
    assert record.train_loss is not None
