"""The planner: what `trilemma privacy` says, with controls, and as curves.

Every figure comes from `trilemma.report.privacy_question`, which the command asks too.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import tomli_w

from trilemma import aggregation
from trilemma import experiment as config
from trilemma.base.errors import UserError
from trilemma.learning.defences.evidence import hidden_shift
from trilemma.page.answers import finite
from trilemma.page.plan_answers import Choices, Figure, PlanAnswer, PlanCurve, PlanCurves, PlanSeconds
from trilemma.privacy import NoiseLaw, mean_noise
from trilemma.privacy.accounting import calculator
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.accounting.calibration import plan as least_noise
from trilemma.privacy.threats.catalogue import threat_models
from trilemma.privacy.types import Adjacency, Scheme, Unit
from trilemma.report.plain import plain_json
from trilemma.report.privacy_question import Question
from trilemma.report.round_cost import expected_seconds

ALONE = {"clients": "-n", "byzantine": "-f", "collusion": "-q", "neighbours": "-k", "dim": "-d"}
"""Options of `trilemma privacy` that go by a letter."""

MOST_ON_A_GRAPH = 500
"""Clients at most where each shares secrets with some: a graph's eigenvalues take n³ steps, and curves 4n."""

NUMBER = 4
"""Bytes of a number on its way."""


def choices() -> Choices:
    """Return what the controls offer."""
    return Choices(
        threats={name: threat_models.summary(name) for name in threat_models},
        accountants={name: accountants[name].assumes for name in accountants},
        rules=sorted(aggregation.rules),
        units=list(get_args(Unit)),
        schemes=list(get_args(Scheme)),
        adjacencies=list(get_args(Adjacency)),
    )


@lru_cache(maxsize=256)
def plan(question: Question, rule: str) -> PlanAnswer:
    """Answer a question; a setting that is impossible raises the command's own error."""
    if question.neighbours is not None and question.clients > MOST_ON_A_GRAPH:
        raise UserError(
            f"with k neighbours the planner answers up to n = {MOST_ON_A_GRAPH}; ask `{command(question)}`"
        )
    record: dict[str, Any] = json.loads(plain_json(question.record()))
    law = question.finding.release.law
    asked: Literal["epsilon", "delta"] = "delta" if question.delta is None else "epsilon"
    reason = record.get("no_guarantee", "")
    figures = record["printed"] if reason else record[asked]
    scales = question.model.scales
    variance = mean_noise(law, question.clients, question.byzantine, question.neighbours, scales)
    kappa, criterion, problem = _robustness(rule, question)
    hidden, nothing_hides = _hidden(question, law)
    toml, wrong = _toml(question, law, rule)
    return PlanAnswer(
        asked=asked,
        figures=[
            Figure(accountant=name, value=value, assumes=accountants[name].assumes)
            for name, value in figures.items()
        ],
        held=not reason,
        reason=reason,
        notes=record["notes"],
        sigma_ind=law.sigma_ind,
        sigma_cor=law.sigma_cor,
        multiplier=record["multiplier"],
        deviation=math.sqrt(variance),
        norm=math.sqrt(question.dim * variance),
        kappa=finite(kappa),
        criterion=criterion,
        rule_problem=problem,
        hidden=hidden,
        hidden_problem=nothing_hides,
        up_bytes=NUMBER * question.dim * question.clients,
        down_bytes=NUMBER * question.dim * question.clients,
        command=command(question),
        toml=toml,
        toml_problem=wrong,
        record=record,
    )


def command(question: Question) -> str:
    """Return the command that asks the same.

    >>> command(Question(clients=7, rounds=30, sigma_ind=4.0, delta=1e-4))
    'trilemma privacy -n 7 --rounds 30 --sigma-ind 4.0 --delta 0.0001'
    """
    words = ["trilemma", "privacy"]
    for part in fields(question):
        value = getattr(question, part.name)
        if value is not None and value != part.default:
            words += [ALONE.get(part.name, f"--{part.name.replace('_', '-')}"), str(value)]
    return " ".join(words)


def _robustness(rule: str, question: Question) -> tuple[float | None, str, str]:
    """Return κ of a rule and its criterion, or why the rule is not for so many liars."""
    try:
        parsed = aggregation.parse(rule, question.byzantine, question.shares)
        parsed.check(question.clients)
        return parsed.kappa(question.clients), parsed.criterion, ""
    except UserError as error:
        return None, "", str(error)


def _hidden(question: Question, law: NoiseLaw) -> tuple[float | None, str]:
    """Return how far liars can move the mean, whatever they send, or why that is not a question here."""
    if question.shares:
        return None, "what liars can hide is not known for clients of unequal weight"
    try:
        found = hidden_shift(
            law,
            question.clip,
            question.clients,
            question.byzantine,
            question.dim,
            question.rounds,
            neighbours=question.neighbours,
        )
    except UserError as error:
        return None, str(error)
    return finite(found.most), ""


def plan_seconds(question: Question, rule: str) -> PlanSeconds:
    """Time the rule and the noise of a question on this machine."""
    law = question.finding.release.law
    found = expected_seconds(
        rule, question.clients, question.byzantine, law, question.dim, question.neighbours
    )
    return (
        PlanSeconds(rule=None, noise=None)
        if found is None
        else PlanSeconds(rule=found.rule, noise=found.noise)
    )


def _toml(question: Question, law: NoiseLaw, rule: str) -> tuple[str, str]:
    """Return the configuration of a run like that, and what is wrong with it, if anything is."""
    algorithm: dict[str, Any] = {"name": "cafcor" if question.unit == "user" else "safe-dshb"}
    algorithm |= {"unit": question.unit, "batch_size": question.batch}
    if question.sampling == "poisson":
        algorithm["sampling"] = "poisson"
    noise: dict[str, Any] = {"sigma_ind": law.sigma_ind, "sigma_cor": law.sigma_cor}
    if question.law is None and question.epsilon is not None:
        noise = {"epsilon": question.epsilon}
    limits = {key: getattr(question, key) for key in ("delta", "collusion", "neighbours", "accountant")}
    privacy = {"threat": question.threat, "clip": question.clip, **noise}
    privacy |= {key: value for key, value in limits.items() if value is not None}
    usual = {"adjacency": "replace", "assume": "guaranteed"}
    privacy |= {
        key: getattr(question, key) for key, value in usual.items() if getattr(question, key) != value
    }
    tables = {
        "federation": {"clients": question.clients, "tolerate": question.byzantine}
        | ({"weights": list(question.shares)} if question.shares else {}),
        "algorithm": algorithm,
        "aggregation": {"rule": rule},
        "privacy": privacy,
        "run": {"rounds": question.rounds},
    }
    try:
        config.parse(tables)
    except UserError as error:
        return tomli_w.dumps(tables), str(error)
    return tomli_w.dumps(tables), ""


@lru_cache(maxsize=64)
def plan_curves(question: Question) -> PlanCurves:
    """Return ε over rounds, ε over the noise, and the noise for the same ε over the number of clients."""
    plan(question, "mean")  # what is impossible says so
    if question.delta is None:
        raise UserError("curves are of ε at a given δ: give --delta")
    found = question.finding
    drawn = calculator.picture(found.release, found.threat, question.rounds, question.delta)
    name = min(drawn.curves, key=lambda one: float(drawn.curves[one][-1]))
    return PlanCurves(
        over_rounds=[
            PlanCurve(name=name, x=drawn.rounds.tolist(), y=[finite(float(one)) for one in values])
            for name, values in drawn.curves.items()
        ],
        over_noise=_over_noise(question, found.release.law, name),
        over_clients=_over_clients(question, drawn.spent),
        epsilon=finite(drawn.spent),
    )


def _over_noise(question: Question, law: NoiseLaw, accountant: str) -> PlanCurve:
    """Return ε when all noise is so many times what it is."""
    factors = [0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0]
    release, threat = question.finding.release, question.finding.threat
    found: list[float | None] = []
    for factor in factors:
        scaled = replace(release, law=NoiseLaw(factor * law.sigma_ind, factor * law.sigma_cor))
        cost = calculator.find_epsilon(scaled, threat, question.rounds, question.delta or 0.0)
        assert not isinstance(cost.epsilon, float)
        found.append(finite(cost.epsilon.get(accountant)))
    return PlanCurve(name=accountant, x=factors, y=found)


def _over_clients(question: Question, epsilon: float) -> PlanCurve:
    """Return the noise in the honest mean that ε takes, over n; f and q grow with n."""
    sizes = sorted(
        {max(2, round(question.clients * factor)) for factor in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)}
    )
    found: list[float | None] = []
    for size in sizes:
        share = size / question.clients
        liars = min(int(question.byzantine * share), size - 1)
        colluders = None if question.collusion is None else min(int(question.collusion * share), liars)
        other = replace(question, clients=size, byzantine=liars, collusion=colluders, weights="")
        plans = least_noise(
            other.shape, (other.model,), epsilon, other.delta or 0.0, other.rounds, other.accountant
        )
        found.append(finite(math.sqrt(plans[0].variance)))
    return PlanCurve(name="noise in the honest mean", x=[float(size) for size in sizes], y=found)
