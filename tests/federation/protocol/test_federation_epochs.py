"""The decisions about absence, exhaustively for small federations."""

from __future__ import annotations

from itertools import combinations

import pytest

from trilemma.federation.protocol.epochs import EpochsStopped, Policy, check_progress, decide, open_epoch

SMALL = [(n, f) for n in range(1, 8) for f in range((n - 1) // 2 + 1)]


@pytest.mark.parametrize(("n", "f"), SMALL)
def test_every_set_of_joiners_gets_a_sound_epoch_or_a_stop(n, f):
    policy = Policy(n, f)
    for size in range(n + 1):
        for joined in combinations(range(n), size):
            try:
                epoch = open_epoch(policy, 3, joined)
            except EpochsStopped:
                assert n - size > f
                assert size <= 2 * f
                continue
            assert epoch.members == joined
            assert set(joined) <= set(epoch.rows)
            assert len(epoch.rows) > 2 * f
            assert len(set(epoch.rows) - set(joined)) <= f


@pytest.mark.parametrize(("n", "f"), SMALL)
def test_at_most_f_absent_commits_and_more_never_does(n, f):
    policy = Policy(n, f, repeats=2)
    epoch = open_epoch(policy, 0, range(n))
    for absent in range(n + 1):
        answered = range(absent, n)
        decisions = [decide(policy, epoch, answered, attempt) for attempt in range(3)]
        assert decisions == (["commit"] * 3 if absent <= f else ["repeat", "repeat", "rekey"])


def test_two_dropouts_of_five():
    assert decide(Policy(5, 2), open_epoch(Policy(5, 2), 0, range(5)), {0, 1, 2}, 0) == "commit"
    strict = Policy(5, 1)
    assert decide(strict, open_epoch(strict, 0, range(5)), {0, 1, 2}, 1) == "rekey"
    smaller = open_epoch(strict, 1, {0, 1, 2})
    assert smaller.rows == (0, 1, 2)
    assert decide(strict, smaller, {0, 2}, 0) == "commit"


def test_answers_of_outsiders_do_not_count():
    policy = Policy(5, 1)
    smaller = open_epoch(policy, 1, {0, 1, 2})
    assert decide(policy, smaller, {0, 3, 4}, 1) == "rekey"


def test_a_round_that_fails_in_every_epoch_stops():
    policy = Policy(5, 1, epochs_per_round=3)
    check_progress(policy, 4, 2)
    with pytest.raises(EpochsStopped, match="round 4 failed in 3 epochs"):
        check_progress(policy, 4, 3)
