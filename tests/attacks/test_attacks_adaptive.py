"""Adaptive liars: they pass every test, do harm by doing so, and keep what they claim to keep."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trilemma import config, simulate
from trilemma.attacks import View, attacks
from trilemma.attacks.adaptive import _shifted, _Stage
from trilemma.keys import Key
from trilemma.learning.evidence.outlook import Outlook

RUN = {
    "federation": {"clients": 20, "byzantine": 4},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "aggregation": {"rule": "evidence+mean"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 30.0, "delta": 1e-4},
    "attack": {"name": "adaptive"},
    "run": {"rounds": 4},
}


STEP = -0.5
WAY = torch.ones(50, dtype=torch.float64) / 50**0.5


def steps(*changes: str) -> list[simulate.engine.Record]:
    ready = simulate.assemble(config.parse(RUN, changes), 1)
    progress, records = simulate.engine.start(ready), []
    for _ in range(ready.config.run.rounds):
        progress, record = simulate.engine.step(ready, progress)
        records.append(record)
    return records


def stage(noise: str, limit: float = np.inf) -> _Stage:
    """Ten clients' random messages, the last three liars', and a server that expels sums over `limit`."""
    rng = torch.Generator().manual_seed(1)
    sums = torch.randn(10, 50, generator=rng, dtype=torch.float64)
    vectors = torch.cat([sums, sums / STEP, torch.zeros(1, 50, dtype=torch.float64)])

    def gram(beside: torch.Tensor) -> np.ndarray:
        rows = torch.cat([vectors, beside])
        return (rows @ rows.T).numpy()

    def outcome(gram: np.ndarray, changes: np.ndarray) -> SimpleNamespace:
        after = np.eye(10, len(gram)) + STEP * changes
        lengths = np.einsum("ip,pq,iq->i", after, gram, after)
        expelled = int((lengths > limit).sum())
        return SimpleNamespace(expelled=expelled, move=after.mean(0), corrected=0.0, awaited=0)

    defence = SimpleNamespace(vectors=vectors, senders=np.arange(10), step=STEP, gram=gram, outcome=outcome)
    return _Stage(defence, (7, 8, 9), np.ones(3), -WAY[None], torch.ones(50, dtype=torch.float64), noise)


@pytest.mark.parametrize("noise", ["protocol", "rotated"])
def test_harm_is_what_the_messages_do_to_the_mean(noise: str) -> None:
    """The Gram matrix's answer against the messages themselves."""
    made = stage(noise)
    passes, harm = made.harm(0, 4.0, greedy=True)
    after = made.defence.vectors[:10].mean(0) + STEP * made.lies(0, 4.0).sum(0) / 10
    assert passes
    assert harm == pytest.approx(float(after @ WAY))
    assert harm > made.quiet


def test_rotated_noise_keeps_every_length_and_inner_product_among_liars() -> None:
    """Of messages, or of sums: here one is a multiple of the other, so of both."""
    made = stage("rotated")
    before = made.defence.vectors[10:20]
    after = before.clone()
    after[7:] += made.lies(0, 4.0)
    assert torch.allclose(after[7:] @ after[7:].T, before[7:] @ before[7:].T)
    assert float((after[7:] @ -WAY).mean()) == pytest.approx(float((before[7:] @ -WAY).mean()) + 4.0)
    assert made.candidates(0, 1e3) == []


def test_noise_is_turned_as_far_as_it_goes_and_no_further() -> None:
    """Between two strengths of a grid nearly a fifth of the push would be given away."""
    found = stage("rotated")
    for end in found.furthest(0):
        assert found.harm(0, end, True)[0]
    assert not found.harm(0, 1.001 * max(found.furthest(0)), True)[0]


def test_liars_whose_noise_cannot_turn_any_further_send_it_as_it_is() -> None:
    """Along the direction they are as long as they can be: there is no strength left, and nothing to turn."""
    own = torch.stack([WAY, WAY]).float()
    lies = _shifted(own, WAY, np.zeros(2), "rotated")
    assert lies is not None
    assert torch.equal(lies, own)


def test_a_lie_that_would_be_expelled_is_not_a_candidate() -> None:
    longest = float((stage("protocol").defence.vectors[:10] ** 2).sum(1).max())
    bold = stage("protocol", limit=longest * 1.01)
    assert bold.harm(0, 1e-3, greedy=True)[0]
    assert not bold.harm(0, 1e3, greedy=True)[0]


def test_nobody_is_expelled_and_the_descent_suffers() -> None:
    records = steps()
    assert not any(record.expelled for record in records)
    assert any(record.attack_strength > 0 for record in records)


def test_sleepers_behave_until_they_strike_and_a_burst_ends() -> None:
    strengths = [record.attack_strength for record in steps("attack.start=2", "attack.stop=3")]
    assert strengths[:2] == [0.0, 0.0]
    assert strengths[3] == 0.0
    assert strengths[2] > 0


@pytest.mark.parametrize("direction", ["ones", "std", "top", "across", "loss", "best"])
def test_every_direction_is_searched(direction: str) -> None:
    assert len(steps(f"attack.direction={direction}", "attack.role=turns", "run.rounds=2")) == 2


def test_without_memory_they_face_the_rule_alone() -> None:
    honest = torch.ones(5, 4)
    view = View(
        honest=honest,
        own=torch.ones(2, 4),
        byzantine=2,
        target=lambda x, key=None: SimpleNamespace(value=x.mean(0)),
        round=0,
        key=Key(0),
    )
    crafted = attacks["adaptive"]().build().craft(view)
    assert crafted.strength > 100
    assert (crafted.messages < 0).all()


@pytest.mark.parametrize("attack", ["alie", "foe"])
def test_known_attacks_are_searched_against_the_defended_pipeline(attack: str) -> None:
    """Strengths that get their senders expelled achieve nothing; the search knows."""
    records = steps(f"attack.name={attack}", "run.rounds=1")
    assert records[0].attack_strength is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("noise", ["protocol", "rotated"])
def test_on_a_gpu_the_search_finds_what_it_finds_on_a_cpu(noise: str) -> None:
    """The same sums, messages and directions on both: the same harm for every strength."""
    ready = simulate.assemble(config.parse(RUN, ["run.device=cpu"]), 1)
    progress = simulate.engine.start(ready)
    for _ in range(2):
        progress, _ = simulate.engine.step(ready, progress)
    court, heard = ready.resolved.algorithm.court, tuple(range(20))
    generator = torch.Generator().manual_seed(1)
    dim = ready.clients.model.dim
    sent = torch.randn(20, dim, generator=generator)
    way = torch.nn.functional.normalize(torch.randn(1, dim, generator=generator, dtype=torch.float64))
    found = []
    for device in ("cpu", "cuda"):
        state = {name: part.to(device) for name, part in progress.server.items()}
        outlook = Outlook.of(court, state, sent.to(device), heard, 2)
        there = _Stage(outlook, heard[-4:], np.ones(4), way.to(device), -way[0].to(device), noise)
        found.append([there.harm(0, strength, True) for strength in (0.1, 1.0, 3.0)])
    for here, elsewhere in zip(*found, strict=True):
        assert here[0] == elsewhere[0]
        assert here[1] == pytest.approx(elsewhere[1], rel=1e-4)


def test_liars_may_push_where_public_examples_do_not_show_it() -> None:
    """In the last round of a run that goes on on a root set; without one it is the direction of the loss."""
    said = "aggregation.root=60", "attack={name='adaptive', direction='unshown', points=4}", "run.rounds=2"
    tuned = steps(*said, "aggregation.tune=model")
    plain, loss = (
        steps(*said),
        steps(*said[:1], "attack={name='adaptive', direction='loss', points=4}", said[2]),
    )
    assert [one.attack_strength for one in plain] == [one.attack_strength for one in loss]
    assert tuned[0].attack_strength == loss[0].attack_strength
