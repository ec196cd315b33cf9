"""The ledger never hides a release, whatever goes wrong and when."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy import (
    Mechanism,
    NoiseLaw,
    Release,
    Sampling,
    SecretGraph,
    Threat,
    covariance,
    mechanism,
)
from trilemma.privacy.accounting.spending import composed_epsilon
from trilemma.privacy.ledger import ledger as module
from trilemma.privacy.ledger.ledger import BudgetExceeded, Ledger, reach
from trilemma.privacy.ledger.lines import Budget, LedgerError, read_entries
from trilemma.privacy.ledger.statement import read_statement
from trilemma.privacy.noise.drawing import Drawing

BUDGET = Budget(epsilon=20.0, delta=1e-5)
THREAT = Threat("secldp", clients=20, byzantine=3)


def user(sigma: float) -> Release:
    return Release(clip=1.0, law=NoiseLaw(sigma_ind=sigma, sigma_cor=0.5))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def test_costs_of_mixed_rounds_are_recomputed_from_the_file(path):
    sigmas = [2.0, 3.0, 2.0, 5.0]
    with Ledger(path, BUDGET) as ledger:
        for t, sigma in enumerate(sigmas):
            last = ledger.authorise(user(sigma), THREAT, "run", t)
        held = ledger.verdict
    assert (held.epsilon, held.delta, held.threat) == (min(last.epsilon.values()), 1e-5, "secldp")
    past = tuple(Counter(mechanism(user(sigma), THREAT) for sigma in sigmas).items())
    with Ledger(path, BUDGET) as again:
        assert again.epsilon == last.epsilon
        assert [entry.round for entry in again.entries] == [0, 1, 2, 3]
        for name in ("exact", "rdp"):
            assert again.epsilon[name] == composed_epsilon(past, 1e-5, name)


def test_a_release_is_on_disk_before_it_is_authorised(path, monkeypatch):
    """authorise fsyncs the very line it wrote, last, before it returns."""
    done = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(module.os, "write", lambda fd, data: (done.append("write"), write(fd, data))[1])
    monkeypatch.setattr(module.os, "fsync", lambda fd: (done.append("sync"), sync(fd))[1])
    with Ledger(path, BUDGET) as ledger:
        done.clear()
        ledger.authorise(user(3.0), THREAT, "run", 0)
        assert done == ["write", "sync"]
        assert b'"round":0' in path.read_bytes()


def test_over_budget_is_refused_and_leaves_no_trace(path):
    with Ledger(path, BUDGET) as ledger:
        one = mechanism(user(2.0), THREAT)
        allowed = reach({}, BUDGET, lambda rounds: ((one, rounds),), most=1000)
        assert 0 < allowed < 1000
        for t in range(allowed):
            ledger.authorise(user(2.0), THREAT, "run", t)
        before = path.read_bytes()
        with pytest.raises(BudgetExceeded, match="nothing was released"):
            ledger.authorise(user(2.0), THREAT, "run", allowed)
        assert path.read_bytes() == before
        assert reach({one: allowed}, BUDGET, lambda rounds: ((one, rounds),), most=9) == 0
        assert min(ledger.epsilon.values()) <= BUDGET.epsilon


def test_what_is_spent_never_falls_and_is_the_same_wherever_it_is_read(path):
    """Sampled rounds close to the budget: the tightest accountant is asked from the first of them on."""
    law, sampling = NoiseLaw(sigma_ind=0.02), Sampling("poisson", 0.02)
    release = Release(1.0, law, "example", batch=50, sampling=sampling)
    threat, budget, spent = Threat("ldp", 7), Budget(1.25, 1e-5, "example"), []
    with contextlib.suppress(BudgetExceeded):
        for t in range(60):
            with Ledger(path, budget) as ledger:
                entry = ledger.authorise(release, threat, "run", t)
                assert min(ledger.epsilon.values()) == min(entry.epsilon.values())
                spent.append(min(entry.epsilon.items(), key=lambda one: one[1]))
    assert 9 < len(spent) < 60
    assert {name for name, _ in spent} == {"pld"}
    assert [figure for _, figure in spent] == sorted(figure for _, figure in spent)
    assert read_statement(path).spent == spent[-1]


def test_no_noise_is_always_over_budget(path):
    with Ledger(path, BUDGET) as ledger, pytest.raises(BudgetExceeded):
        ledger.authorise(Release(1.0, NoiseLaw()), THREAT, "run", 0)


def test_a_figure_that_counts_on_liars_is_not_held_against_a_budget(path):
    published = Threat("secldp", clients=20, byzantine=3, assume="published")
    with Ledger(path, BUDGET) as ledger, pytest.raises(PrivacyError, match="holds only if liars exist"):
        ledger.authorise(user(3.0), published, "run", 0)
    with pytest.raises(PrivacyError, match="convention of papers"):
        Budget(1.0, 1e-5, "example", "published")


def test_nobody_lying_costs_no_more_than_the_ledger_says(path):
    """The messages' joint noise, with no liar at all: what a server that sees everything can tell."""
    sigma = covariance(SecretGraph.complete(20), user(3.0).law, senders=range(20))
    z = 1 / (2.0 * math.sqrt(np.linalg.inv(sigma)[0, 0]))
    with Ledger(path, BUDGET) as ledger:
        claimed = ledger.authorise(user(3.0), THREAT, "run", 0).epsilon["exact"]
    assert claimed >= composed_epsilon(((Mechanism(z), 1),), BUDGET.delta, "exact") * (1 - 1e-9)


def test_a_round_is_released_once(path):
    with Ledger(path, BUDGET) as ledger:
        ledger.authorise(user(3.0), THREAT, "run", 0)
        ledger.authorise(user(3.0), THREAT, "other run", 0)
    with Ledger(path, BUDGET) as ledger, pytest.raises(PrivacyError, match="released once"):
        ledger.authorise(user(3.0), THREAT, "run", 0)


class Crash(BaseException):
    """The process dies here."""


@given(
    sigmas=st.lists(st.floats(1.5, 6.0), min_size=1, max_size=6),
    crash_at=st.integers(0, 3000),
    lose_sync=st.booleans(),
)
def test_crashes_at_every_byte_never_hide_a_release(sigmas, crash_at, lose_sync):
    """Kill the process once `crash_at` bytes are written, or at the fsync that follows; then carry on.

    Whatever the moment, the reopened ledger holds every release that was authorised, in order, and at most
    one more; and it goes on from there.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path, left, released = Path(folder) / "ledger", [crash_at], []
        write, sync = os.write, os.fsync

        def dying_write(fd, data):
            written = write(fd, bytes(data)[: left[0]])
            left[0] -= written
            if written < len(data) or (left[0] == 0 and not lose_sync):
                raise Crash
            return written

        def dying_sync(fd):
            sync(fd)
            if left[0] == 0 and lose_sync:
                raise Crash

        patch.setattr(module.os, "write", dying_write)
        patch.setattr(module.os, "fsync", dying_sync)
        with contextlib.suppress(Crash, BudgetExceeded), Ledger(path, BUDGET) as ledger:
            for t, sigma in enumerate(sigmas):
                ledger.authorise(user(sigma), THREAT, "run", t)
                released.append(sigma)
        patch.undo()
        with Ledger(path, BUDGET) as again:
            found = [entry.mechanism for entry in again.entries]
            expected = [mechanism(user(sigma), THREAT) for sigma in sigmas]
            assert found[: len(released)] == expected[: len(released)]
            assert found == expected[: len(found)]
            assert len(found) - len(released) in (0, 1)
            again.authorise(user(50.0), THREAT, "after", 0)
        with Ledger(path, BUDGET) as last:
            assert last.entries[-1].run == "after"
            assert not last.repaired


@pytest.mark.parametrize("kept", [1, 70, -2])
def test_a_torn_last_line_is_cut_off(path, kept):
    with Ledger(path, BUDGET) as ledger:
        ledger.authorise(user(3.0), THREAT, "run", 0)
        whole = path.read_bytes()
        ledger.authorise(user(3.0), THREAT, "run", 1)
    last = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + last[:kept])
    with Ledger(path, BUDGET) as ledger:
        assert "torn last line" in ledger.repaired
        assert len(ledger.entries) == 1
    assert path.read_bytes() == whole


def test_a_missing_line_end_is_completed_and_counts(path):
    with Ledger(path, BUDGET) as ledger:
        ledger.authorise(user(3.0), THREAT, "run", 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with Ledger(path, BUDGET) as ledger:
        assert ledger.repaired == "completed the last line"
        assert len(ledger.entries) == 1
    assert path.read_bytes() == whole


def test_a_changed_or_missing_line_is_found(path):
    with Ledger(path, BUDGET) as ledger:
        for t in range(3):
            ledger.authorise(user(3.0), THREAT, "run", t)
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (
        [lines[0], lines[2], lines[3]],
        [lines[0], lines[1].replace(b'"round":0', b'"round":7'), *lines[2:]],
        [lines[0], lines[2], lines[1], lines[3]],
        lines[1:],
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(LedgerError, match="changed or is out of place"):
            Ledger(path, BUDGET)


def test_a_flipped_bit_in_the_last_line_is_corruption_and_not_a_torn_write(path):
    """Cutting it off would hide a release that has left. Every bit of the line, its end included."""
    with Ledger(path, BUDGET) as ledger:
        ledger.authorise(user(3.0), THREAT, "run", 0)
        before = path.stat().st_size
        ledger.authorise(user(3.0), THREAT, "run", 1)
    whole = path.read_bytes()
    for place in (
        *range(before, before + 70),
        *range(before + 70, len(whole), 7),
        len(whole) - 2,
        len(whole) - 1,
    ):
        for bit in (0x01, 0x40):
            changed = bytearray(whole)
            changed[place] ^= bit
            path.write_bytes(changed)
            with pytest.raises(LedgerError, match="changed or is out of place"):
                Ledger(path, BUDGET)
            assert path.read_bytes() == changed, "nothing is mended"


@pytest.mark.usefixtures("refused_at_once")
def test_two_writers_are_refused(path):
    with Ledger(path, BUDGET), pytest.raises(LedgerError, match="open elsewhere"):
        Ledger(path, BUDGET)
    with Ledger(path, BUDGET):
        pass


@pytest.mark.slow
def test_two_processes_are_refused(path):
    with Ledger(path, BUDGET):
        other = (
            "import sys; from pathlib import Path; from trilemma.base import files\n"
            "from trilemma.privacy.ledger.ledger import Ledger\n"
            "from trilemma.privacy.ledger.lines import Budget\n"
            "files.PATIENCE = 0.0\n"
            "Ledger(Path(sys.argv[1]), Budget(20.0, 1e-5))"
        )
        run = subprocess.run([sys.executable, "-c", other, str(path)], capture_output=True, text=True)
        assert "open elsewhere" in run.stderr


def test_a_failed_write_closes_the_ledger(path, monkeypatch):
    ledger = Ledger(path, BUDGET)
    monkeypatch.setattr(module.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        ledger.authorise(user(3.0), THREAT, "run", 0)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="closed"):
        ledger.authorise(user(3.0), THREAT, "run", 1)


def test_sampled_releases_are_held_against_the_tightest_accountant(path):
    budget = Budget(3.0, 1e-5, "example")
    release = Release(1.0, NoiseLaw(0.08), "example", 25, Sampling("poisson", 0.01))
    threat = Threat("ldp", 7, 3)
    with Ledger(path, budget, ("rdp", "pld")) as ledger:
        epsilon = ledger.authorise(release, threat, "run", 0).epsilon
    assert set(epsilon) == {"rdp", "pld"}
    assert epsilon["pld"] < epsilon["rdp"]
    one = Mechanism(1.0, Sampling("poisson", 0.01))
    assert epsilon["rdp"] == pytest.approx(composed_epsilon(((one, 1),), 1e-5, "rdp"))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda path: Budget(1.0, 1e-5, "example", "add_remove"), "did you mean 'add-remove'"),
        (lambda path: Budget(0.0, 1e-5), "positive"),
        (lambda path: Budget(1.0, 0.0), "strictly between"),
        (lambda path: Ledger(path, Budget(5.0, 1e-5)), "not changed on the way"),
        (
            lambda path: Ledger(path, BUDGET).authorise(
                Release(1.0, NoiseLaw(1.0), "example"), THREAT, "r", 0
            ),
            "ledger of its own",
        ),
    ],
)
def test_bad_input_says_why(path, call, reason):
    Ledger(path, BUDGET).close()
    with pytest.raises(UserError, match=reason):
        call(path)


def test_remarks_stand_among_the_entries_and_cost_nothing(path):
    with Ledger(path, BUDGET) as ledger:
        before = ledger.authorise(user(2.0), THREAT, "run", 0).epsilon
        ledger.remark("run", 0, "not heard: clients 3")
        assert ledger.epsilon == before
    with Ledger(path, BUDGET) as again:
        assert again.epsilon == before
        assert [(remark.round, remark.text) for remark in again.remarks] == [(0, "not heard: clients 3")]
        again.authorise(user(2.0), THREAT, "run", 1)
        again.authorise(user(2.0), THREAT, "run", 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b"not heard" not in line))
    with pytest.raises(LedgerError, match="changed or is out of place"):
        Ledger(path, BUDGET)


def test_an_accountant_that_says_nothing_is_left_out(tmp_path: Path):
    """Drawn noise ends somewhere: after some rounds Rényi moments certify nothing, others still do."""
    drawing = Drawing(spread=2.7e-17, worst=3.2e-07, missed=1.6e-26, factor=2.6e-42)
    release = Release(clip=1.0, law=NoiseLaw(1.057, 0.748), drawing=drawing)
    threat = Threat("secldp", clients=5, byzantine=1, collusion=1)
    budget = Budget(epsilon=1e6, delta=1e-5)
    with Ledger(tmp_path / "ledger", budget) as ledger:
        said = [set(ledger.authorise(release, threat, "run", round_).epsilon) for round_ in range(19)]
    assert said[0] > said[-1] >= {"exact"}
    with Ledger(tmp_path / "ledger", budget) as again:
        assert len(again.entries) == 19


@pytest.mark.parametrize(
    "said",
    [[], None, {"remark": "text"}, {"run": "r", "round": 0}, {"run": "r", "round": 0, "epsilon": "low"}],
)
def test_a_line_that_says_something_else_is_refused_though_its_digest_is_right(path, said):
    with Ledger(path, Budget(epsilon=3.0, delta=1e-5)):
        pass
    first = path.read_bytes()
    record = {**said, "previous": first[:64].decode()} if isinstance(said, dict) else said
    body = json.dumps(record).encode()
    path.write_bytes(first + hashlib.sha256(body).hexdigest().encode() + b" " + body + b"\n")
    for read in (lambda: Ledger(path, Budget(epsilon=3.0, delta=1e-5)), lambda: read_entries(path)):
        with pytest.raises(LedgerError, match="line 2"):
            read()
