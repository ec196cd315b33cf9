"""The audit: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from federation_harness import make, small_config
from trilemma import config as configurations
from trilemma.audit import Effort, Subject, examine, examine_federation
from trilemma.audit.bits import bits
from trilemma.audit.bounds import by_shape, clopper_pearson, one_run, one_run_risk
from trilemma.audit.canaries import canary_pairs
from trilemma.audit.likelihood import likelihood
from trilemma.audit.matrix import BAR, Case, below_bar, everything, plain, setting
from trilemma.audit.observer import AuditObserver
from trilemma.audit.one_run import from_one_run
from trilemma.audit.sensitivity import sensitivity, wild_pairs
from trilemma.base.keys import Key
from trilemma.cli import app
from trilemma.learning import Algorithm, Messages
from trilemma.learning.messages import one_vector
from trilemma.learning.protocol import ClientStep, Start
from trilemma.models.engines.clipping import clip_rows
from trilemma.privacy import Mechanism, NoiseLaw, SecretNoise, Threat, multiplier
from trilemma.privacy.accounting.gaussian import gaussian_epsilon

RISK = 0.0025


def subject_of(*assignments: str, arithmetic: str = "grid") -> Subject:
    subject = Subject.of(configurations.parse({}, assignments), 200, arithmetic)
    assert subject is not None
    return subject


# --- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bounds_are_false_no_more_often_than_they_say() -> None:
    """A Gaussian mechanism of known ε, 150 times, at a risk of a twentieth: both bounds, and not in vain."""
    rng, false, mu = np.random.default_rng(3), np.zeros(2), 1.5
    true, found = float(gaussian_epsilon(mu, 1e-2)), []
    for _ in range(150):
        coins = rng.random(1000) < 0.5
        scores = rng.normal(size=1000) + np.where(coins, mu / 2, -mu / 2)
        bounds = (
            clopper_pearson(scores, coins, 1e-2, 0.05),
            by_shape(scores, coins, Mechanism(9.0), 1, 1e-2, 0.05),
        )
        false += np.array(bounds) > true
        found.append(bounds)
    assert (false <= 0.05 * 150 + 3 * math.sqrt(150 * 0.05)).all()
    assert false[1] > 0, "a bound that is never false is not tight"
    assert np.mean(found, axis=0)[1] > 0.8 * true


def test_one_run_bound_is_that_of_randomised_response() -> None:
    """Pure ε-private coins: right guesses are binomial, so the risk is the binomial tail."""
    rng, epsilon = np.random.default_rng(4), 1.0
    right = rng.binomial(500, 1 / (1 + math.exp(-epsilon)), size=2000)
    seen, times = np.unique(right, return_counts=True)
    refuted = [one_run_risk(500, 500, int(v), epsilon, 0.0) <= 0.05 for v in seen]
    assert 0.02 < np.average(refuted, weights=times) <= 0.06
    assert one_run(500, 500, 366, 1e-3, 0.05) < one_run(500, 500, 366, 0.0, 0.05)


@pytest.mark.parametrize(
    "threat",
    [
        Threat("ldp", 9),
        Threat("cdp", 9, 2),
        Threat("secldp", 9, 2),
        Threat("secldp", 9, 2, collusion=1),
        Threat("byzldp", 9, 2),
    ],
)
def test_the_observer_is_left_with_what_the_certificate_counts_on(threat: Threat) -> None:
    subject = subject_of(*setting("dsgd", "ldp", 1, 2.0))
    release = replace(subject.release, law=NoiseLaw(0.3, 0.0 if threat.name == "ldp" else 0.7))
    observer = AuditObserver.of(threat, release.law)
    assert math.sqrt(observer.variance) / release.sensitivity == pytest.approx(multiplier(release, threat))


# --- nothing is wrong -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", list(plain((4.0,))), ids=lambda case: case.name)
def test_the_audit_comes_near_the_certificate_and_not_beyond(case: Case) -> None:
    subject = subject_of(*case.assignments)
    found = likelihood(subject, canary_pairs(subject.release), 4_000, RISK, Key(1))
    assert not any(outcome.exceeds for outcome in found)
    assert max(outcome.ratio for outcome in found) >= BAR


def few() -> list[Case]:
    """Every private algorithm, each under one of the threat models in turn."""
    cases = list(everything(rounds=2))
    return [*cases[:-2:5], cases[-1]]


@pytest.mark.slow
def test_algorithms_keep_what_they_declare() -> None:
    for case in few():
        audit = case.audit(Effort(trials=100, canaries=30))
        assert audit.passed, (case.name, audit.plain())
        assert audit.certified is not None
        assert not below_bar(case, audit)


# --- something is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threat", ["ldp", "secldp", "cdp"])
def test_halved_noise_is_caught(threat: str) -> None:
    subject = subject_of(*setting("dsgd", threat, 3, 4.0))
    law = subject.release.law
    noise = f"sigma_ind={law.sigma_ind / 2!r}, sigma_cor={law.sigma_cor / 2!r}"
    half = f"privacy={{threat='{threat}', clip=1.0, {noise}}}"
    wrong = subject_of(*setting("dsgd", threat, 3, 4.0), half)
    caught = replace(subject, algorithm=wrong.algorithm)
    found = likelihood(caught, canary_pairs(subject.release), 1000, RISK, Key(1))
    assert any(outcome.exceeds for outcome in found)


@pytest.mark.slow
def test_halved_noise_shows_in_one_run() -> None:
    subject = subject_of(*setting("dsgd", "ldp", 3, 4.0))
    wrong = subject_of(*setting("dsgd", "ldp", 3, 12.0))
    right, caught = (
        from_one_run(replace(subject, algorithm=one.algorithm), 200, RISK, Key(1)) for one in (subject, wrong)
    )
    assert right.found < caught.found
    assert right.facts["right"] < caught.facts["right"]


@pytest.mark.parametrize(
    "assignments",
    [(), ("algorithm.unit=example", "algorithm.sampling=poisson", "privacy.adjacency=add-remove")],
)
def test_float_noise_tells_data_sets_apart_and_grid_noise_does_not(assignments: tuple[str, ...]) -> None:
    for arithmetic, expected in (("grid", 0.0), ("float", math.inf)):
        subject = subject_of(*setting("dsgd", "ldp", 1, 2.0, *assignments), arithmetic=arithmetic)
        outcome = bits(subject, canary_pairs(subject.release)[0], Key(1), RISK)
        assert outcome.found == expected
        assert outcome.exceeds == (arithmetic == "float")


def test_a_clip_that_is_not_the_declared_one_is_caught() -> None:
    subject = subject_of(*setting("dsgd", "ldp", 3, 4.0))
    loose = subject_of(*setting("dsgd", "ldp", 3, 4.0), "privacy.clip=1.5")
    pairs = wild_pairs(subject, 8, Key(1))
    assert not sensitivity(subject, pairs, Key(1), "canaries").exceeds
    wrong = sensitivity(replace(subject, algorithm=loose.algorithm), pairs, Key(1), "canaries")
    assert wrong.exceeds
    assert wrong.found == pytest.approx(3.0, rel=0.02)


def hoarder(subject: Subject) -> Algorithm:
    """An algorithm that clips its gradient and then adds half of the last one: 2C in round 0, 3C later."""

    def init(model, ids, key):
        params = {"params": model.init(key)}
        return Start(params, {"last": torch.zeros(len(ids), model.dim)}, params)

    def client(broadcast, state, clients, round_, key):
        batch = clients.everything()
        gradient = torch.cat([batch.x * batch.y[..., None], batch.y[..., None]], 2).mean(1)
        bounded, _ = clip_rows(gradient, 1.0)
        noise = clients.noise.draw(
            subject.release.law, clients.ids, bounded.shape[1], round_, torch.device("cpu")
        )
        return ClientStep(Messages(bounded + 0.5 * state["last"] + noise), {"last": bounded})

    return Algorithm("hoarder", init, client, None, one_vector("params"), subject.release)


def test_a_state_that_carries_data_along_is_caught() -> None:
    subject = subject_of(*setting("dsgd", "ldp", 4, 4.0), arithmetic="float")
    pairs = [pair for pair in wild_pairs(subject, 8, Key(1)) if pair.name == "at the clip, opposite"]
    outcome = sensitivity(replace(subject, algorithm=hoarder(subject)), pairs, Key(1), "canaries")
    assert outcome.exceeds
    assert outcome.found == pytest.approx(3.0, rel=0.01)
    assert outcome.facts["round"] >= 1
    once = replace(subject, rounds=1, algorithm=hoarder(subject))
    assert not sensitivity(once, pairs, Key(1), "canaries").exceeds


def test_without_a_guarantee_nothing_is_exceeded_and_everything_is_shown() -> None:
    """CafCor's published figure, with nobody lying: the sum of the messages has no noise."""
    config = configurations.parse(
        {},
        [
            *setting("cafcor", "secldp", 2, 4.0),
            "privacy={threat='secldp', clip=1.0, sigma_cor=1.0, assume='published'}",
        ],
    )
    audit = examine(config, effort=Effort(trials=300, canaries=10))
    assert audit.certified is None
    assert audit.passed
    assert any("nothing is certified" in note for note in audit.notes)
    assert max(outcome.found for outcome in audit.outcomes if outcome.measures == "ε") > 5.0


def test_nothing_noised_is_nothing_to_test() -> None:
    audit = examine(configurations.parse({}, ["federation.clients=7"]), effort=Effort(trials=10))
    assert (audit.outcomes, audit.certified, audit.passed) == ((), None, True)


# --- the command ------------------------------------------------------------------------------------------

SMALL = ["--trials", "50", "--canaries", "20", "--set", "privacy.threat=ldp", "--set", "privacy.clip=1.0"]
SMALL += ["--set", "privacy.epsilon=4", "--set", "run.rounds=2"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ([], 0),
        (["--arithmetic", "float"], 1),
        (["--arithmetic", "flaot"], 2),
        (["--confidence", "2"], 2),
        (["--trials", "0"], 2),
        (["--set", "privacy.clip=-1"], 2),
    ],
)
def test_exit_codes(more: list[str], code: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["audit", *SMALL, "--json", *more])
    if code == 2:
        assert result.exit_code != 0
        assert not result.stdout
    else:
        assert result.exit_code == code, result.output
        shown = json.loads(result.stdout)
        assert shown["passed"] == (code == 0)
        assert {"test", "found", "certified", "ratio", "exceeds"} <= set(shown["outcomes"][0])
    assert list(tmp_path.iterdir()) == []


# --- a federation's nodes ---------------------------------------------------------------------------------


@pytest.fixture
def federation(tmp_path):
    private = ("algorithm.name=cafcor", "privacy.threat=secldp", "privacy.clip=1.0", "privacy.epsilon=12")
    make(tmp_path / "federation", 5, small_config(5, *private, "privacy.collusion=1"))
    return tmp_path / "federation"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_nodes_keep_their_certificate_and_their_folders(federation, monkeypatch) -> None:
    before = contents(federation)
    audit = examine_federation(federation, Effort(trials=200, canaries=10))
    assert audit.passed, audit.plain()
    released = [outcome for outcome in audit.outcomes if outcome.test.startswith("one release")]
    assert released[1].found > 0.2 * released[1].certified
    assert contents(federation) == before

    honest = SecretNoise.steps

    def halved(self, law, *arguments):
        return honest(self, NoiseLaw(law.sigma_ind / 2, law.sigma_cor / 2), *arguments)

    monkeypatch.setattr(SecretNoise, "steps", halved)
    audit = examine_federation(federation, Effort(trials=200, canaries=10))
    assert any(outcome.exceeds for outcome in audit.outcomes if outcome.test.startswith("one release"))
    assert contents(federation) == before


def test_a_single_clients_folder_is_not_enough(federation) -> None:
    with pytest.raises(ValueError, match="does not hold the server and all 5 clients"):
        examine_federation(federation / "client-0")
