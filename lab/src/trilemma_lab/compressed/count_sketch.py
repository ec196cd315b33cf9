"""Sketched SGD: clients send count sketches; the server asks for the coordinates that look heavy.

A count sketch of v ∈ R^D is r rows of c buckets. Row j puts coordinate i into bucket b_j(i) with sign σ_j(i):

    table[j, b] = Σ_{i: b_j(i) = b} σ_j(i) v_i          estimate(i) = median_j σ_j(i) table[j, b_j(i)]

with b_j pairwise and σ_j four-wise independent polynomial hashes modulo 2³¹ − 1, the same for all parties. A
sketch is linear: the mean of tables is the table of the mean. With r = 1 all coordinates of a bucket have the
same |estimate|, and with few rows many do; among equals the smaller position wins. One round:

    client   u ← m u + g,   v ← v + u;   send the table of v
    server   take the p₂k coordinates with the largest estimates, fetch the exact v there, and keep the k
             largest of the mean: Δ;   w ← w − η Δ
    client   if it took part, set u = v = 0 on Δ's support

A round has two exchanges (`protocol.Inquiry`), and the rule is applied in both: to the tables, which gives
the candidates, and to the clients' values there. A client learns with its next broadcast which coordinates of
its last message were used. Here it reads them from the supports of the last 62 rounds (one bit per round and
coordinate). A real server would send each client only the support of its own round, and bytes are counted so.

Reference: Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora, "Communication-efficient distributed SGD with
sketching", NeurIPS 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.learning.messages import MessageLayout, Messages, Part, one_vector
from trilemma.learning.protocol import (
    Algorithm,
    Clients,
    ClientStep,
    Inquiry,
    ServerStep,
    Start,
    State,
)
from trilemma.learning.settings import Setup, algorithms
from trilemma.learning.steps.server import aggregate
from trilemma.models.types import Model
from trilemma_lab.compressed.gradient import CompressedSettings, compute, start

PRIME = (1 << 31) - 1
HISTORY = 62
"""How many rounds' supports fit into one non-negative int64."""

HASHES = Key(0).fold("count sketch")
"""The key of the hash functions: a public constant, the same for sender and receiver."""


@dataclass(frozen=True)
class CountSketch:
    """The hash functions of a sketch: `buckets` and `signs` are (rows, dim).

    `members` (rows, columns, width) are the coordinates of every bucket, padded with `dim`. A table sums over
    members, always in the same order; adding into buckets would not be deterministic on a GPU.

    >>> sketch = count_sketch(rows=5, columns=20, dim=100)
    >>> v = torch.zeros(1, 100)
    >>> v[0, 42] = 7.0
    >>> sketch.estimate(sketch.table(v)[0])[42]
    tensor(7.)
    """

    columns: int
    buckets: Tensor
    signs: Tensor
    members: Tensor

    @property
    def rows(self) -> int:
        """Number of rows r."""
        return self.buckets.shape[0]

    def table(self, vectors: Tensor) -> Tensor:
        """Return the sketches (k, rows, columns) of k vectors (k, dim)."""
        nothing = vectors.new_zeros(len(vectors), 1)
        tables = [
            torch.cat([vectors * signs, nothing], dim=1)[:, members.long()].sum(-1)
            for members, signs in zip(self.members, self.signs, strict=True)
        ]
        return torch.stack(tables, dim=1)

    def estimate(self, table: Tensor) -> Tensor:
        """Return the estimated vector (dim,) of one table (rows, columns): the (lower) median over rows."""
        return (table.gather(1, self.buckets.long()) * self.signs).median(0).values


def count_sketch(
    rows: int, columns: int, dim: int, key: Key = HASHES, device: torch.device | str = "cpu"
) -> CountSketch:
    """Draw the hash functions of a sketch; the same arguments give the same functions.

    >>> count_sketch(rows=0, columns=20, dim=100)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: a count sketch has at least one row and one column, got 0 × 20
    """
    if rows < 1 or columns < 1:
        raise UserError(f"a count sketch has at least one row and one column, got {rows} × {columns}")
    return _hashes(rows, columns, dim, key, torch.device(device))


@lru_cache(maxsize=2)
def _hashes(rows: int, columns: int, dim: int, key: Key, device: torch.device) -> CountSketch:
    rng = key.numpy()
    points = np.arange(1, dim + 1, dtype=np.int64)
    buckets, signs = np.empty((rows, dim), np.int32), np.empty((rows, dim), np.int8)
    for row in range(rows):
        buckets[row] = _polynomial(rng.integers(1, PRIME, 2), points) % columns
        signs[row] = 1 - 2 * (_polynomial(rng.integers(1, PRIME, 4), points) & 1)
    arrays = buckets, signs, _members(buckets, columns)
    return CountSketch(columns, *(torch.from_numpy(array).to(device) for array in arrays))


def _members(buckets: np.ndarray, columns: int) -> np.ndarray:
    """Return the coordinates of every bucket in order, (rows, columns, width), padded with dim.

    >>> _members(np.array([[1, 0, 1]]), columns=2).tolist()
    [[[1, 3], [0, 2]]]
    """
    rows, dim = buckets.shape
    counts = np.stack([np.bincount(row, minlength=columns) for row in buckets])
    members = np.full((rows, columns, counts.max()), dim, np.int32)
    for row in range(rows):
        order = np.argsort(buckets[row], kind="stable")
        place = np.arange(dim) - np.repeat(np.cumsum(counts[row]) - counts[row], counts[row])
        members[row, buckets[row, order], place] = order
    return members


def heaviest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest values; among equals the smaller position, on every device.

    >>> heaviest(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist()
    [1, 3, 2]
    """
    return values.sort(descending=True, stable=True).indices[:count]


def _polynomial(coefficients: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Evaluate a polynomial modulo PRIME; degree t−1 with random coefficients is t-wise independent."""
    value = np.zeros_like(points)
    for coefficient in coefficients:
        value = (value * points + coefficient) % PRIME
    return value


@dataclass(frozen=True)
class Sizes:
    """The sizes of a sketch for a model, as numbers; p₂ is reduced if p₂k ≥ D."""

    columns: int
    rows: int
    kept: int
    candidates: int

    @property
    def table(self) -> int:
        """How many numbers a table has."""
        return self.rows * self.columns

    def down(self, dim: int) -> int:
        """Return how many bytes a client is sent in a round.

        They are the model; the positions it is asked for, as numbers or as a bitmap; and for each position it
        was asked for when it last took part, one bit: whether it was used.

        >>> Sizes(columns=12, rows=5, kept=9, candidates=32).down(dim=100)
        417
        """
        asked = min(4 * self.candidates, math.ceil(dim / 8))
        return 4 * dim + asked + math.ceil(self.candidates / 8)


@algorithms.register("sketch")
class Sketch(CompressedSettings):
    """Sketched SGD: clients send short summaries (count sketches), then the coordinates that look largest."""

    columns: float = Field(default=0.05, gt=0, description="columns c; below 1: times the model's size")
    rows: float = Field(default=0.01, gt=0, description="rows r; below 1: times the model's size")
    kept: float = Field(
        default=0.05, gt=0, description="coordinates k updated a round; below 1: times the size"
    )
    second: int = Field(default=4, ge=1, description="candidates fetched per coordinate kept (p₂)")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum m")

    def sizes(self, dim: int) -> Sizes:
        """Return the sizes for a model of `dim` parameters.

        >>> Sketch(columns=0.02, rows=0.005, kept=0.05).sizes(79510)
        Sizes(columns=1590, rows=398, kept=3976, candidates=15904)
        """
        columns, rows, kept = (
            max(1, round(value * dim if value < 1 else value))
            for value in (self.columns, self.rows, self.kept)
        )
        kept = min(kept, dim)
        second = self.second if self.second * kept < dim else max(1, dim // kept)
        return Sizes(columns, rows, kept, second * kept)

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        clears = self.preset == "correct"

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            begin = start(model, ids, key, "u", "v")
            shared = {**begin.broadcast, "supports": torch.zeros(model.dim, dtype=torch.int64)}
            kept = {**begin.clients, "heard": torch.full((len(ids),), -1, dtype=torch.int64)}
            if not clears:
                kept["table"] = torch.zeros(len(ids), self.sizes(model.dim).table)
            return Start(shared, kept, shared)

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            done = compute(self, broadcast, state, clients, key, carries=False)
            sizes = self.sizes(clients.model.dim)
            sketch = count_sketch(sizes.rows, sizes.columns, clients.model.dim, device=done.gradient.device)
            used = used_coordinates(broadcast["supports"], state["heard"], round_)
            u = self.momentum * torch.where(used, 0.0, state["u"]) + done.gradient
            v = torch.where(used, 0.0, state["v"]) + u
            table = sketch.table(v).flatten(1)
            kept = {**done.state, "u": u, "v": v, "heard": torch.full_like(state["heard"], round_)}
            if not clears:
                table = table + state["table"]
                kept["table"] = table
            return ClientStep(Messages(table), kept, {"loss": done.loss})

        def question(messages: Messages, state: State, round_: int, key: Key) -> State:
            params = state["params"]
            sizes = self.sizes(len(params))
            sketch = count_sketch(sizes.rows, sizes.columns, len(params), device=params.device)
            table, _ = aggregate(setup, messages.vectors, key)
            estimate = sketch.estimate(table.view(sizes.rows, sizes.columns))
            return {"candidates": heaviest(estimate.abs(), sizes.candidates)}

        def answer(question: State, state: State) -> Messages:
            dim = state["v"].shape[1]
            candidates = asked_for(question, self.sizes(dim).candidates, dim)
            return Messages(state["v"][:, candidates], question=question)

        def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
            params, candidates = state["params"], messages.question["candidates"]
            exact, report = aggregate(setup, messages.vectors, key)
            largest = heaviest(exact.abs(), self.sizes(len(params)).kept)
            chosen = candidates[largest]
            delta = torch.zeros_like(params)
            delta[chosen] = exact[largest]
            support = torch.zeros_like(state["supports"])
            support[chosen] = 1
            history = (state["supports"] << 1) & ((1 << HISTORY) - 1)
            after = {"params": params - self.lr * delta, "supports": history | support}
            return ServerStep(after, after, report)

        def downlink(broadcast: State) -> tuple[float, int]:
            dim = len(broadcast["params"])
            travels = self.sizes(dim).down(dim)
            return travels / 4, travels

        def message(model: Model) -> MessageLayout:
            sizes = self.sizes(model.dim)
            return MessageLayout((Part("table", (sizes.rows, sizes.columns)),), ("table",))

        values = one_vector("values", lambda model: self.sizes(model.dim).candidates)
        inquiry = Inquiry(question, answer, values)
        return Algorithm("sketch", init, client, server, message, downlink=downlink, inquiry=inquiry)


def asked_for(question: State, count: int, dim: int) -> Tensor:
    """Return the coordinates that a question asks for; refuse anything but `count` positions below `dim`.

    >>> asked_for({"candidates": torch.tensor([3, 9])}, count=2, dim=9)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: the server may ask for 2 of 9 coordinates; it asked for something else
    """
    candidates = question.get("candidates")
    if (
        candidates is None
        or candidates.dtype != torch.int64
        or tuple(candidates.shape) != (count,)
        or not bool(((candidates >= 0) & (candidates < dim)).all())
    ):
        raise UserError(f"the server may ask for {count} of {dim} coordinates; it asked for something else")
    return candidates


def used_coordinates(supports: Tensor, heard: Tensor, round_: int) -> Tensor:
    """Return which coordinates of each client's last message the server used, (k, D).

    Bit h of `supports` (D,) is set for the coordinates updated h+1 rounds ago; `heard` (k,) is the round of
    each client's last message, −1 if there is none.

    >>> supports = torch.tensor([0b01, 0b10, 0b00])
    >>> used_coordinates(supports, torch.tensor([4, 3, -1]), round_=5).tolist()
    [[True, False, False], [False, True, False], [False, False, False]]
    """
    age = round_ - heard - 1
    known = (heard >= 0) & (age < HISTORY)
    bits = (supports >> age.clamp(min=0, max=HISTORY)[:, None]) & 1
    return (bits == 1) & known[:, None]
