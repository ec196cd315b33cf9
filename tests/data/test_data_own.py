"""Own data: every form gives the same data set, batches of several columns, messages that find the cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from trilemma import data
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import IGNORED, FederatedData, from_clients

X = np.arange(12, dtype=np.float64).reshape(4, 3)
Y = np.array([0, 1, 2, 1])
TEXTS = [[5, 6, 7], [8], [9, 10]]


class Pairs(TorchDataset[Any]):
    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(X[index]), int(Y[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter({"x": row, "label": label} for row, label in zip(X, Y, strict=True))


class FaceHugger:
    """What a Hugging Face data set looks like from outside."""

    column_names = ("x", "label")

    def __getitem__(self, name: str) -> Any:
        return {"x": X.tolist(), "label": Y.tolist()}[name]


@pytest.mark.parametrize(
    "form",
    [
        (X, Y),
        (torch.tensor(X), torch.tensor(Y)),
        (X.astype(np.float16), Y.astype(np.uint8)),
        (X.tolist(), Y.tolist()),
        (X, Y[:, None]),
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        Pairs(),
    ],
    ids=["numpy", "tensors", "half", "lists", "column", "tensor-dataset", "dataset"],
)
def test_every_form_gives_the_same_data_set(form: Any) -> None:
    own = from_clients([form, (X[:2], Y[:2])], test=form)
    assert torch.equal(own.x_train, torch.tensor(np.concatenate([X, X[:2]]), dtype=torch.float32))
    assert torch.equal(own.y_train, torch.tensor([0, 1, 2, 1, 0, 1]))
    assert (own.x_train.dtype, own.y_train.dtype, own.classes) == (torch.float32, torch.int64, 3)
    assert torch.equal(own.x_test, own.x_train[:4])
    assert own.natural is not None
    assert [rows.tolist() for rows in own.natural.train] == [[0, 1, 2, 3], [4, 5]]
    assert own.natural.test == []


@pytest.mark.parametrize("form", [{"x": X, "label": Y}, Stream(), FaceHugger()], ids=["dict", "stream", "hf"])
def test_columns_keep_their_names(form: Any) -> None:
    own = from_clients({"a": form})
    assert [*own.x_train] == ["x"]
    assert torch.equal(own.x_train["x"], torch.tensor(X, dtype=torch.float32))
    assert own.x_test["x"].shape == (0, 3)
    assert len(own.y_test) == 0


def test_rows_of_any_length_are_padded_and_masked() -> None:
    own = from_clients(
        [
            {"input_ids": TEXTS, "segment": [[0, 0, 1], [0], [1, 1]], "age": [1, 2, 3], "labels": [0, 1, 1]},
            {"input_ids": [[1, 2, 3, 4]], "segment": [[0, 0, 0, 1]], "age": [4], "labels": [2]},
        ]
    )
    assert [*own.x_train] == ["input_ids", "segment", "age", "attention_mask"]
    assert own.x_train["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [9, 10, 0, 0], [1, 2, 3, 4]]
    assert own.x_train["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert all(own.x_train[name].dtype == torch.int64 for name in own.x_train)
    cut = from_clients([{"input_ids": TEXTS, "labels": [0, 1, 1]}], length=2)
    assert cut.x_train["input_ids"].tolist() == [[5, 6], [8, 0], [9, 10]]


def test_a_mask_that_is_there_is_kept_and_a_bare_x_gets_a_name() -> None:
    masks = [[1, 1, 1], [1], [0, 1]]
    own = from_clients([{"ids": TEXTS, "attention_mask": masks, "y": [0, 1, 1]}])
    assert [*own.x_train] == ["ids", "attention_mask"]
    assert own.x_train["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [0, 1, 0]]
    assert [*from_clients([(TEXTS, [0, 1, 1])]).x_train] == ["x", "attention_mask"]


@pytest.mark.parametrize(
    ("y", "options", "expected", "classes"),
    [
        (np.array([True, False, True]), {}, [1, 0, 1], 2),
        (np.array([0.0, 3.0, 1.0]), {"target": "classes", "classes": 5}, [0, 3, 1], 5),
        (["no", "yes", "no"], {"classes": ["no", "yes"]}, [0, 1, 0], 2),
        (np.array([1, 2, 4]), {"classes": [1, 2, 4]}, [0, 1, 2], 3),
        (np.eye(3, dtype=bool), {}, np.eye(3).tolist(), None),
        (np.eye(3, dtype=int), {}, np.eye(3).tolist(), None),
        (np.array([0.5, 1.5, -2.0]), {}, [0.5, 1.5, -2.0], None),
        (np.array([3, 1, 2]), {"target": "values"}, [3.0, 1.0, 2.0], None),
        ((np.array([3.5, 1.0, 2.0]), np.array([0, 1, 1])), {}, [[3.5, 0.0], [1.0, 1.0], [2.0, 1.0]], None),
        ([[1, 0, 2], [1], [0, 0]], {}, [[1, 0, 2], [1, IGNORED, IGNORED], [0, 0, IGNORED]], 3),
        (np.array([[1, 0], [1, IGNORED], [0, 0]]), {"target": "tokens"}, [[1, 0], [1, IGNORED], [0, 0]], 2),
    ],
)
def test_targets_of_every_kind(y: Any, options: Any, expected: Any, classes: int | None) -> None:
    own = from_clients([(X[:3], y)], **options)
    assert own.y_train.tolist() == expected
    assert own.y_train.dtype == (torch.int64 if classes else torch.float32)
    assert own.classes == classes


@pytest.mark.parametrize(
    ("x", "multilabel"),
    [
        (np.zeros((2, 5)), True),
        (np.zeros((2, 3, 8, 8)), True),
        (np.zeros((2, 3), dtype=int), False),
        (np.zeros((2, 3, 4)), False),
        ([[1.0, 2.0, 3.0], [1.0]], False),
    ],
    ids=["vectors", "images", "token numbers", "vectors in a row", "of any length"],
)
def test_several_whole_numbers_are_yes_or_no_unless_examples_are_sequences(x: Any, multilabel: bool) -> None:
    """By type and shape, never by value: every party of a federation must read its own alike."""
    own = from_clients([(x, np.array([[0, 1, 1], [1, 0, 0]]))])
    assert own.multilabel == multilabel
    assert own.y_train.dtype == (torch.float32 if multilabel else torch.int64)
    if multilabel:
        with pytest.raises(UserError, match=r"label 2; allowed: 0 and 1 .*target = 'tokens'"):
            from_clients([(x, np.array([[0, 1, 1], [1, 2, 0]]))])


NAN = X.copy()
NAN[2, 1] = np.nan
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nan": ((NAN, Y), {}, r"client 'b', row 2, column 1: nan is not a finite number"),
    "infinite": ((X * [1, 1, np.inf], Y), {}, r"client 'b', row 0, column 2: inf"),
    "picture": ((NAN.reshape(4, 1, 3), Y), {}, r"client 'b', row 2, column \(0, 1\): nan"),
    "label range": ((X, Y), {"classes": 2}, r"client 'b', row 2: label 2; allowed: 0 to 1"),
    "label sign": ((X, -Y), {}, r"client 'b', row 1: label -1; allowed: 0 to"),
    "label kind": ((X, Y / 2), {}, r"client 'b', row 1: label 0.5; class labels are whole numbers"),
    "label text": ((X, ["no"] * 4), {}, r"client 'b', row 0: label 'no' is text; name the classes"),
    "label name": (
        (X, [1, 0, 7, 0]),
        {"classes": [0, 1, 2]},
        r"client 'b', row 2: label 7; allowed: 0, 1, 2",
    ),
    "label missing": (
        (X, [0, None, 1, 1]),
        {},
        r"client 'b', row 1, column 'the label': None is not a number",
    ),
    "label nan": ((X, [0, np.nan, 1, 1]), {}, r"client 'b', row 1, column 'the label': nan"),
    "width": ((X[:, :2], Y), {}, r"client 'b': examples of shape \(2,\), client 'a' has \(3,\)"),
    "dtype": ((X.astype(int), Y), {}, r"client 'b': int64, client 'a' has float32"),
    "text": ((X.astype(str), Y), {}, r"client 'b', row 0: '0.0' is not a number"),
    "complex": ((X + 1j, Y), {}, r"client 'b': cannot read numbers of type complex128"),
    "empty": ((X[:0], Y[:0]), {}, r"client 'b' holds no examples"),
    "rows": ((X, Y[:3]), {}, r"client 'b': 4 rows, but 3 labels"),
    "columns": (({"x": X}, Y), {}, r"client 'b' has 'x', client 'a' has a single tensor"),
    "form": (X, {}, r"client 'b': cannot read a ndarray; allowed: \(x, y\)"),
    "no label": ({"x": X}, {}, r"client 'b': 0 columns that may be the label"),
    "target": ((X, Y), {"target": "clases"}, r"target = 'clases'; allowed: classes"),
    "two dimensions": (
        (X, np.eye(4)),
        {"target": "classes"},
        r"client 'b': targets of shape \(4,\) where classes",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_with_its_place(wrong: str) -> None:
    given, options, message = WRONG[wrong]
    good = X.reshape(4, 1, 3) if wrong == "picture" else X
    with pytest.raises(UserError, match=message):
        from_clients({"a": (good, np.minimum(Y, 1)), "b": given}, **options)


def test_other_wrong_targets_are_refused() -> None:
    for y, options, message in (
        (
            np.array([[0, 2], [1, 1]]),
            {"target": "multi-label"},
            "client 0, row 0, column 1: label 2; allowed: 0",
        ),
        ([[1, 5], [1]], {"classes": 3}, "client 0, row 0, token 1: label 5; allowed: 0 to 2"),
        (np.array([0.5, np.inf]), {}, "client 0, row 1, column 'the target': inf"),
        ([[0.5, 1.0], [1.0]], {}, "client 0, row 1: 1 targets, row 0 has 2"),
    ):
        with pytest.raises(UserError, match=message):
            from_clients([(X[:2], y)], **options)


def test_test_data_for_each_client_or_for_everyone() -> None:
    clients = {"a": (X, Y), "b": (X[:2], Y[:2])}
    own = from_clients(clients, {"a": (X[:1], Y[:1]), "b": (X[1:], Y[1:])})
    assert own.natural is not None
    assert [rows.tolist() for rows in own.natural.test] == [[0], [1, 2, 3]]
    with pytest.raises(UserError, match="client 'b' has no test data"):
        from_clients(clients, {"a": (X, Y)})
    with pytest.raises(UserError, match="the test data: examples of shape"):
        from_clients(clients, (X[:, :1], Y))
    with pytest.raises(UserError, match="no clients"):
        from_clients([])


def texts() -> FederatedData:
    """Two clients whose columns and token labels all tell which example they are of."""

    def client(first: int, count: int) -> dict[str, Any]:
        rows = [[number] * (1 + number % 3) for number in range(first, first + count)]
        return {"ids": rows, "size": [float(row[0]) for row in rows], "labels": rows}

    own = from_clients([client(1, 7), client(8, 5)])
    assert own.natural is not None
    return FederatedData(own, own.natural)


def test_every_draw_gathers_all_columns_alike() -> None:
    fed = texts()
    draws = [
        fed.sample((0, 1), 4, Key(1)),
        fed.poisson((0, 1), 0.5, 2, Key(1)),
        fed.epoch_batches((0, 1), 3, 4, Key(1))[2],
        fed.everything((0, 1)),
    ]
    for batch in draws:
        which = batch.x["size"].long()
        assert batch.x["ids"].shape == (*which.shape, 3)
        assert torch.equal(batch.x["ids"][..., 0], which)
        assert torch.equal(batch.x["attention_mask"].sum(-1), 1 + which % 3)
        assert torch.equal(batch.y[..., 0], which)
        assert torch.equal(batch.y == IGNORED, batch.x["attention_mask"] == 0)
    alone = fed.sample((1,), 4, Key(1))
    assert torch.equal(alone.x["ids"][0], draws[0].x["ids"][1])


def test_relabelling_leaves_ignored_tokens_alone() -> None:
    fed = texts().with_labels((1,), lambda labels, client: 12 - labels)
    honest, liar = fed.everything((0,)), fed.everything((1,))
    assert torch.equal(honest.y[..., 0], honest.x["ids"][..., 0])
    assert torch.equal(liar.y[..., 0], 12 - liar.x["ids"][..., 0])
    assert torch.equal(liar.y == IGNORED, liar.x["attention_mask"] == 0)


def test_a_regression_has_no_classes_to_divide_or_to_flip_by() -> None:
    own = from_clients([(X, Y / 2)])
    assert data.divide("homogeneous", own, 2, key=Key(1)).clients == 2
    for name, options in (("extreme", {}), ("dirichlet", {"alpha": 1.0}), ("shards", {})):
        with pytest.raises(UserError, match=f"partition '{name}' needs class labels"):
            data.divide(name, own, 2, key=Key(1), **options)
    with pytest.raises(UserError, match="needs one class per example"):
        data.divide("extreme", from_clients([(X[:2], [[1, 0], [1]])]), 2, key=Key(1))
    fed = FederatedData(own, data.divide("homogeneous", own, 2, key=Key(1)))
    assert torch.equal(
        fed.with_labels((1,), lambda y, client: -y).everything((1,)).y, -fed.everything((1,)).y
    )
