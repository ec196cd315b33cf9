"""lp-proj, pFedMe and RSA against exact solutions, against each other, and against a loop written plainly."""

from __future__ import annotations

from dataclasses import replace

import linear_oracle as oracle
import numpy as np
import pytest
import torch
from personal_clients import ArrayClients, Dense, classification, regression, rounds, run, setup
from torch import Tensor

from trilemma import models
from trilemma.base.keys import Key
from trilemma.learning import Messages
from trilemma.learning.personal.bilevel import Coupling, bilevel_algorithm, norm, squared
from trilemma.learning.personal.lp_proj import LpProj
from trilemma.learning.personal.pfedme import PFedMe
from trilemma.learning.personal.rsa import RSA

FULL, SUB, CLIENTS, HELD = 5, 2, 4, 12


def _regression(equal: bool) -> tuple[ArrayClients, np.ndarray, np.ndarray]:
    """Clients with linear data; A_k and least-squares solutions. `equal`: A_k = I for everyone."""
    rng = np.random.default_rng(3)
    designs = rng.standard_normal((CLIENTS, HELD, FULL))
    designs[..., -1] = 1.0
    if equal:
        # Columns orthogonal to the ones and to each other, all of norm √n; the ones come back last.
        bases = [np.linalg.qr(np.roll(design, 1, axis=1))[0] * np.sqrt(HELD) for design in designs]
        designs = np.roll(np.stack([basis * np.sign(basis[0, 0]) for basis in bases]), -1, axis=2).round(15)
        designs[..., -1] = 1.0
    y = np.einsum("kni,ki->kn", designs, rng.standard_normal((CLIENTS, FULL)))
    y = y + rng.standard_normal((CLIENTS, HELD))
    a = np.einsum("kni,knj->kij", designs, designs) / HELD
    what = np.stack([np.linalg.lstsq(d, t, rcond=None)[0] for d, t in zip(designs, y, strict=True)])
    clients = regression(designs, y)
    return clients, a, what


def _settings(**given: object) -> LpProj:
    full_batch = {"batch_size": HELD, "weight_decay": 0.0, "personal_lr": 0.3}
    return LpProj(**{**full_batch, **given})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["orthonormal", "gaussian", "identity"])
def test_lp_proj_2_finds_the_exact_solution(kind: str) -> None:
    """Any P, general design: many short rounds of exact solves find w and every x_k of the linear solve."""
    clients, a, what = _regression(equal=False)
    rows = np.random.default_rng(1).standard_normal((SUB, FULL))
    matrix = {
        "orthonormal": np.linalg.qr(rows.T)[0].T,
        "gaussian": rows / np.linalg.norm(rows, axis=1, keepdims=True),
        "identity": np.eye(FULL),
    }[kind]
    settings = _settings(p=2, lam=0.8, lr=1.2, local_rounds=1, inner_steps=3000, tolerance=1e-20)
    coupling = Coupling(
        project=lambda model, seed, device: Dense(torch.from_numpy(matrix)),
        size=lambda model: len(matrix),
        start=lambda model, key: torch.zeros(len(matrix), dtype=torch.float64),
        penalty=squared,
        decay=0.0,
    )
    done = run(bilevel_algorithm("test", settings, coupling, setup(CLIENTS)), clients, 50)
    w = oracle.common(a, what, 0.8, matrix)
    np.testing.assert_allclose(done.broadcast["w"], w, atol=1e-8)
    np.testing.assert_allclose(done.state["x"], oracle.personal(a, what, w, 0.8, matrix), atol=1e-8)


@pytest.mark.slow
def test_one_round_of_many_local_steps_is_exact_for_equal_designs() -> None:
    """w_k → P ŵ_k at rate 1 − η λ b/(b+λ), so the mean of one round is already the solution."""
    clients, a, what = _regression(equal=True)
    p = np.linalg.qr(np.random.default_rng(1).standard_normal((FULL, SUB)))[0].T
    settings = _settings(p=2, lam=1.0, lr=0.5, local_rounds=100, inner_steps=2000, tolerance=1e-26)
    coupling = Coupling(
        squared,
        0.0,
        project=lambda model, seed, device: Dense(torch.from_numpy(p)),
        size=lambda model: SUB,
        start=lambda model, key: torch.zeros(SUB, dtype=torch.float64),
    )
    done = run(bilevel_algorithm("test", settings, coupling, setup(CLIENTS)), clients, 1)
    np.testing.assert_allclose(done.messages[0].vectors, what @ p.T, atol=1e-8)
    np.testing.assert_allclose(done.broadcast["w"], oracle.common(a, what, 1.0, p), atol=1e-8)


def test_lambda_zero_is_local_least_squares() -> None:
    clients, _, what = _regression(equal=False)
    settings = PFedMe(
        lam=0.0,
        batch_size=HELD,
        weight_decay=0.0,
        personal_lr=0.15,
        inner_steps=4000,
        tolerance=1e-28,
        local_rounds=1,
    )
    np.testing.assert_allclose(rounds(settings, clients, 1).state["x"], what, atol=1e-8)


def test_identity_and_p_2_is_pfedme() -> None:
    """From the same start, lp-proj-2 with P = I and pFedMe take the same steps, bit for bit."""
    clients = classification(_classifier())
    common = {"lam": 0.7, "local_rounds": 3, "inner_steps": 4, "batch_size": 16}
    lp = LpProj(p=2, projection="identity", **common).build(setup(6))
    me = PFedMe(**common).build(setup(6))
    start = replace(lp, init=me.init)
    left, right = run(start, clients, 4), run(me, clients, 4)
    assert torch.equal(left.broadcast["w"], right.broadcast["w"])
    assert torch.equal(left.state["x"], right.state["x"])


def test_identity_and_p_1_is_rsa() -> None:
    clients = classification(_classifier())
    common = {"lam": 0.05, "local_rounds": 2, "inner_steps": 3, "batch_size": 16}
    lp = LpProj(p=1, projection="identity", **common).build(setup(6))
    rsa = RSA(**common).build(setup(6))
    left, right = run(replace(lp, init=rsa.init), clients, 3), run(rsa, clients, 3)
    assert torch.equal(left.state["x"], right.state["x"])


def _classifier() -> models.Model:
    return models.build("multinomial", (8,), 4)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("preset", ["correct", "reference"])
def test_a_round_is_what_the_formulas_say(p: int, preset: str) -> None:
    """One client at a time, one step at a time, gradients by autograd."""
    clients = classification(_classifier(), clients=3)
    settings = LpProj(
        p=p, dim=5, lam=0.9, lr=0.2, personal_lr=0.3, local_rounds=2, inner_steps=3, batch_size=16,
        weight_decay=0.05, preset=preset,
    )  # fmt: skip
    algorithm = settings.build(setup(3))
    start = algorithm.init(clients.model, clients.ids, Key(1).fold("init"))
    step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(1).fold("round", 0))
    matrix = settings._project(clients.model, int(start.clients["seed"][0]), torch.device("cpu")).stored

    decay = 0.0 if (p == 1 and preset == "reference") else 0.05
    for k in range(3):
        x, w = start.clients["x"][k].clone(), torch.zeros(5)
        batches = list(clients.only(k).epochs(16, 6, Key(1).fold("round", 0).fold("batch")))
        for r in range(2):
            for i in range(3):
                batch = batches[3 * r + i]
                g = _gradient(clients.model, x, batch.x[0], batch.y[0])
                g = g * min(1.0, 60.0 / float(g.norm()))
                c = w - matrix @ x
                x = x - 0.3 * (g + decay * x - 0.9 * matrix.T @ (c if p == 2 else c.sign()))
            c = w - matrix @ x
            w = w - 0.2 * 0.9 * (c if p == 2 else c.sign())
        torch.testing.assert_close(step.state["x"][k], x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.messages.vectors[k], w, rtol=1e-4, atol=1e-5)


def _gradient(model: models.Model, x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    logits = model.forward(models.unflatten(model, leaf), features, None)
    (grad,) = torch.autograd.grad(model.loss(logits, labels).mean(), leaf)
    return grad


def test_personal_models_are_warm() -> None:
    clients = classification(_classifier())
    settings = LpProj(dim=5, local_rounds=1, inner_steps=5, batch_size=16)
    first, third = rounds(settings, clients, 1), rounds(settings, clients, 3)
    assert third.reports[-1]["loss"].mean() < first.reports[0]["loss"].mean()
    assert len(third.messages[0].vectors[0]) == 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_common_vector_that_is_not_finite(bad: float) -> None:
    """p = 1 goes on without that coordinate's penalty and says so; "star" and p = 2 diverge."""
    clients = classification(_classifier())
    common = {"dim": 4, "local_rounds": 1, "inner_steps": 2, "batch_size": 16}
    w = {"w": torch.tensor([bad, 0.0, 0.0, 0.0])}

    def step(settings: LpProj) -> object:
        algorithm = settings.build(setup(6))
        start = algorithm.init(clients.model, clients.ids, Key(1))
        return algorithm, algorithm.client(w, start.clients, clients, 0, Key(2))

    algorithm, dropped = step(LpProj(p=1, **common))
    assert algorithm.tolerates_nonfinite
    assert torch.isfinite(dropped.state["x"]).all()
    assert torch.isfinite(dropped.report["loss"]).all()
    assert dropped.report["unregularised"].tolist() == [0.25] * 6
    for settings in (LpProj(p=1, nonfinite="star", **common), LpProj(p=2, **common)):
        algorithm, lost = step(settings)
        assert not algorithm.tolerates_nonfinite
        assert not torch.isfinite(lost.report["loss"]).any()


def test_no_finite_message_leaves_nan_not_an_exception() -> None:
    algorithm = LpProj(dim=4).build(setup(6))
    start = algorithm.init(_classifier(), (0, 1), Key(1))
    done = algorithm.server(Messages(torch.full((2, 4), torch.inf)), start.server, 0, Key(1))
    assert torch.isnan(done.broadcast["w"]).all()
    assert done.report["weights"].tolist() == [0.0, 0.0]


def test_norm_penalty_is_the_gradient_of_the_norm() -> None:
    c = torch.randn(4, 7, dtype=torch.float64, generator=Key(1).torch(), requires_grad=True)
    for p in (1.0, 1.5, 2.0, 3.0):
        (grad,) = torch.autograd.grad(torch.linalg.vector_norm(c, ord=p, dim=1).sum(), c)
        torch.testing.assert_close(norm(p)(c.detach()), grad)
    assert torch.equal(norm(2.0)(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_first_w_of_pfedme_is_the_model_of_client_0() -> None:
    model = _classifier()
    start = PFedMe().build(setup(3)).init(model, (2, 0), Key(4))
    assert torch.equal(start.broadcast["w"], start.clients["x"][1])
