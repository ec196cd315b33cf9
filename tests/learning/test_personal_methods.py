"""FedAvg, Local, Ditto, Per-FedAvg and LG-FedAvg against their formulas; private messages; batch norm."""

from __future__ import annotations

from dataclasses import replace

import linear_oracle as oracle
import numpy as np
import pytest
import torch
from personal_clients import ArrayClients, Seeded, classification, heard, regression, rounds, setup
from torch import Tensor

from trilemma import models
from trilemma.base.keys import Key
from trilemma.learning import algorithms
from trilemma.learning.fedavg import FedAvg, with_statistics
from trilemma.learning.personal.ditto import Ditto
from trilemma.learning.personal.lg_fedavg import LGFedAvg
from trilemma.learning.personal.local import Local
from trilemma.learning.personal.lp_proj import LpProj
from trilemma.learning.personal.per_fedavg import PerFedAvg, hessian_product
from trilemma.learning.steps.local_steps import initial_models
from trilemma.models.layers.normalisation import EPSILON
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.testing.test_algorithms import settings_of

NAMES = ["fedavg", "local", "ditto", "per-fedavg", "lg-fedavg", "lp-proj", "pfedme", "rsa"]


def _model() -> models.Model:
    return models.build("multinomial", (8,), 4)


def _loss(model: models.Model, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return model.loss(model.forward(models.unflatten(model, params), x, None), y).mean()


def _gradient(model: models.Model, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = params.clone().requires_grad_()
    return torch.autograd.grad(_loss(model, leaf, x, y), leaf)[0]


@pytest.mark.parametrize("name", NAMES)
def test_training_works(name: str) -> None:
    clients = classification(_model())
    gentle = {"pfedme": {"lam": 0.1}, "rsa": {"lam": 0.1}}
    done = rounds(algorithms[name](**gentle.get(name, {})), clients, 6)
    assert done.reports[-1]["loss"].mean() < 0.85 * done.reports[0]["loss"].mean()


def test_fedavg_is_gradient_descent_on_the_mean_for_one_step() -> None:
    clients = classification(_model())
    algorithm = FedAvg(lr=0.3, local_steps=1, batch_size=40).build(setup(6))
    start = algorithm.init(clients.model, clients.ids, Key(1))
    step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    done = algorithm.server(step.messages, start.server, 0, Key(3))
    w = start.broadcast["params"]
    mean = torch.stack(
        [_gradient(clients.model, w, x, y) for x, y in zip(clients.x, clients.y, strict=True)]
    ).mean(0)
    torch.testing.assert_close(done.broadcast["params"], w - 0.3 * mean, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fedavg_with_one_step_finds_the_average_solution() -> None:
    """Least squares in double precision, to 1e-8."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((4, 12, 5)), rng.standard_normal((4, 12))
    x[..., -1] = 1.0
    clients = regression(x, y)
    done = rounds(FedAvg(lr=0.3, local_steps=1, batch_size=12), clients, 250)
    a = np.einsum("kni,knj->kij", x, x) / 12
    what = np.stack([np.linalg.lstsq(d, t, rcond=None)[0] for d, t in zip(x, y, strict=True)])
    w = oracle.average(a, what)
    np.testing.assert_allclose(done.broadcast["params"], w, atol=1e-8)
    ditto = Ditto(
        lr=0.3, personal_lr=0.2, lam=0.7, local_steps=1, inner_steps=10, batch_size=12, weight_decay=0.0
    )
    personal = rounds(ditto, clients, 250)
    np.testing.assert_allclose(personal.broadcast["params"], w, atol=1e-8)
    np.testing.assert_allclose(personal.state["x"], oracle.personal(a, what, w, 0.7, np.eye(5)), atol=1e-8)


def test_local_sends_nothing_and_steps_as_often_as_asked() -> None:
    clients = classification(_model())
    one = rounds(Local(lr=0.1, batch_size=40, steps=3), clients, 1)
    three = rounds(Local(lr=0.1, batch_size=40, steps=1), clients, 3)
    torch.testing.assert_close(one.state["x"], three.state["x"], rtol=1e-4, atol=1e-5)
    assert one.messages[0].vectors.shape == (6, 0)
    assert one.broadcast == {}


def test_per_fedavg_follows_its_formula() -> None:
    clients = classification(_model())
    w0 = None
    for order in ("first", "product"):
        settings = PerFedAvg(lr=0.2, personal_lr=0.4, local_steps=1, batch_size=40, order=order)
        algorithm = settings.build(setup(6))
        start = algorithm.init(clients.model, clients.ids, Key(1))
        step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
        w0 = start.broadcast["params"]
        for k in range(6):
            x, y = clients.x[k], clients.y[k]
            if order == "first":
                u = w0 - 0.4 * _gradient(clients.model, w0, x, y)
                expected = w0 - 0.2 * _gradient(clients.model, u, x, y)
            else:
                leaf = w0.clone().requires_grad_()
                (inner,) = torch.autograd.grad(_loss(clients.model, leaf, x, y), leaf, create_graph=True)
                outer = _loss(clients.model, leaf - 0.4 * inner, x, y)
                expected = w0 - 0.2 * torch.autograd.grad(outer, leaf)[0]
            torch.testing.assert_close(step.messages.vectors[k], expected, rtol=1e-3, atol=1e-4)


def test_per_fedavg_is_scored_after_adapting() -> None:
    clients = classification(_model())
    for preset in ("correct", "reference"):
        settings = PerFedAvg(lr=0.2, personal_lr=0.4, batch_size=40, preset=preset)
        algorithm = settings.build(setup(6))
        start = algorithm.init(clients.model, clients.ids, Key(1))
        adapted = algorithm.evaluated(start.broadcast, start.clients, clients, Key(5))
        w = start.broadcast["params"]
        expected = w - 0.4 * _gradient(clients.model, w, clients.x[2], clients.y[2])
        if preset == "reference":
            expected = expected - 0.2 * _gradient(clients.model, expected, clients.x[2], clients.y[2])
        torch.testing.assert_close(adapted[2], expected, rtol=1e-4, atol=1e-5)


def test_hessian_product() -> None:
    clients = classification(_model(), clients=2)
    w = clients.model.init(Key(1))
    v = torch.randn(2, clients.model.dim, generator=Key(2).torch())
    found = hessian_product(clients.model, w, v, clients.everything(), {})
    for k in range(2):
        exact = torch.autograd.functional.hvp(
            lambda p, k=k: _loss(clients.model, p, clients.x[k], clients.y[k]), w, v[k]
        )[1]
        torch.testing.assert_close(found[k], exact, rtol=1e-3, atol=1e-4)


def test_lg_fedavg_shares_only_the_head() -> None:
    model = models.build("mnist-mlp", (8,), 4)
    clients = classification(model)
    algorithm = LGFedAvg(head_layers=1).build(setup(6))
    start = algorithm.init(model, clients.ids, Key(1))
    head = model.last(1)
    assert start.broadcast["head"].shape == (head.size,)
    step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    assert step.messages.vectors.shape == (6, head.size)
    done = algorithm.server(step.messages, start.server, 0, Key(3))
    scored = algorithm.evaluated(done.broadcast, step.state, clients, Key(4))
    assert torch.equal(scored[:, head.slice], done.broadcast["head"].expand(6, -1))
    assert torch.equal(scored[:, : head.start], step.state["x"][:, : head.start])
    assert not torch.equal(step.state["x"][0, : head.start], step.state["x"][1, : head.start])


@pytest.mark.parametrize(
    ("name", "layers", "shape", "classes", "size"),
    [
        ("mnist-mlp", 1, (784,), 10, 1010),
        ("emnist-mlp", 1, (784,), 62, 6262),
        ("cifar-cnn", 2, (3, 32, 32), 10, 11014),
        ("fashion-resnet", 2, (1, 28, 28), 10, 1546),
    ],
)
def test_heads_have_the_published_sizes(
    name: str, layers: int, shape: tuple[int, ...], classes: int, size: int
) -> None:
    assert models.build(name, shape, classes).last(layers).size == size


@pytest.mark.parametrize("name", ["lp-proj", "fedavg", "ditto", "pfedme", "rsa", "per-fedavg", "lg-fedavg"])
def test_private_messages_are_clipped_and_noised(name: str) -> None:
    """Without noise every move has at most norm C; with it, what is added has the law asked for."""
    clients = replace(classification(_model()), noise=Seeded())
    quiet, loud = Release(0.01, NoiseLaw()), Release(0.01, NoiseLaw(sigma_ind=3.0))
    sent = []
    for release in (quiet, loud):
        algorithm = settings_of(name).build(setup(6, release=release))
        assert algorithm.release == release
        start = algorithm.init(clients.model, clients.ids, Key(1))
        step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
        sent.append(step.messages.vectors)
        origin = next(iter(start.broadcast.values()))
        if release is quiet:
            norms = (step.messages.vectors - origin).norm(dim=1)
            assert bool((norms <= 0.01 * (1 + 1e-3)).all())
            assert step.report["clipped"].mean() > 0
    noise = sent[1] - sent[0]
    expected = torch.stack(
        [Seeded().draw(loud.law, (k,), noise.shape[1], 0, noise.device)[0] for k in range(6)]
    )
    torch.testing.assert_close(noise, expected, rtol=1e-3, atol=1e-4)


def test_exposure_protects_a_whole_client() -> None:
    for name in ("lp-proj", "fedavg", "ditto"):
        release = algorithms[name]().exposure(0.5, 100)
        assert (release.unit, release.sensitivity) == ("user", 1.0)


def test_server_momentum() -> None:
    """β moves the server part of the way, or beyond."""
    clients = classification(_model())
    for settings in (LpProj(dim=4, beta=0.5), FedAvg(beta=0.5)):
        name = "w" if isinstance(settings, LpProj) else "params"
        half = rounds(settings, clients, 1)
        whole = rounds(settings.model_copy(update={"beta": 1.0}), clients, 1)
        algorithm = settings.build(setup(6))
        start = algorithm.init(clients.model, clients.ids, Key(1).fold("init")).broadcast[name]
        torch.testing.assert_close(
            half.broadcast[name], (start + whole.broadcast[name]) / 2, rtol=1e-4, atol=1e-6
        )


def _pictures() -> ArrayClients:
    model = models.build("fashion-resnet", (1, 28, 28), 10)
    generator = Key(3).torch()
    x = torch.randn(2, 6, 1, 28, 28, generator=generator)
    return ArrayClients(x, torch.randint(0, 10, (2, 6), generator=generator), model, (0, 1))


@pytest.mark.slow
def test_batch_norm_statistics_stay_local_or_travel() -> None:
    clients = _pictures()
    names = [name for name, _ in clients.model.buffers]
    local = rounds(FedAvg(local_steps=1, batch_size=6), clients, 1)
    assert any(not torch.equal(local.state[name][0], local.state[name][1]) for name in names)
    assert local.messages[0].vectors.shape[1] == clients.model.dim

    settings = FedAvg(local_steps=1, batch_size=6, statistics="averaged")
    shared = rounds(settings, clients, 1)
    count = sum(torch.Size(shape).numel() for _, shape in clients.model.buffers)
    assert shared.messages[0].vectors.shape[1] == clients.model.dim + count
    assert {name: tuple(part.shape) for name, part in shared.broadcast.items() if name != "params"} == dict(
        clients.model.buffers
    )
    scored = settings.build(setup(2)).evaluated(shared.broadcast, shared.state, clients, Key(1))
    torch.testing.assert_close(scored[0], scored[1])


@pytest.mark.slow
def test_statistics_folded_into_parameters_score_the_same() -> None:
    clients = _pictures()
    model = clients.model
    generator = Key(4).torch()
    statistics = {
        name: torch.rand(2, *shape, generator=generator) + 0.5 * name.endswith("variance")
        for name, shape in model.buffers
    }
    params = initial_models(model, (0, 1), Key(5))
    batch = clients.everything()
    direct = models.evaluate(model, params, batch.x, batch.y, buffers=statistics)
    folded = with_statistics(model, params, statistics, EPSILON)
    again = models.evaluate(model, folded, batch.x, batch.y, buffers=model.initial_buffers(2))
    torch.testing.assert_close(direct.loss, again.loss, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*NAMES, "sketch", "lbgm", "qsgd", "dgc"])
def test_a_round_on_a_gpu_is_the_round_on_a_cpu(name: str) -> None:
    clients = classification(_model())
    algorithm = algorithms[name]().build(setup(6))
    start = algorithm.init(clients.model, clients.ids, Key(1))
    here = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    moved = replace(clients, x=clients.x.cuda(), y=clients.y.cuda())
    broadcast = {field: value.cuda() for field, value in start.broadcast.items()}
    state = {field: value.cuda() for field, value in start.clients.items()}
    there = algorithm.client(broadcast, state, moved, 0, Key(2))
    torch.testing.assert_close(there.messages.vectors.cpu(), here.messages.vectors, rtol=1e-3, atol=1e-4)
    server = {field: value.cuda() for field, value in start.server.items()}
    last = Key(3)
    after = algorithm.server(heard(algorithm, there, server, 0, last), server, 0, last).broadcast
    told = heard(algorithm, here, start.server, 0, last)
    expected = algorithm.server(told, start.server, 0, last).broadcast
    for field, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(after[field].cpu(), value, rtol=1e-3, atol=1e-4)
    scored = algorithm.evaluated(after, there.state, moved, Key(4))
    right = algorithm.evaluated(expected, here.state, clients, Key(4))
    torch.testing.assert_close(scored.cpu(), right, rtol=1e-3, atol=1e-4)
