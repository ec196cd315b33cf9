"""A step that was paid for: of a client's examples only one that fails counts as zero."""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trilemma import models
from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning import Messages
from trilemma.learning.protocol import ClientStep
from trilemma.learning.steps import total
from trilemma.learning.steps.switches import SWITCHES, put_back

SIZE, WIDTH, BAD = 6, 4, 2
FAILS = 9.0
"""The target at which a loss goes wrong."""


class Nasty(Exception):
    """An exception that cannot be told."""

    @property
    def __notes__(self):
        raise KeyboardInterrupt

    def __str__(self):
        raise SystemExit


class Line(nn.Module):
    """Fails, as `fails` does, at features that are `FAILS`."""

    def __init__(self, fails=None):
        super().__init__()
        self.fails = fails
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x):
        outputs = self.through(x)
        return self.fails(bool((x == FAILS).any()), outputs) if self.fails else outputs

    def through(self, x):
        return self.layer(x)


class Chaotic(Line):
    """Tame where it starts; with large parameters the last bit of a product decides about everything."""

    def __init__(self, fails=None):
        super().__init__(fails)
        self.layer, self.last = nn.Linear(WIDTH, 301), nn.Linear(301, 1)

    def through(self, x):
        return torch.sin(self.last(self.layer(x))) / 3 + 0.5


class Dropping(Line):
    def __init__(self, fails=None):
        super().__init__(fails)
        self.dropout = nn.Dropout(0.5)

    def through(self, x):
        return self.layer(self.dropout(x))


def raising(error):
    def fails(bad, outputs):
        if bad:
            raise error
        return outputs

    return fails


WRONG = {
    "None": lambda bad, outputs: None if bad else outputs,
    "NaN": lambda bad, outputs: outputs * torch.nan if bad else outputs,
}


def examples(bad=None, size=SIZE):
    drawn = Key(3).fold("examples").torch()
    x, y = torch.randn(1, size, WIDTH, generator=drawn), torch.rand(1, size, 1, generator=drawn)
    if bad is not None:
        x[0, bad] = FAILS
    return x, y


def stepped(net, batch, clip, loss=nn.functional.mse_loss):
    """Let a real client take a step; return what it contributes and what counted as zero."""
    model = models.from_module(net, loss)
    keys, params = [Key(5)], torch.randn(model.dim, generator=Key(7).torch())
    params[-300:] *= 1e7 if isinstance(net, Chaotic) else 1.0
    models.gradients(model, params, Batch(*examples()), clip=clip, keys=keys)

    def client(broadcast, state, clients, round_, key):
        found = total.gradients(model, params, batch, clip=clip, keys=keys)
        return ClientStep(Messages(found.value), {}, {"loss": found.loss})

    algorithm = SimpleNamespace(release=object(), client=client)
    clients = SimpleNamespace(ids=(0,), model=model)
    done, failures = total.step(algorithm, {}, {}, clients, 0, Key(1), again=lambda: None)
    return done.messages.vectors, failures


def without(batch, bad=BAD):
    """Return the batch with another example in the place of one, and weight 0 there."""
    weight = torch.full(batch.y.shape[:2], 1 / batch.y.shape[1])
    weight[0, bad] = 0.0
    x, y = batch.x.clone(), batch.y.clone()
    x[0, bad], y[0, bad] = x[0, 0], y[0, 0]
    return Batch(x, y, weight)


ERRORS = [
    ValueError("patient 4711"),
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
    StopIteration(),
    MemoryError(),
    RecursionError(),
    torch.OutOfMemoryError("CUDA"),
    UserWarning("as an error"),
    Nasty(),
]
FAILURES = {type(error).__name__: raising(error) for error in ERRORS} | WRONG
EXAMPLE, CLIENT = models.Clip.example(0.1), models.Clip.client(0.1)


class Sure(Dropping):
    def through(self, x):
        return torch.sigmoid(super().through(x))


@pytest.mark.parametrize("net", [Line, Dropping])
@pytest.mark.parametrize("said", FAILURES)
def test_only_the_example_that_fails_counts_as_zero(net, said):
    """Taken again in halves, others changed: by other draws."""
    batch = Batch(*examples(BAD))
    found, failures = stepped(net(FAILURES[said]), batch, EXAMPLE)
    expected, sound = stepped(net(FAILURES[said]), without(batch), EXAMPLE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (failures.counts.tolist(), sound.counts.tolist()) == ([1], [0])
    assert found.any()
    assert failures.why


class Halving(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found / 2 if isinstance(found, torch.Tensor) and found.is_floating_point() else found


class Stopping(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise ValueError


HELD = []


def entered(mode):
    """Enter a mode and never leave it."""
    HELD.append(mode)
    mode.__enter__()


SWITCHED = {
    "the default type": lambda: torch.set_default_dtype(torch.float16),
    "how finely products are computed": lambda: torch.set_float32_matmul_precision("medium"),
    "the default device": lambda: torch.set_default_device("meta"),
    "function modes": lambda: entered(Halving()),
    "dispatch modes": lambda: entered(Stopping()),
    "autocast": lambda: entered(torch.autocast("cpu", torch.bfloat16)),
    "algorithms that are deterministic": lambda: torch.use_deterministic_algorithms(True),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "numpy's errors": lambda: np.seterr(all="raise"),
    "warnings": lambda: warnings.simplefilter("error"),
    "the folder": lambda: os.chdir("/"),
    "how deep calls go": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "gradients": lambda: torch.set_grad_enabled(False),
    "inference": lambda: entered(torch.inference_mode()),
}


def standing():
    """Return what is switched now, by its names."""
    read = {name: each() for name, (each, _) in SWITCHES.items()}
    return {**read, "gradients": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled()}


def test_every_switch_is_tried():
    assert set(SWITCHED) == set(standing())


@pytest.mark.parametrize("said", SWITCHED)
def test_what_code_has_switched_before_it_failed_is_put_back(said):
    """As code does that means to switch it back itself, a line further on."""
    changed = []

    def fails(bad, outputs):
        if bad:
            SWITCHED[said]()
            changed.append(said)
            raise ValueError
        return outputs

    batch, clip = Batch(*examples(BAD)), models.Clip.example(0.1, careful=True)
    expected, _ = stepped(Line(fails), without(batch), clip)
    with put_back():  # should it not be put back, other tests go on without it
        before = standing()
        found, failures = stepped(Line(fails), batch, clip)
        after, _ = stepped(Line(fails), without(batch), clip)
        assert standing() == before
    HELD.clear()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(after, expected, rtol=0, atol=0)
    assert (changed[0], failures.counts.tolist()) == (said, [1])


@pytest.mark.parametrize("bad", [[BAD], list(range(SIZE))])
def test_a_batch_is_tried_no_more_often_than_twice_for_each_of_its_examples(bad, monkeypatch):
    tried, gradients = [], models.gradients
    x, y = examples()
    x[0, bad] = FAILS

    def counted(*given, **options):
        tried.append(1)
        return gradients(*given, **options)

    monkeypatch.setattr(models, "gradients", counted)
    monkeypatch.setattr(total.replay, "gradients", counted)
    found, failures = stepped(Line(raising(ValueError())), Batch(x, y), EXAMPLE)
    assert failures.counts.tolist() == [len(bad)]
    assert bool(found.any()) == (len(bad) < SIZE)
    assert 2 < len(tried) - 1 <= 2 * SIZE  # the first one is of sound examples, and not of the step


@pytest.mark.parametrize("net", [Sure, Chaotic])
def test_of_a_batch_that_torch_refuses_one_example_counts_as_zero(net):
    """In shapes of other lengths others changed in their last bits, which parameters can make decide."""
    x, y = examples()
    x[0, BAD] = torch.nan
    batch, loss = Batch(x, y), nn.BCELoss()
    model = models.from_module(net(), loss)
    assert models.paths(model, Batch(*examples())).way == "flat"
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        models.gradients(model, model.init(Key(1)), batch, clip=EXAMPLE, keys=[Key(5)])
    found, failures = stepped(net(), batch, EXAMPLE, loss)
    expected, _ = stepped(net(), without(batch), EXAMPLE, loss)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (failures.counts.tolist(), bool(found.any())) == ([1], True)


@pytest.mark.parametrize("said", FAILURES)
def test_a_client_that_fails_counts_as_zero(said):
    found, failures = stepped(Line(FAILURES[said]), Batch(*examples(BAD)), CLIENT)
    assert not found.any()
    assert failures.counts.tolist() == [1]


@pytest.mark.parametrize("number", [torch.nan, FAILS])
def test_an_example_that_was_not_drawn_changes_nothing(number):
    """Empty places hold some example of the client: the first, with weight 0."""
    net, batch = Line(raising(ValueError())), without(Batch(*examples()))
    expected, _ = stepped(net, batch, EXAMPLE)
    batch.x[0, BAD] = number
    found, failures = stepped(net, batch, EXAMPLE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert failures.counts.tolist() == [0]


@pytest.mark.parametrize("number", [torch.nan, FAILS])
def test_who_drew_nobody_says_nothing(number):
    x, y = examples()
    empty = Batch(torch.full_like(x, number), y, torch.zeros(1, SIZE))
    found, _ = stepped(Line(raising(ValueError())), empty, EXAMPLE)
    assert not found.any()


def test_all_may_fail():
    x, y = examples()
    found, failures = stepped(Line(raising(ValueError())), Batch(torch.full_like(x, FAILS), y), EXAMPLE)
    assert not found.any()
    assert failures.counts.tolist() == [SIZE]


@pytest.mark.parametrize("said", [name for name in FAILURES if name != "NaN"])
def test_an_example_that_cannot_be_scored_is_a_wrong_answer(said):
    class Classes(Line):
        def __init__(self, fails=None):
            super().__init__(fails)
            self.layer = nn.Linear(WIDTH, 3)

    x, _ = examples(BAD)
    model = models.from_module(Classes(FAILURES[said]), nn.CrossEntropyLoss())
    params = torch.randn(model.dim, generator=Key(7).torch())
    right = models.outputs(models.from_module(Classes(), nn.CrossEntropyLoss()), params, x[0]).argmax(1)
    wrong = [0, 3]
    y = right.clone()
    y[wrong] = (right[wrong] + 1) % 3
    share, failures = total.right_shares(model, params, Batch(x, y[None]))
    assert share.tolist() == [pytest.approx((SIZE - len(wrong) - 1) / SIZE)]
    assert failures.counts.tolist() == [1]


def test_what_a_failure_held_is_let_go():
    """Memory that ran out is needed for the next attempt."""
    held = []

    def fails(bad, outputs):
        assert not any(one() is not None for one in held)
        if bad:
            try:
                large = torch.zeros(10)
                held.append(weakref.ref(large))
                raise MemoryError
            except MemoryError as error:
                raise RuntimeError("out of memory") from error
        return outputs

    gc.disable()
    try:
        _, failures = stepped(Line(fails), Batch(*examples(BAD)), EXAMPLE)
    finally:
        gc.enable()
    assert len(held) > 1
    assert failures.counts.tolist() == [1]
