"""Tables as clients' data: CSV without pandas, data frames, Parquet, folders; where an error is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma import data
from trilemma.base.errors import DataUnavailable, UserError

CSV = "site,age,pulse,ill\nb,61,80.5,1\na,47,?,0\nb,38,77,0\na,52,64,1\n"
FOLDER = os.environ.get("TRILEMMA_DATA")
real_data = pytest.mark.skipif(not FOLDER, reason="TRILEMMA_DATA names no folder with the hospitals' records")
HEART = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
HEART += ["slope", "ca", "thal", "num"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(CSV)
    return path


def test_a_csv_with_a_client_column(table: Path) -> None:
    own = data.from_table(table, client="site", label="ill", features=["age"])
    assert own.natural is not None
    assert [own.x_train[rows, 0].tolist() for rows in own.natural.train] == [[47.0, 52.0], [61.0, 38.0]]
    assert own.y_train.tolist() == [0, 1, 1, 0]
    assert own.classes == 2


def test_missing_values_are_found_or_dropped(table: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"client 'a', row 1 \(table.csv, line 3\), column 'pulse': nan is not a finite number",
    ):
        data.from_table(table, client="site", label="ill")
    own = data.from_table(table, client="site", label="ill", missing="drop")
    assert own.x_train.tolist() == [[52.0, 64.0], [61.0, 80.5], [38.0, 77.0]]


def test_several_targets_prepared_columns_and_classes_by_name(table: Path) -> None:
    both = data.from_table(table, client="site", label=["age", "ill"], missing="drop")
    assert both.y_train.tolist() == [[52.0, 1.0], [61.0, 1.0], [38.0, 0.0]]
    assert (both.classes, both.x_train.shape) == (None, (3, 1))

    def old(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"site": columns["site"], "age": columns["age"] / 100, "old": columns["age"] > 50}

    assert data.from_table(table, client="site", label="old", prepare=old).y_train.tolist() == [0, 1, 1, 0]
    named = data.from_table(table, client="ill", label="site", features=["age"], classes=["a", "b"])
    assert named.y_train.tolist() == [0, 1, 1, 0]


def test_a_text_column_is_refused_or_tokenised(table: Path) -> None:
    with pytest.raises(UserError, match=r"client 0, row 1 \(.*\), column 'site': 'a' is text, a category"):
        data.from_table(table, client="ill", label="age")
    rows = {"bank": [0, 1, 0], "text": ["my card", "lost", "no"], "intent": [0, 1, 1]}

    def letters(columns: dict[str, list[str]]) -> dict[str, object]:
        return {**columns, "text": [[ord(letter) for letter in text] for text in columns["text"]]}

    own = data.from_table(rows, client="bank", label="intent", prepare=letters)
    assert own.x_train["text"].shape == (3, 7)
    assert own.x_train["attention_mask"].sum(1).tolist() == [7, 2, 4]


def test_test_tables_for_everyone_or_for_each(table: Path, tmp_path: Path) -> None:
    common, own = tmp_path / "common.csv", tmp_path / "own.csv"
    common.write_text("age,ill\n30,0\n")
    own.write_text("site,age,ill\nb,30,0\nb,31,0\n")
    options = {"client": "site", "label": "ill", "features": ["age"]}
    assert data.from_table(table, test=common, **options).natural.test == []
    each = data.from_table(table, test=own, **options)
    assert [rows.tolist() for rows in each.natural.test] == [[], [0, 1]]
    own.write_text("site,age,ill\nc,30,0\n")
    with pytest.raises(UserError, match="client 'c' has test examples only"):
        data.from_table(table, test=own, **options)


def test_bad_tables_are_refused(table: Path, tmp_path: Path) -> None:
    for change, message in (
        ({"client": "sit"}, "no column 'sit' that says whose row it is: did you mean 'site'"),
        ({"label": "il"}, "no column 'il': did you mean 'ill'"),
        ({"features": ["puls"]}, "no column 'puls': did you mean 'pulse'"),
        ({"missing": "keep"}, "allowed: refuse, drop"),
        ({"client": "pulse", "features": ["age"]}, "row 1, column 'pulse': it is not said whose row it is"),
    ):
        with pytest.raises(UserError, match=message):
            data.from_table(table, **{"client": "site", "label": "ill", **change})
    for text, message in (
        ("a,b\n1,2\n3\n", r"row 1 \(line 3\): 1 fields, the table has 2 columns"),
        ("a,a\n1,2\n", "two columns"),
    ):
        table.write_text(text)
        with pytest.raises(UserError, match=message):
            data.read_table(table)
    with pytest.raises(DataUnavailable, match="there is no file"):
        data.read_table(tmp_path / "absent.csv")
    with pytest.raises(UserError, match="unknown kind of table"):
        data.read_table(Path(__file__))


def test_a_folder_for_each_client(tmp_path: Path) -> None:
    for client in (10, 2):
        folder = tmp_path / f"client-{client}"
        folder.mkdir()
        np.savez(folder / "train.npz", x=np.full((client, 1, 2, 2), client / 8), y=np.arange(client) % 2)
    own = data.from_folder(tmp_path)
    assert own.name == tmp_path.name
    assert [len(rows) for rows in own.natural.train] == [2, 10]
    assert own.x_train[0].tolist() == [[[0.25, 0.25], [0.25, 0.25]]]
    (tmp_path / "client-2" / "test.csv").write_text("x,y\n1,1\n")
    with pytest.raises(UserError, match="1 of 2 clients have test examples"):
        data.from_folder(tmp_path)
    (tmp_path / "client-2" / "more.csv").write_text("x,y\n1,1\n")
    with pytest.raises(DataUnavailable, match="holds 2 tables"):
        data.from_folder(tmp_path)
    with pytest.raises(DataUnavailable, match="no folder"):
        data.from_folder(tmp_path / "absent")


def test_a_file_for_each_client_and_one_test_for_all(tmp_path: Path) -> None:
    for name, rows in (("north", "1,2,0\n3,4,1\n"), ("south", "5,6,1\n"), ("test", "7,8,0\n")):
        (tmp_path / f"{name}.csv").write_text(rows)
    own = data.from_folder(tmp_path, label="c", names=["a", "b", "c"])
    assert own.x_train.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert own.x_test.tolist() == [[7, 8]]
    assert own.natural.test == []
    (tmp_path / "south.csv").write_text("5,,1\n")
    with pytest.raises(UserError, match=r"client 'south', row 0 \(south.csv, line 1\), column 'b': nan"):
        data.from_folder(tmp_path, label="c", names=["a", "b", "c"])


def test_parquet_without_a_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.parquet"
    path.write_bytes(b"")
    for package in ("pandas", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install 'trilemma\[tables\]'"):
        data.read_table(path)


def test_data_frames(table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table, na_values="?")
    from_frame, from_file = (
        data.from_table(form, client="site", label="ill", missing="drop") for form in (frame, table)
    )
    assert torch.equal(from_frame.x_train, from_file.x_train)
    assert torch.equal(from_frame.y_train, from_file.y_train)


def test_parquet_with_lists(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"bank": ["a", "b", "a"], "ids": [[1, 2], [3], [4, 5, 6]], "intent": [0, 1, 0]}
    parquet.write_table(arrow.table(rows), tmp_path / "rows.parquet")
    own = data.from_table(tmp_path / "rows.parquet", client="bank", label="intent")
    assert own.x_train["ids"].tolist() == [[1, 2, 0], [4, 5, 6], [3, 0, 0]]


@real_data
def test_four_hospitals() -> None:
    """FLamby's protocol leaves 303, 261, 46 and 130 patients."""

    def disease(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**columns, "num": columns["num"] > 0}

    own = data.from_folder(
        Path(str(FOLDER)) / "heart",
        label="num",
        names=HEART,
        features=HEART[:10],
        prepare=disease,
        missing="drop",
        classes=2,
    )
    assert [len(rows) for rows in own.natural.train] == [303, 261, 46, 130]
    assert own.x_train.shape == (740, 10)
