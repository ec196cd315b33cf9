"""Liars who lie differently: shifts that add up, numbers that change places, and one who is given up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attack_helpers import RUN, steps
from hypothesis import given
from hypothesis import strategies as st
from one_by_one import rounds

from trilemma import aggregation, config
from trilemma.attacks import View
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma_lab.adversary.adaptive import Adaptive
from trilemma_lab.adversary.candidate import Candidates
from trilemma_lab.adversary.own_ways import SHARES, apart, ranked

NEEDED = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDED])]


def crafted(rule: str, device: str = "cpu", **said: object) -> tuple[View, torch.Tensor]:
    """What four liars among twenty see of a rule without memory, and what they send."""
    rng = torch.Generator().manual_seed(1)
    honest, own = ((torch.randn(k, 60, generator=rng) + 0.3).to(device) for k in (16, 4))
    view = View(honest, own, 4, aggregation.parse(rule, f=4), round=0, key=Key(0))
    return view, Adaptive(**said).build().craft(view).messages


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["mean", "caf", "cwmed"])
def test_shifts_apart_have_no_inner_products_and_add_up_to_one_against_the_truth(
    rule: str, device: str
) -> None:
    view, sent = crafted(rule, device, role="apart")
    assert sent.device.type == device
    shifts = (sent - view.own).double()
    inner = shifts @ shifts.T
    assert float(inner.diagonal().min()) > 0.01
    assert float((inner - inner.diagonal().diag()).abs().max()) < 1e-4 * float(inner.max())
    truth = view.honest.double().mean(0)
    assert float(torch.cosine_similarity(shifts.mean(0), -truth, dim=0)) > 0.999
    assert float(shifts.norm(dim=1).mean() / shifts.mean(0).norm()) == pytest.approx(2, rel=1e-3)  # √4


def test_where_there_is_no_room_to_be_apart_liars_shift_alike() -> None:
    ways = torch.eye(1, 4, dtype=torch.float64)
    assert torch.equal(apart(ways, 4, Key(0)), ways.expand(1, 4, 4))
    assert torch.equal(apart(ways, 1, Key(0)), ways[None])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["mean", "caf", "cwmed"])
def test_ranked_lies_keep_every_number_and_point_away_from_the_truth(rule: str, device: str) -> None:
    view, sent = crafted(rule, device, noise="ranked")
    assert sent.device.type == device
    torch.testing.assert_close(sent.sort(1).values, view.own.sort(1).values, rtol=0, atol=1e-5)
    against = -view.honest.mean(0)
    assert bool((sent @ against > view.own @ against).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["caf", "cwmed"])
def test_in_half_precision_ranked_lies_are_finite_too(rule: str, device: str) -> None:
    rng = torch.Generator().manual_seed(1)
    honest, own = (((torch.randn(k, 3, generator=rng) + 0.3) * 10).half().to(device) for k in (9, 1))
    view = View(honest, own, 1, aggregation.parse(rule, f=1), round=0, key=Key(0))
    sent = Adaptive(noise="ranked", points=5).build().craft(view).messages
    assert sent.dtype == torch.float16
    torch.testing.assert_close(sent.sort(1).values, own.sort(1).values, rtol=0, atol=0.02)


@given(st.integers(2, 40), st.sampled_from(SHARES), st.integers(0, 10**6))
def test_of_all_orders_of_the_chosen_numbers_ranked_points_furthest(
    dim: int, share: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    own, way = (torch.randn(k, dim, generator=rng, dtype=torch.float64) for k in (3, 1))
    found = ranked(own, way[0], share)
    assert torch.equal(found.sort(1).values, own.sort(1).values)
    count = min(dim, max(2, int(np.ceil(share * dim))))
    places = way[0].abs().sort(descending=True).indices[:count]
    kept = torch.ones(dim, dtype=torch.bool)
    kept[places] = False
    assert torch.equal(found[:, kept], own[:, kept])
    for _ in range(5):
        other = own.clone()
        other[:, places] = own[:, places[torch.randperm(count, generator=rng)]]
        assert bool((found @ way[0] >= other @ way[0] - 1e-12).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_test_of_single_messages_lets_ranked_lies_pass_that_it_takes_for_lies_when_added(
    device: str,
) -> None:
    """Length and distribution are honest: who passes without a lie passes with it."""
    rule = "aggregation.rule=noise-test+mean"
    few = ("run.rounds=1", "privacy.epsilon=3.0", f"run.device={device}")
    (quiet,), (placed,), (gross,) = (
        steps(rule, *few, said)
        for said in ("attack.stop=0", "attack.noise=ranked", "attack={name='ipm', strength=10000.0}")
    )
    assert placed.attack_strength > 0
    assert placed.weights == quiet.weights
    assert any(quiet.weights[i] > 0 for i in range(16, 20))
    assert all(gross.weights[i] == 0 for i in range(16, 20))


@pytest.mark.parametrize("device", DEVICES)
def test_a_liar_a_round_is_sacrificed_and_the_last_one_is_not(device: str) -> None:
    records = steps(
        "attack.role=sacrificed", "run.rounds=5", "algorithm.momentum=0.9", f"run.device={device}"
    )
    gone = [[int(one["client"]) for one in record.expelled] for record in records]
    assert gone == [[16], [17], [18], [], []]
    assert any(record.attack_strength > 0 for record in records), "the others lie on"


@pytest.mark.parametrize("device", DEVICES)
def test_who_is_given_up_is_gross_and_the_others_do_not_count_on_it(device: str) -> None:
    view, sent = crafted("mean", device, role="sacrificed", reach=7.0)
    shifts = (sent - view.own).double()
    truth = view.honest.double().mean(0)
    torch.testing.assert_close(shifts[0], -7.0 * truth, rtol=1e-4, atol=1e-5)
    assert float((shifts[1:] - shifts[1]).abs().max()) < 1e-5
    assert Adaptive(role="sacrificed")._lying(view).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("said", ["role=apart", "noise=ranked"])
def test_nobody_who_lies_in_its_own_way_is_expelled_for_it(said: str, device: str) -> None:
    records = steps(f"attack.{said}", f"run.device={device}")
    assert not any(record.expelled for record in records)
    assert any(record.attack_strength > 0 for record in records)


@pytest.mark.parametrize("rule", ["evidence+mean", "evidence+caf"])
def test_what_is_foreseen_of_lies_that_differ_is_what_the_server_does_with_each(rule: str) -> None:
    made = rounds(1, rule, 20, 4, 300, 2, 0, 0.0)
    way = -made.truth / made.truth.norm()
    shifts = apart(way[None], 4, Key(3))[0]
    liars = made.senders[-4:]
    there = Candidates(made.lookahead, liars, np.ones(4), shifts, made.truth, "protocol", own_ways=True)
    assert there.ways == 1
    lies = there.lies(0, [0.3, 1.0, 3.0, 8.0, 15.0, 30.0, 80.0])
    changes = there.in_the_basis(lies.changes)
    found = there.defence.outcomes(there.measured, there.active, changes, there.beside)
    basis = torch.cat([there.defence.vectors.double(), shifts, made.truth[None] / made.truth.norm()])
    for place in range(len(lies)):
        sent = there.sent(lies, place)
        torch.testing.assert_close(sent, lies.strength[place] * shifts)
        expelled, move = made.after(sent)
        assert bool(found.expelled[place]) == expelled
        if not expelled:
            assert float((found.move[place] @ basis - move).norm()) < 1e-4 * float(move.norm())
    assert 0 < int(found.expelled.sum()) < len(lies)


@pytest.mark.parametrize("noise", ["rotated", "stretched", "ranked"])
def test_two_ways_to_differ_at_once_are_refused(noise: str) -> None:
    with pytest.raises(ConfigError, match=r"apart.*allowed with it: noise 'protocol'"):
        config.parse(RUN, ["attack.role=apart", f"attack.noise={noise}"])
