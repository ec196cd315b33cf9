"""Scores of one model and of many, on shared and on per-client data."""

from __future__ import annotations

import pytest
import torch
from model_oracles import CASES, at, losses, module

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models.scoring import _right


def problem(name: str, lead: tuple[int, ...], clients: int | None):
    shape, classes, _ = CASES[name]
    model = models.build(name, shape, classes)
    theta = (
        model.init(Key(1)) if clients is None else torch.stack([model.init(Key(i)) for i in range(clients)])
    )
    generator = Key(5).torch()
    x = torch.randn(*lead, *shape, generator=generator)
    return model, theta, x, torch.randint(classes, lead, generator=generator)


@pytest.mark.parametrize("name", ["logistic", "emnist-mlp", "cifar-cnn"])
@pytest.mark.parametrize("clients", [None, 3], ids=["one-model", "personal"])
@pytest.mark.parametrize("lead", [(17,), (3, 17)], ids=["shared-data", "own-data"])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_to_the_module(name, clients, lead, weighted):
    model, theta, x, y = problem(name, lead, clients)
    weight = None
    if weighted:
        weight = torch.rand(lead, generator=Key(6).torch())
        weight[..., 3:5] = 0.0
    score = models.evaluate(model, theta, x, y, weight, chunk=16)
    rows = [None] if clients is None and len(lead) == 1 else range(3)
    for row in rows:
        net = at(module(name), theta if clients is None else theta[row])
        mine = (lambda t: t) if len(lead) == 1 else (lambda t, row=row: t[row])
        logits = net(mine(x)).detach()
        w = torch.ones(17) if weight is None else mine(weight)
        right = model.predict(logits) == mine(y)
        pick = (lambda t: t) if row is None else (lambda t, row=row: t[row])
        torch.testing.assert_close(pick(score.loss), (losses(logits, mine(y)) * w).sum() / w.sum())
        torch.testing.assert_close(pick(score.accuracy), (right * w).sum() / w.sum())
        assert pick(score.correct) == (right & (w > 0)).sum()
        assert pick(score.examples) == (w > 0).sum()


def test_running_statistics_are_used_and_asked_for():
    model, theta, x, y = problem("fashion-resnet", (2, 5), 2)
    buffers = model.initial_buffers(2)
    for name in buffers:
        buffers[name] += torch.rand(buffers[name].shape, generator=Key(2).fold(name).torch())
    score = models.evaluate(model, theta, x, y, buffers=buffers)
    for row in range(2):
        net = at(module("fashion-resnet"), theta[row]).eval()
        norms = [part for part in net.modules() if isinstance(part, torch.nn.BatchNorm2d)]
        means = [part for name, part in buffers.items() if name.endswith("mean")]
        variances = [part for name, part in buffers.items() if name.endswith("variance")]
        for norm, mean, variance in zip(norms, means, variances, strict=True):
            norm.running_mean.copy_(mean[row])
            norm.running_var.copy_(variance[row])
        expected = losses(net(x[row]), y[row]).mean().detach()
        torch.testing.assert_close(score.loss[row], expected, rtol=1e-4, atol=1e-4)
    alone = models.evaluate(model, theta[0], x[1], y[1], buffers={n: b[:1] for n, b in buffers.items()})
    both = models.evaluate(model, theta[0], x[1], y[1], buffers=buffers)
    assert both.loss.shape == (2,)
    torch.testing.assert_close(both.loss[0], alone.loss)
    assert both.loss[1] != alone.loss
    with pytest.raises(UserError, match="pass buffers"):
        models.evaluate(model, theta, x, y)


def test_mismatched_shapes_are_refused():
    model, theta, x, y = problem("logistic", (4, 6), 3)
    with pytest.raises(UserError, match="3 models, 4 clients with data"):
        models.evaluate(model, theta, x, y)
    with pytest.raises(UserError, match="per client, and weights"):
        models.evaluate(model, theta[0], x, y[:, :2])


def test_an_example_without_a_label_is_not_right_and_spoils_nothing():
    right = _right(torch.zeros(1, 2, 3).long(), torch.tensor([[[0, 0, 1], [-100, -100, -100]]]))
    torch.testing.assert_close(right, torch.tensor([[2 / 3, 0.0]]))
