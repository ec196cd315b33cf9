"""What a column is called decides where it goes: another order is put right, other columns are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trilemma as tl
from trilemma import data
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.experiment import Own, parse
from trilemma.experiment.assembly import one_party

NAMES = ("age", "pulse", "oxygen")


def csv(folder: Path, name: str, text: str, encoding: str = "utf-8") -> Path:
    path = folder / f"{name}.csv"
    path.write_bytes(text.encode(encoding))
    return path


def expects(names: tuple[str, ...] = NAMES) -> tl.Declaration:
    return tl.Declaration(tl.Values("numbers", (3,), -9, 9, names=names), tl.Values("whole", high=1))


def net() -> nn.Module:
    return nn.Linear(3, 2)


A = "age,pulse,oxygen,y\n1,2,3,0\n4,5,6,1\n"
TURNED = "y,oxygen,age,pulse\n1,3,1,2\n0,6,4,5\n"
ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize("form", ["paths", "frames", "pairs", "folder", "by column", "test"])
def test_columns_in_another_order_are_put_in_one(tmp_path: Path, form: str) -> None:
    pandas = pytest.importorskip("pandas")
    paths = [csv(tmp_path, "a", A), csv(tmp_path, "b", TURNED)]
    frames = [pandas.read_csv(path) for path in paths]
    pairs = [(frame.drop(columns="y"), frame["y"]) for frame in frames]
    if form == "folder":
        own = data.from_folder(tmp_path)
    elif form == "by column":
        table = {**{name: frames[0][name] for name in frames[0]}, "site": [0, 1]}
        other = {name: table[name] for name in reversed(table)}
        own = data.from_table(table, client="site", label="y", test=other)
        assert own.x_test.tolist() == ROWS
    elif form == "test":
        own = data.from_clients(paths[:1], test=frames[1])
        assert own.x_test.tolist() == ROWS
    else:
        own = data.from_clients({"paths": paths, "frames": frames, "pairs": pairs}[form])
        assert own.x_train.tolist() == ROWS * 2
        assert own.y_train.tolist() == [0, 1, 1, 0]
    assert own.names == NAMES


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("age,Pulse,oxygen,y\n1,2,3,0\n", "client 1: no column 'pulse', which client 0 has: did you mean 'P"),
        ("age,pulse,y\n1,2,0\n", "client 1: no column 'oxygen', which client 0 has"),
        ("age,pulse,oxygen,ward,y\n1,2,3,4,0\n", "client 1: column 'ward', which client 0 has not"),
        (",age,pulse,oxygen,y\n0,1,2,3,0\n", "client 1: the column '' has no name.*to_csv"),
        ("Unnamed: 0,age,pulse,oxygen,y\n0,1,2,3,0\n", "client 1: the column 'Unnamed: 0' has no name"),
        ("age,pulse,age,y\n1,2,3,0\n", "two columns are called 'age'"),
        ("age, pulse,oxygen,pulse,y\n1,2,3,4,0\n", "two columns are called 'pulse'"),
        ("1.5,2,3,0\n1,2,3,0\n", "the first line holds numbers"),
        ("age;pulse;oxygen;y\n1;2;3;0\n", "separated by ';'"),
    ],
)  # fmt: skip
def test_other_columns_are_refused(tmp_path: Path, other: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.from_clients([csv(tmp_path, "a", A), csv(tmp_path, "b", other)], label="y")


def test_a_category_that_one_site_alone_has_seen_is_another_column() -> None:
    pandas = pytest.importorskip("pandas")
    sites = [{"ward": ["red", "blue"], "y": [0, 1]}, {"ward": ["red", "green"], "y": [0, 1]}]
    frames = [pandas.get_dummies(pandas.DataFrame(site), columns=["ward"]) for site in sites]
    with pytest.raises(UserError, match="client 1: no column 'ward_blue', which client 0 has"):
        data.from_clients(frames)


def test_spaces_and_marks_around_headings_are_none_of_them(tmp_path: Path) -> None:
    other = csv(tmp_path, "b", "age , pulse,oxygen, y\n1,2,3,0\n", "utf-8-sig")
    own = data.from_clients([csv(tmp_path, "a", A), other])
    assert own.names == NAMES
    with pytest.raises(UserError, match=r"b\.csv: not UTF-8"):
        data.read_table(csv(tmp_path, "b", "größe,y\n1,0\n", "latin-1"))


def test_frames_with_one_name_twice_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    for names in (["a", "a"], [1, "1"], ["a", " a"]):
        with pytest.raises(UserError, match="two columns are called"):
            data.read_table(pandas.DataFrame([[1, 2]], columns=names))


def test_labels_of_other_rows_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    x = pandas.DataFrame({"age": [1, 2]})
    with pytest.raises(UserError, match=r"other indexes.*y\.loc\[x\.index\]"):
        data.from_clients([(x, pandas.Series([0, 1]).sort_values(ascending=False))])


def test_arrays_and_tables_do_not_mix_unless_names_are_declared() -> None:
    table, bare = {"age": [1, 2], "pulse": [3, 4], "y": [0, 1]}, (np.ones((2, 2)), np.array([0, 1]))
    named = data.from_table({**table, "site": [0, 0]}, client="site", label="y")
    assert named.names == ("age", "pulse")
    pandas = pytest.importorskip("pandas")
    both = [pandas.DataFrame(table), bare]
    with pytest.raises(UserError, match="client 1: columns without names, and client 0 has a table"):
        data.from_clients(both)
    assert data.from_clients(both, columns=("pulse", "age")).x_train[0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("unknown", r"row 2 \(a.csv, line 5\), column 'pulse': 'unknown' is not a number; correct it"),
        ("10,05", r"row 2 \(a.csv, line 5\), column 'pulse': '10,05' is not.*with a point, 10\.05"),
        ("", r"row 2 \(a.csv, line 5\), column 'pulse': nan is not a finite number"),
    ],
)
def test_the_cell_that_is_no_number_is_named(tmp_path: Path, cell: str, message: str) -> None:
    text = f'pulse,y\n1,0\n2,1\n\n"{cell}",0\n4,1\n'
    with pytest.raises(UserError, match=message):
        data.from_clients([csv(tmp_path, "a", text)])
    with pytest.raises(UserError, match=r"row 2 \(a.csv, line 5\): label 'unknown' is not a number"):
        data.from_clients([csv(tmp_path, "a", text.replace(f'"{cell}",0', "3,unknown"))])


def test_numbers_are_places_of_named_classes() -> None:
    x = np.ones((3, 1))
    own = data.from_clients([(x, np.array([0, 1, 1]))], classes=["malignant", "benign"])
    assert own.y_train.tolist() == [0, 1, 1]
    with pytest.raises(UserError, match="row 2: label 2; allowed: 0 to 1"):
        data.from_clients([(x, np.array([0, 1, 2]))], classes=["malignant", "benign"])


def test_a_prediction_goes_by_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(0)
    frames = [pandas.DataFrame(draw.normal(size=(40, 3)), columns=[*NAMES]) for _ in range(2)]
    clients = [frame.assign(y=(frame["age"] > 0).astype(int)) for frame in frames]
    result = tl.run(tl.Task(model=net, clients=clients), rounds=20, algorithm={"name": "dsgd", "lr": 1.0},
                    out=tmp_path / "run")  # fmt: skip
    right = result.predict(frames[0])
    columns = {name: frames[0][name] for name in NAMES[::-1]}
    for other in (frames[0][["oxygen", "age", "pulse"]], clients[0], columns):
        assert (result.predict(other) == right).all()
    assert (result.predict(frames[0].to_numpy()) == right).all()
    turned = clients[0][["y", "oxygen", "age", "pulse"]]
    assert result.evaluate(turned) == result.evaluate(clients[0])
    with pytest.raises(UserError, match="the examples: no column 'age', which the training data has"):
        result.predict(frames[0].rename(columns={"age": "Age"}))


def test_a_prediction_takes_what_is_declared(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3)).clip(-2, 2).astype(np.float32)
    task = tl.Task(model=net, clients=[(x, np.arange(20) % 2)], expects=expects())
    result = tl.run(task, rounds=1, algorithm={"name": "dsgd", "batch_size": 5}, out=tmp_path / "run")
    assert len(result.predict(x)) == 20
    with pytest.raises(
        UserError, match=r"row 1: the numbers outside -9 … 9 \(expects\); predict takes what data"
    ):
        result.predict([[0.0, 1.0, 2.0], [4254.0, 0.0, 0.0]])
    with pytest.raises(UserError, match=r"allowed: shape \(3,\)"):
        result.predict([[0.0, 1.0]])


def federated(task: tl.Task, tell: list[str] | None = None) -> data.Dataset:
    config = parse({"data": {"name": "own"}}, own=Own(1))
    told = None if tell is None else tell.append
    return one_party(config, Key(1), task, 0, 1, told).held.dataset


def test_a_federation_goes_by_the_names_that_all_signed(tmp_path: Path) -> None:
    """Each party sees its own file alone: the order is `expects`'."""
    for text in (A, TURNED):
        path = csv(tmp_path, "a", text)
        task = tl.Task(model=net, clients=lambda client, path=path: path, label="y", expects=expects())
        for told in (None, []):
            assert federated(task, told).x_train.tolist() == ROWS
            assert not told
    path = csv(tmp_path, "a", A.replace("pulse", "puls"))
    task = tl.Task(model=net, clients=lambda client: path, label="y", expects=expects())
    with pytest.raises(UserError, match="no column 'pulse', which `expects` has: did you mean 'puls'"):
        federated(task)
    said: list[str] = []
    assert not federated(task, said).x_train.any()  # a node refuses nothing for what a client's data are
    assert "no column 'pulse'" in said[0]


def test_a_federation_of_tables_needs_their_names(tmp_path: Path) -> None:
    path = csv(tmp_path, "a", A)
    for declared in (None, expects(())):
        task = tl.Task(model=net, clients=lambda client: path, label="y", expects=declared)
        with pytest.raises(UserError, match=r"names=\('age', 'pulse', 'oxygen'\)"):
            federated(task)


def test_names_are_declared_one_for_each_number() -> None:
    for names in (("age",), ("age", "age", "pulse")):
        with pytest.raises(UserError, match="a name for each number"):
            expects(names)
    assert tl.Declaration.read(expects().plain()) == expects()
    assert "names=('age', 'pulse', 'oxygen')" in expects().code()
    assert expects().plain() != expects(NAMES[::-1]).plain()


def test_one_bad_record_of_a_table_costs_its_own_place_only(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = csv(tmp_path, "a", "age,pulse,oxygen,y\n1,2,3,0\n4,unknown,6,1\n7,8,9,0\n")
    frame = pandas.read_csv(path)
    for given in (path, frame, (frame.drop(columns="y"), frame["y"])):
        task = tl.Task(model=net, clients=lambda client, given=given: given, label="y", expects=expects())
        found = task.fitted(0, lambda said: None, 3)
        assert found.left_out is not None
        assert found.left_out.tolist() == [False, True, False]
        assert found.x_train[2].tolist() == [7.0, 8.0, 9.0]


def test_targets_are_what_is_declared_and_not_what_one_client_happens_to_hold() -> None:
    """Whole numbers alone are no classes where values are declared."""
    declared = tl.Declaration(tl.Values("numbers", (1,)), tl.Values("numbers"))
    task = tl.Task(model=nn.Linear(1, 1), clients=[(np.ones((2, 1)), np.array([3, 4]))], expects=declared)
    assert task.dataset.left_out is None
    assert torch.equal(task.dataset.y_train, torch.tensor([3.0, 4.0]))


def test_the_first_client_does_not_decide_what_the_targets_of_all_are() -> None:
    """Gaps that were dropped make a column of classes one of numbers with a point."""
    x = np.ones((2, 1))
    clients = [(x, np.array([0.0, 1.0])), (x, np.array([0, 1]))]
    with pytest.raises(UserError, match=r"client 1 has whole numbers as targets.*say target = 'classes'"):
        data.from_clients(clients)
    assert data.from_clients(clients, target="classes").classes == 2
