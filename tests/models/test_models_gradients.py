"""Stacked gradients against the obvious loop: every model, every clipping, shared and personal, uneven."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_oracles import CASES, at, gradient, losses, module, reference

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.engines import groups
from trilemma.models.layers.layers import Linear, sequential
from trilemma.testing.examples import Stack

NAMES = sorted(CASES)


def problem(name: str, clients: int = 3, size: int = 4, personal: bool = False, uneven: bool = False):
    """Return a model, parameters and a batch; uneven: padding and weights that are not 1/b."""
    shape, classes, _ = CASES[name]
    model = models.build(name, shape, classes)
    key = Key(11).fold(name)
    params = torch.stack([model.init(key.fold(i)) for i in range(clients)]) if personal else model.init(key)
    generator = key.fold("batch").torch()
    x = torch.randn(clients, size, *shape, generator=generator)
    y = torch.randint(classes, (clients, size), generator=generator)
    weight = None
    if uneven:
        weight = torch.rand(clients, size, generator=generator) + 0.1
        weight[0, -1] = 0.0
        weight[-1, 1:] = 0.0 if not model.buffers else weight[-1, 1:]
        weight /= weight.sum(1, keepdim=True)
    return model, params, Stack(x, y, weight)


def middle(model, params, batch, unit: str) -> float:
    """Return a threshold that clips some and not others."""
    norms = models.gradients(model, params, batch, clip=Clip(unit, math.inf)).norms
    present = norms[norms > 0]
    return float((present.min() + present.max()) / 2)


def close(actual, expected):
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=1e-5 * max(scale, 1e-3), rtol=1e-5)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
@pytest.mark.parametrize("unit", ["none", "client", "example"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_loop(name, unit, personal, uneven):
    model, params, batch = problem(name, personal=personal, uneven=uneven)
    if unit == "example" and model.buffers:
        with pytest.raises(UserError, match="per-example clipping is undefined"):
            models.gradients(model, params, batch, clip=Clip.example(1.0))
        return
    threshold = math.inf if unit == "none" else middle(model, params, batch, unit)
    result = models.gradients(model, params, batch, clip=Clip(unit, threshold))
    expected = reference(module(name), params, batch, unit, threshold)
    close(result.value, expected)
    if unit != "none":
        assert 0 < result.clipped.sum() < len(result.clipped)
    assert not result.value.requires_grad


@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
@pytest.mark.parametrize("name", NAMES)
def test_infinite_thresholds_change_no_bit(name, personal):
    model, params, batch = problem(name, personal=personal, uneven=True)
    plain = models.gradients(model, params, batch, weight_decay=0.1)
    units = ["client"] if model.buffers else ["client", "example"]
    for unit in units:
        free = models.gradients(model, params, batch, clip=Clip(unit, math.inf), weight_decay=0.1)
        assert torch.equal(free.value, plain.value)
        assert torch.equal(free.loss, plain.loss)
        assert free.clipped.sum() == 0


@pytest.mark.parametrize("name", NAMES)
def test_one_by_one_equals_stacked(name):
    model, params, batch = problem(name, clients=4, personal=True, uneven=True)
    clip = Clip.client(1.0) if model.buffers else Clip.example(1.0)
    whole = models.gradients(model, params, batch, clip=clip)
    for i in range(4):
        one = Stack(batch.x[i : i + 1], batch.y[i : i + 1], batch.weight[i : i + 1])
        own = models.gradients(model, params[i], one, clip=clip)
        torch.testing.assert_close(own.value[0], whole.value[i], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(own.loss[0], whole.loss[i], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("unit", ["none", "client", "example"])
@pytest.mark.parametrize("name", ["emnist-mlp", "cifar-cnn"])
def test_memory_bounds_groups_but_not_results(name, unit):
    model, params, batch = problem(name, clients=5, size=7, uneven=True)
    clip = Clip(unit, math.inf if unit == "none" else 0.8)
    ample = models.gradients(model, params, batch, clip=clip)
    for memory in (1, 300_000, 3_000_000):
        tight = models.gradients(model, params, batch, clip=clip, memory=memory)
        torch.testing.assert_close(tight.value, ample.value, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(tight.loss, ample.loss, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(tight.clipped, ample.clipped)


@given(clients=st.integers(1, 40), size=st.integers(1, 90), memory=st.integers(1, 1 << 22))
def test_groups_cover_every_example_once_within_memory(clients, size, memory):
    model = models.build("mnist-mlp", (784,), 10)
    seen = torch.zeros(clients, size, dtype=torch.int64)
    each = groups.footprint(model, (784,))
    for rows, columns in groups.groups(model, Stack(torch.empty(clients, size, 784), seen), memory):
        seen[rows, columns] += 1
        taken = seen[rows, columns].numel()
        assert taken == 1 or taken * each <= memory
    assert (seen == 1).all()


def test_norms_losses_and_shares_are_those_of_the_examples():
    model, params, batch = problem("cnn", uneven=True)
    net = at(module("cnn"), params)
    result = models.gradients(model, params, batch, clip=Clip.example(1.5))
    for i in range(3):
        for j in range(4):
            norm = gradient(net, batch.x[i, j : j + 1], batch.y[i, j : j + 1], torch.ones(1)).norm()
            expected = norm if batch.weight[i, j] > 0 else torch.zeros(())
            torch.testing.assert_close(result.norms[i, j], expected, rtol=1e-5, atol=1e-5)
        real = batch.weight[i] > 0
        torch.testing.assert_close(result.clipped[i], (result.norms[i][real] > 1.5).float().mean())
        loss = (losses(net(batch.x[i]), batch.y[i]) * batch.weight[i]).sum().detach()
        torch.testing.assert_close(result.loss[i], loss)
    whole = models.gradients(model, params, batch, clip=Clip.client(1.5))
    assert whole.norms.shape == (3,)
    assert (whole.value.norm(dim=1) <= 1.5 * (1 + 1e-5)).all()


@pytest.mark.parametrize("unit", ["none", "client", "example"])
def test_a_client_without_examples_has_gradient_zero(unit):
    model, params, batch = problem("cifar-cnn", uneven=True)
    batch.weight[1] = 0.0
    result = models.gradients(model, params, batch, clip=Clip(unit, math.inf if unit == "none" else 0.5))
    assert result.value[1].abs().max() == 0
    assert result.clipped[1] == 0
    assert result.loss[1] == 0
    assert result.value.isfinite().all()


def test_a_client_without_examples_keeps_its_running_statistics():
    model, params, batch = problem("fashion-resnet", uneven=True)
    batch.weight[1] = 0.0
    start = {name: value + 0.5 for name, value in model.initial_buffers(3).items()}
    result = models.gradients(model, params, batch, buffers=start)
    assert result.value[1].abs().max() == 0
    assert result.value.isfinite().all()
    for name, value in result.buffers.items():
        assert torch.equal(value[1], start[name][1])
        assert not torch.equal(value[0], start[name][0])


@pytest.mark.parametrize("unit", ["none", "client", "example"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_stays_with_its_client(unit, bad):
    model, params, batch = problem("cnn")
    clip = Clip(unit, math.inf if unit == "none" else 0.5)
    clean = models.gradients(model, params, batch, clip=clip)
    batch.x[1, 2, 0, 3, 3] = bad
    result = models.gradients(model, params, batch, clip=clip)
    others = [0, 2]
    torch.testing.assert_close(result.value[others], clean.value[others], atol=1e-7, rtol=1e-6)
    if math.isnan(bad) and unit == "example":  # that example alone is left out
        assert result.value[1].isfinite().all()
        assert result.value[1].norm() > 0
    elif math.isnan(bad):
        assert result.value[1].isnan().any()
    elif result.value[1].isfinite().all() and unit != "none":
        assert result.value[1].norm() <= 0.5 * (1 + 1e-5)


def test_same_arguments_same_bytes_and_nothing_is_touched():
    model, params, batch = problem("cnn", personal=True, uneven=True)
    before = [params.clone(), batch.x.clone(), batch.weight.clone(), torch.get_rng_state()]
    first = models.gradients(model, params.requires_grad_(), batch, clip=Clip.example(0.7), weight_decay=0.1)
    with torch.no_grad():
        second = models.gradients(model, params, batch, clip=Clip.example(0.7), weight_decay=0.1)
    assert torch.equal(first.value, second.value)
    assert not first.value.requires_grad
    for old, new in zip(before, [params.detach(), batch.x, batch.weight, torch.get_rng_state()], strict=True):
        assert torch.equal(old, new)
    assert params.grad is None


@pytest.mark.parametrize("padded", [False, True])
def test_running_statistics_are_the_modules(padded):
    name = "fashion-resnet"
    model, params, batch = problem(name, personal=True)
    if padded:
        weight = torch.full((3, 4), 0.25)
        weight[1] = torch.tensor([0.5, 0.5, 0.0, 0.0])
        batch = Stack(batch.x, batch.y, weight)
    start = model.initial_buffers(3)
    kept = {part: value.clone() for part, value in start.items()}
    result = models.gradients(model, params, batch, buffers=start)
    assert all(torch.equal(start[part], kept[part]) for part in start), "buffers come in and go out"
    for i in range(3):
        net = at(module(name), params[i]).train()
        net(batch.x[i][: 2 if padded and i == 1 else 4])
        theirs = [part for part in net.modules() if isinstance(part, torch.nn.BatchNorm2d)]
        names = [part.removesuffix(".mean") for part in result.buffers if part.endswith(".mean")]
        for part, norm in zip(names, theirs, strict=True):
            torch.testing.assert_close(
                result.buffers[f"{part}.mean"][i], norm.running_mean, atol=1e-5, rtol=1e-4
            )
            torch.testing.assert_close(
                result.buffers[f"{part}.variance"][i], norm.running_var, atol=1e-5, rtol=1e-4
            )
    assert models.gradients(model, params, batch).buffers == {}


def test_what_cannot_be_meant_is_refused():
    model, params, batch = problem("logistic", personal=True)
    for arguments, message in [
        ((model, params[:2], batch), "2 personal models for 3 clients"),
        ((model, params[:, :5], batch), "69 parameters"),
        ((model, params, Stack(batch.x, batch.y[:, :1])), r"features \(k, b, …\) and labels \(k, b, …\)"),
        ((model, params, Stack(batch.x, batch.y, torch.ones(3, 1))), r"must be \(clients, examples\)"),
    ]:
        with pytest.raises(UserError, match=message):
            models.gradients(*arguments)
    with pytest.raises(UserError, match="running statistics"):
        models.gradients(model, params, batch, buffers={"norm.mean": torch.zeros(3, 1)})
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(UserError, match="must be positive"):
            Clip.client(threshold)


def test_a_model_whose_layers_save_nothing_is_refused():
    model, params, batch = problem("multinomial")
    silent = replace(model, forward=lambda p, x, saved: x @ p["fc1.weight"].mT + p["fc1.bias"])
    with pytest.raises(UserError, match=r"must save the output of each of its layers \['fc1'\]"):
        models.gradients(silent, params, batch)
    twice = sequential("twice", [Linear("fc", 60, 60), Linear("fc", 60, 60)])
    with pytest.raises(UserError, match="must save the output"):
        models.gradients(twice, twice.init(Key(1)), batch)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
@pytest.mark.parametrize("unit", ["none", "client", "example"])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_equals_the_loop_and_repeats_bit_for_bit(name, uneven, unit, personal):
    model, params, batch = problem(name, personal=personal, uneven=uneven)
    if unit == "example" and model.buffers:
        pytest.skip("undefined with batch normalisation")
    threshold = math.inf if unit == "none" else middle(model, params, batch, unit)
    there = Stack(batch.x.cuda(), batch.y.cuda(), None if batch.weight is None else batch.weight.cuda())
    buffers = model.initial_buffers(3, "cuda") if model.buffers else None
    first, second = (
        models.gradients(model, params.cuda(), there, clip=Clip(unit, threshold), buffers=buffers)
        for _ in range(2)
    )
    close(first.value.cpu(), reference(module(name), params, batch, unit, threshold))
    assert torch.equal(first.value, second.value)
    assert first.value.device.type == first.clipped.device.type == "cuda"
    here = models.gradients(model, params, batch, buffers=model.initial_buffers(3) if model.buffers else None)
    for name, fresh in first.buffers.items():
        close(fresh.cpu(), here.buffers[name])


@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_a_regulariser_is_added_after_clipping(name, unit, personal):
    model, params, batch = problem(name, personal=personal, uneven=True)
    plain = models.gradients(model, params, batch, clip=Clip(unit, 0.7))
    found = models.gradients(model, params, batch, clip=Clip(unit, 0.7), weight_decay=0.5)
    close(found.value, plain.value + 0.5 * params)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("name", ["logistic", "cnn"])
def test_what_stands_in_an_empty_place_does_no_harm(name, careful):
    """An example that was not drawn may stand there: it must not decide about those that were."""
    shape, classes = ((68,), 2) if name == "logistic" else ((1, 28, 28), 10)
    model = models.build(name, shape, classes)
    generator = Key(5).torch()
    x = torch.randn(1, 4, *shape, generator=generator)
    batch = Stack(
        x, torch.randint(classes, (1, 4), generator=generator), torch.tensor([[0.3, 0.3, 0.3, 0.0]])
    )
    clip = Clip.example(1.0, careful)
    plain = models.gradients(model, model.init(Key(1)), batch, clip=clip)
    batch.x[0, 3] = torch.nan
    found = models.gradients(model, model.init(Key(1)), batch, clip=clip)
    assert torch.equal(found.value, plain.value)
    assert float(found.loss) == pytest.approx(float(plain.loss))


@pytest.mark.parametrize("name", ["logistic", "cnn", "module"])
def test_an_example_without_a_finite_gradient_is_left_out(name):
    """The others' clipped gradients are as without it; a client with no other example has gradient zero."""
    if name == "module":
        model = models.from_module(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss())
        shape, classes = (4,), 3
    else:
        shape, classes = ((68,), 2) if name == "logistic" else ((1, 28, 28), 10)
        model = models.build(name, shape, classes)
    generator = Key(5).torch()
    x = torch.randn(3, 4, *shape, generator=generator)
    y = torch.randint(classes, (3, 4), generator=generator)
    params = model.init(Key(1))
    broken = x.clone()
    broken[0, 2], broken[1] = torch.nan, torch.inf
    weight = torch.full((3, 4), 0.25)
    weight[0, 2], weight[1] = 0.0, 0.0
    clip = models.Clip.example(0.5)
    without = models.gradients(model, params, SimpleNamespace(x=x, y=y, weight=weight), clip=clip)
    found = models.gradients(model, params, SimpleNamespace(x=broken, y=y, weight=None), clip=clip)
    torch.testing.assert_close(found.value[[0, 2]], without.value[[0, 2]], rtol=1e-6, atol=1e-7)
    assert not found.value[1].any()
