"""After a client has paid it answers: no record decides whether, with which status, or in which shape.

Real nodes with ledgers, driven block by block. A client's folder holds the file `record`, or not: its first
example is then the one that goes wrong. Whatever leaves must look the same with and without it.
"""

from __future__ import annotations

import errno
import signal

import pytest
import torch
from malicious_server import Server, entries

from federation_harness import INSTANT
from trilemma import config as configurations
from trilemma.base.errors import UserError
from trilemma.federation.client import rounds
from trilemma.federation.client.journal import Journal
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.party import provisioning
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import OneClient, load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.reasons import Refused
from trilemma.learning.settings import algorithms, private_algorithms
from trilemma.learning.steps import total

ROWS, BATCH, CLIP = 12, 6, 0.5

TASK = """
from pathlib import Path

import numpy as np
import torch
from torch import nn
from trilemma import Declaration, Values

HERE = Path(__file__).parent
expects = Declaration(x=Values("numbers", (4,)), y=Values("numbers", (1,), low=0, high=1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        {check}
        return {forward}


def model():
    return Net()


def raises(error):
    raise error


def loss(outputs, targets):
    return {loss}


def data(client):
    rng = np.random.default_rng(client)
    x, y = rng.normal(size=({rows}, 4)), rng.integers(2, size=({rows}, 1)).astype(float)
    if client == 0 and (HERE / "record").exists():
        x[0], y[0] = {x}, 1
    return x, y
"""

MIXED = "3e38 * np.array([1, 1, -1, -1])"
LINE, SQUARES = "self.layer(x)", "nn.functional.mse_loss(outputs, targets)"
ERRORS = {
    "value error": "ValueError('patient 4711')",
    "exit": "SystemExit(3)",
    "interrupt": "KeyboardInterrupt()",
    "memory": "MemoryError()",
    "recursion": "RecursionError()",
    "no memory on a GPU": "torch.OutOfMemoryError('CUDA')",
}
WAYS = {
    # name: (forward, loss, what the module does before, the record's features)
    "nan": ("torch.sigmoid(self.layer(x))", "nn.BCELoss()(outputs, targets)", "pass", MIXED),
    "huge": (LINE, SQUARES, "pass", 1e30),
    "tiny": (LINE, SQUARES, "pass", 1e-38),
    "infinite": (LINE, SQUARES, "pass", MIXED),
    "no number": (LINE, SQUARES, "pass", "np.nan"),
    "no table": (LINE, SQUARES, "pass", "raises(SystemExit('no table'))"),
} | {name: (LINE, SQUARES, f"bool((x == 9).any()) and raises({error})", 9) for name, error in ERRORS.items()}

OPTIONS = {
    "fedavg": ["algorithm.local_steps=3"],
    "per-fedavg": ["algorithm.local_steps=2"],
    "lg-fedavg": ["algorithm.local_steps=2"],
    "lp-proj": ["algorithm.dim=3", "algorithm.local_rounds=2", "algorithm.inner_steps=2"],
    "pfedme": ["algorithm.local_rounds=2", "algorithm.inner_steps=2"],
    "rsa": ["algorithm.local_rounds=2", "algorithm.inner_steps=2"],
    "statistics": ["algorithm.columns.x0={low=-1.0, high=1.0}"],
}
"""Short rounds of the methods that take many steps; a column to count."""


def units(name: str) -> list[str]:
    """Return the units that an algorithm protects."""
    return ["user", "example"] if "unit" in algorithms[name].model_fields else [""]


def settings(name: str, unit: str, *more: str) -> str:
    """Return a configuration in which the algorithm's messages are noised, a little."""
    options = [f"algorithm.name={name}", f"algorithm.batch_size={BATCH}", *OPTIONS.get(name, [])]
    noise = ["privacy.threat=ldp", f"privacy.clip={CLIP}", "privacy.sigma_ind=1.0"]
    if unit:
        options.append(f"algorithm.unit={unit}")
    if not algorithms[name].rounds:
        options.append("run.rounds=8")
    wanted = [*options, *noise, "aggregation.rule=cwmed", "federation.tolerate=0", *more]
    return configurations.parse({}, wanted, configurations.Own(2)).toml()


def federation(folder, way: str, config: str) -> list[Party]:
    """Make a federation of two clients; the record is not there yet."""
    folder.mkdir(parents=True)
    forward, loss, check, x = WAYS[way]
    (folder / "task.py").write_text(TASK.format(rows=ROWS, forward=forward, loss=loss, check=check, x=x))
    facts = Federation("own", 2, examples=ROWS, timing=INSTANT)
    made = provisioning.init(folder / "federation", facts, config, task=folder / "task.py")
    write_budgets(made[1:], load_task(made[0]), 1e12)
    return made


class Observer(Server):
    """Remembers what each node says: how long its answer is, or the refusal, and its events."""

    def __init__(self, parties):
        super().__init__(parties)
        self.seen: list[object] = []
        for node in self.nodes.values():
            node.say = self._heard

    def _heard(self, event):
        timed = {"seconds"}
        self.seen.append(
            (event.code, {name: fact for name, fact in event.facts.items() if name not in timed})
        )

    def asked(self, client: int, epoch: int, round_: int, scale: float = 1.0):
        """Ask for a step; return the block that comes, or None."""
        node = self.nodes[client]
        broadcast = {
            name: scale * torch.ones(shape) if dtype == torch.float32 else torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in _shapes(node)
        }
        block = wire.dumps(kinds.Ask(run=self.run, epoch=epoch, round=round_, heard={}, unused=[]), broadcast)
        try:
            answer = node.answer(block)
        except Refused as refused:
            self.seen.append(str(refused))
            return None
        _, tensors = wire.loads(answer, kinds.Answer)
        self.seen.append((len(answer), [(name, part.shape, part.dtype) for name, part in tensors.items()]))
        return tensors


def _shapes(node):
    return [(name, (tuple(part.shape), part.dtype)) for name, part in node.loaded.start().broadcast.items()]


def outside(parties, rounds=3):
    """Return all that client 0's rounds show to the others."""
    server = Observer(parties)
    server.open(0, (0, 1))
    for round_ in range(rounds):
        server.asked(0, 0, round_, 2.0)
    return server.seen, len(entries(parties[1]))


EVERY = [(name, unit) for name in private_algorithms() for unit in units(name)]


@pytest.mark.parametrize(
    ("way", "name", "unit"),
    [
        *(("nan", name, unit) for name, unit in EVERY),
        *((way, "safe-dshb", unit) for way in [*WAYS][1:] for unit in ("user", "example")),
        *((way, "fedavg", "") for way in [*WAYS][1:]),
    ],
)
def test_no_record_decides_whether_a_client_answers(tmp_path, way, name, unit):
    """It did: with a record at which `nn.BCELoss` raises 5 of 5 refused, without it 5 of 5 answered."""
    config, asked = settings(name, unit), algorithms[name].rounds or 3
    without = outside(federation(tmp_path / "without", way, config), asked)
    made = federation(tmp_path / "with", way, config)
    (made[1].folder / "record").touch()
    assert outside(made, asked) == without
    assert len(without[0]) == 4 + asked * 2, "all were answered"
    assert without[1] == asked, "and paid for"


def test_what_fails_is_told_to_its_owner_and_nobody_else(tmp_path):
    made = federation(
        tmp_path / "two", "nan", settings("safe-dshb", "example", f"algorithm.batch_size={ROWS}")
    )
    (made[1].folder / "record").touch()
    outside(made)
    assert "Assertion" in made[1].log.read_text() or "between 0 and 1" in made[1].log.read_text()


def test_a_log_that_cannot_be_written_stops_no_answer(tmp_path, monkeypatch):
    def broken(*said):
        raise OSError("no space left")

    monkeypatch.setattr(rounds, "note_down", broken)
    made = federation(tmp_path / "two", "nan", settings("safe-dshb", "user", f"algorithm.batch_size={ROWS}"))
    (made[1].folder / "record").touch()
    seen, spent = outside(made)
    assert (len(seen), spent) == (4 + 3 * 2, 3)


def test_an_interrupt_waits_until_the_answer_is_on_disk(tmp_path, monkeypatch):
    """A signal is no failure of the data, and is not lost."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        made = federation(tmp_path / "two", "huge", settings("safe-dshb", "user"))
        server = Observer(made)
        server.open(0, (0, 1))
        step = total.step

        def interrupted(*arguments, **named):
            signal.raise_signal(signal.SIGINT)
            return step(*arguments, **named)

        monkeypatch.setattr(total, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.asked(0, 0, 0)
        monkeypatch.setattr(total, "step", step)
        assert server.asked(0, 0, 0) is not None, "as it was written down"
        assert len(entries(made[1])) == 1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["safe-dshb", "cafcor"])
def test_nor_where_noise_is_shared_and_epochs_change(tmp_path, name):
    """Each in an epoch of its own, one of them with secrets shared on a graph."""

    def rounds(folder, record):
        noise = ["privacy.threat=secldp", "privacy.sigma_cor=1.0"]
        made = federation(folder, "nan", settings(name, "user", *noise))
        if record:
            (made[1].folder / "record").touch()
        server = Observer(made)
        for epoch in range(3):
            server.open(epoch, (0, 1))
            server.asked(0, epoch, epoch, 2.0)
        return server.seen, len(entries(made[1]))

    with_record = rounds(tmp_path / "with", record=True)
    assert with_record == rounds(tmp_path / "without", record=False)
    assert with_record[1] == 3


def test_what_a_record_may_be_is_in_the_terms(tmp_path):
    """A party whose task expects other records, or whose folder says others, is of no use to the others."""
    made = federation(tmp_path / "two", "huge", settings("safe-dshb", "user"))
    facts, task = made[1].folder / "federation.toml", made[1].task
    terms = made[1].agreed.terms
    task.write_text(task.read_text().replace("high=1", "high=2"))
    with pytest.raises(UserError, match="expects records"):
        load_task(made[1])
    facts.write_text(facts.read_text().replace("high = 1", "high = 2"))
    load_task(made[1])
    assert Party.open(made[1].folder).agreed.terms != terms


def test_without_a_declaration_nothing_private_is_learned(tmp_path):
    made = federation(tmp_path / "two", "huge", settings("safe-dshb", "user"))
    for party in made:
        party.task.write_text(party.task.read_text().replace("expects =", "expected ="))
        facts = party.folder / "federation.toml"
        facts.write_text(facts.read_text().partition("[records")[0])
    with pytest.raises(UserError, match="expects = Declaration"):
        load_task(Party.open(made[1].folder))


def test_a_model_that_fails_at_allowed_records_is_refused_before_anything_is_paid_for(tmp_path):
    WAYS["always"] = (LINE, SQUARES, "pass", 1)
    made = federation(tmp_path / "two", "always", settings("safe-dshb", "user"))
    for party in made[1:]:
        party.task.write_text(party.task.read_text().replace("pass", "1 / 0"))
    server = Observer(made)
    with pytest.raises(Refused):
        server.open(0, (0, 1))
    assert not entries(made[1])
    assert "division by zero" in made[1].log.read_text()


def test_a_step_is_tried_with_as_many_places_as_it_will_have(tmp_path):
    """A Poisson batch has more places than examples are expected: it is their memory that has to do."""
    WAYS["few"] = (LINE, SQUARES, "len(x) > 20 and raises(MemoryError())", 1)
    config = settings("safe-dshb", "example", "algorithm.sampling=poisson")
    made = federation(tmp_path / "two", "few", config)
    with pytest.raises(Refused):
        Observer(made).open(0, (0, 1))
    assert not entries(made[1])
    assert "MemoryError" in made[1].log.read_text()


def test_a_round_that_was_paid_for_and_not_answered_is_never_drawn_again(tmp_path, monkeypatch):
    """As after a kill, without power, or on a full disk."""
    made = federation(tmp_path / "two", "huge", settings("safe-dshb", "user"))
    server = Observer(made)
    server.open(0, (0, 1))

    def full(*written):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full)
        assert server.asked(0, 0, 0) is None
    drawn = []
    monkeypatch.setattr(total, "step", lambda *given, **named: drawn.append(given))
    assert [server.asked(0, 0, 0), Observer(made).asked(0, 0, 0)] == [None, None], "after a restart too"
    assert not drawn
    assert len(entries(made[1])) == 1, "paid for"


@pytest.mark.parametrize(("name", "unit"), EVERY)
def test_what_goes_wrong_beside_models_and_losses_counts_as_zero_too(tmp_path, monkeypatch, name, unit):
    config = settings(name, unit)
    without = outside(federation(tmp_path / "without", "tiny", config))
    for draw in ("sample", "poisson", "epochs", "everything"):
        monkeypatch.setattr(OneClient, draw, lambda *asked: 1 / 0)
    made = federation(tmp_path / "with", "tiny", config)
    assert outside(made) == without
    assert "division by zero" in made[1].log.read_text()
