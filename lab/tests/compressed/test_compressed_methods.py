"""LBGM, QSGD, DGC and sketched SGD against their formulas, one client and one round at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from personal_clients import classification, heard, rounds, setup
from torch import Tensor

from trilemma import models
from trilemma.base.keys import Key
from trilemma.learning import Algorithm, algorithms
from trilemma.models.types import Segment
from trilemma_lab.compressed.count_sketch import Sketch, count_sketch, heaviest, used_coordinates
from trilemma_lab.compressed.dgc import DGC, largest
from trilemma_lab.compressed.lbgm import LBGM, look_back
from trilemma_lab.compressed.qsgd import QSGD
from trilemma_lab.compressed.wire import encode_sparse

NAMES = ["sketch", "lbgm", "qsgd", "dgc"]


def _model() -> models.Model:
    return models.build("multinomial", (8,), 4)


def _gradients(params: Tensor) -> Tensor:
    """Full-batch gradients of the six test clients by autograd."""
    clients, rows = classification(_model()), []
    for x, y in zip(clients.x, clients.y, strict=True):
        leaf = params.clone().requires_grad_()
        logits = clients.model.forward(models.unflatten(clients.model, leaf), x, None)
        rows.append(torch.autograd.grad(clients.model.loss(logits, y).mean(), leaf)[0])
    return torch.stack(rows)


def _begin(algorithm: Algorithm) -> tuple[object, object]:
    clients = classification(_model())
    return clients, algorithm.init(clients.model, clients.ids, Key(1))


@pytest.mark.parametrize("name", NAMES)
def test_training_works(name: str) -> None:
    """Every compressor lowers the training loss of the global model."""
    small = {"sketch": {"columns": 12, "rows": 5, "kept": 9}, "dgc": {"rising": 1.0}}
    done = rounds(algorithms[name](lr=0.1, **small.get(name, {})), classification(_model()), 20)
    assert done.reports[-1]["loss"].mean() < 0.9 * done.reports[0]["loss"].mean()


@pytest.mark.parametrize("name", NAMES)
def test_stacked_clients_of_the_reference_code_equal_clients_alone(name: str) -> None:
    """As published code behaves; as methods are described is in `trilemma.testing.test_algorithms`."""
    algorithm = algorithms[name](preset="reference").build(setup(6))
    clients, start = _begin(algorithm)
    together = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    alone = {field: value[4:5] for field, value in start.clients.items()}
    step = algorithm.client(start.broadcast, alone, clients.only(4), 0, Key(2))
    torch.testing.assert_close(step.messages.vectors[0], together.messages.vectors[4], rtol=1e-4, atol=1e-6)
    layout = algorithm.message(clients.model)
    for size in ("scalars", "bytes"):
        assert (
            getattr(layout.lengths(step.messages), size)[0]
            == getattr(layout.lengths(together.messages), size)[4]
        )


def test_qsgd_sends_the_gradient_on_average() -> None:
    algorithm = QSGD(levels=3, bucket=10).build(setup(6))
    clients, start = _begin(algorithm)
    draws = [
        algorithm.client(start.broadcast, start.clients, clients, 0, Key(seed)).messages.vectors.double()
        for seed in range(800)
    ]
    stack = torch.stack(draws)
    error = stack.std(0) / len(draws) ** 0.5
    assert bool(((stack.mean(0) - _gradients(start.broadcast["params"])).abs() <= 5.5 * error + 1e-6).all())


@pytest.mark.parametrize("name", ["qsgd", "dgc"])
def test_the_reference_code_never_clears_a_gradient(name: str) -> None:
    """Twice the same model: the second message of the reference preset is made from twice the gradient."""
    settings = {
        "qsgd": {"levels": 1 << 16, "bucket": 10},
        "dgc": {"sparsity": 0.0, "rising": 1.0, "momentum": 0.0},
    }
    sent = {}
    for preset in ("correct", "reference"):
        algorithm = algorithms[name](preset=preset, **settings[name]).build(setup(6))
        clients, start = _begin(algorithm)
        first = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
        second = algorithm.client(start.broadcast, first.state, clients, 1, Key(3))
        sent[preset] = second.messages.vectors
    truth = _gradients(start.broadcast["params"])
    torch.testing.assert_close(sent["correct"], truth, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sent["reference"], 2 * truth, rtol=1e-3, atol=1e-4)


def test_dgc_sends_the_largest_of_every_tensor_and_keeps_the_rest() -> None:
    settings = DGC(sparsity=0.75, rising=0.5, momentum=0.9)
    algorithm = settings.build(setup(6))
    clients, start = _begin(algorithm)
    step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    gradient = _gradients(start.broadcast["params"])
    sent = step.messages.vectors != 0
    assert sent[:, :32].sum(1).tolist() == [8] * 6  # a quarter of the 4 × 8 weights
    assert sent[:, 32:].sum(1).tolist() == [1] * 6  # and of the 4 biases
    for k in range(6):
        assert gradient[k, :32].abs()[sent[k, :32]].min() >= gradient[k, :32].abs()[~sent[k, :32]].max()
    torch.testing.assert_close(step.messages.vectors + step.state["v"], gradient, rtol=1e-4, atol=1e-6)
    assert bool((step.state["u"][sent] == 0).all())
    lengths = algorithm.message(clients.model).lengths(step.messages)
    assert lengths.scalars.tolist() == [13.5] * 6
    real = [
        len(encode_sparse(vector, mask)) for vector, mask in zip(step.messages.vectors, sent, strict=True)
    ]
    assert lengths.bytes.tolist() == real


def test_dgc_counts() -> None:
    assert [DGC(sparsity=0.75, rising=0.5).density(t) for t in range(3)] == [0.25, 0.125, 0.0625]
    ties = torch.tensor([[1.0, -1.0, 1.0, 0.5]])
    assert largest(ties, (Segment("a", 0, 4),), 0.25).tolist() == [[True, True, True, False]]
    assert not largest(ties, (Segment("a", 0, 4),), 0.1).any()


def test_lbgm_full_gradient_first_then_one_number() -> None:
    algorithm = LBGM(threshold=0.5, local_steps=2).build(setup(6))
    clients, start = _begin(algorithm)
    first = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    layout = algorithm.message(clients.model)
    assert layout.lengths(first.messages).scalars.tolist() == [36] * 6
    assert layout.lengths(first.messages).bytes.tolist() == [1 + 4 * 36] * 6
    second = algorithm.client(start.broadcast, first.state, clients, 1, Key(3))
    assert layout.lengths(second.messages).scalars.tolist() == [1] * 6
    assert layout.lengths(second.messages).bytes.tolist() == [5] * 6
    # The same model and the same full batch: the projection of G on itself is G.
    torch.testing.assert_close(second.messages.vectors, first.messages.vectors, rtol=1e-4, atol=1e-5)
    assert torch.equal(second.state["last"], first.state["last"])


def test_lbgm_multipliers() -> None:
    last = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    g = torch.tensor([[6.0, 8.0], [1.0, 1.0], [0.0, 0.0]])
    message, full, _ = look_back(g, last, 0.2)
    assert full.tolist() == [False, True, True]
    assert message.tolist() == [[6.0, 8.0], [1.0, 1.0], [0.0, 0.0]]
    wrong, _, _ = look_back(g, last, 0.2, power=1)
    assert wrong[0].tolist() == [30.0, 40.0]


def test_lbgm_reconstruction_error_is_at_most_the_threshold() -> None:
    generator = Key(3).torch()
    last = torch.randn(200, 5, generator=generator)
    g = last + torch.randn(200, 5, generator=generator)
    message, full, _ = look_back(g, last, 0.4)
    error = (g - message).square().sum(1) / g.square().sum(1)
    assert 0 < full.sum() < 200
    assert bool((error <= 0.4 + 1e-5).all())


def test_sketch_is_linear_and_unbiased() -> None:
    """Over 400 draws of the hashes, one row's estimate is on average the coordinate itself."""
    v = torch.randn(2, 50, generator=Key(1).torch())
    sketch = count_sketch(3, 7, 50, Key(9))
    torch.testing.assert_close(sketch.table(v).mean(0), sketch.table(v.mean(0, keepdim=True))[0])
    draws = torch.stack(
        [one.estimate(one.table(v[:1])[0]) for one in (count_sketch(1, 7, 50, Key(s)) for s in range(400))]
    )
    error = draws.double().std(0) / 20
    assert bool(((draws.double().mean(0) - v[0].double()).abs() < 5 * error).all())


def test_sketch_hashes_are_pairwise_and_balanced() -> None:
    """Pair collisions happen about once in c, signs average out: five standard errors over 200 rows."""
    sketch = count_sketch(200, 16, 64, Key(4))
    same = (sketch.buckets[:, :, None] == sketch.buckets[:, None, :]).double()
    share = (same.sum((1, 2)) - 64) / (64 * 63)
    assert abs(share.mean() - 1 / 16) < 5 * share.std() / 200**0.5
    signs = sketch.signs.double()
    fourth = (signs[:, 0] * signs[:, 7] * signs[:, 20] * signs[:, 41]).mean()
    assert abs(fourth) < 5 / 200**0.5
    assert abs(signs.mean()) < 5 / (200 * 64) ** 0.5


def test_sketch_recovers_heavy_coordinates() -> None:
    v = 0.01 * torch.randn(1, 1000, generator=Key(1).torch())
    v[0, [3, 500, 999]] = torch.tensor([5.0, -7.0, 6.0])
    sketch = count_sketch(9, 60, 1000)
    assert set(sketch.estimate(sketch.table(v)[0]).abs().topk(3).indices.tolist()) == {3, 500, 999}


def test_sketch_table_is_the_sum_over_each_bucket() -> None:
    v = torch.randn(4, 90, generator=Key(6).torch(), dtype=torch.float64)
    sketch = count_sketch(3, 11, 90, Key(7))
    expected = torch.zeros(4, 3, 11, dtype=torch.float64)
    for row, i in itertools.product(range(3), range(90)):
        expected[:, row, sketch.buckets[row, i]] += sketch.signs[row, i] * v[:, i]
    torch.testing.assert_close(sketch.table(v), expected, rtol=1e-12, atol=1e-12)


def test_sketch_breaks_ties_by_position() -> None:
    """Two buckets for 36 coordinates: estimates of a bucket are equal, whatever sums gave them."""
    sketch = count_sketch(1, 2, 36)
    full = int(sketch.buckets[0, 0])
    table = torch.zeros(1, 2)
    table[0, full] = 0.1
    shares = (sketch.buckets[0] == full).nonzero().flatten()
    assert len(shares) > 8
    assert torch.equal(heaviest(sketch.estimate(table).abs(), 8), shares[:8])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sketch_has_the_same_bits_every_time_on_a_gpu() -> None:
    v = torch.randn(20, 20_000, generator=Key(8).torch())
    sketch = count_sketch(5, 40, 20_000, device="cuda")
    tables = [sketch.table(v.cuda()) for _ in range(5)]
    assert all(torch.equal(table, tables[0]) for table in tables)
    torch.testing.assert_close(tables[0].cpu(), count_sketch(5, 40, 20_000).table(v), rtol=1e-4, atol=1e-3)


def test_sketch_updates_k_coordinates_by_the_exact_mean() -> None:
    settings = Sketch(columns=12, rows=5, kept=4, second=3, lr=0.5)
    algorithm = settings.build(setup(6))
    clients, start = _begin(algorithm)
    step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    answers = heard(algorithm, step, start.server, 0, Key(3))
    done = algorithm.server(answers, start.server, 0, Key(3))
    moved = done.broadcast["params"] - start.broadcast["params"]
    mean = _gradients(start.broadcast["params"]).mean(0)
    support = moved != 0
    assert int(support.sum()) == 4
    torch.testing.assert_close(moved[support], -0.5 * mean[support], rtol=1e-4, atol=1e-6)
    tables, values = algorithm.message(clients.model), algorithm.inquiry.message(clients.model)
    assert tables.lengths(step.messages).scalars.tolist() == [5 * 12] * 6
    assert values.lengths(answers).bytes.tolist() == [4 * 3 * 4] * 6
    following = algorithm.client(done.broadcast, step.state, clients, 1, Key(4))
    fresh = _gradients(done.broadcast["params"])
    torch.testing.assert_close(following.state["u"][:, support], fresh[:, support], rtol=1e-4, atol=1e-6)


def test_reference_sketch_holds_the_sum_of_all_rounds() -> None:
    tables = {}
    for preset in ("correct", "reference"):
        algorithm = Sketch(columns=6, rows=3, kept=2, momentum=0.0, preset=preset).build(setup(6))
        clients, start = _begin(algorithm)
        first = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
        second = algorithm.client(start.broadcast, first.state, clients, 1, Key(3))
        tables[preset] = first.messages.vectors[:, :18], second.messages.vectors[:, :18]
    torch.testing.assert_close(tables["reference"][1], sum(tables["correct"]), rtol=1e-4, atol=1e-5)


def test_supports_are_remembered_per_round() -> None:
    supports = torch.tensor([0b100, 0b011])
    assert used_coordinates(supports, torch.tensor([7, 9, 8]), 10).tolist() == [
        [True, False],
        [False, True],
        [False, True],
    ]
    assert not used_coordinates(supports, torch.tensor([10 - 100]).clamp(min=0), 100).any()
