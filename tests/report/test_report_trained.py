"""A trained model in use: predicted, evaluated, as one module; whatever the data came as."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trilemma as tl

NAMES = ["age", "pulse", "oxygen"]


def records(rows: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def columns(rows: int = 120) -> dict[str, Any]:
    x, y = records(rows)
    return {"site": ["north", "south", "west"] * (rows // 3), **dict(zip(NAMES, x.T, strict=True)), "ill": y}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def trained(out: Path, rounds: int = 30, **more: Any) -> tl.report.Result:
    given = {"model": net, "clients": [records(seed=i) for i in range(3)], "test": records(60, 9), **more}
    return tl.run(tl.Task(**given), rounds=rounds, algorithm={"name": "dsgd", "lr": 1.0}, out=out / "run")


def test_predict_evaluate_and_the_module_agree(tmp_path: Path) -> None:
    result = trained(tmp_path, metrics=("accuracy", "auc"))
    x, y = records(60, 9)
    scores = result.evaluate(x, y)
    assert scores["accuracy"] == pytest.approx(result.summary.accuracy.mean, abs=1e-6)
    assert scores["accuracy"] == pytest.approx((result.predict(x) == y).mean())
    assert set(scores) == {"loss", "accuracy", "auc"}
    module = result.model
    assert isinstance(module, nn.Sequential)
    assert not module.training
    assert np.array_equal(module(torch.from_numpy(x)).argmax(1).numpy(), result.predict(x.tolist()))
    assert torch.equal(module[0].weight, result.state_dict()["0.weight"])


def test_classes_with_names_are_predicted_by_name(tmp_path: Path) -> None:
    named = [(x, np.array(["well", "ill"])[y]) for x, y in (records(seed=i) for i in range(3))]
    result = trained(tmp_path, clients=named, test=named[0], classes=["well", "ill"])
    assert set(result.predict(named[0][0])) == {"well", "ill"}
    assert result.evaluate(*named[0])["accuracy"] == pytest.approx(result.summary.accuracy.mean, abs=1e-6)


def test_features_and_buffers_are_part_of_the_module(tmp_path: Path) -> None:
    data = {"name": "phishing", "project": 8, "norm": 1.0}
    result = tl.run(data=data, clients=3, rounds=5, seeds=2, out=tmp_path / "features")
    x, y = (part.numpy() for part in (_phishing().x_test, _phishing().y_test))
    assert result.evaluate(x, y)["accuracy"] == pytest.approx(result.summary.accuracy.per_seed["1"], abs=1e-3)
    assert result.evaluate(x, y, seed=2)["accuracy"] == pytest.approx(
        result.summary.accuracy.per_seed["2"], abs=1e-3
    )
    assert len(result.model(torch.from_numpy(x[:5]))) == 5

    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    given = tl.Task(model=normalised, clients=[records(seed=i) for i in range(3)], test=records(60, 9))
    averaged = tl.run(given, algorithm="fedavg", rounds=4, out=tmp_path / "buffers")
    assert int(averaged.model[1].running_mean.abs().sum() > 0)
    assert set(averaged.predict(records()[0])) <= {0, 1}


def _phishing() -> Any:
    from trilemma.base.keys import Key

    return tl.data.load("phishing", key=Key(1))


def test_numbers_are_predicted_as_numbers(tmp_path: Path) -> None:
    values = [(x, x.sum(1)) for x, _ in (records(seed=i) for i in range(3))]
    result = trained(tmp_path, model=lambda: nn.Linear(3, 1), clients=values, test=values[0])
    found = result.predict(values[0][0])
    assert found.shape == (40,)
    assert np.mean((found - values[0][1]) ** 2) == pytest.approx(result.evaluate(*values[0])["mse"], rel=1e-4)


def frame(kind: str, tmp_path: Path) -> Any:
    if kind == "mapping":
        return columns()
    if kind in ("csv", "parquet"):
        pandas = pytest.importorskip("pandas", reason="data frames need pandas")
        path = tmp_path / f"all.{kind}"
        getattr(pandas.DataFrame(columns()), f"to_{kind}")(path, index=False)
        return path
    package = {"pandas": "pandas", "polars": "polars", "pyarrow": "pyarrow", "datasets": "datasets"}[kind]
    module = pytest.importorskip(package, reason=f"{kind} is not installed")
    made = {
        "pandas": lambda: module.DataFrame(columns()),
        "polars": lambda: module.DataFrame(columns()),
        "pyarrow": lambda: module.table(columns()),
        "datasets": lambda: module.Dataset.from_dict(columns()),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["mapping", "pandas", "polars", "pyarrow", "datasets", "csv", "parquet"])
def test_a_table_with_a_client_column_is_taken_as_it_is(kind: str, tmp_path: Path) -> None:
    given = frame(kind, tmp_path)
    task = tl.Task(model=net, clients=given, client="site", label="ill")
    assert [*task.clients] == ["north", "south", "west"]
    x, y = records(120)
    assert task.dataset.natural is not None
    north = task.dataset.natural.train[0]
    assert torch.allclose(task.dataset.x_train[north], torch.from_numpy(x[::3]))
    assert torch.equal(task.dataset.y_train[north], torch.from_numpy(y[::3]))


def test_frames_train_test_and_are_predicted_as_they_are(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="data frames need pandas")
    table = pandas.DataFrame(columns())
    given = {"clients": table, "client": "site", "label": "ill", "test": table[:30]}
    result = trained(tmp_path, **given)
    assert result.evaluate(table[:30])["accuracy"] == pytest.approx(result.summary.accuracy.mean, abs=1e-6)
    assert np.array_equal(result.predict(table[:30]), result.predict(table[:30][NAMES].to_numpy()))
    parts = [part.drop(columns="site") for _, part in table.groupby("site")]
    apart = tl.Task(model=net, clients=parts, label="ill", test=parts[0])
    assert apart.dataset.x_train.shape == (120, 3)


def test_a_loader_brings_its_data_set() -> None:
    pairs = torch.utils.data.TensorDataset(*map(torch.from_numpy, records()))
    loader = torch.utils.data.DataLoader(pairs, batch_size=8, shuffle=True)
    task = tl.Task(model=net, clients=[loader, loader], test=loader)
    assert torch.equal(task.dataset.x_train[:40], torch.from_numpy(records()[0]))
    odd = torch.utils.data.DataLoader(pairs, collate_fn=lambda batch: batch)
    with pytest.raises(tl.UserError, match="client 0: a DataLoader that collates in its own way"):
        tl.Task(model=net, clients=[odd])


def test_a_category_is_named() -> None:
    pandas = pytest.importorskip("pandas", reason="data frames need pandas")
    table = pandas.DataFrame({**columns(), "colour": pandas.Categorical(["red", "blue"] * 60)})
    with pytest.raises(tl.UserError, match=r"column 'colour': 'red' is text, a category: make numbers"):
        tl.Task(model=net, clients=table, client="site", label="ill")


def test_one_table_needs_to_say_whose_rows_are_whose() -> None:
    pandas = pytest.importorskip("pandas", reason="data frames need pandas")
    with pytest.raises(tl.UserError, match="one table with client = the column that says whose row it is"):
        tl.Task(model=net, clients=pandas.DataFrame(columns()), label="ill")


def test_metrics_of_scikit_learn_are_taken_as_they_are(tmp_path: Path) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    f1 = partial(metrics.f1_score, average="macro")
    wanted = {"balanced": metrics.balanced_accuracy_score, "f1 of both": f1, "area": metrics.roc_auc_score}
    result = trained(tmp_path, metrics=wanted)
    x, y = records(60, 9)
    scores, said = result.evaluate(x, y), result.predict(x)
    assert scores["balanced"] == pytest.approx(metrics.balanced_accuracy_score(y, said))
    assert scores["f1 of both"] == pytest.approx(metrics.f1_score(y, said, average="macro"))
    chances = result.model(torch.from_numpy(x)).softmax(1)[:, 1].detach().numpy()
    assert scores["area"] == pytest.approx(metrics.roc_auc_score(y, chances))
    listed = tl.Task(model=net, clients=[(x, y)], metrics=[metrics.f1_score, "auc"])
    assert [*listed.learner(None).metrics] == ["f1_score", "auc"]


def test_regression_is_scored_by_scikit_learn_too(tmp_path: Path) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    values = [(x, x.sum(1)) for x, _ in (records(seed=i) for i in range(3))]
    result = trained(
        tmp_path, model=lambda: nn.Linear(3, 1), clients=values, test=values[0], metrics=metrics.r2_score
    )
    assert result.evaluate(*values[0])["r2_score"] == pytest.approx(
        metrics.r2_score(values[0][1], result.predict(values[0][0])), rel=1e-4
    )
