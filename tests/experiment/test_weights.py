"""What a configuration may say beside weights, what is refused, and what a reader is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from trilemma import experiment as config
from trilemma.audit.subject import Subject
from trilemma.base.errors import UserError
from trilemma.cli.run import run_command
from trilemma.experiment.resolve import resolve
from trilemma.privacy.mechanism import multiplier

SAID = [
    "federation.clients=7",
    "federation.byzantine=1",
    "federation.weights=[14, 14, 14, 10, 10, 10, 8]",
    "algorithm.name=cafcor",
    "aggregation.rule=caf",
    "run.rounds=5",
    "privacy.threat=secldp",
    "privacy.clip=1.0",
    "privacy.sigma_ind=1.0",
    "privacy.sigma_cor=0.5",
]


def test_a_reader_is_told_what_liars_weigh_and_what_it_costs() -> None:
    found = resolve(config.parse({}, SAID), examples=50)
    assert any("f = 1 liars weigh at most 0.175; κ = 2.05" in note for note in found.notes)
    assert found.release is not None
    assert found.threat is not None
    assert sum(found.threat.scales) == pytest.approx(7)
    equal = resolve(config.parse({}, [one for one in SAID if "weights" not in one]), examples=50)
    assert equal.threat is not None
    assert multiplier(found.release, found.threat) < multiplier(found.release, equal.threat)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("aggregation.rule=krum", "krum has no meaning for clients of unequal weight"),
        ("aggregation.rule=evidence+caf", "evidence has no meaning"),
        ("aggregation.rule=noise-test+caf", "noise-test has no meaning"),
        ("federation.sampled=5", "sampled = 5 with weights"),
        ("privacy.neighbours=3", "secrets are shared with all"),
        ("privacy.assume=published", "count on no liars"),
        ("federation.weights=[1, 2]", "2 weights for 7 clients"),
        ("federation.weights=[50, 1, 1, 1, 1, 1, 1]", "allowed, for instance"),
    ],
)
def test_what_has_no_proof_is_refused_and_nothing_is_left(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_command(None, set_=[*SAID, change], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_audit_of_weights_is_refused_and_not_passed() -> None:
    with pytest.raises(UserError, match="audit the configuration without them"):
        Subject.of(config.parse({}, SAID), 50, "grid")
