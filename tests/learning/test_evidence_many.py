"""Many Gram matrices looked at together: of each, what the server says of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trilemma.learning.defences.evidence import convict, correct
from trilemma.learning.defences.evidence.conviction import apart, improbable
from trilemma.learning.defences.evidence.correction import corrected, left_out
from trilemma.learning.defences.evidence.directions import BoundedGrams, peeled, visible
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.steps.trace import Law

LIARS, ALARM, DIM = 4, 1e-3, 80
NEEDED = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDED])]


def law(members: int, alike: bool) -> Law:
    """The law of three rounds, in which everybody was heard, or some were not."""
    heard = np.ones((members, 3))
    if not alike:
        heard[::3, 1] = heard[1::4, 2] = 0.0
    return Law.of(np.full(3, 0.4), heard, np.full(3, 1.0 + 0.4 * members), np.full(3, 1.0), DIM)


def grams(members: int, known: Law, count: int) -> torch.Tensor:
    """Noise of this law, a common move, and liars who push alone or together, harder and harder."""
    rng, root = np.random.default_rng(3), np.linalg.cholesky(known.covariance)
    found = []
    for push in np.linspace(0.0, 9.0, count):
        rows = root @ rng.standard_normal((members, DIM))
        rows[:, 0] += 1.5 * known.deviation
        rows[: 1 + int(push) % LIARS, 1 + int(push) % 2] -= push * known.deviation[0]
        found.append(rows @ rows.T)
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alike", [True, False])
def test_many_are_judged_and_set_right_as_one_is(alike: bool, device: str) -> None:
    """Expelled or not, and the correction, with and without members who are left out."""
    members, rng = 24, np.random.default_rng(4)
    known = law(members, alike)
    given = grams(members, known, 40)
    shares = 1.0 + 0.1 * rng.random(members)
    moved, parts = rng.standard_normal((40, members)), rng.random((40, members)) / members
    look = LookLimits.of(known, LIARS, ALARM, shares, None, torch.device(device))
    there = given.to(device)[None]
    seen = visible(there, [look])
    expelled = (improbable(there, [look])[0] | apart(seen[0], look)).cpu()
    aside, set_right = 0, 0
    for known_parts in (False, True):
        shown = torch.from_numpy(parts).to(device) if known_parts else None
        left, counted = (seen[0], None) if shown is None else left_out(there[0], look, seen[0])
        found = corrected(there[0], torch.from_numpy(moved).to(device), look, left, shown, counted)
        for place, gram in enumerate(given.numpy()):
            one = correct(gram, moved[place], known, LIARS, shares, parts[place] if known_parts else None)
            assert float(found.scale[place]) == pytest.approx(one.scale, rel=1e-6)
            assert found.mix[place].cpu().numpy() == pytest.approx(one.mix, rel=1e-5, abs=1e-8)
            aside, set_right = aside + (one.scale != 1.0), set_right + bool(one.mix.any())
    assert expelled.tolist() == [bool(convict(gram, known, LIARS, ALARM)) for gram in given.numpy()]
    assert 0 < int(expelled.sum()) < 40
    assert aside > 10
    assert set_right > 20


def test_what_is_found_by_squaring_one_after_the_other_is_what_a_decomposition_finds() -> None:
    known = law(24, alike=True)
    white = torch.from_numpy(known.whitening) @ grams(24, known, 30) @ torch.from_numpy(known.whitening)
    edges = torch.linspace(0.5, 1.5, 30, dtype=torch.float64) * float(
        torch.linalg.eigvalsh(white)[:, -2].mean()
    )
    for most in (1, 3):
        values, vectors = peeled(white, edges, most)
        for place in range(30):
            top, across = torch.linalg.eigh(white[place])
            wanted = [k for k in range(23, 23 - most, -1) if top[k] > edges[place]]
            there = torch.nonzero(values[place])[:, 0].tolist()
            assert there == list(range(len(wanted)))
            for row, k in enumerate(wanted):
                assert float(values[place, row]) == pytest.approx(float(top[k]), rel=1e-9)
                assert abs(float(vectors[place, row] @ across[:, k])) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("count", [0, 3])
def test_who_asks_for_no_direction_gets_none_also_where_steps_are_bounded(count: int) -> None:
    white, edges = torch.eye(4, dtype=torch.float64).expand(count, 4, 4), torch.full((count,), 0.5)
    bounded = BoundedGrams(directions=2, left_out=1)
    for asked in (None, bounded):
        values, vectors = peeled(white, edges, 0, asked)
        assert (values.shape, vectors.shape) == ((count, 0), (count, 0, 4))
    assert [going.tolist() for going in bounded.going_on] == [[False] * count]


def test_nothing_is_made_of_directions_where_half_may_lie() -> None:
    """However clearly something stands out: the middle may be the liars'."""
    known = law(6, alike=True)
    look, given = LookLimits.of(known, 3, ALARM), grams(6, known, 5)
    [seen] = visible(given[None], [look])
    assert bool(seen.there.any())
    assert not bool(apart(seen, look).any())
    assert not any(correct(one, np.ones(6), known, 3).mix.any() for one in given.numpy())
