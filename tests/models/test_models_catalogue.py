"""Sizes, order of the parameters, initialisation and forward passes of every registered model."""

from __future__ import annotations

import math

import pytest
import torch
from model_oracles import CASES, at, module

from trilemma import models
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key

NAMES = sorted(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_size_and_order_are_those_of_the_module(name):
    shape, classes, dim = CASES[name]
    model = models.build(name, shape, classes)
    assert model.dim == dim
    assert [size for _, size in model.shapes] == [tuple(p.shape) for p in module(name).parameters()]
    assert [span.stop for span in model.tensors][-1] == dim
    assert sum(layer.size for layer in model.layers) == dim


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_modules(name):
    shape, classes, _ = CASES[name]
    model = models.build(name, shape, classes)
    theta = model.init(Key(3))
    x = torch.randn(4, *shape, generator=Key(4).torch())
    net = at(module(name), theta).eval()
    saved = None
    if model.buffers:
        from trilemma.models.engines.saved import SavedActivations

        saved = SavedActivations(buffers=model.initial_buffers(1))
    expected = net(x).detach()
    logits = model.forward(models.unflatten(model, theta), x, saved)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.predict(logits), logits.argmax(-1) if classes > 2 else (logits[:, 0] > 0).long())


@pytest.mark.parametrize("name", NAMES)
def test_initialisation_is_pytorchs_law(name):
    shape, classes, dim = CASES[name]
    model = models.build(name, shape, classes)
    state = torch.get_rng_state()
    flat = model.init(Key(7))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    assert flat.dtype == torch.float32
    assert flat.shape == (dim,)
    assert torch.equal(flat, model.init(Key(7)))
    assert not torch.equal(flat, model.init(Key(8)))
    parts, net = models.unflatten(model, flat), module(name)
    for (tensor, part), theirs in zip(parts.items(), net.parameters(), strict=True):
        if "norm" in tensor:
            assert torch.equal(part, theirs), tensor
            continue
        weight = parts[tensor.replace(".bias", ".weight")]
        bound = 1.0 / math.sqrt(weight[0].numel())
        assert part.abs().max() <= bound
        if part.numel() > 400:
            assert part.abs().max() > 0.97 * bound
            assert abs(float(part.std()) / (bound / math.sqrt(3)) - 1) < 0.1


def test_layers_give_the_heads_that_lg_fedavg_shares():
    heads = {
        "mnist-mlp": (1, 1010),
        "emnist-mlp": (1, 6262),
        "cifar-cnn": (2, 11014),
        "fashion-resnet": (2, 1546),
    }
    for name, (count, size) in heads.items():
        shape, classes, dim = CASES[name]
        model = models.build(name, shape, classes)
        assert model.last(count).size == size
        assert model.last(0).size == dim
    with pytest.raises(UserError, match="allowed are 0"):
        model.last(99)


def test_unflatten_gives_views_and_flatten_inverts_it():
    model = models.build("mlp", (6,), 3, hidden=(4, 5))
    for flat in (torch.randn(model.dim), torch.randn(7, model.dim)):
        parts = models.unflatten(model, flat)
        assert torch.equal(models.flatten(model, parts), flat)
        parts["fc2.weight"].zero_()
        span = next(span for span in model.tensors if span.name == "fc2.weight")
        assert flat[..., span.slice].abs().max() == 0
    with pytest.raises(UserError, match="expected a vector"):
        models.unflatten(model, torch.zeros(model.dim + 1))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cnm", (1, 28, 28), 10), {}, "did you mean 'cnn'"),
        (("cnn", (784,), 10), {}, "needs images"),
        (("cnn", (1, 8, 8), 10), {}, "at least 16×16"),
        (("mlp", (784,), 1), {}, "at least 2 classes"),
        (("mlp", (0,), 2), {}, "positive sizes"),
        (("mlp", (784,), 10), {"hidden": (0,)}, "hidden.0 = 0: allowed: at least 1"),
        (("mlp", (784,), 10), {"hiden": (3,)}, "did you mean 'hidden'"),
    ],
)
def test_bad_requests_say_what_is_allowed(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build(*arguments, **options)


def test_logistic_with_more_classes_is_multinomial():
    assert models.build("logistic", (60,), 10).dim == 610


def test_images_without_a_channel_axis_are_taken():
    assert models.build("cnn", (28, 28), 10).dim == 431080


def test_models_of_equal_layers_are_equal():
    shape = (1, 28, 28)
    for name in ("cnn", "fashion-resnet", "mnist-mlp"):
        first, second = models.build(name, shape, 10), models.build(name, shape, 10)
        assert first == second
        assert hash(first) == hash(second)
        assert first != models.build(name, shape, 9)
    assert models.build("mlp", shape, 10, hidden=(8, 9)) != models.build("mlp", shape, 10, hidden=(9, 8))
