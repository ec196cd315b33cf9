"""Adaptive liars: they pass every test, do harm by doing so, and keep what they claim to keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attack_helpers import RUN, steps
from one_by_one import Round, rounds, strongest

from trilemma import aggregation, config, simulate
from trilemma.attacks import View
from trilemma.base.keys import Key
from trilemma_lab.adversary import many_rounds, memoryless
from trilemma_lab.adversary.adaptive import Adaptive
from trilemma_lab.adversary.candidate import Candidates
from trilemma_lab.adversary.informed import Foreseen, Informed
from trilemma_lab.adversary.lookahead import Lookahead
from trilemma_lab.adversary.many_rounds import SearchEffort, Weigher, foreseen, recordable
from trilemma_lab.adversary.memoryless import one_by_one, shifted

STEP = -0.5
WAY = torch.ones(50, dtype=torch.float64) / 50**0.5


def candidates(noise: str, limit: float = np.inf) -> Candidates:
    """Ten clients' random messages, the last three liars', and a server that expels sums over `limit`."""
    rng = torch.Generator().manual_seed(1)
    sums = torch.randn(10, 50, generator=rng, dtype=torch.float64)
    vectors = torch.cat([sums, sums / STEP, torch.zeros(1, 50, dtype=torch.float64)])

    def gram(beside: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([vectors, beside])
        return rows @ rows.T

    def outcomes(
        gram: torch.Tensor, rows: np.ndarray, changes: torch.Tensor, beside: torch.Tensor
    ) -> Foreseen:
        after = torch.eye(10, len(gram), dtype=torch.float64).repeat(len(changes), 1, 1)
        after[:, rows] += STEP * changes
        lengths = torch.einsum("bip,pq,biq->bi", after, gram, after)
        return Foreseen.of(gram, (lengths > limit).any(1), after.mean(1), torch.zeros(len(changes)))

    defence = SimpleNamespace(
        vectors=vectors,
        rows=lambda places: vectors[places],
        size=len(vectors),
        senders=np.arange(10),
        step=STEP,
        gram=gram,
        outcomes=outcomes,
    )
    return Candidates(defence, (7, 8, 9), np.ones(3), -WAY[None], torch.ones(50, dtype=torch.float64), noise)


def harm(candidates: Candidates, strength: float) -> float:
    """The most harm that a strength does, −∞ where it cannot be sent."""
    return float(candidates.judged(candidates.lies(0, [strength])).harm.max(initial=-np.inf))


@pytest.mark.parametrize("noise", ["protocol", "rotated"])
def test_harm_is_what_the_messages_do_to_the_mean(noise: str) -> None:
    """The Gram matrix's answer against the messages themselves."""
    made = candidates(noise)
    lies = made.lies(0, [4.0])
    for place, found in enumerate(made.judged(lies).harm):
        after = made.defence.vectors[:10].mean(0) + STEP * made.sent(lies, place).sum(0) / 10
        assert found == pytest.approx(float(after @ WAY))
        assert found > made.judged(made.honest).harm[0]


def test_rotated_noise_keeps_every_length_and_inner_product_among_liars() -> None:
    """Of messages, or of sums: here one is a multiple of the other, so of both."""
    made = candidates("rotated")
    before, lies = made.defence.vectors[10:20], made.lies(0, [4.0])
    assert len(lies) == 2
    for place in range(2):
        after = before.clone()
        after[7:] += made.sent(lies, place)
        assert torch.allclose(after[7:] @ after[7:].T, before[7:] @ before[7:].T)
        assert float((after[7:] @ -WAY).mean()) == pytest.approx(float((before[7:] @ -WAY).mean()) + 4.0)
    assert len(made.lies(0, [1e3])) == 0


def test_stretched_noise_is_turned_as_far_as_it_goes_and_then_made_longer_along_the_direction() -> None:
    """Across it liars stay as they are when they have turned as far as they can."""
    made = candidates("stretched")
    before, ends = made.defence.vectors[10:20], candidates("rotated").furthest(0)
    lies = made.lies(0, [0.5 * min(ends), max(ends), 3 * max(ends)])
    rotated = candidates("rotated").lies(0, [0.5 * min(ends)])
    assert lies.changes[[0, 3]] == pytest.approx(rotated.changes, abs=1e-9)
    across = []
    for place, strength in enumerate(lies.strength):
        after = before[7:] + made.sent(lies, place)
        assert float((after @ -WAY).mean()) == pytest.approx(float((before[7:] @ -WAY).mean()) + strength)
        rest = after - (after @ WAY)[:, None] * WAY
        across.append(rest @ rest.T)
    assert torch.allclose(across[1], across[2], atol=1e-3)
    assert torch.allclose(across[4], across[5], atol=1e-3)
    assert harm(made, 3 * max(ends)) > harm(made, max(ends))


def test_noise_is_turned_as_far_as_it_goes_and_no_further() -> None:
    """Between two strengths of a grid nearly a fifth of the push would be given away."""
    found = candidates("rotated")
    for end in found.furthest(0):
        assert np.isfinite(harm(found, end))
    assert harm(found, 1.001 * max(found.furthest(0))) == -np.inf


def test_liars_whose_noise_cannot_turn_any_further_send_it_as_it_is() -> None:
    """Along the direction they are as long as they can be: there is no strength left, and nothing to turn."""
    own = torch.stack([WAY, WAY]).float()
    view = View(-own, own, 2, lambda x, key=None: SimpleNamespace(value=x.mean(0)), round=0, key=Key(0))
    crafted, further = one_by_one(view, own, WAY, shifted(own, WAY, np.ones(2), [1.0], "rotated"))
    assert crafted.strength == further == 0
    assert torch.equal(crafted.messages, own)


def test_a_lie_that_would_be_expelled_is_not_a_candidate() -> None:
    longest = float((candidates("protocol").defence.vectors[:10] ** 2).sum(1).max())
    limited = candidates("protocol", limit=longest * 1.01)
    assert np.isfinite(harm(limited, 1e-3))
    assert harm(limited, 1e3) == -np.inf


CASES = [
    ("evidence+mean", 20, 4, 300, 2, 0, 0.0),
    ("evidence+mean", 20, 3, 60, 3, 2, 5.0),
    ("evidence+caf", 16, 3, 200, 1, 0, 5.0),
    ("evidence+nnm+caf", 12, 2, 100, 2, 1, 0.0),
    ("evidence(correct=0)+mean", 12, 2, 100, 2, 1, 8.0),
    ("evidence+mean", 12, 2, 60, 8, 0, 4.0),  # between two looks at sums
]


@pytest.mark.parametrize("noise", ["protocol", "rotated"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_foreseen_for_all_lies_is_what_the_server_does_with_each(case: tuple, noise: str) -> None:
    """Expelled or not, and where the model lands: with members left out, unheard, and liars in view."""
    made = rounds(1, *case)
    way = -made.truth / made.truth.norm()
    there = Candidates(
        made.lookahead, made.senders[-made.liars :], np.ones(made.liars), way[None], made.truth, noise
    )
    lies = there.lies(0, [0.3, 1.0, 3.0, 8.0, 15.0, 30.0, 80.0])
    changes = there.in_the_basis(lies.changes)
    found = there.defence.outcomes(there.measured, there.active, changes, there.beside)
    basis = torch.cat([there.defence.vectors.double(), way[None], made.truth[None] / made.truth.norm()])
    for place in range(len(lies)):
        expelled, move = made.after(there.sent(lies, place))
        assert bool(found.expelled[place]) == expelled
        if not expelled:
            foreseen = found.move[place] @ basis
            assert float((foreseen - move).norm()) < 1e-4 * float(move.norm())


@pytest.mark.parametrize("walks", [(6,), (1,), (1, 6)])
@pytest.mark.parametrize("noise", ["protocol", "rotated"])
@pytest.mark.parametrize("rule", ["evidence+mean", "evidence+caf", "evidence+nnm+caf", "evidence+smea"])
def test_what_is_foreseen_in_one_piece_is_what_is_foreseen_step_by_step(
    rule: str, noise: str, walks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU replays it, without waiting for anything: where it would have to wait, it says so.

    Walks that are cut short after their first step have to be taken to their end. The next lies begin with
    as many steps as these needed.
    """
    monkeypatch.setattr(many_rounds, "WALKS", walks)
    made = rounds(1, rule, 20, 4, 300, 2, 0, 1.0)
    lookahead, way = made.lookahead.looked(), -made.truth / made.truth.norm()
    there = Candidates(lookahead, made.senders[-4:], np.ones(4), way[None], made.truth, noise)
    lies = there.lies(0, np.geomspace(0.3, 80.0, 24).tolist())
    changes = there.in_the_basis(lies.changes)
    expected = lookahead.outcomes(there.measured, there.active, changes, there.beside)
    (whole, fresh), chain = lookahead._looks, lookahead._rule
    assert recordable(whole, fresh)
    weigher = None
    if chain is not None:
        weigher = Weigher(rule, chain.weights_from_grams or lookahead._weights, rule != "evidence+smea")
    which, taken = torch.from_numpy(there.active), lookahead.history.weights
    given = (there.measured, which, changes, lookahead.step, whole, fresh, taken, weigher)
    effort = SearchEffort(walk=1)
    found = foreseen(*given, effort)
    assert found is not None
    if rule.endswith("caf"):
        assert effort.walk == math.inf if walks == (1,) else 1 < effort.walk <= 6
    again = foreseen(*given, effort)
    assert torch.equal(again.move, found.move)
    assert torch.equal(again.harm, found.harm)
    assert torch.equal(found.expelled, expected.expelled)
    assert 0 < int(found.expelled.sum()) < len(lies)
    torch.testing.assert_close(found.move, expected.move, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.corrected, expected.corrected, rtol=1e-6, atol=1e-7)
    assert bool((expected.corrected[~expected.expelled] > 0).any())


def test_bold_liars_push_between_looks_as_far_as_messages_hide() -> None:
    """Further than those who mean to pass the next look at their sums; nobody is expelled before it."""
    made = rounds(1, "evidence+mean", 12, 2, 60, 8, 0, 8.0)
    way = -made.truth / made.truth.norm()
    most = []
    for reckoned in (made.lookahead.looked(), made.lookahead):
        there = Candidates(reckoned, made.senders[-2:], np.ones(2), way[None], made.truth, "protocol")
        lies = there.lies(0, np.geomspace(0.1, 100.0, 40).tolist())
        harm = there.judged(lies).harm
        assert not made.after(there.sent(lies, int(harm.argmax())))[0]
        most.append(harm.max())
    assert most[1] > most[0]


def seen_by_liars(made: Round, uphill: torch.Tensor | None = None) -> Informed:
    """What liars know of a round: the defence and the truth, and where a loss rises, if that is given."""
    return Informed(
        honest=made.sent[: -made.liars],
        own=made.sent[-made.liars :],
        byzantine=made.liars,
        target=lambda x, key=None: x,
        round=made.number,
        key=Key(0),
        defence=lambda: made.lookahead,
        truth=lambda: made.truth,
        uphill=None if uphill is None else lambda: uphill,
        members=made.senders[-made.liars :],
    )


@pytest.mark.parametrize("noise", ["protocol", "rotated"])
@pytest.mark.parametrize("case", CASES[:3])
def test_the_search_finds_no_less_than_one_that_sends_lies_to_the_server(case: tuple, noise: str) -> None:
    made = rounds(2, *case)
    view = seen_by_liars(made)
    crafted = Adaptive(noise=noise, points=16).build().craft(view)
    grid = (float(made.truth.norm()) * 0.1 * 1000 ** np.linspace(0, 1, 16)).tolist()
    most, _ = strongest(made, -made.truth / made.truth.norm(), grid, noise)
    assert made.harm(crafted.messages - view.own) >= most - 1e-4 * abs(most)


def test_lies_that_lean_back_along_the_gradient_land_further_uphill() -> None:
    """They hide where those straight uphill show along the mean that they lead to."""
    made = rounds(2, *CASES[1])
    uphill = torch.randn(len(made.truth), generator=torch.Generator().manual_seed(3)).double()
    view, landed = seen_by_liars(made, uphill), {}
    for direction in ("loss", "slanted"):
        crafted = Adaptive(direction=direction, noise="rotated").build().craft(view)
        expelled, move = made.after(crafted.messages - view.own)
        assert not expelled
        landed[direction] = float(np.sign(made.lookahead.step) * (move @ uphill))
    assert landed["slanted"] > 1.2 * landed["loss"] > 0


@pytest.mark.parametrize("said", ["", ", direction='errors', noise='stretched'"])
def test_nobody_is_expelled_and_the_descent_suffers(said: str) -> None:
    records = steps(f"attack={{name='adaptive'{said}}}")
    assert not any(record.expelled for record in records)
    assert any(record.attack_strength > 0 for record in records)


def erring(errors: Callable[..., torch.Tensor], mistaken: Callable[..., float]) -> Informed:
    """What two liars among seven see of a mean, and of how many examples it gets wrong."""
    return Informed(
        honest=torch.ones(5, 4),
        own=torch.ones(2, 4),
        byzantine=2,
        target=lambda x, key=None: SimpleNamespace(value=x.mean(0)),
        round=0,
        key=Key(0),
        uphill=lambda: -torch.ones(4),
        errors=errors,
        mistaken=mistaken,
    )


def test_of_all_lies_towards_errors_the_one_is_sent_after_which_most_examples_are_mistaken() -> None:
    """A world in which mistakes come and go with every try: the most of them is what counts."""
    mistakes = [0.2, 0.3, 0.1, 0.5, 0.4, 0.5, 0.3]
    tried, asked = [], []

    def mistaken(stack: torch.Tensor, sharper: float) -> float:
        assert sharper == 1.0
        tried.append(stack)
        return mistakes[len(tried) - 1]

    def errors(far: float, lie: tuple[torch.Tensor, torch.Tensor] | None, sharper: float) -> torch.Tensor:
        asked.append((far, None if lie is None else lie[1]))
        return torch.nn.functional.one_hot(torch.tensor(len(asked) % 4), 4).float()

    view = erring(errors, mistaken)
    crafted = Adaptive(direction="errors", points=3).build().craft(view)
    assert torch.equal(view.stack(crafted.messages), tried[3])
    assert len(tried) == len(mistakes)
    before = [None, 1, 1, 3, 3, 3]  # the lie from which each sets out
    for (_, lie), number in zip(asked, before, strict=True):
        assert lie is None if number is None else torch.equal(lie, tried[number])


@pytest.mark.parametrize("sharper", [1.0, 2.0])
@pytest.mark.parametrize("better", [1.0, 2.0])
def test_of_lies_found_at_two_sharpnesses_the_one_is_sent_that_errs_more_outright(
    sharper: float, better: float
) -> None:
    """Each climb pushes a coordinate of its own; soft counts of one sharpness say nothing to the other."""

    def pushed(stack: torch.Tensor, sharp: float) -> float:
        return float(-stack[-1, int(sharp)])

    def mistaken(stack: torch.Tensor, sharp: float) -> float:
        outright = sharp > 2
        return pushed(stack, better) if outright else (1000.0 if sharp == 1 else 1.0) * pushed(stack, sharp)

    def errors(far: float, lie: tuple[torch.Tensor, torch.Tensor] | None, sharp: float) -> torch.Tensor:
        return -torch.nn.functional.one_hot(torch.tensor(int(sharp)), 4).float()

    view = erring(errors, mistaken)
    crafted = Adaptive(direction="errors", points=3, sharper=sharper).build().craft(view)
    assert int(crafted.messages[-1].argmin()) == (int(better) if sharper > 1 else 1)


def test_sleepers_behave_until_they_strike_and_a_burst_ends() -> None:
    strengths = [record.attack_strength for record in steps("attack.start=2", "attack.stop=3")]
    assert strengths[:2] == [0.0, 0.0]
    assert strengths[3] == 0.0
    assert strengths[2] > 0
    assert not any(record.attack_strength for record in steps("attack.stop=0", "run.rounds=2")), "never lie"


DIRECTIONS = ["ones", "std", "top", "across", "loss", "slanted", "poisoned", "backdoor", "errors", "best"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction_is_searched(direction: str) -> None:
    assert len(steps(f"attack.direction={direction}", "attack.role=turns", "run.rounds=2")) == 2


@pytest.mark.parametrize("rule", ["caf", "nnm+caf", "krum", "mean"])
def test_a_rule_alone_is_foreseen_in_one_piece_as_it_is_lie_by_lie(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU replays it; where a walk would take more steps it says so."""
    generator = torch.Generator().manual_seed(1)
    honest, own = (torch.randn(k, 80, generator=generator) + 0.3 for k in (16, 4))
    view = View(honest, own, 4, aggregation.parse(rule, f=4), round=0, key=Key(0))
    defence, way = memoryless.RuleAlone.of(view, own), -torch.ones(80, dtype=torch.float64) / 80**0.5
    assert defence is not None
    there = Candidates(defence, (16, 17, 18, 19), np.ones(4), way[None], -way, "protocol")
    changes = there.in_the_basis(there.lies(0, np.geomspace(0.1, 100.0, 20)).changes)
    expected = defence.outcomes(there.measured, there.active, changes, there.beside).move
    which = torch.from_numpy(there.active)
    found = defence._recorded(there.measured, which, changes)
    assert found is not None
    torch.testing.assert_close(found.move, expected, rtol=1e-6, atol=1e-8)
    assert (defence.needed["walk"] > 1) == rule.endswith("caf")
    monkeypatch.setattr(memoryless, "WALKS", (1,))
    assert (defence._recorded(there.measured, which, changes) is None) == rule.endswith("caf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_noise_of_messages_of_few_digits_is_turned_towards_a_direction_of_all_its_digits(
    dtype: torch.dtype,
) -> None:
    """Directions are not rounded to the messages' numbers before both are multiplied."""
    generator = torch.Generator().manual_seed(1)
    honest, own = (torch.randn(k, 80, generator=generator).to(dtype) for k in (16, 4))
    view = View(honest, own, 4, aggregation.parse("caf", f=4), round=0, key=Key(0))
    way = torch.randn(80, generator=generator, dtype=torch.float64)
    way, defence = way / way.norm(), memoryless.RuleAlone.of(view, own)
    assert defence is not None
    there = Candidates(defence, (16, 17, 18, 19), np.ones(4), way[None], -way, "rotated")
    vectors = torch.cat([own.double(), way[None]])
    assert torch.from_numpy(there._inner) == pytest.approx(vectors @ vectors.T, abs=1e-6)


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
    crafted = Adaptive().build().craft(view)
    assert crafted.strength > 100
    assert (crafted.messages < 0).all()


@pytest.mark.parametrize("attack", ["alie", "foe"])
def test_known_attacks_are_searched_against_the_defended_pipeline(attack: str) -> None:
    """Strengths that get their senders expelled achieve nothing; the search knows."""
    records = steps(f"attack.name={attack}", "run.rounds=1")
    assert records[0].attack_strength is not None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("noise", ["protocol", "rotated"])
def test_on_a_gpu_the_search_finds_what_it_finds_on_a_cpu(noise: str) -> None:
    """The same sums, messages and directions on both: the same harm for every strength."""
    ready = simulate.assemble(config.parse(RUN, ["run.device=cpu"]), 1)
    progress = simulate.engine.start(ready)
    for _ in range(2):
        progress, _ = simulate.engine.step(ready, progress)
    detector, heard = ready.resolved.algorithm.detector, tuple(range(20))
    generator = torch.Generator().manual_seed(1)
    dim = ready.clients.model.dim
    sent = torch.randn(20, dim, generator=generator)
    way = torch.nn.functional.normalize(torch.randn(1, dim, generator=generator, dtype=torch.float64))
    found = []
    for device in ("cpu", "cuda"):
        state = {name: part.to(device) for name, part in progress.server.items()}
        lookahead = Lookahead.of(detector, state, sent.to(device), heard, 2)
        there = Candidates(lookahead, heard[-4:], np.ones(4), way.to(device), -way[0].to(device), noise)
        found.append(there.judged(there.lies(0, [0.1, 1.0, 3.0, 10.0, 100.0])).harm)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


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
