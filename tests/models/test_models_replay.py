"""Gradients that are replayed on a GPU are those that are computed, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trilemma import models
from trilemma.base.keys import Key
from trilemma.base.recordings import Recordings, unasked
from trilemma.models import Clip
from trilemma.models.engines import replay
from trilemma.models.engines.precision import products
from trilemma.models.layers.layers import Layer, Linear, sequential
from trilemma.testing.examples import Stack

on_a_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_a_gpu)]


def asked(name: str, device: str, turn: int, padded: bool):
    """Return a model, parameters of 3 clients, their batch and running statistics, others every turn."""
    shape = (1, 28, 28)
    model = models.build(name, shape, 10)
    generator = Key(5).fold(name, turn).torch()
    params = torch.stack([model.init(Key(turn).fold(i)) for i in range(3)])
    weight = torch.rand(3, 4, generator=generator) + 0.1
    weight[1, 2:] = 0.0
    weight /= weight.sum(1, keepdim=True)
    x, y = torch.randn(3, 4, *shape, generator=generator), torch.randint(10, (3, 4), generator=generator)
    batch = Stack(x.to(device), y.to(device), weight.to(device) if padded else None)
    buffers = {key: part + turn for key, part in model.initial_buffers(3, device).items()}
    return model, params.to(device), batch, buffers


@pytest.fixture
def recordings(monkeypatch):
    """Forget what others recorded; return what there is."""
    fresh = Recordings(replay.KEPT)
    monkeypatch.setattr(replay, "_recordings", fresh)
    return fresh.kept


BY_CLIENT, BY_EXAMPLE, CAREFULLY = Clip.client(0.5), Clip.example(0.5), Clip.example(0.5, careful=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "padded", "clip"),
    [
        *((name, padded, BY_CLIENT) for name in ("mnist-mlp", "cnn") for padded in (False, True)),
        *((name, False, clip) for name in ("mnist-mlp", "cnn") for clip in (BY_EXAMPLE, CAREFULLY)),
        *(pytest.param("fashion-resnet", padded, BY_CLIENT, marks=pytest.mark.slow) for padded in (0, 1)),
    ],
)
def test_replayed_is_computed(name, padded, clip, device, recordings):
    model, *_ = asked(name, device, 0, padded)
    kept = []
    for turn in range(4):
        _, params, batch, buffers = asked(name, device, turn, padded)
        own = {"clip": clip, "weight_decay": 0.1, "buffers": buffers or None}
        found = replay.gradients(model, params, batch, **own)
        expected = models.gradients(model, params, batch, **own)
        kept.append((found, expected))
    for found, expected in kept:  # nothing that was returned is overwritten by what came later
        for part in ("value", "loss", "clipped", "norms"):
            assert torch.equal(getattr(found, part), getattr(expected, part))
        assert found.buffers.keys() == expected.buffers.keys()
        assert all(torch.equal(found.buffers[key], expected.buffers[key]) for key in found.buffers)
    assert len(recordings) == (device == "cuda")
    assert None not in recordings.values()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_other_shapes_precisions_and_settings_are_recorded_apart_and_the_oldest_are_forgotten(recordings):
    model, params, batch, _ = asked("mnist-mlp", "cuda", 1, False)
    for _ in range(2):
        fine = replay.gradients(model, params, batch)
        with products(tf32=True):
            rough = replay.gradients(model, params, batch)
        clipped = replay.gradients(model, params, batch, clip=Clip.client(0.01))
        fewer = replay.gradients(model, params[:2], Stack(batch.x[:2], batch.y[:2], None))
    assert len(recordings) == replay.KEPT
    assert not torch.equal(fine.value, rough.value)
    torch.testing.assert_close(fewer.value, fine.value[:2])
    assert clipped.value.norm(dim=1).max() < 0.011
    replay.gradients(model, params, batch, weight_decay=1.0)
    assert len(recordings) == replay.KEPT
    assert torch.equal(replay.gradients(model, params, batch).value, fine.value)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_that_is_built_anew_is_replayed(recordings):
    for turn in range(3):
        model, params, batch, _ = asked("cnn", "cuda", turn, False)
        found = replay.gradients(model, params[0], batch)
        assert torch.equal(found.value, models.gradients(model, params[0], batch).value)
    assert len(recordings) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_that_asks_the_gpu_something_on_the_way_is_computed(recordings):
    class Asking(Layer):
        def __call__(self, params, x, saved):
            return x * 2.0 if float(x.sum()) > 0 else x

    model = sequential("asking", [Asking(), Linear("fc", 6, 3)])
    params = torch.stack([model.init(Key(i)) for i in range(2)]).cuda()
    for turn in range(4):
        x = torch.randn(2, 5, 6, generator=Key(turn).torch()).cuda()
        batch = Stack(x, torch.zeros(2, 5, dtype=torch.long, device="cuda"), None)
        found = replay.gradients(model, params, batch)
        assert torch.equal(found.value, models.gradients(model, params, batch).value)
    assert list(recordings.values()) == [False]


@pytest.mark.parametrize("device", DEVICES)
def test_examples_without_a_finite_gradient_are_left_out_of_what_is_replayed_too(device, recordings):
    model, params, batch, _ = asked("cnn", device, 1, False)
    for broken in (None, None, (1, 2), None, slice(None)):  # computed, recorded, then replayed
        x = batch.x.clone()
        if broken is not None:
            x[broken] = torch.inf
        asked_for = params, Stack(x, batch.y, None)
        found = replay.gradients(model, *asked_for, clip=BY_EXAMPLE)
        expected = models.gradients(model, *asked_for, clip=BY_EXAMPLE)
        assert torch.equal(found.value, expected.value)
        assert torch.isfinite(found.value).all()
        assert torch.equal(found.norms, expected.norms)
    assert len(recordings) == (device == "cuda")


def test_what_is_recorded_tells_whose_examples_have_no_finite_gradient():
    model, params, batch, _ = asked("mnist-mlp", "cpu", 1, False)
    with unasked(steps=1) as passes:
        whole = models.gradients(model, params, batch, clip=BY_EXAMPLE)
        batch.x[1, 2] = torch.nan
        models.gradients(model, params, batch, clip=BY_EXAMPLE)
    assert torch.stack(passes).tolist() == [[1, 1, 1], [1, 2, 1]]
    assert torch.isfinite(whole.value).all()


@pytest.mark.parametrize("device", DEVICES)
def test_what_draws_or_is_padded_and_clipped_by_example_is_computed(device, recordings):
    model, params, batch, _ = asked("cnn", device, 1, True)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))
    drawing = models.from_module(net, nn.CrossEntropyLoss())
    theta, clip = drawing.init(Key(1)).to(device), Clip.example(1.0)
    for turn in range(3):  # the second time anything else is recorded
        found = replay.gradients(model, params, batch, clip=clip)
        assert torch.equal(found.value, models.gradients(model, params, batch, clip=clip).value)
        keys = [Key(turn).fold("client", i) for i in range(3)]
        found = replay.gradients(drawing, theta, batch, keys=keys)
        assert torch.equal(found.value, models.gradients(drawing, theta, batch, keys=keys).value)
    assert not recordings
