"""A threat model is one registered class: nothing else asks for its name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trilemma.base.errors import ConfigError, UserError
from trilemma.experiment import parse
from trilemma.experiment.resolve import resolve
from trilemma.privacy import NoiseLaw, Threat
from trilemma.privacy.threats.catalogue import ThreatModel, threat_models

SETTINGS = {
    "federation": {"clients": 9},
    "run": {"rounds": 3},
    "algorithm": {"name": "dsgd", "lr": 0.1, "momentum": 0.0},
    "privacy": {"threat": "half", "clip": 1.0, "epsilon": 4.0},
}


@pytest.fixture
def half() -> Iterator[None]:
    @threat_models.register("half", "the adversary takes half of the noise away")
    class Half(ThreatModel):
        shares = False

        def multiplier(self, law: NoiseLaw, move: float, threat: Threat) -> float:
            return law.sigma_ind / move / 2

        def notes(self, threat: Threat) -> tuple[str, ...]:
            return ("half of the noise counts",)

    yield
    threat_models.withdraw("half")


@pytest.mark.usefixtures("half")
def test_a_threat_model_of_ones_own_is_calibrated_and_certified() -> None:
    own, plain = (
        resolve(parse({**SETTINGS, "privacy": SETTINGS["privacy"] | {"threat": name}}), examples=100)
        for name in ("half", "ldp")
    )
    assert own.release is not None
    assert plain.release is not None
    assert own.release.law.sigma_ind == pytest.approx(2 * plain.release.law.sigma_ind)
    assert own.certified
    assert own.verdict(3, 1e-5).assumptions[0] == "half of the noise counts"


@pytest.mark.usefixtures("half")
def test_what_a_threat_model_has_no_use_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="under half nobody shares secrets"):
        parse({"privacy": {"threat": "half", "clip": 1.0, "sigma_cor": 1.0}})
    for name in ("half", "cdp", "ldp"):
        with pytest.raises(UserError, match="only secldp and byzldp share secrets"):
            Threat(name, 9, neighbours=4)


def test_a_name_that_is_no_threat_model_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'secldp'\? Allowed: .*none"):
        parse({"privacy": {"threat": "secldb"}})
