"""When evidence looks at sums, what happens between looks, and the memory in which sums lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from evidence_server import CLIENTS, CPU, EVERYBODY, LAW, LIARS, MODEL, ROUNDS, noise, server, start

from trilemma import aggregation, privacy
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.evidence import Expulsion, convict
from trilemma.learning.defences.evidence.guard import SINGLE
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.learning.defences.evidence.schedule import EARLY, looks
from trilemma.learning.defences.stage import staged
from trilemma.learning.steps.trace import Law
from trilemma.models import build
from trilemma.privacy.types import Release


@pytest.mark.parametrize("pace", [1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("rounds", [1, 7, EARLY, 9, 30, 401])
def test_every_early_round_and_the_last_are_looked_at_and_gaps_are_a_share_of_the_past(
    rounds: int, pace: float
) -> None:
    found = looks(rounds, pace)
    assert found[: min(rounds, EARLY)] == tuple(range(min(rounds, EARLY)))
    assert found[-1] == rounds - 1
    held = [round_ + 1 for round_ in found]
    assert all(after <= max(before + 1, np.ceil(before * pace)) for before, after in pairwise(held))
    assert (
        len(found) == rounds
        if pace == 1.0
        else len(found) <= EARLY + np.log(max(rounds / EARLY, 1)) / np.log(pace) + 1
    )


def test_a_model_that_waited_is_set_right_in_the_round_that_moves_it() -> None:
    assert 10 not in looks(30)
    assert 10 in looks(30, wait=11)
    assert looks(5, wait=9) == looks(5)


@pytest.mark.parametrize("spoilt", [None, "length", "sum", "difference"])
def test_a_first_look_at_the_longest_and_shortest_misses_nothing(spoilt: str | None) -> None:
    """Against every length and pair one by one, messages changed to a little below and beyond the limits."""
    seen = set()
    for strength in np.linspace(0.8, 1.4, 25):
        sums = noise(0).double().numpy()
        if spoilt == "length":
            sums[3] *= strength
        elif spoilt is not None:
            sums[3] = sums[3] + (strength - 0.8) * (1 if spoilt == "sum" else -1) * sums[7]
            sums[3] *= np.linalg.norm(sums[7]) / np.linalg.norm(sums[3])
        spread = np.full(1, LAW.sigma_ind**2 + CLIENTS * LAW.sigma_cor**2)
        shared, once = np.full(1, LAW.sigma_cor**2), np.ones((CLIENTS, 1))
        law = Law.of(shared, once, spread, np.full(1, 0.1), MODEL.dim)
        found = convict(sums @ sums.T, law, LIARS, 1e-6)
        assert law.alike
        assert found == convict(sums @ sums.T, replace(law, alike=None), LIARS, 1e-6)
        seen |= {bool(found)}
    assert seen == ({False} if spoilt is None else {False, True})


def test_all_looks_of_a_run_together_raise_a_false_alarm_with_the_stated_probability() -> None:
    """The levels at which a whole run's looks are taken, added up: those of sums and those of messages."""
    algorithm, levels = server("evidence(1e-3)+mean"), []
    state = start(algorithm)
    for round_ in range(ROUNDS):
        taken: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "trilemma.learning.defences.evidence.detector.convict",
                lambda gram, law, liars, alarm, seen, taken=taken: taken.append(alarm) or [],
            )
            state = algorithm.server(Messages(noise(round_)), state, round_, Key(3)).state
        assert len(taken) == (2 if round_ in looks(ROUNDS) else 1)
        levels += taken
    assert sum(levels) == pytest.approx(1e-3)


def test_a_look_that_was_missed_is_made_up_for_in_the_next_round_that_is_held() -> None:
    detector = server().detector
    history = ClientHistory.empty(CLIENTS, ROUNDS, torch.zeros(3))
    assert detector.schedule[7:10] == (7, 9, 12)
    held = replace(history, sharing=(torch.arange(ROUNDS) < 9).repeat(CLIENTS, 1))  # rounds 0 … 8
    assert detector.due(held, 9)
    assert detector.due(held, 10)  # round 9 was not held
    held.sharing[:, 10] = True
    assert not detector.due(held, 11)


def test_a_drift_that_no_message_shows_is_seen_at_the_next_look_and_undone() -> None:
    """From round 9 on a liar pushes as much as hides in one message: the look in round 13 sees the sum."""
    algorithm, told = server("evidence(correct=0)+mean", clip=0.05), {}
    honest, state = start(algorithm), start(algorithm)
    for round_ in range(14):
        sent = noise(round_)
        honest = algorithm.server(Messages(sent), honest, round_, Key(3)).state
        if round_ >= 8:
            sent[19, 0] += 18.0
        step = algorithm.server(Messages(sent), state, round_, Key(3))
        state, told[round_] = step.state, [one.client for one in step.report["expelled"]]
    assert {round_: who for round_, who in told.items() if who} == {12: [19]}
    left, pushed = float((state["params"] - honest["params"])[0]), 4 * 18.0 / CLIENTS
    assert abs(left) < pushed / 2


def test_who_is_expelled_between_looks_is_not_taken_back_twice() -> None:
    """Client 19 stands apart early and is left out of the model; between looks its message betrays it.

    The model is then what it would have been had the sums been looked at in that round.
    """
    ends = []
    for pace in (1.25, 1.0):
        algorithm = server(f"evidence(pace={pace})+mean")
        state = start(algorithm)
        for round_ in range(9):
            sent = noise(round_)
            sent[19, 0] += 4.0 if round_ < 8 else 1e4
            step = algorithm.server(Messages(sent), state, round_, Key(3))
            state = step.state
        assert [one.client for one in step.report["expelled"]] == [19]
        ends.append(state["params"])
    assert torch.allclose(*ends, atol=1e-6)


@pytest.mark.parametrize("method", ["byz-clip-sgd", "fedavg"])
@pytest.mark.parametrize("round_", [0, 1])
def test_a_message_whose_step_no_number_holds_is_no_part_of_the_sums(method: str, round_: int) -> None:
    """3·10³⁸ is a number and ten times as much is none: 0 times that would have been the model's end."""
    options = {"momentum": 0.0, "lr": 10.0} if method == "byz-clip-sgd" else {"beta": 10.0}
    setup = Setup(CLIENTS, LIARS, ROUNDS, aggregation.parse("evidence+mean", f=LIARS), Release(0.5, LAW))
    algorithm = staged(algorithms[method](**options).build, setup)
    state = start(algorithm)
    for now in range(round_ + 2):
        members = algorithm.members(state)
        source = privacy.SimulatedNoise(Key(2), CLIENTS).among(members)
        sent = source.draw(LAW, members, MODEL.dim, now, CPU)
        sent[:, 1] += 0.5
        if algorithm.trace.around:
            sent = sent + state["params"]
        if now == round_:
            sent[19] = 3e38
        step = algorithm.server(Messages(sent, senders=members), state, now, Key(3))
        state = step.state
        assert [one.client for one in step.report["expelled"]] == ([19] if now == round_ else [])
    assert torch.isfinite(state["evidence.sums"]).all()
    assert torch.isfinite(state["params"]).all()


def test_a_state_that_another_version_kept_is_refused_with_the_reason() -> None:
    algorithm = server()
    older = {name: part for name, part in start(algorithm).items() if name != "evidence.proved"}
    with pytest.raises(UserError, match=r"kept by another version, without evidence\.proved"):
        algorithm.members(older)


def test_sums_of_earlier_rounds_stay_what_they_were_although_memory_is_used_again() -> None:
    """Whoever keeps a state, or runs the server from it again, finds it as it was."""
    algorithm, kept, expected = server(), [], []
    state, total = start(algorithm), torch.zeros(CLIENTS, MODEL.dim)
    places = []
    for round_ in range(6):
        sent = noise(round_)
        total = total - sent
        if round_ == 3:  # only some are heard, and a liar rehearses
            sent, total = sent[:15], total + torch.cat([torch.zeros(15, MODEL.dim), sent[15:]])
            algorithm.server(Messages(2 * sent, senders=EVERYBODY[:15]), state, round_, Key(3))
        state = algorithm.server(
            Messages(sent, senders=EVERYBODY[: len(sent)], sharing=EVERYBODY), state, round_, Key(3)
        ).state
        places.append(state["evidence.sums"].data_ptr())
        if round_ in (1, 3):
            kept.append(state)
            expected.append(total)
    for one, sums in zip(kept, expected, strict=True):
        assert torch.allclose(one["evidence.sums"], sums, atol=1e-5)
    assert torch.allclose(state["evidence.sums"], total, atol=1e-5)
    assert len(set(places)) < len(places)


def test_long_messages_are_measured_in_float32_and_the_same_comes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights and model as with float64 products, up to 10⁻⁵; a message that is no number goes either way."""
    model, ends, generator = build("logistic", (SINGLE,), 2), [], torch.Generator().manual_seed(2)
    own, shared = (torch.randn(3, CLIENTS, model.dim, generator=generator) for _ in range(2))
    asked: list[bool] = []

    def later(vectors: torch.Tensor, *, single: bool = False) -> Callable[[], aggregation.Geometry]:
        asked.append(single)
        return measuring(vectors, single=single)

    measuring = aggregation.geometry_later
    monkeypatch.setattr(aggregation, "geometry_later", later)
    for least in (SINGLE, SINGLE * 100):
        monkeypatch.setattr("trilemma.learning.defences.evidence.guard.SINGLE", least)
        algorithm, weights = server("evidence+caf"), []
        state = algorithm.init(model, EVERYBODY, Key(1)).server
        for round_ in range(3):
            members = algorithm.members(state)
            common = shared[round_, list(members)]
            sent = LAW.sigma_ind * own[round_, list(members)]
            sent += LAW.sigma_cor * len(members) ** 0.5 * (common - common.mean(0))
            sent[:, 3] += 0.5
            if round_ == 1:
                sent[7, 5] = torch.nan
            step = algorithm.server(Messages(sent, senders=members), state, round_, Key(3))
            assert [one.client for one in step.report["expelled"]] == ([7] if round_ == 1 else [])
            state = step.state
            weights.append(step.report["weights"])
        ends.append((torch.cat(weights), state["params"]))
    assert asked == [True] * 3 + [False] * 3
    (single, moved), (double, expected) = ends
    assert torch.allclose(single, double, atol=1e-5)
    assert float((moved - expected).norm()) < 1e-5 * float(expected.norm())


def test_of_two_who_are_set_aside_one_counts_as_a_liar_that_is_gone() -> None:
    """Four may lie and one copies an honest client: both go, and three may still lie among the others."""
    algorithm = server(rounds=2)
    detector, state, sent = algorithm.detector, start(algorithm), noise(0)
    sent[19] = sent[3]
    step = algorithm.server(Messages(sent), state, 0, Key(3))
    assert [(one.client, one.test) for one in step.report["expelled"]] == [
        (3, "one of a pair"),
        (19, "one of a pair"),
    ]
    history = ClientHistory.read(step.state)
    assert detector.liars(history) == LIARS - 1
    assert detector.liars(history.expelling([Expulsion(18, "length")])) == LIARS - 2
