"""What is released moves by no more than is declared, whatever the record and the broadcast are.

Every pair here was found by an attack on a certificate. A move is measured on what is really released, in
double precision, and divided by the declared 2C/b.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.engines.clipping import clip_rows
from trilemma.testing.examples import Stack

Record = tuple[Tensor, Tensor]


def move(model, theta, heads: Record, tails: Record, others: list[Record], clip: float = 1.0) -> float:
    """Return the move between two batches that differ in their first record, over the declared 2C/b."""

    def released(first: Record) -> Tensor:
        x, y = (torch.stack(column)[None] for column in zip(first, *others, strict=True))
        found = models.gradients(model, theta, Stack(x, y), clip=Clip.example(clip, careful=True))
        return found.value[0].double()

    return float((released(heads) - released(tails)).norm()) / (2 * clip / (1 + len(others)))


def worst(model, trials, clip: float = 1.0) -> float:
    """Return the largest move of several (broadcast, heads, tails, others)."""
    return max(move(model, *trial, clip) for trial in trials)


def at(model, seed: int = 0, **tensors) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a broadcast of zeros and its tensors."""
    theta = torch.zeros(model.dim)
    return theta, models.unflatten(model, theta)


# --- ghost norms that cancel ------------------------------------------------------------------------------


class Positions(nn.Module):
    """One layer at every position, and one head per position: a broadcast makes output gradients opposite."""

    def __init__(self, layer: nn.Module, width: int, positions: int = 2, channels_first: bool = False):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(positions * width, 2)
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head((h.flatten(2).mT if self.channels_first else h).flatten(1))


def opposite(model, records, width: int, rests=(1e-4, 2e-4, 4e-4)):
    """Yield broadcasts under which two positions' output gradients are opposite but for a ten-thousandth."""
    generator = Key(1).torch()
    for scale, rest in itertools.product((1e3, 1e4, 1e5, 1e6), rests):
        theta, tensors = at(model)
        head = scale * torch.randn(2, width, generator=generator)
        tensors["head.weight"].copy_(torch.cat([head, -(1 - rest) * head], 1))
        for heads, tails, other in records(generator):
            yield theta, heads, tails, [other] * 9


def tokens(generator):
    for y in (0, 1):
        yield tuple((torch.tensor(ids), torch.tensor(y)) for ids in ((7, 7), (7, 9), (1, 2)))


def vectors(*shape: int, axis: int = 0):
    def records(generator):
        for _ in range(4):
            one = torch.randn(shape, generator=generator)
            sign = torch.tensor([1.0, -1.0]).view([2 if i == axis else 1 for i in range(len(shape) + 1)])
            same = torch.stack([one, one], axis)
            other = torch.randn(same.shape, generator=generator)
            yield tuple((x, torch.tensor(0)) for x in (same, same * sign, other))

    return records


@pytest.mark.parametrize(
    ("module", "records", "width"),
    [
        (Positions(nn.Embedding(10, 4), 4), tokens, 4),
        (Positions(nn.Linear(16, 16, bias=False), 16), vectors(16), 16),
        (Positions(nn.Conv1d(8, 8, 1, bias=False), 8, channels_first=True), vectors(8, axis=1), 8),
        (Positions(nn.Conv2d(8, 8, 1, bias=False), 8, channels_first=True), vectors(8, 1, axis=1), 8),
    ],
    ids=["embedding", "linear", "conv1d", "conv2d"],
)
def test_positions_that_cancel(module, records, width):
    model = models.from_module(module, nn.CrossEntropyLoss())
    assert worst(model, opposite(model, records, width)) <= 1


def test_positions_that_cancel_under_autocast():
    """Products in half precision, switched on around everything: it was 13 times the declared."""
    module = Positions(nn.Linear(16, 16, bias=False), 16)
    model = models.from_module(module, nn.CrossEntropyLoss())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert worst(model, opposite(model, vectors(16), 16, rests=(1e-2, 1e-3))) <= 1


class Tied(nn.Module):
    """A table that is the head too; between its uses vectors are turned by almost a right angle."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)
        sine, cosine = math.sin(1.5707), math.cos(1.5707)
        self.turn = torch.kron(torch.eye(4), torch.tensor([[cosine, -sine], [sine, cosine]]))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.table(ids).mean(1) @ self.turn, self.table.weight)[:, 0]


def test_uses_of_one_matrix_that_cancel():
    """Token 0's gradient through the table is opposite to that through the head."""
    model = models.from_module(Tied(), nn.BCEWithLogitsLoss())
    generator, trials = Key(2).torch(), []
    for scale, _, y in itertools.product((1e5, 1e6), range(5), (0.0, 1.0)):
        theta, tensors = at(model)
        tensors["table.weight"][0] = scale * torch.randn(8, generator=generator)
        heads, tails, other = ((torch.tensor([token]), torch.tensor(y)) for token in (0, 1, 2))
        trials.append((theta, heads, tails, [other] * 9))
    assert worst(model, trials) <= 1


# --- products of squares that underflow -------------------------------------------------------------------


def test_squares_that_underflow():
    """∂z ≈ 1e-23 beside an input of 1e19: a gradient of 1e-4, whose squared norm comes out as 0."""
    model = models.build("mnist-mlp", (784,), 10)
    trials = []
    for bias in (50, 52):
        theta, tensors = at(model)
        tensors["fc1.weight"][0, 0] = 1e6
        tensors["fc2.bias"][0] = bias
        x = torch.zeros(784)
        x[0] = 1e13
        trials.append((theta, (x, torch.tensor(0)), (0 * x, torch.tensor(0)), [(0 * x, torch.tensor(0))] * 9))
    assert worst(model, trials, clip=1e-5) <= 1


# --- structure that depends on data -----------------------------------------------------------------------


class Dropping(nn.Module):
    """Leaves padding out before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != 0
        found = self.head(self.table(ids[there]))
        return torch.zeros(*ids.shape, 3).masked_scatter(there[..., None], found).sum(1)


class Experts(nn.Module):
    """Sends every example to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, chosen, out = x[:, 0], (x[:, 0, 0] > 0).long(), torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(x[mine]))
        return self.head(out.tanh())


class Packed(nn.Module):
    """Packs sequences of different lengths, as recurrent layers take them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = (
            nn.Embedding(10, 4),
            nn.GRU(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.body(packed)[1][0])


class Branching(nn.Module):
    """Decides by the sum of whatever batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        return self.first(x) if float(x.sum()) > 0 else self.second(x)


def sentence(length: int, generator: torch.Generator) -> Record:
    ids = torch.zeros(6, dtype=torch.long)
    ids[:length] = torch.randint(1, 10, (length,), generator=generator)
    return ids, torch.randint(3, (), generator=generator)


def test_padding_that_is_left_out():
    """The first two examples ever seen are equally long; later ones are not."""
    model = models.from_module(Dropping(), nn.CrossEntropyLoss())
    theta, generator = model.init(Key(1)), Key(3).torch()
    sentences = [sentence(4, generator) for _ in range(3)]
    assert move(model, theta, *sentences[:2], sentences[:2], 0.1) <= 1
    trials = [
        (
            theta,
            *(sentence(length, generator) for length in (3, 6)),
            [sentence(length, generator) for length in (2, 4)],
        )
        for _ in range(40)
    ]
    assert worst(model, trials, 0.1) <= 1


@pytest.mark.parametrize("kind", [Dropping, Experts, Branching, Packed])
def test_routing_by_data_is_right_or_refused(kind):
    torch.manual_seed(1)
    module, generator = kind(), Key(4).torch()
    model = models.from_module(module, nn.CrossEntropyLoss())
    ragged = kind in (Dropping, Packed)

    def batch(lengths):
        if ragged:
            return [sentence(length, generator) for length in lengths]
        return [
            (torch.randn(1, 4, generator=generator), torch.randint(3, (), generator=generator))
            for _ in lengths
        ]

    right_or_refused(
        model, module, nn.CrossEntropyLoss(), [batch((4, 4, 4)), batch((5, 1, 6)), batch((2, 6, 3))]
    )


def looped(module: nn.Module, loss, records: list[Record]) -> Tensor:
    """Return the mean of the records' gradients, one after the other in double precision."""
    net, total = copy.deepcopy(module).double(), 0.0
    trained = [part for part in net.parameters() if part.requires_grad]
    torch.set_default_dtype(torch.float64)
    try:
        for x, y in records:
            x, y = (part.double() if part.is_floating_point() else part for part in (x, y))
            # As a batch of two alike: torch's own batch normalisation is wrong for one (2.13, on a CPU).
            alike = loss(net(torch.stack([x, x])), torch.stack([y, y])).mean()
            found = torch.autograd.grad(alike, trained, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
            total = total + parameters_to_vector(filled) / len(records)
    finally:
        torch.set_default_dtype(torch.float32)
    return total


def right_or_refused(model, module, loss, batches) -> None:
    """Gradients per client and per example are those of the plain loop, or there are none."""
    theta = parameters_to_vector([part for part in module.parameters() if part.requires_grad]).detach()
    for records in batches:
        expected = looped(module, loss, records)
        x, y = (torch.stack(column)[None] for column in zip(*records, strict=True))
        for clip in (Clip.client(1e6), Clip.example(1e6, careful=True)):
            try:
                found = models.gradients(model, theta, Stack(x, y), clip=clip).value[0].double()
            except UserError:
                continue
            assert float((found - expected).norm()) <= 1e-4 * float(expected.norm()), clip


# --- per client, under vmap -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Convolution, batch normalisation that is frozen, and a layer over channels: the blocks of XCiT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.frozen = nn.BatchNorm2d(8).eval()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.patches(x)).flatten(2).transpose(1, 2)
        return self.head((self.scale * self.norm(h)).mean(1))


def test_batch_normalisation_in_eval_and_a_norm_of_turned_axes():
    torch.manual_seed(1)
    module, generator = Attention(), Key(5).torch()
    module.frozen.running_mean.normal_()
    model = models.from_module(module, nn.CrossEntropyLoss())
    batches = [
        [
            (torch.randn(3, 8, 8, generator=generator), torch.randint(3, (), generator=generator))
            for _ in range(3)
        ]
    ]
    right_or_refused(model, module, nn.CrossEntropyLoss(), batches)


# --- what was left out silently ---------------------------------------------------------------------------


def test_a_loss_that_reads_the_nets_own_parameters():
    torch.manual_seed(1)
    module, generator = nn.Linear(4, 3), Key(6).torch()

    def loss(outputs, y):
        return F.cross_entropy(outputs, y) + sum(part.square().sum() for part in module.parameters())

    records = [(torch.randn(4, generator=generator), torch.tensor(1)) for _ in range(3)]
    ridge = 2 * parameters_to_vector(module.parameters()).detach().double()
    x, y = (torch.stack(column)[None] for column in zip(*records, strict=True))
    try:
        model = models.from_module(module, loss)
        theta = model.init(Key(1))
        found = models.gradients(model, theta, Stack(x, y)).value[0].double()
    except UserError:
        return
    expected = looped(module, nn.CrossEntropyLoss(), records) + ridge
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


def test_a_loss_with_parameters_of_its_own():
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.warmth = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(outputs * self.warmth, y)

    try:
        model = models.from_module(nn.Linear(4, 3), Temperature())
    except UserError:
        return
    assert model.dim == 16, "its parameter is trained"


def test_complex_parameters():
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.ifft(torch.fft.fft(x) * self.filter).real

    with pytest.raises(UserError, match="complex"):
        models.from_module(Spectral(), nn.CrossEntropyLoss())


# --- what a module remembers ------------------------------------------------------------------------------


class Highest(nn.Module):
    """Scales by the largest number it has ever seen above 100, which it keeps as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.most = nn.Linear(4, 3), kind, 1.0
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        most = float(x.detach().abs().max())
        if most > 100:
            if self.kind == "number":
                self.most = most
            elif self.kind == "tensor":
                self.most = torch.tensor(most)
            elif self.kind == "buffer":
                self.largest = torch.tensor(most)
            else:
                self.largest.fill_(most)
        return self.layer(x) / self.most / self.largest


@pytest.mark.parametrize("kind", ["number", "tensor", "buffer", "in place"])
def test_a_record_is_not_remembered(kind):
    """A record of an earlier batch, or an earlier record of the same, scaled what others contribute."""
    torch.manual_seed(1)
    model = models.from_module(Highest(kind), nn.CrossEntropyLoss())
    theta, generator = model.init(Key(1)), Key(8).torch()
    others = [(torch.randn(4, generator=generator), torch.tensor(1)) for _ in range(5)]
    loud, quiet = ((size * torch.ones(4), torch.tensor(0)) for size in (1e4, 1.0))
    moves = []
    for first, second in ((quiet, loud), (quiet, quiet), (quiet, others[0])) * 2:
        try:
            moves.append(move(model, theta, first, second, others, 0.1))
        except UserError:  # of a paid step this record counts as zero
            moves.append(0.0)
    assert moves[:3] == moves[3:]
    assert max(moves) <= 1


# --- a client's factor ------------------------------------------------------------------------------------


def test_a_factor_of_few_bits_is_not_rounded_up():
    """C/‖g‖ = 1e-45 has one bit in single precision; rounded up, a client sent 1.4 C."""
    for size, clip in itertools.product((1e37, 1e38, 3e38), (1e-3, 1e-5, 1e-7, 3e-7)):
        sent, _ = clip_rows(torch.full((1, 100), size), clip)
        assert float(sent.double().norm()) <= clip * (1 + 2**-23)


# --- rounding ---------------------------------------------------------------------------------------------


def test_the_total_of_a_batch_is_not_rounded_coarser_than_a_record_moves_it():
    """Two records of weights 1 − 2⁻²⁰ and 2⁻²⁰: what a record of a batch of a million weighs."""
    model, generator, weight = models.build("logistic", (4095,), 2), Key(7).torch(), 2.0**-20
    theta, worst = torch.zeros(model.dim), 0.0
    for _ in range(10):
        x = torch.randn(3, 4095, generator=generator)

        def released(number: int, x: Tensor = x) -> Tensor:
            batch = Stack(
                x[None, [0, number]], torch.tensor([[0, 1]]), torch.tensor([[1.0 - weight, weight]])
            )
            return (
                models.gradients(model, theta, batch, clip=Clip.example(1.0, careful=True)).value[0].double()
            )

        x[2] = -x[1]
        worst = max(worst, float((released(1) - released(2)).norm()) / (2 * weight))
    assert worst <= 1
