"""A verdict is a guarantee or the reason why there is none; nothing in between."""

from __future__ import annotations

import json

import pytest

from trilemma.privacy import (
    Guarantee,
    NoGuarantee,
    NoiseLaw,
    Release,
    Sampling,
    Threat,
    judge,
    read_verdict,
)
from trilemma.privacy.verdict import OUTSIDE

SECLDP = Threat("secldp", 100, 10)
PUBLISHED = Threat("secldp", 100, 10, assume="published")
USER = Release(2.25, NoiseLaw(1.19, 0.64))
EXAMPLE = Release(1.0, NoiseLaw(0.08), "example", 25, Sampling("poisson", 25 / 2764), "published")


def test_noise_for_every_number_of_liars_is_a_guarantee():
    held = judge(USER, SECLDP, 30, 1e-4)
    assert isinstance(held, Guarantee)
    assert (held.unit, held.adjacency, held.threat, held.accountant) == ("user", "replace", "secldp", "exact")
    assert any("0 to f = 10 clients may lie" in text for text in held.assumptions)
    assert set(OUTSIDE) < set(held.assumptions)


@pytest.mark.parametrize(
    ("release", "threat", "caveats", "reason", "figure"),
    [
        (Release(2.25, NoiseLaw(sigma_cor=0.6)), PUBLISHED, (), "only if 10 liars exist", "26.4"),
        (EXAMPLE, Threat("ldp", 7, 3), (), "convention", "1.14"),
        (USER, SECLDP, ("another rule than the mean",), "another rule", "26.3"),
        (Release(1.0, NoiseLaw()), SECLDP, (), "no noise", "none"),
        (None, None, (), "nothing is clipped", "none"),
    ],
)
def test_what_is_not_a_guarantee_says_why_with_the_printed_figure(release, threat, caveats, reason, figure):
    rounds = 400 if release is EXAMPLE else 30
    found = judge(release, threat, rounds, 1e-4, caveats)
    assert isinstance(found, NoGuarantee)
    assert reason in found.reason
    assert (f"{found.figure:.3g}" if found.figure is not None else "none") == figure
    assert read_verdict(json.loads(json.dumps(found.plain()))) == found


def test_where_no_secret_is_shared_the_published_assumption_assumes_nothing():
    release = Release(1.0, NoiseLaw(2.0))
    as_published = Threat("ldp", 7, 3, assume="published")
    assert judge(release, as_published, 5, 1e-5) == judge(release, Threat("ldp", 7, 3), 5, 1e-5)


def test_a_paper_s_own_noise_keeps_the_paper_s_figure():
    found = judge(USER, SECLDP, 30, 1e-4, ("noise as the paper sets it",), printed=13.0)
    assert isinstance(found, NoGuarantee)
    assert found.figure == 13.0
    assert found.reason.startswith("noise as the paper sets it; ")


def test_a_papers_noise_is_no_guarantee_and_says_what_it_is_worth():
    release, threat = Release(1.0, NoiseLaw(4.0)), Threat("ldp", 10)
    held = judge(release, threat, 2, 1e-5)
    found = judge(release, threat, 2, 1e-5, caveats=("as the paper sets it",), printed=0.3)
    assert isinstance(held, Guarantee)
    assert isinstance(found, NoGuarantee)
    assert found.figure == 0.3
    assert f"really added certifies ε = {held.epsilon:.3g} (exact)" in found.reason
