"""After a client has paid it answers: no record decides whether, with which status, or in which shape.

Real nodes with ledgers, driven block by block. A client's folder holds the file `record`, or not: its first
example is then the one that goes wrong. Whatever leaves must look the same with and without it.
"""

from __future__ import annotations

import pytest
import torch
from malicious_server import Server, entries

from federation_harness import INSTANT
from trilemma import config as configurations
from trilemma.federation import kinds, provisioning, wire
from trilemma.federation.layout import Party
from trilemma.federation.public_facts import Federation
from trilemma.federation.reasons import Refused
from trilemma.federation.spending import write_budgets
from trilemma.federation.task import load_task
from trilemma.learning.settings import algorithms, private_algorithms

ROWS, BATCH, CLIP = 12, 6, 0.5

TASK = """
from pathlib import Path

import numpy as np
import torch
from torch import nn
from trilemma import Declaration, Values

HERE = Path(__file__).parent
expects = Declaration(x=Values("numbers", (4,)), y=Values("numbers", (1,), low=0, high=9))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return {forward}


def model():
    return Net()


def raises(error):
    raise error


def loss(outputs, targets):
    {loss}


def data(client):
    rng = np.random.default_rng(client)
    x, y = rng.normal(size=({rows}, 4)), rng.integers(2, size=({rows}, 1)).astype(float)
    if client == 0 and (HERE / "record").exists():
        x[0], y[0] = {x}, {y}
    return x, y
"""

MIXED = "3e38 * np.array([1, 1, -1, -1])"
PLAIN = "nn.functional.mse_loss(outputs, targets)"
RAISES = "if bool((targets > 5).any()):\n        raises({})\n    return " + PLAIN

WAYS = {
    # name: (forward, loss, the record's features and target)
    "nan": ("torch.sigmoid(self.layer(x))", "return nn.BCELoss()(outputs, targets)", MIXED, 1),
    "value error": ("self.layer(x)", RAISES.format("ValueError('patient 4711')"), 1, 9),
    "exit": ("self.layer(x)", RAISES.format("SystemExit(3)"), 1, 9),
    "interrupt": ("self.layer(x)", RAISES.format("KeyboardInterrupt()"), 1, 9),
    "memory": ("self.layer(x)", RAISES.format("MemoryError()"), 1, 9),
    "recursion": ("self.layer(x)", RAISES.format("RecursionError()"), 1, 9),
    "no memory on a GPU": ("self.layer(x)", RAISES.format("torch.OutOfMemoryError('CUDA')"), 1, 9),
    "huge": ("self.layer(x)", "return " + PLAIN, 1e30, 9),
    "tiny": ("self.layer(x)", "return " + PLAIN, 1e-38, 0),
    "infinite": ("self.layer(x)", "return " + PLAIN, MIXED, 9),
}  # fmt: skip

OPTIONS = {
    "fedavg": ["algorithm.local_steps=3"],
    "per-fedavg": ["algorithm.local_steps=2"],
    "lg-fedavg": ["algorithm.local_steps=2"],
    "lp-proj": ["algorithm.dim=3", "algorithm.local_rounds=2", "algorithm.inner_steps=2"],
    "pfedme": ["algorithm.local_rounds=2", "algorithm.inner_steps=2"],
    "rsa": ["algorithm.local_rounds=2", "algorithm.inner_steps=2"],
}
"""Short rounds of the methods that take many steps."""


def units(name: str) -> list[str]:
    """Return the units that an algorithm protects."""
    return ["user", "example"] if "unit" in algorithms[name].model_fields else [""]


def settings(name: str, unit: str, *more: str) -> str:
    """Return a configuration in which the algorithm's messages are noised, a little."""
    options = [f"algorithm.name={name}", f"algorithm.batch_size={BATCH}", *OPTIONS.get(name, [])]
    noise = ["privacy.threat=ldp", f"privacy.clip={CLIP}", "privacy.sigma_ind=1.0"]
    if unit:
        options.append(f"algorithm.unit={unit}")
    wanted = [*options, *noise, "aggregation.rule=cwmed", "federation.tolerate=0", "run.rounds=8", *more]
    return configurations.parse({}, wanted, configurations.Own(2)).toml()


def federation(folder, way: str, config: str) -> list[Party]:
    """Make a federation of two clients; the record is not there yet."""
    folder.mkdir(parents=True)
    forward, loss, x, y = WAYS[way]
    (folder / "task.py").write_text(TASK.format(rows=ROWS, forward=forward, loss=loss, x=x, y=y))
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
            object.__setattr__(node, "say", self._heard)

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
    return [(name, (tuple(part.shape), part.dtype)) for name, part in node._start().broadcast.items()]


def outside(parties, rounds=3):
    """Return all that client 0's rounds show to the others."""
    server = Observer(parties)
    server.open(0, (0, 1))
    for round_ in range(rounds):
        server.asked(0, 0, round_, 2.0)
    return server.seen, len(entries(parties[1]))


@pytest.mark.parametrize("way", ["nan"])
@pytest.mark.parametrize(
    ("name", "unit"), [(name, unit) for name in private_algorithms() for unit in units(name)]
)
def test_no_record_decides_whether_a_client_answers(tmp_path, name, unit, way):
    """It did: with a record at which `nn.BCELoss` raises 5 of 5 refused, without it 5 of 5 answered."""
    config = settings(name, unit)
    without = outside(federation(tmp_path / "without", way, config))
    made = federation(tmp_path / "with", way, config)
    (made[1].folder / "record").touch()
    assert outside(made) == without
    assert len(without[0]) == 4 + 3 * 2, "all were answered"
    assert without[1] == 3, "and paid for"
