"""Few coordinates: every way of training a part, against a loop over examples of the whole model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trilemma import models
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.models import Clip, Lora, Model, Subspace
from trilemma.models.coordinates import subspace
from trilemma.models.coordinates.subspace import in_subspace
from trilemma.models.engines.saved import SavedActivations
from trilemma.testing.examples import Stack, clip

CLIENTS, EXAMPLES = 3, 4
WEIGHT = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.3, 0.2, 0.0], [0.6, 0.4, 0.0, 0.0]])


class Attentive(nn.Module):
    """Tokens, an encoder layer, a head: linear layers that are called and some that are only read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def images(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(CLIENTS, EXAMPLES, *shape, generator=Key(5).torch())


def labels() -> Tensor:
    return torch.randint(3, (CLIENTS, EXAMPLES), generator=Key(6).torch())


def made(name: str) -> tuple[Model, Tensor]:
    """Return a model and examples for it."""
    if name == "cnn":
        return models.build("cifar-cnn", (1, 16, 16), 3), images((1, 16, 16))
    if name == "mlp":
        return models.build("mlp", (6,), 3, hidden=(5, 4)), images((6,))
    torch.manual_seed(3)
    if name == "module":
        return models.from_module(perceptron(), nn.CrossEntropyLoss()), images((6,))
    tokens = torch.randint(11, (CLIENTS, EXAMPLES, 5), generator=Key(5).torch())
    return models.from_module(Attentive(), nn.CrossEntropyLoss()), tokens


WAYS = {
    "head": ("head", {"cnn", "mlp", "module", "attention"}),
    "bias": (("*bias",), {"cnn", "mlp", "module", "attention"}),
    "weights": (("conv1.weight", "fc1.weight", "fc3"), {"cnn"}),
    "middle": (("*[23].*",), {"mlp", "module"}),
    "subspace": (Subspace(subspace=7), {"cnn", "mlp", "module", "attention"}),
    "lora": (Lora(lora=2), {"cnn", "mlp", "module", "attention"}),
    "lora-on": (Lora(lora=2, on=("fc1",), alpha=6.0, head=False), {"cnn", "mlp"}),
    "lora-inside": (Lora(lora=2, on=("body.*",), alpha=6.0), {"attention"}),
}
CASES = [(way, name) for way, (_, names) in WAYS.items() for name in sorted(names)]


def made_smaller(model: Model, way: str) -> tuple[Model, Tensor]:
    """Return the model of fewer coordinates and a point where nothing is zero by accident."""
    chosen = models.choose(model, WAYS[way][0], Key(1))
    return chosen, chosen.init(Key(1)) + 0.3 * torch.randn(chosen.dim, generator=Key(2).torch())


def chain_rule(model: Model, chosen: Model, flat: Tensor, gradient: Tensor, scale: float) -> Tensor:
    """From the gradient of all parameters to that of what is trained, written out."""
    if chosen.shapes[0][0] == subspace.COORDINATES:
        origin = whole(model, chosen, torch.zeros(chosen.dim))
        return torch.stack(
            [(whole(model, chosen, unit) - origin) @ gradient for unit in torch.eye(chosen.dim)]
        )
    full, own = models.unflatten(model, gradient), models.unflatten(chosen, flat)
    parts = []
    for name, _ in chosen.shapes:
        layer = name.rpartition(".")[0]
        if name.endswith("lora_A"):
            parts.append(scale * own[f"{layer}.lora_B"].T @ full[f"{layer}.weight"])
        elif name.endswith("lora_B"):
            parts.append(scale * full[f"{layer}.weight"] @ own[f"{layer}.lora_A"].T)
        else:
            parts.append(full[name])
    return torch.cat([part.flatten() for part in parts])


def whole(model: Model, chosen: Model, flat: Tensor) -> Tensor:
    """Return all parameters of the model."""
    return models.flatten(model, models.state_dict(chosen, flat))


def slow(model: Model, chosen: Model, params: Tensor, batch: Stack, limit: Clip, way: str) -> Tensor:
    """Return Σ_i w_i clip(∇ℓ_i) of every client, one example of the whole model at a time."""
    train = WAYS[way][0]
    shares = torch.full((CLIENTS, EXAMPLES), 1 / EXAMPLES) if batch.weight is None else batch.weight
    rows = []
    for row in range(CLIENTS):
        flat = params if params.dim() == 1 else params[row]
        theta, total = whole(model, chosen, flat), torch.zeros(chosen.dim)
        for column in range(EXAMPLES):
            one = Stack(batch.x[row, column][None, None], batch.y[row, column][None, None])
            gradient = models.gradients(model, theta, one).value[0]
            mine = chain_rule(model, chosen, flat, gradient, train.scale if isinstance(train, Lora) else 1.0)
            mine = clip(mine, limit.threshold) if limit.unit == "example" else mine
            total += shares[row, column] * mine
        rows.append(clip(total, limit.threshold) if limit.unit == "client" else total)
    return torch.stack(rows)


def close(actual: Tensor, expected: Tensor) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.parametrize(("way", "name"), CASES)
def test_every_way_agrees_with_the_loop(way, name):
    model, x = made(name)
    chosen, shared = made_smaller(model, way)
    personal = shared + 0.1 * torch.randn(CLIENTS, chosen.dim, generator=Key(4).torch())
    for params, weight in ((shared, None), (personal, WEIGHT)):
        batch = Stack(x, labels(), weight)
        norms = models.gradients(chosen, params, batch, clip=Clip.example(math.inf)).norms
        threshold = float(norms[norms > 0].median())
        for limit in (Clip.none(), Clip.client(threshold / 2), Clip.example(threshold)):
            found = models.gradients(chosen, params, batch, clip=limit)
            close(found.value, slow(model, chosen, params, batch, limit, way))
            assert found.value.shape == (CLIENTS, chosen.dim)


@pytest.mark.parametrize(("way", "name"), [(way, name) for way, name in CASES if name in ("cnn", "module")])
def test_one_client_alone_equals_all_stacked(way, name):
    model, x = made(name)
    chosen, params = made_smaller(model, way)
    together = models.gradients(chosen, params, Stack(x, labels()), clip=Clip.example(0.1))
    for row in range(CLIENTS):
        alone = Stack(x[row : row + 1], labels()[row : row + 1])
        close(
            models.gradients(chosen, params, alone, clip=Clip.example(0.1)).value,
            together.value[row : row + 1],
        )


@pytest.mark.parametrize(("way", "name"), CASES)
def test_the_whole_model_comes_back(way, name):
    model, x = made(name)
    chosen, params = made_smaller(model, way)
    theta = whole(model, chosen, params)
    given, expected = (
        models.evaluate(one, point, x[0], labels()[0]) for one, point in ((chosen, params), (model, theta))
    )
    assert torch.allclose(given.loss, expected.loss, atol=1e-5)
    moved = (theta != model.init(Key(1).fold("init", "model"))).nonzero().flatten()
    trained = {name for name, _ in chosen.shapes}
    if way in ("head", "bias", "weights", "middle"):
        inside = [span for span in model.tensors if span.name in trained]
        assert all(any(span.start <= index < span.stop for span in inside) for index in moved.tolist())


def test_a_projection_that_is_not_kept_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(subspace, "WORKSPACE", 100_000)
    model, x = made("cnn")
    start, batch = model.init(Key(1)), Stack(x, labels(), WEIGHT)
    params = torch.randn(5, generator=Key(2).torch())
    kept, drawn = (in_subspace(model, start, 5, Key(3), memory=memory) for memory in (1 << 30, 0))
    for limit in (Clip.client(0.1), Clip.example(0.1)):
        one, other = (
            models.gradients(each, params, batch, clip=limit, memory=10_000_000) for each in (kept, drawn)
        )
        close(one.value, other.value)
        assert one.clipped.tolist() == other.clipped.tolist()


def test_columns_of_a_subspace_have_norm_one():
    model, _ = made("cnn")
    small = in_subspace(model, model.init(Key(1)), 6, Key(3))
    origin = whole(model, small, torch.zeros(6))
    lengths = torch.stack([(whole(model, small, unit) - origin).norm() for unit in torch.eye(6)])
    assert torch.allclose(lengths, torch.ones(6), atol=1e-5)
    assert torch.equal(origin, model.init(Key(1)))


def test_dropout_of_a_subspace_draws_as_the_whole_model_does():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    model = models.from_module(net, nn.CrossEntropyLoss())
    batch, keys = Stack(images((6,)), labels()), [Key(9).fold(i) for i in range(CLIENTS)]
    small = models.choose(model, Subspace(subspace=model.dim), Key(1))
    params = torch.zeros(model.dim)
    theta = whole(model, small, params)
    origin = models.gradients(model, theta, batch, keys=keys)
    found = models.gradients(small, params, batch, clip=Clip.example(math.inf), keys=keys)
    columns = torch.stack([whole(model, small, unit) - theta for unit in torch.eye(model.dim)])
    close(found.value, origin.value @ columns.T)


@pytest.mark.parametrize(("way", "name"), [("subspace", "cnn"), ("subspace", "module"), ("lora", "module")])
def test_the_check_before_any_epsilon_is_spent_takes_them_all(way, name):
    model, x = made(name)
    chosen, params = made_smaller(model, way)
    batch = Stack(x, labels())
    assert models.verify(chosen, params, batch) < 1e-4
    assert set(models.paths(chosen, batch).layers) == {name for name, _ in chosen.shapes}


def test_batch_normalisation_below_a_head_keeps_its_statistics():
    model = models.build("fashion-resnet", (1, 28, 28), 3)
    batch, buffers = Stack(images((1, 28, 28)), labels()), model.initial_buffers(CLIENTS)
    for way in ("head", Subspace(subspace=3)):
        chosen = models.choose(model, way, Key(1))
        start = chosen.init(Key(1).fold("init", "model"))
        found = models.gradients(chosen, start, batch, buffers=buffers)
        expected = models.gradients(model, model.init(Key(1).fold("init", "model")), batch, buffers=buffers)
        for name, value in expected.buffers.items():
            assert torch.allclose(found.buffers[name], value, atol=1e-5)
        with pytest.raises(UserError, match="batch normalisation"):
            models.gradients(chosen, start, batch, clip=Clip.example(1.0))
    head = models.choose(model, "head", Key(1))
    close(
        models.gradients(head, head.init(Key(1).fold("init", "model")), batch, buffers=buffers).value,
        expected.value[:, model.last(1).slice],
    )


def test_adapters_on_a_frozen_body_come_back_merged():
    torch.manual_seed(3)
    net = perceptron()
    for part in net[:3].parameters():
        part.requires_grad_(False)
    model = models.from_module(net, nn.CrossEntropyLoss())
    chosen = models.choose(model, Lora(lora=2, on=("0",)), Key(1))
    assert [name for name, _ in chosen.shapes] == ["0.lora_A", "0.lora_B", "5.weight", "5.bias"]
    params = torch.randn(chosen.dim, generator=Key(2).torch())
    state = models.state_dict(chosen, params)
    assert set(state) == set(net.state_dict())
    x = images((6,))[0]
    fresh = perceptron().requires_grad_(False)
    fresh.load_state_dict(state)
    close(chosen.forward(models.unflatten(chosen, params), x[None], None)[0], fresh(x))


def test_scoring_in_eval_mode_does_not_pass_an_adapter_by():
    model, x = made("attention")
    chosen, params = made_smaller(model, "lora-inside")
    fresh = Attentive().eval()
    fresh.load_state_dict(models.state_dict(chosen, params))
    with torch.no_grad():
        close(chosen.forward(models.unflatten(chosen, params), x[:1], None)[0], fresh(x[0]))


def test_no_gradient_is_computed_below_what_is_trained():
    model, x = made("cnn")
    chosen = models.choose(model, "head", Key(1))
    saved = SavedActivations(record=True, train=True)
    with torch.enable_grad():
        logits = chosen.forward(models.unflatten(chosen, chosen.init(Key(1))), x, saved)
    assert [each.name for each in saved.outputs] == ["fc3"]
    assert saved.outputs[0].output.is_leaf
    assert logits is saved.outputs[0].output


@pytest.mark.parametrize(
    ("name", "train", "said"),
    [
        ("cnn", ("fc9.*",), r"nothing in 'cifar-cnn' is called 'fc9.\*'; there are conv1.weight, conv1.bias"),
        ("cnn", (), r"nothing to train; there are conv1.weight"),
        ("mlp", Subspace(subspace=10_000), "'mlp' has 74 parameters; allowed: 1 to 74"),
        ("mlp", Lora(lora=8), "rank 8 is more than 'fc1' has; .* of fc1 "),
        (
            "mlp",
            Lora(lora=1, on=("fd*",)),
            r"no linear layer of 'mlp' is called 'fd\*'; there are fc1 \(5 × 6\)",
        ),
        ("attention", ("nothing",), "there are embed.weight"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(name, train, said):
    model, _ = made(name)
    with pytest.raises(ConfigError, match=said):
        models.choose(model, train, Key(1))


def test_adapters_need_linear_layers():
    with pytest.raises(ConfigError, match="the only linear layer of 'logistic' is its head, 'linear'"):
        models.choose(models.build("logistic", (5,), 2), Lora(lora=1), Key(1))
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten())
    with pytest.raises(ConfigError, match="no linear layer for an adapter; its layers are 0"):
        models.choose(models.from_module(net, nn.CrossEntropyLoss()), Lora(lora=1), Key(1))
    normed = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.raises(ConfigError, match="'1', has no weights but shifts"):
        models.choose(models.from_module(normed, nn.CrossEntropyLoss()), "head", Key(1))
