"""When evidence looks at sums, what happens between looks, and the memory in which sums lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from trilemma import aggregation, privacy
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.learning import Algorithm, Messages, Setup, algorithms
from trilemma.learning.defences.evidence import Expulsion, convict, hidden_shift
from trilemma.learning.defences.evidence.guard import SINGLE
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.learning.defences.evidence.schedule import EARLY, looks
from trilemma.learning.defences.stage import staged
from trilemma.learning.protocol import State
from trilemma.learning.steps.trace import Law
from trilemma.models import build
from trilemma.privacy.types import NoiseLaw, Release
from trilemma_lab.adversary.candidate import Candidates
from trilemma_lab.adversary.informed import Foreseen
from trilemma_lab.adversary.lookahead import Lookahead
from trilemma_lab.adversary.many_rounds import foreseen

CLIENTS, LIARS, ROUNDS = 20, 4, 30
EVERYBODY = tuple(range(CLIENTS))
LAW = NoiseLaw(1.0, 0.3)
MODEL = build("logistic", (299,), 2)
CPU = torch.device("cpu")
NEEDED = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDED])]


def server(
    rule: str = "evidence+mean", rounds: int = ROUNDS, clip: float = 0.5, law: NoiseLaw = LAW
) -> Algorithm:
    """Byz-Clip-SGD without momentum, steps of −1: the model is the sum of aggregates, less."""
    setup = Setup(CLIENTS, LIARS, rounds, aggregation.parse(rule, f=LIARS), Release(clip=clip, law=law))
    return staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)


def start(algorithm: Algorithm) -> State:
    return algorithm.init(MODEL, EVERYBODY, Key(1)).server


def noise(round_: int, seed: int = 2) -> torch.Tensor:
    """What everybody sends who contributes nothing."""
    return privacy.SimulatedNoise(Key(seed), CLIENTS).draw(LAW, EVERYBODY, MODEL.dim, round_, CPU)


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


def test_liars_are_told_the_truth_about_rounds_with_and_without_a_look() -> None:
    """Where the lookahead says the model goes is where it goes, and somebody is expelled where it says so."""
    algorithm = server(clip=0.05)
    state, push, awaited = start(algorithm), torch.eye(1, MODEL.dim), set()
    for round_ in range(17):
        sent = noise(round_)
        sent[:, 1] += 0.05
        lookahead = Lookahead.of(algorithm.detector, state, sent, EVERYBODY, round_)
        gram = lookahead.gram(push)
        changes = torch.zeros(1, LIARS, len(gram), dtype=torch.float64)
        changes[..., -1] = 3.6 if round_ < 12 else 7.2
        foreseen = lookahead.outcomes(gram, np.arange(CLIENTS - LIARS, CLIENTS), changes, push)
        sent = sent.clone()
        sent[-LIARS:] += changes[0, :, -1:].float() * push
        origin = ClientHistory.read(state).origin
        step = algorithm.server(Messages(sent), state, round_, Key(3))
        assert bool(foreseen.expelled) == bool(step.report["expelled"])
        reckoned = lookahead.looked()
        looked = reckoned.outcomes(reckoned.gram(push), np.arange(CLIENTS - LIARS, CLIENTS), changes, push)
        assert bool(looked.expelled) or not foreseen.expelled
        if looked.expelled and not foreseen.expelled:
            awaited.add(round_)
        if not foreseen.expelled:
            move = foreseen.move[0] @ torch.cat([lookahead.vectors, push]).double()
            assert torch.allclose(step.broadcast["params"], (origin + move).float(), atol=1e-3)
        state = step.state
    assert awaited == {13, 14, 15}  # after the look in round 12
    assert len(step.report["expelled"]) == LIARS


@pytest.mark.parametrize(
    ("rule", "geometric"),
    [
        ("evidence+caf", True),
        ("evidence+nnm+caf", True),
        ("evidence+nnm+mean", True),
        ("evidence+cwmed", False),
        ("evidence+nnm+cwmed", False),
        ("evidence+cwtm", False),
    ],
)
def test_liars_are_told_what_the_rule_after_evidence_makes_of_their_messages(
    rule: str, geometric: bool
) -> None:
    """A median of columns too, with members missing and a direction that stands out and is set right.

    Where the aggregate is no combination of the messages, its products with all of them are the server's.
    """
    algorithm, push, set_right = server(rule, clip=0.05), torch.eye(2, MODEL.dim), set()
    state = start(algorithm)
    for round_, members in enumerate([EVERYBODY, EVERYBODY, EVERYBODY[2:], EVERYBODY[:1] + EVERYBODY[3:]]):
        sent = noise(round_)[list(members)]
        sent[:, 1] += 2.0
        lookahead = Lookahead.of(algorithm.detector, state, sent, members, round_)
        gram, lying = lookahead.gram(push), np.arange(len(members) - LIARS, len(members))
        changes = torch.zeros(2, LIARS, len(gram), dtype=torch.float64)
        changes[1, :, -2] = 1.5
        found = lookahead.outcomes(gram, lying, changes, push)
        basis, origin = torch.cat([lookahead.vectors, push]).double(), ClientHistory.read(state).origin
        for place in range(2):
            told = sent.clone()
            told[-LIARS:] += changes[place, :, -2:].float() @ push
            step = algorithm.server(Messages(told, senders=members), state, round_, Key(3))
            assert not found.expelled[place]
            assert not step.report["expelled"]
            move = (step.broadcast["params"] - origin).double()
            reckoned = gram @ found.move[place]
            assert torch.allclose(basis @ move, reckoned, atol=1e-4 * float(reckoned.abs().max()))
            assert not geometric or torch.allclose(found.move[place] @ basis, move, atol=1e-4)
        set_right.add(bool(found.corrected[1] > 0))
        state = step.state
    assert True in set_right


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["evidence+mean", "evidence+caf"])
def test_what_a_gpu_records_is_what_is_worked_out_step_by_step(
    rule: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed numbers of steps, all lies through all of them: who is expelled, where the model goes."""
    algorithm, push, kinds, missed = server(rule, clip=0.05), torch.eye(3, MODEL.dim), set(), {}
    state, liars = start(algorithm), np.arange(CLIENTS - LIARS, CLIENTS)
    for round_ in range(4):
        sent = noise(round_)
        sent[:, 1] += 1.5
        sent[-LIARS:, 2] += 3.0
        sent[:, 3] += 5.0 * (-1.0) ** torch.arange(CLIENTS)  # a second direction
        lookahead = Lookahead.of(algorithm.detector, state, sent, EVERYBODY, round_)
        gram = lookahead.gram(push)
        changes = torch.zeros(30, LIARS, len(gram), dtype=torch.float64)
        changes[..., -3] = torch.linspace(0.0, 20.0, 30, dtype=torch.float64)[:, None]
        expected = lookahead.outcomes(gram, liars, changes, push)
        there = {name: part.to(device) for name, part in state.items()}
        same = Lookahead.of(algorithm.detector, there, sent.to(device), EVERYBODY, round_)
        given = (gram.to(device), torch.from_numpy(liars).to(device), changes.to(device), same.step)

        def played(same: Lookahead = same, given: tuple[Any, ...] = given) -> Foreseen | None:
            return foreseen(*given, *same._looks, same._taken, same._weigher)

        for _ in range(2):  # a recording is played again
            found = played()
            assert found is not None
            assert torch.equal(found.expelled.cpu(), expected.expelled)
            assert torch.allclose(found.move.cpu(), expected.move, atol=1e-6)
            assert torch.allclose(found.corrected.cpu(), expected.corrected, atol=1e-5)
        kinds |= set(expected.expelled.tolist())
        if device == "cpu":
            for steps in ((1, 9), (9, 0), (9, 9)):
                with monkeypatch.context() as patch:
                    patch.setattr("trilemma_lab.adversary.many_rounds.STEPS", (steps,))
                    missed[steps] = missed.get(steps, 0) + (played() is None)
        state = algorithm.server(Messages(sent), state, round_, Key(3)).state
    assert kinds == {False, True}
    assert device != "cpu" or (missed[1, 9] == 4 and missed[9, 0] > 0 and not missed[9, 9])
    assert float(expected.corrected[0]) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["evidence(correct=0)+mean", "evidence(correct=0)+caf", "evidence+caf"])
def test_recordings_foresee_a_server_that_sets_nothing_right(rule: str, device: str) -> None:
    """One that is told not to, or that has a robust rule and a quarter of liars or more."""
    count = LIARS if "correct" in rule else 6
    setup = Setup(CLIENTS, count, ROUNDS, aggregation.parse(rule, f=count), Release(clip=0.05, law=LAW))
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)
    state, sent, push = start(algorithm), noise(0), torch.eye(1, MODEL.dim)
    lookahead, liars = (
        Lookahead.of(algorithm.detector, state, sent, EVERYBODY, 0),
        np.arange(CLIENTS)[-count:],
    )
    gram = lookahead.gram(push)
    changes = torch.zeros(30, count, len(gram), dtype=torch.float64)
    changes[..., -1] = torch.linspace(0.0, 20.0, 30, dtype=torch.float64)[:, None]
    expected = lookahead.outcomes(gram, liars, changes, push)
    there = {name: part.to(device) for name, part in state.items()}
    same = Lookahead.of(algorithm.detector, there, sent.to(device), EVERYBODY, 0)
    given = (gram.to(device), torch.from_numpy(liars).to(device), changes.to(device), same.step)
    for _ in range(2):  # a recording is played again
        found = foreseen(*given, *same._looks, same._taken, same._weigher)
        assert found is not None
        assert torch.equal(found.expelled, expected.expelled)
        assert torch.allclose(found.move.cpu(), expected.move, atol=1e-6)
        assert not found.corrected[~found.expelled].any()
    assert set(expected.expelled.tolist()) == {False, True}


def reached(rounds: int, seed: int, law: NoiseLaw = LAW) -> tuple[float, int]:
    """How far bold liars move the model along their way, and how many of them are left at the end."""
    algorithm, way = server(rounds=rounds, law=law), torch.eye(1, MODEL.dim, dtype=torch.float64)
    source, ends, left = privacy.SimulatedNoise(Key(seed), CLIENTS), [], []
    for lying in (True, False):
        state = start(algorithm)
        for round_ in range(rounds):
            members = algorithm.members(state)
            sent = source.among(members).draw(law, members, MODEL.dim, round_, CPU)
            liars = [row for row, client in enumerate(members) if client >= CLIENTS - LIARS]
            if lying and liars:
                lookahead = Lookahead.of(algorithm.detector, state, sent, members, round_)
                names = tuple(members[row] for row in liars)
                candidates = Candidates(lookahead, names, np.ones(len(liars)), way, -way[0], "protocol")
                lies = candidates.lies(0, range(1, 15))
                harm = candidates.judged(lies).harm
                if harm.max() > candidates.judged(candidates.honest).harm[0]:
                    sent[liars] += candidates.sent(lies, int(harm.argmax())).to(sent)
            state = algorithm.server(Messages(sent, senders=members), state, round_, Key(3)).state
        ends.append(float(state["params"][0]))
        left.append(sum(client >= CLIENTS - LIARS for client in algorithm.members(state)))
    return abs(ends[0] - ends[1]), left[0]


def test_liars_who_push_between_looks_gain_nothing_by_it() -> None:
    """They are expelled for it, and what stays of their push is within what careful ones can hide."""
    rounds = 17
    bound = hidden_shift(LAW, 0.5, CLIENTS, LIARS, MODEL.dim, rounds).left * rounds
    pushed, left = reached(rounds, 5)
    assert left == 0
    assert pushed < bound / 2


def test_whatever_set_rounds_right_is_undone_with_those_who_made_it_necessary() -> None:
    """Without common noise nothing is left of bold liars, on either side: not what corrected their rounds."""
    pushed, left = reached(17, 5, NoiseLaw(1.0, 0.0))
    assert left == 0
    assert pushed < 0.3


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


def test_rows_of_the_basis_are_those_of_its_one_piece() -> None:
    """Sums, messages and the move lie apart; liars ask for a few rows of any of them."""
    algorithm = server()
    state, sent = start(algorithm), noise(0)
    lookahead = Lookahead.of(algorithm.detector, state, sent, EVERYBODY, 0)
    last = len(lookahead.vectors) - 1
    for places in ([], [0, 3], [2, CLIENTS, CLIENTS + 4, last], [last]):
        assert torch.equal(lookahead.rows(np.array(places, dtype=np.int64)), lookahead.vectors[places])


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
