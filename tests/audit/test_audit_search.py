"""The directed search finds every break that was, when the old code is put back, and nothing today."""

from __future__ import annotations

import mutants
import others_networks  # noqa: F401 (it adds to OTHERS)
import pytest
import test_models_coordinates
import torch
from module_zoo import ZOO
from others import OTHERS, REFUSED
from test_models_coordinates import CASES
from test_models_declared import Attention, Branching, Dropping, Experts, Packed, Positions, Tied
from torch import nn

from federation_harness import make, small_config
from trilemma import models
from trilemma.audit import Subject
from trilemma.audit.examine import neighbours
from trilemma.audit.matrix import FEW, setting
from trilemma.audit.nodes import answers, copied
from trilemma.audit.own_gradients import faithful
from trilemma.audit.search import of_model, of_subject, search
from trilemma.base.keys import Key
from trilemma.data import Dataset
from trilemma.data.own.declared import Declaration, Values, declaration_of
from trilemma.data.types import each
from trilemma.experiment import parse
from trilemma.federation.party.task import load_task
from trilemma.learning.settings import algorithms, private_algorithms
from trilemma.task import Task
from trilemma.testing.test_models import build

pytestmark = pytest.mark.slow

TOKENS, CLASSES = Values("whole", (2,), low=0, high=9), Values("whole", high=1)
PAIRS = Declaration(Values("numbers", (2, 16)), CLASSES)


def made(module, loss=None, name: str = "searched") -> models.Model:
    torch.manual_seed(1)
    return models.from_module(module, loss or nn.CrossEntropyLoss(), name=name)


def found(model, declaration, unit: str = "example", **options) -> list[str]:
    """Return what exceeds its declaration."""
    outcomes = search(of_model(model, unit, **options), declaration, Key(1))
    return [outcome.measures for outcome in outcomes if outcome.exceeds]


class Guarded(nn.Module):
    """Raises at what is not finite, as `nn.BCELoss` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return torch.sigmoid(self.layer(x))


class Interleaved(nn.Module):
    """A head over all positions' first features, then the second ones: no halves of it are opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16, bias=False), nn.Linear(48, 2)

    def forward(self, x):
        return self.head(self.layer(x).mT.flatten(1))


BREAKS = {
    # What is broken: a mutant, a model, what a record may be, how it is released, and what shows it.
    "tokens that cancel": (
        mutants.ghost_norms,
        lambda: made(Positions(nn.Embedding(10, 4), 4)),
        Declaration(TOKENS, CLASSES),
        {},
        "move",
    ),
    "positions that cancel": (
        mutants.ghost_norms,
        lambda: made(Positions(nn.Linear(16, 16, bias=False), 16)),
        PAIRS,
        {},
        "move",
    ),
    "positions that only ascent makes cancel": (
        mutants.ghost_norms,
        lambda: made(Interleaved()),
        Declaration(Values("numbers", (3, 16)), CLASSES),
        {},
        "move",
    ),
    "uses that cancel": (
        mutants.clamped_pairs,
        lambda: made(Tied(), nn.BCEWithLogitsLoss()),
        Declaration(Values("whole", (1,), low=0, high=3), Values("yes-no")),
        {},
        "move",
    ),
    "underflow": (
        mutants.squares_that_underflow,
        lambda: models.build("mnist-mlp", (784,), 10),
        Declaration(Values("numbers", (784,)), Values("whole", high=9)),
        {"clip": 1e-5},
        "move",
    ),
    "rounded totals": (
        mutants.single_totals,
        lambda: models.build("logistic", (4,), 2),
        Declaration(Values("numbers", (4,)), CLASSES),
        {"light": 2.0**-20},
        "move",
    ),
    "raised": (
        mutants.refusals_after_paying,
        lambda: made(Guarded(), nn.BCELoss()),
        Declaration(Values("numbers", (4,)), Values("numbers", (1,), low=0, high=1)),
        {},
        "answers",
    ),
    "one for all": (
        mutants.everything_is_zero,
        lambda: made(Guarded(), nn.BCELoss()),
        Declaration(Values("numbers", (4,)), Values("numbers", (1,), low=0, high=1)),
        {},
        "move",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_old_formula_is_found_and_todays_is_not(name, monkeypatch):
    mutate, make, declaration, options, measure = BREAKS[name]
    assert found(make(), declaration, **options) == []
    mutate(monkeypatch)
    assert found(make(), declaration, **options) == [measure]


class Ridge:
    """A loss that closes over its net's own parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, outputs, y):
        penalty = sum(part.square().sum() for part in self.module.parameters())
        return nn.functional.cross_entropy(outputs, y) + penalty


def penalised() -> models.Model:
    module = nn.Linear(4, 3)
    return made(module, Ridge(module))


SENTENCES, VECTORS = Values("whole", (6,), low=0, high=9), Values("numbers", (1, 4))
LABELS = Values("whole", high=2)

WRONG = {
    "structure by sizes": (mutants.structure_by_sizes, lambda: made(Dropping()), SENTENCES),
    "a branch on the batch": (mutants.structure_by_sizes, lambda: made(Branching()), VECTORS),
    "compared with nothing": (mutants.uncompared, lambda: made(Dropping()), SENTENCES),
    "hidden parameters": (mutants.hidden_parameters, penalised, Values("numbers", (4,))),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_found(name, monkeypatch):
    mutate, make, x = WRONG[name]
    assert not faithful(make(), Declaration(x, LABELS), Key(1)).exceeds
    mutate(monkeypatch)
    assert faithful(make(), Declaration(x, LABELS), Key(1)).exceeds


class Told(nn.Module):
    """Decides by its batch, where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = x[:, 0]
        return self.first(x) if sum(x.flatten().tolist()) > 0 else self.second(x)


@pytest.mark.parametrize(
    ("kind", "x"),
    [
        (Dropping, SENTENCES),
        (Branching, VECTORS),
        (Experts, VECTORS),
        (Packed, SENTENCES),
        (Attention, Values("numbers", (3, 8, 8))),
        (Told, VECTORS),
    ],
)
def test_structure_that_depends_on_data_is_right(kind, x):
    nothing_is_found(made(kind()), Declaration(x, LABELS))


# --- a client's answers, and its records ------------------------------------------------------------------


def test_a_refusal_at_hello_is_found(tmp_path, monkeypatch):
    private = ("privacy.threat=ldp", "privacy.clip=1.0", "privacy.epsilon=12")
    make(tmp_path / "federation", 3, small_config(3, *private))

    def told():
        with copied(tmp_path / "federation") as parties:
            return answers(parties, load_task(parties[1]), Key(1)).found

    assert told() == 0
    mutants.refusal_at_hello(monkeypatch)
    assert told() > 0


@pytest.mark.parametrize(("split", "right"), [(mutants.ranked_split, False), (mutants.split_by_hash, True)])
def test_a_ranked_split_is_found(split, right):
    rows = torch.randn(60, 3, generator=Key(1).torch()).tolist()
    task = Task(
        model=lambda: nn.Linear(2, 2),
        clients=lambda client, records: split(records),
        records=lambda client: rows,
        test=(torch.randn(4, 2), torch.tensor([0, 1, 0, 1])),
        classes=2,
        count=2,
        examples=60,
    )
    assert neighbours(task).exceeds != right


# --- nothing today ----------------------------------------------------------------------------------------

EVERYTHING = {**ZOO, **OTHERS}
FAST = (
    *(
        "mlp",
        "bert",
        "frozen",
        "regression",
        "multi-label",
        "embedding-bag-mean",
        "linear-sequence-bias-True",
    ),
    *("conv2d-1", "layer-norm-3-1", "group-norm-2", "attention-masked", "lstm-0", "gru-packed"),
)


def nothing_is_found(model, declaration, targets=None) -> None:
    outcomes = [faithful(model, declaration, Key(1))]
    for target in targets or [of_model(model, unit) for unit in ("example", "user")]:
        outcomes += search(target, declaration, Key(1))
    assert [outcome for outcome in outcomes if outcome.exceeds] == []


def whole(names, fast):
    """Return names as cases; what is not fast is for the night."""
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.nightly]) for name in names]


@pytest.mark.parametrize("name", whole([name for name in EVERYTHING if name not in REFUSED], FAST))
def test_nothing_is_found_in_modules_of_others(name):
    one, module = EVERYTHING[name], ready(name)
    x, y = each(one.x, lambda part: part.flatten(0, 1)), one.y.flatten(0, 1)
    classes = int(y.max()) + 1 if y.dtype == torch.int64 else None
    declaration = declaration_of(Dataset(name, x, y, x, y, classes), seen=True)
    nothing_is_found(made(module, one.loss, name), declaration)


def ready(name):
    torch.manual_seed(3)
    module = EVERYTHING[name].module()
    if any(isinstance(part, nn.LazyLinear) for part in module.modules()):
        module(EVERYTHING[name].x[0])
    return module


@pytest.mark.parametrize("name", whole(models.models, ["logistic", "mlp"]))
def test_nothing_is_found_in_the_packages_models(name):
    model, shape, classes = build(name)
    nothing_is_found(model, Declaration(Values("numbers", shape), Values("whole", high=classes - 1)))


@pytest.mark.parametrize(
    ("way", "name"),
    [pytest.param(*case, marks=[] if case[1] == "mlp" else [pytest.mark.nightly]) for case in CASES],
)
def test_nothing_is_found_in_few_coordinates(way, name):
    model, x = test_models_coordinates.made(name)
    small, _ = test_models_coordinates.made_smaller(model, way)
    y = test_models_coordinates.labels().flatten()
    nothing_is_found(small, declaration_of(Dataset(name, x.flatten(0, 1), y, x, y, 3), seen=True))


@pytest.mark.parametrize("name", private_algorithms())
def test_nothing_is_found_in_algorithms(name):
    model = models.build("mlp", (6,), 3, hidden=(5,))
    declaration = Declaration(Values("numbers", (6,)), Values("whole", high=2))
    fields = algorithms[name].model_fields
    batch = ["algorithm.batch_size=4"] if "batch_size" in fields else []
    for unit in ["user", "example"] if "unit" in fields else [""]:
        more = [*batch, *([f"algorithm.unit={unit}"] if unit else []), *FEW.get(name, ())]
        config = parse({}, [*setting(name, "ldp", 2, 4.0), *more])
        subject = Subject.of(config, 50, "grid")
        assert subject is not None
        nothing_is_found(model, declaration, [of_subject(subject, model, 4, Key(1))])
