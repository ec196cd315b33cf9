"""Private statistics of real records: what they cost, what they tell, and what nobody gets past."""

from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn
from typer.testing import CliRunner

import trilemma as tl
from trilemma import experiment
from trilemma.audit.examine import Effort, examine
from trilemma.audit.outcomes import Audit
from trilemma.audit.search import AuditSearch, of_subject, records
from trilemma.audit.subject import Subject
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.cli import app
from trilemma.data import declaration_of
from trilemma.learning.statistics import PrivateStatistics
from trilemma.learning.steps import total
from trilemma.report.statistics import simulated_statistics
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble
from trilemma.survey.columns import SurveyColumn
from trilemma.survey.layout import Layout
from trilemma.survey.told import ToldFigure
from trilemma.task.neighbours import changes
from trilemma.task.surveyed import surveyed

ROOT = Path(__file__).parents[2]
TASK = ROOT / "examples" / "hospitals" / "task.py"
CONFIG = ROOT / "examples" / "hospitals" / "statistics.toml"
COLUMNS = {
    "age": {"low": 20, "high": 90, "bins": 14},
    "sex": {"values": [0, 1]},
    "trestbps": {"low": 80, "high": 200},
    "disease": {"values": [0, 1, 2, 3, 4]},
}


def task_of(sites: list[list[dict[str, Any]]]) -> tl.Task:
    """Return a task of these sites' records."""
    return tl.Task(
        model=lambda: nn.Linear(1, 1),
        clients=lambda client, records: (np.zeros((1, 1), np.float32), np.zeros(1, np.float32)),
        records=lambda client: sites[client],
        count=len(sites),
        target="values",
    )


def settings(epsilon: float, threat: str = "ldp", clients: int = 4, **more: Any) -> experiment.Config:
    """Return a configuration of statistics."""
    said = {"name": "statistics", "batch_size": 400, "columns": COLUMNS, "label": "disease", **more}
    private = {"threat": threat, "epsilon": epsilon, "delta": 1e-3, "arithmetic": "grid"}
    return experiment.parse({"algorithm": said, "privacy": private}, own=experiment.Own(clients))


@pytest.mark.parametrize(
    ("threat", "adjacency"), [("ldp", "replace"), ("ldp", "add-remove"), ("cdp", "replace")]
)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_the_noise_is_worth_the_epsilon_by_an_independent_computation(
    epsilon: float, threat: str, adjacency: str
) -> None:
    """By δ(ε) of Gaussians μ apart, Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), and nothing of the accountants."""
    config = settings(epsilon, threat).with_(f"privacy.adjacency={adjacency}")
    release = assemble(config, 1, tl.Task.from_file(TASK)).resolved.release
    move = (2 if adjacency == "replace" else 1) / 400
    noise = release.law.sigma_ind * (math.sqrt(4) if threat == "cdp" else 1)

    def excess(one: float) -> float:
        mu = move / noise
        return norm.cdf(mu / 2 - one / mu) - math.exp(one) * norm.cdf(-mu / 2 - one / mu) - 1e-3

    found = brentq(excess, 1e-3, 20)
    assert 0.99 * epsilon <= found <= epsilon


class _Silent(tl.privacy.Noiseless):
    """Noise of zero steps."""

    def steps(self, law, step, ids, dim, round_, device):  # type: ignore[no-untyped-def]
        return torch.zeros(len(ids), dim, dtype=torch.int64)


def test_no_record_moves_a_message_further_than_is_declared() -> None:
    """Also one that misses everything, or is of no kind: before noise, as a client's integers."""
    good = [{"age": 20 + row, "sex": row % 2, "trestbps": 100 + row, "disease": row % 5} for row in range(30)]
    odd = [
        {},
        None,
        {"age": math.nan},
        {"age": "1e999", "disease": 9},
        {"age": 90, "sex": 1, "trestbps": 200},
    ]
    config = settings(1.0, clients=1, correlations=True)

    def sums(records: list[Any]) -> torch.Tensor:
        found = assemble(config, 1, task_of([records]))
        release = found.resolved.release
        clients = replace(found.clients, noise=_Silent())
        begin = engine.start(found)
        done, _ = total.step(found.resolved.algorithm, begin.broadcast, begin.clients, clients, 0, Key(1))
        assert release.sensitivity == 2 / 400
        return done.messages.vectors[0].double()

    before = sums(good)
    for record in odd:
        for place in (0, 29):
            moved = torch.linalg.vector_norm(sums([*good[:place], record, *good[place + 1 :]]) - before)
            assert float(moved) <= 2 / 400
    assert float(torch.linalg.vector_norm(sums([*good, odd[-1]]) - before)) <= 1 / 400


def test_one_record_changes_one_vector() -> None:
    task = surveyed(tl.Task.from_file(TASK), settings(1.0).algorithm.options.layout)
    found = changes(task, pairs=40)
    assert max(change.examples for change in found) == 1
    assert not any(change.refused for change in found)


@pytest.mark.slow
@pytest.mark.parametrize("threat", ["ldp", "secldp"])
def test_an_audit_finds_no_more_than_is_certified(threat: str) -> None:
    found = audited(threat)
    assert found.certified <= 1.0
    assert found.passed
    assert {one.test for one in found.outcomes} >= {"bits", "neighbours", "one run"}


@pytest.mark.slow
def test_an_audit_finds_a_survey_that_weighs_records_more_than_it_declares(monkeypatch: Any) -> None:
    declared = PrivateStatistics.exposure
    monkeypatch.setattr(
        PrivateStatistics, "exposure", lambda *given: replace(declared(*given), batch=2 * given[0].batch_size)
    )
    assert not audited("ldp").passed


def audited(threat: str) -> Audit:
    """Return an audit of a survey of few records: the searches take the time that batches are long."""
    sites = [[{"sex": (row + site) % 2} for row in range(6)] for site in range(4)]
    config = settings(1.0, threat, columns={"sex": {"values": [0, 1]}}, label="sex", batch_size=6)
    return examine(config, task_of(sites), Effort(trials=400, canaries=50))


def test_an_audit_takes_batches_longer_than_what_it_tries() -> None:
    """More examples in a batch than records that are made up: the others are taken again."""
    config = settings(1.0, clients=1, columns={"sex": {"values": [0, 1]}}, label=None, batch_size=8)
    found = assemble(config, 1, task_of([[{"sex": 1}] * 8]))
    subject = Subject.resolved(found.config, found.resolved, 8)
    assert subject is not None
    target = of_subject(subject, found.clients.model, 8, Key(1))
    pool = records(declaration_of(found.clients.data.dataset), Key(1)).first(6)
    tried = AuditSearch(target)
    tried.under("first", target.model.init(Key(1)), pool)
    assert tried.answers == []
    assert 0 < tried.move <= 1 + target.slack


def exact(column: str) -> list[float]:
    """Return all that hospitals have in a column, from their files."""
    names = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
             "slope", "ca", "thal", "disease")  # fmt: skip
    found = []
    for path in sorted((ROOT / "examples" / "hospitals" / "data").glob("*.csv")):
        with path.open() as file:
            found += [row[column] for row in csv.DictReader(file, names) if row[column] not in ("?", "")]
    return [float(one) for one in found]


def off(figure: ToldFigure | None, truth: float) -> float:
    """Return how far a figure is from the truth, in deviations of its noise; refuse one outside."""
    assert figure is not None
    assert figure.value is not None
    assert figure.noise
    return abs(figure.value - truth) / figure.noise


@pytest.mark.parametrize(("epsilon", "age", "count"), [(0.5, 9.0, 170.0), (1.0, 4.5, 85.0), (2.0, 2.3, 45.0)])
def test_hospitals_are_told_as_well_as_the_noise_allows(epsilon: float, age: float, count: float) -> None:
    """Beside the exact numbers: within the noise that is said, and that is no more than a known figure."""
    result = simulated_statistics(settings(epsilon), tl.Task.from_file(TASK))
    ages, ill = exact("age"), exact("disease")
    found, labels = result.column("age"), result.column("disease")
    assert found.mean.noise < age / 2
    assert off(found.mean, float(np.mean(ages))) < 3.5
    assert off(found.variance, float(np.var(ages))) < 3.5
    assert found.mean.low <= np.mean(ages) <= found.mean.high
    assert found.variance.low <= np.var(ages) <= found.variance.high
    assert off(result.records, len(ages)) < 3.5
    healthy = labels.cells[1]
    assert healthy.name == "0"
    assert healthy.count.noise < count / 2
    assert off(healthy.count, sum(one == 0 for one in ill)) < 3.5
    pressure = exact("trestbps")
    missing = result.column("trestbps").missing
    assert missing.low <= 1 - len(pressure) / len(ages) <= missing.high
    ordered = np.sort(ages)
    for quantile in found.quantiles:
        truth = ordered[int(quantile.share * len(ordered))]
        low, high = quantile.figure.low, quantile.figure.high
        assert (-math.inf if low is None else low) <= truth <= (math.inf if high is None else high)


@pytest.fixture(scope="module")
def banks() -> tuple[tl.Task, list[list[dict[str, Any]]]]:
    """Return a task of queries at twenty banks, as records with their length and intent."""
    folder = Path(os.environ.get("TRILEMMA_DATA", "")) / "banking77"
    if not (folder / "train.csv").is_file():
        pytest.skip(f"no {folder}: see examples/banks/README.md")
    with (folder / "train.csv").open(newline="") as file:
        rows = [{"length": len(row["text"]), "intent": row["category"]} for row in csv.DictReader(file)]
    order = np.random.default_rng(1).permutation(len(rows))
    sites = [[rows[row] for row in order[bank::20]] for bank in range(20)]
    return task_of(sites), sites


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_banks_queries_are_told_with_three_liars(epsilon: float, banks: Any) -> None:
    task, sites = banks
    some = sorted({row["intent"] for row in sites[0]})[:8]
    columns = {"length": {"low": 0, "high": 200, "bins": 20}, "intent": {"values": some}}
    lying = {"attack": {"name": "sf"}, "federation": {"byzantine": 3}, "aggregation": {"rule": "cwtm"}}
    private = {"threat": "secldp", "epsilon": epsilon, "delta": 1e-4}
    said = {"name": "statistics", "batch_size": 600, "columns": columns, "label": "intent"}
    config = experiment.parse({"algorithm": said, "privacy": private, **lying}, own=experiment.Own(20))
    result = simulated_statistics(config, task)
    lengths = [min(200, row["length"]) for site in sites[:17] for row in site]
    mean = result.column("length").mean
    assert mean.low <= np.mean(lengths) <= mean.high
    assert mean.high - mean.low < 60 / epsilon + 15
    assert abs(mean.value - np.mean(lengths)) < 16 / epsilon
    assert result.liars == 3
    rest = result.column("intent").cells[-1]
    others = sum(row["intent"] not in some for site in sites[:17] for row in site) * 20 / 17
    assert rest.count.low <= others <= rest.count.high


def test_without_noise_every_number_is_exact() -> None:
    result = tl.statistics(TASK, COLUMNS, most=400, label="disease", least=0)
    assert result.column("age").mean.value == pytest.approx(np.mean(exact("age")), rel=1e-4)
    assert result.column("age").variance.value == pytest.approx(np.var(exact("age")), rel=1e-3)
    counts = [cell.count.value for cell in result.column("disease").cells[1:6]]
    assert counts == pytest.approx(
        [sum(one == stage for one in exact("disease")) for stage in range(5)], abs=0.1
    )
    assert result.plain()["verdict"]["no_guarantee"]
    weights = result.proposal.class_weights
    assert weights["4"] == pytest.approx(920 / (5 * 28), rel=0.01)


def test_a_site_without_records_and_a_constant_column_are_told_as_such() -> None:
    same = [{"age": 50, "sex": 1, "trestbps": None, "disease": 0}] * 200
    result = simulated_statistics(settings(2.0), task_of([same, same, same, []]))
    assert result.records.low <= 600 <= result.records.high
    age = result.column("age")
    assert age.variance.low == 0.0
    assert age.mean.low <= 50 <= age.mean.high
    pressure = result.column("trestbps")
    assert pressure.missing.high == 1.0
    assert pressure.missing.low > 0.8
    assert pressure.mean.value is None  # nothing stands out of the noise
    assert (pressure.mean.low, pressure.mean.high) == (80.0, 200.0)
    assert result.sites[3].records.count is None
    assert result.column("sex").cells[1].count is None
    assert "trestbps" not in result.proposal.scales


def test_an_example_that_cannot_be_read_costs_its_own_place_only(tmp_path: Path) -> None:
    """Of a task without records, at a node: a row that is no row is left out, and no other one changes."""
    (tmp_path / "task.py").write_text(
        "import numpy as np\nfrom torch import nn\nimport trilemma as tl\n"
        "expects = tl.Declaration(tl.Values('numbers', (2,), low=0, high=9), tl.Values('whole', high=1))\n"
        "clients = 1\n"
        "def model(): return nn.Linear(2, 2)\n"
        "def data(client):\n"
        "    x = np.arange(8.0).reshape(4, 2)\n"
        f"    x[1, 0] = float(open({str(tmp_path / 'value')!r}).read())\n"
        "    return x, np.array([0, 1, 0, 1])\n"
    )
    columns = {"x0": SurveyColumn(low=0, high=9, bins=3), "label": SurveyColumn(values=(0, 1))}
    found = {}
    for value in ("5", "nan", "inf", "100"):
        (tmp_path / "value").write_text(value)
        survey = surveyed(tl.Task.from_file(tmp_path / "task.py"), Layout(columns))
        found[value] = survey.fitted(0, lambda said: None, 4)
    good = found.pop("5").x_train
    for one in found.values():
        kept = one.x_train if one.left_out is None else one.x_train[~one.left_out]
        assert torch.equal(kept, good[[0, 2, 3]])


def test_bounds_that_are_not_known_are_found_and_paid_for_like_all_else() -> None:
    found = simulated_statistics(
        settings(2.0, columns={"trestbps": {}}, label=None, threat="secldp"), tl.Task.from_file(TASK)
    )
    bounds = found.proposal.bounds["trestbps"]
    values = [one for one in exact("trestbps") if one > 0]
    inside = np.mean([bounds.low <= one <= bounds.high for one in values])
    assert inside > 0.95
    assert bounds.high - bounds.low < 400
    assert found.verdict["guarantee"]["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert found.column("trestbps").mean is None


def test_under_cdp_nothing_is_told_that_follows_from_single_messages() -> None:
    result = simulated_statistics(settings(1.0, "cdp"), tl.Task.from_file(TASK))
    assert (result.sites, result.drift) == ((), ())
    assert result.records.low <= 920 <= result.records.high


def test_the_messages_are_the_servers_alone() -> None:
    """What a server hands out is the rule's value; a client that saw messages would know others' noise."""
    found = assemble(settings(1.0, "secldp"), 1, tl.Task.from_file(TASK))
    progress, _ = engine.step(found, engine.start(found))
    assert set(progress.broadcast) == {"params"}
    assert progress.broadcast["params"].shape == (found.clients.model.dim,)


REFUSED = {
    "a column that no record has": ("algorithm.columns.agee={low=1,high=2}", "did you mean 'age'"),
    "bins of the wrong type": ("algorithm.columns.age.bins='many'", "whole number"),
    "bounds that are reversed": ("algorithm.columns.age={low=90,high=20}", "not below"),
    "an epsilon of nothing": ("privacy.epsilon=0", "more than 0"),
    "a negative epsilon": ("privacy.epsilon=-1", "more than 0"),
    "too many liars": ("federation.tolerate=2", "2f < n"),
    "several rounds": ("run.rounds=3", "statistics has 1"),
    "a label that is no column": ("algorithm.label='stage'", "none of the columns"),
    "an unknown key": ("algorithm.colums={}", "did you mean 'columns'"),
    "no columns": ("algorithm.columns={}", "columns"),
    "a robust rule under cdp": ("privacy.threat='cdp'", "mean only"),
    "features": ("data.project=3", "leave"),
    "weights of sites": ("federation.weights=[25, 25, 25, 26]", "count every site's records alike"),
    "sites larger than promised": ("algorithm.batch_size=100", "one holds 303"),
}


@pytest.mark.parametrize(("setting", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_words_and_nothing_is_written(
    setting: str, said: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    call = ["statistics", str(CONFIG), "--task", str(TASK), "--out", str(out), "--set", setting]
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, call, catch_exceptions=False, standalone_mode=False)
    assert not out.exists()


def test_a_configuration_that_trains_is_no_statistics_and_statistics_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains a model"):
        simulated_statistics(experiment.parse({}, own=experiment.Own(4)), tl.Task.from_file(TASK))
    with pytest.raises(ConfigError, match="trilemma statistics"):
        tl.simulate.run(settings(1.0), tmp_path / "run", task=tl.Task.from_file(TASK))
    assert not (tmp_path / "run").exists()


def test_the_command_shows_writes_and_prints_one_object(tmp_path: Path) -> None:
    call = ["statistics", str(CONFIG), "--task", str(TASK), "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, call, catch_exceptions=False)
    assert shown.exit_code == 0
    for words in (
        "ε = 2 at δ = 0.001 for one record",
        "age: ",
        "correlation of",
        "apart in",
        "proposed: scale age",
    ):
        assert words in shown.output
    written = json.loads((tmp_path / "out" / "statistics.json").read_text())
    printed = CliRunner().invoke(app, [*call[:4], "--json"], catch_exceptions=False)
    assert json.loads(printed.output) == written
