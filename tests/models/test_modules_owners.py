"""Whose every number is: what mixes examples or asks what they are is seen; what keeps them apart passes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilemma import models
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.modules.owners import NotFlat, Owners, rows_of
from trilemma.testing.examples import Stack

APART = {
    "turned": lambda x: x.permute(2, 0, 1).reshape(-1, 5).view(4, -1, 5).permute(1, 2, 0),
    "written": lambda x: _written(torch.zeros_like(x), x),
    "gathered": lambda x: x.gather(1, x.argsort(1)),
    "picked": lambda x: x[torch.arange(len(x)), x[..., 0].argmax(1)],
    "shuffled there and back": lambda x: x.flip(0).tanh().flip(0),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "patches": lambda x: F.unfold(x[:, None], 2).mT,
    "spectrum": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "masked by itself": lambda x: x.masked_fill(x > 0, 0.0) + torch.where(x < 0, x, -x),
    "sums": lambda x: x.softmax(-1).cumsum(1) + x.var(1, keepdim=True) - x.logsumexp((1, 2))[:, None, None],
    "joined": lambda x: torch.cat([x, torch.ones(len(x), 1, 4)], 1).roll(1, 1),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
}

MIXED = {
    "mean over the batch": lambda x: x - x.mean(0),
    "neighbours": lambda x: x + x.roll(1, 0),
    "order": lambda x: x.sort(0).values,
    "cross products over the batch": lambda x: torch.linalg.cross(x[:3], x[3:6], dim=0),
    "in an object": lambda x: SimpleNamespace(it=x),
    "softmax over the batch": lambda x: x.softmax(0),
    "products": lambda x: (x.flatten(1) @ x.flatten(1).T) @ x.flatten(1),
    "mask": lambda x: x.masked_fill((x > 0).any(), 0.0),
    "dropped": lambda x: x[x > 0],
    "chosen": lambda x: x.index_add(0, (x[:, 0, 0] > 0).nonzero()[:, 0], x[(x[:, 0, 0] > 0)]),
    "asked": lambda x: x if float(x.sum()) > 0 else -x,
    "read": lambda x: x * (1 if sum(x.flatten().tolist()) > 0 else -1),
    "made of numbers": lambda x: x - torch.tensor([x[0].mean(), x[1].mean()]).mean(),
    "copied": lambda x: x - copy.deepcopy(x).mean(),
    "read as text": lambda x: x * len(repr(x)),
    "read one by one": lambda x: x + (x.detach().clone().apply_(abs) * 0),
    "asked in vain": lambda x: x + _asked(x),
    "read as an array": lambda x: x * float(x.detach().numpy().sum() > 0),
    "written over another": lambda x: _written(x.clone(), x.flip(0), keep=True),
    "routed": lambda x: x[x[:, 0, 0].argsort()],
    "statistics": lambda x: F.batch_norm(x, None, None, training=True),
}


def _written(out: Tensor, x: Tensor, keep: bool = False) -> Tensor:
    for step in range(x.shape[1]):
        out[:, step] = (out[:, step] + x[:, step]) if keep else x[:, step]
    return out


class Changed(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.change, self.inner, self.head = change, nn.Linear(4, 4), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.inner(x)).flatten(1))


def way_of(change) -> str:
    torch.manual_seed(1)
    net, x = Changed(change), torch.randn(2, 3, 5, 4, generator=Key(1).torch())
    with torch.no_grad():
        net.head = nn.Linear(change(torch.rand(2, 5, 4)).flatten(1).shape[1], 3)
    model = models.from_module(net, nn.CrossEntropyLoss())
    return models.paths(model, Stack(x, torch.tensor([[0, 1, 2], [1, 1, 0]]))).way


@pytest.mark.parametrize("name", APART)
def test_what_keeps_examples_apart_goes_through_as_one_batch(name):
    assert way_of(APART[name]) == "flat"


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_or_asks_what_they_are_does_not(name):
    owners, x = Owners(), torch.randn(7, 5, 4, generator=Key(2).torch())
    owners.begin(Owners.numbers(7, x.device), (), [x])

    def through() -> None:
        from trilemma.models.modules.flat import FlatFrame
        from trilemma.models.modules.randomness import Draws
        from trilemma.models.modules.recorder import Log, Recorder

        frame = FlatFrame(torch.zeros(1, 7, requires_grad=True), (1, 7), None, owners)
        with owners, Recorder({}, frame, Log(), Draws(None, off=True)):
            out = MIXED[name](x)
        owners.rows(out, 7)

    with pytest.raises((NotFlat, models.modules.normalisations.MixesExamples)):
        through()


def test_a_row_that_is_nobodys_may_not_serve_two_examples():
    """A first row for all, of which the linear layer writes down that it is the first example's."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            every = self.inner(torch.cat([torch.ones(len(x), 4), x]))
            return self.head(every[len(x) :].tanh() + every[: len(x)].mean(0))

    torch.manual_seed(1)
    model = models.from_module(Shared(), nn.CrossEntropyLoss())
    x, y = torch.randn(2, 3, 4, generator=Key(1).torch()), torch.tensor([[0, 1, 2], [1, 1, 0]])
    assert models.paths(model, Stack(x, y)).way == "mapped"
    assert models.verify(model, model.init(Key(1)), Stack(x, y)) < 1e-4


def test_a_batch_that_comes_out_in_other_shapes_is_recorded_again():
    """Settings of a module may change between batches: rows are not cut as they were."""
    net = nn.Sequential(nn.Unflatten(1, (2, 6)), nn.Linear(6, 4), nn.Flatten(), nn.LazyLinear(3))
    net[3] = nn.Linear(8, 3)
    model = models.from_module(net, nn.CrossEntropyLoss())
    x, y = torch.randn(2, 3, 12, generator=Key(1).torch()), torch.tensor([[0, 1, 2], [1, 1, 0]])
    theta = model.init(Key(1))
    clip = Clip.example(0.1)
    before = models.gradients(model, theta, Stack(x, y), clip=clip).value
    layout = model.engine.found[next(iter(model.engine.found))].layouts[0]
    found = model.engine.structure(model, Stack(x, y))
    moved = layout._replace(shape=(3, *layout.shape[1:]))
    object.__setattr__(found, "layouts", (moved, *found.layouts[1:]))
    assert torch.equal(models.gradients(model, theta, Stack(x, y), clip=clip).value, before)


def test_a_loss_that_reads_more_than_outputs_is_not_one_batch():
    """A penalty on what the module computed, passed on behind everybody's back."""
    passed = []

    class Telling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            passed.append(super().forward(x))
            return passed[-1].tanh()

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + 0.1 * passed[-1].mean()

    torch.manual_seed(1)
    model = models.from_module(Telling(4, 3), loss)
    x, y = torch.randn(2, 3, 4, generator=Key(1).torch()), torch.tensor([[0, 1, 2], [1, 1, 0]])
    assert models.paths(model, Stack(x, y)).way == "mapped"
    assert "besides its outputs" in models.paths(model, Stack(x, y)).note


def test_what_a_module_does_for_many_examples_only_is_seen():
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            return z - z.mean(0) if len(x) > 10 else z

    torch.manual_seed(1)
    net = Centred(4, 3)
    model, theta = models.from_module(net, nn.CrossEntropyLoss()), torch.randn(15, generator=Key(3).torch())
    for size in (3, 12):
        x = torch.randn(1, size, 4, generator=Key(size).torch())
        y = torch.arange(size)[None] % 3
        found = models.gradients(model, theta, Stack(x, y), clip=Clip.example(0.1)).value[0]
        alone = [
            models.gradients(model, theta, Stack(x[:, [i]], y[:, [i]]), clip=Clip.example(0.1)).value[0]
            for i in range(size)
        ]
        torch.testing.assert_close(found, torch.stack(alone).mean(0))
        assert models.paths(model, Stack(x, y)).way == ("flat" if size == 3 else "mapped")


def _asked(x: Tensor) -> float:
    try:
        return float(x.detach().max())
    except Exception:  # as it may be met in libraries: whatever cannot be asked is taken for small
        return 0.0


def _largest(x: Tensor) -> float:
    seen: list[float] = []
    x.detach().clone().apply_(lambda number: seen.append(number) or number)
    return max(seen)


def _classes(x: Tensor) -> bool:
    try:
        torch.ones(60)[x.detach().abs().long()]
    except IndexError:
        return True
    return False


def _backwards(h: Tensor, x: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: (-grads[0] if grads[0].abs().max() > 2 else grads[0],))
    return h


def _hooked(h: Tensor, x: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: -grad if grad.abs().max() > 2 else grad)
    return h


def _packed(h: Tensor, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: -t if t.abs().max() > 50 else t, lambda t: t):
        return h * h


HIDDEN = {
    "asked, and what stands in the way is caught": lambda h, x: h * (1 if _asked(x) < 50 else -1),
    "an operation that fails is caught": lambda h, x: -h if _classes(x) else h,
    "read as text": lambda h, x: -h if "e+02" in repr(x.detach()) else h,
    "read number by number": lambda h, x: h * (1 if _largest(x) < 50 else -1),
    "a hook of a node": _backwards,
    "a hook of a tensor": _hooked,
    "what is kept for the way back": _packed,
    "so many examples": lambda h, x: h - h.mean(0) if len(x) == 4 else h,
}


class ManyInPlace(nn.Module):
    """Changes a tensor in place, but only for more examples than a way is chosen by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head(h.relu_() if len(x) > 8 else h.relu()).mean(1)


class Leaving(nn.Module):
    """Leaves something on itself, moves something to a part of itself, and removes something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.moved, self.gone = [1], [2]

    def forward(self, x: Tensor) -> Tensor:
        self.inner.moved = self.__dict__.pop("moved", None)
        self.__dict__.pop("gone", None)
        self.last = x
        return self.inner(x)


def test_what_a_forward_pass_leaves_on_the_module_is_taken_off_again():
    model = models.from_module(Leaving(), nn.CrossEntropyLoss())
    before = [[*vars(part).items()] for part in model.engine.source.module.modules()]
    batch = Stack(torch.randn(2, 6, 4, generator=Key(2).torch()), torch.arange(12).view(2, 6) % 3)
    models.gradients(model, model.init(Key(1)), batch)
    after = [[*vars(part).items()] for part in model.engine.source.module.modules()]
    assert [[name for name, _ in own] for own in after] == [[name for name, _ in own] for own in before]
    assert all(
        one is other
        for own, was in zip(after, before, strict=True)
        for (_, one), (_, other) in zip(own, was, strict=True)
    )


def _hooked_loss() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, given, found: 3.0 * found)
    return loss


def _own_loss() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda outputs, y: 3.0 * F.cross_entropy(outputs, y)  # type: ignore[method-assign]
    return loss


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, _hooked_loss, _own_loss])
def test_a_change_in_place_for_many_examples_and_a_loss_with_code_of_its_own(loss):
    """What was recorded for a few examples is not relied on, and torch's losses are only what torch wrote."""
    model = models.from_module(ManyInPlace(), loss())
    theta, labels = model.init(Key(1)), torch.arange(12).view(2, 6) % 3
    batch = Stack(torch.randn(2, 6, 5, 4, generator=Key(2).torch()), labels)
    assert models.verify(model, theta, batch) < 1e-5
    flat = theta.clone().requires_grad_()
    weight, bias, head, shift = (
        flat[s.slice].view(shape) for s, (_, shape) in zip(model.tensors, model.shapes, strict=True)
    )
    outputs = F.linear(F.linear(batch.x[0], weight, bias).relu(), head, shift).mean(1)
    expected = torch.autograd.grad(loss()(outputs, labels[0]), flat)[0]
    found = models.gradients(model, theta, batch).value[0]
    assert torch.allclose(found, expected, atol=1e-6)
    assert models.paths(model, batch).way == "flat"


@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_no_way_past_what_watches_lets_a_record_move_what_others_contribute(name, vmapped):
    """Nothing shows of it in the examples that a way is chosen by; then one record is large."""

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = HIDDEN[name](torch.tanh(self.inner(x)), x)
            return self.head(h + 0 * x.detach().amax() if vmapped else h)

    torch.manual_seed(1)
    model = models.from_module(Hiding(), nn.MSELoss())
    theta, clip = model.init(Key(1)), Clip.example(0.01, careful=True)
    generator = Key(3).torch()
    x, y = torch.randn(1, 8, 6, generator=generator), torch.randn(1, 8, 3, generator=generator)
    models.gradients(model, theta, Stack(x, y), clip=clip)  # a way is chosen
    x, y = x[:, 4:], y[:, 4:]
    before = models.gradients(model, theta, Stack(x, y), clip=clip).value
    x, y = x.clone(), y.clone()
    x[0, 0], y[0, 0] = 100.0, 1e3
    try:
        after = models.gradients(model, theta, Stack(x, y), clip=clip).value
    except (RuntimeError, IndexError):
        return  # a step that was paid for then goes on without this record (learning.total)
    assert float((after - before).norm()) <= 2 * 0.01 / 4 * (1 + 2.0**-7)


def test_nor_does_a_loss_that_catches_what_fails():
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        found = F.mse_loss(outputs, y)
        try:
            torch.ones(60)[outputs.detach().abs().long()]
        except IndexError:
            return -found
        return found

    torch.manual_seed(1)
    model = models.from_module(nn.Linear(6, 3), loss)
    theta, clip = model.init(Key(1)), Clip.example(0.01, careful=True)
    x, y = (torch.randn(1, 8, each, generator=Key(each).torch()) for each in (6, 3))
    models.gradients(model, theta, Stack(x, y), clip=clip)
    assert models.paths(model, Stack(x, y)).way == "flat"
    x[0, 0] = 1e4
    with pytest.raises(IndexError):
        models.gradients(model, theta, Stack(x, y), clip=clip)


@pytest.mark.parametrize("length", [6, 7, 11])
def test_lengths_that_are_as_many_as_examples_are_not_taken_for_them(length):
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.place(torch.arange(x.shape[1]))).tanh().mean(1))

    torch.manual_seed(1)
    model = models.from_module(Placed(), nn.CrossEntropyLoss())
    for examples in (length, 3, 2 * length):
        x, y = torch.randn(1, examples, length, 4), torch.zeros(1, examples).long()
        models.gradients(model, model.init(Key(1)), Stack(x, y), clip=Clip.example(0.1))
        assert models.paths(model, Stack(x, y)).way == "flat"


def test_where_examples_lie():
    one = torch.tensor([[2.0, 3.0], [0.0, 3.0], [2.0, 1.0]])
    assert rows_of(one, 2) == (1, 1, 1)
    assert rows_of(torch.ones(3, 2), 2) is None
    assert rows_of(torch.tensor([2.0, 2.0, 3.0, 3.0]), 2) == (0, 1, 2)
    with pytest.raises(NotFlat):
        rows_of(torch.tensor([[2.0, 3.0], [3.0, 2.0]]), 2)


def _drawn(*shape: int, seed: int = 4) -> Tensor:
    return torch.rand(shape, generator=Key(seed).torch()) + 0.1


W, ONE = _drawn(6, 6, seed=5), torch.ones(6)
ROWS, PLACES = torch.tensor([0, 2, 1]), torch.tensor([[0, 1], [2, 0]])

# Of x (3 examples, 4, 6) and i (3, 4), whole numbers from 0 to 3 that depend on the examples too.
OPERATIONS = {
    "add": lambda x, i: x + ONE,
    "where": lambda x, i: torch.where(x > 0.5, x, ONE),
    "mm": lambda x, i: x[:, 0] @ W,
    "bmm": lambda x, i: x @ x.mT,
    "baddbmm": lambda x, i: torch.baddbmm(x[:, :, :4], x, x.mT),
    "addmm": lambda x, i: torch.addmm(ONE, x.flatten(0, 1), W),
    "mv": lambda x, i: x[0] @ ONE,
    "dot": lambda x, i: x[1, 1] @ ONE,
    "outer products": lambda x, i: x[:, :, :, None] * x[:, :, None],
    "sum": lambda x, i: x.sum((1, 2)),
    "mean": lambda x, i: x.mean(-1, keepdim=True),
    "all of one": lambda x, i: x[1].sum(),
    "max": lambda x, i: x.max(1).values,
    "argmax": lambda x, i: x.argmax(-1),
    "norm": lambda x, i: x.norm(dim=2),
    "softmax": lambda x, i: x.softmax(1),
    "sort": lambda x, i: x.sort(2).values,
    "topk": lambda x, i: x.topk(2, 1).values,
    "cumsum": lambda x, i: x.cumsum(-1),
    "variance": lambda x, i: torch.stack(torch.var_mean(x, (1, 2))),
    "cat": lambda x, i: torch.cat([x, x * 2, torch.ones(3, 1, 6)], 1),
    "cat along examples": lambda x, i: torch.cat([x, torch.zeros(1, 4, 6), x.flip(0)]),
    "stack": lambda x, i: torch.stack([x, 2 * x], 1),
    "roll": lambda x, i: x.roll((1, 2), (0, 2)),
    "flip": lambda x, i: x.flip(0, 2),
    "repeat": lambda x, i: x.repeat(2, 1, 3),
    "repeat each": lambda x, i: x.repeat_interleave(2, 0),
    "pad": lambda x, i: F.pad(x, (1, 2, 0, 0, 1, 0), value=3.0),
    "reflect": lambda x, i: F.pad(x, (2, 1), mode="reflect"),
    "triangle": lambda x, i: x.tril(),
    "unfold": lambda x, i: F.unfold(x[:, None], 2),
    "windows": lambda x, i: x.unfold(2, 3, 2).sum(-1),
    "pixels": lambda x, i: F.pixel_shuffle(x[:, :, None], 2),
    "turned": lambda x, i: x.permute(2, 0, 1).reshape(6, 12) + 1,
    "convolution": lambda x, i: F.conv1d(x, W[:2, :4, None].expand(2, 4, 3), padding=1),
    "grouped convolution": lambda x, i: F.conv1d(x, W[:4, :2, None], groups=2),
    "transposed convolution": lambda x, i: F.conv_transpose1d(x, W[:4, :2, None]),
    "pool": lambda x, i: F.max_pool2d(x[:, None], 2),
    "mean pool": lambda x, i: F.adaptive_avg_pool2d(x[:, None], 2),
    "larger": lambda x, i: F.interpolate(x, scale_factor=2.0, mode="linear"),
    "grid": lambda x, i: F.grid_sample(
        x[:, None], x[:, :, :2, None].expand(-1, -1, -1, 2), align_corners=False
    ),
    "layer norm": lambda x, i: F.layer_norm(x, (4, 6)),
    "rms norm": lambda x, i: F.rms_norm(x, (6,)),
    "group norm": lambda x, i: F.group_norm(x, 2),
    "instance norm": lambda x, i: F.instance_norm(x),
    "batch norm": lambda x, i: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "attention": lambda x, i: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "causal attention": lambda x, i: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], is_causal=True
    ),
    "masked attention": lambda x, i: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], attn_mask=(i > 1)[:, None, None]
    ),
    "embedding": lambda x, i: F.embedding(i, W),
    "gather": lambda x, i: x.gather(1, i[:, :, None].expand(-1, -1, 6)),
    "gather in place": lambda x, i: x.gather(0, PLACES[:, :, None]),
    "select": lambda x, i: x.index_select(0, ROWS),
    "select by data": lambda x, i: x[0].index_select(0, i[0]),
    "table by data": lambda x, i: W[i],
    "two by data": lambda x, i: W[i, i],
    "rows by data": lambda x, i: x[torch.arange(3), i[:, 0]],
    "columns by data": lambda x, i: x[torch.arange(3)[:, None], i],
    "rows in another order": lambda x, i: x[ROWS, 1:],
    "scatter": lambda x, i: torch.zeros(3, 4).scatter(1, i, x[:, :, 0]),
    "scatter add": lambda x, i: x[:, :, 0].scatter_add(1, i, x[:, :, 1]),
    "written": lambda x, i: _changed(x.clone(), lambda z: z[:, 1].copy_(x[:, 2])),
    "written at places": lambda x, i: _changed(torch.zeros(3, 4, 6), lambda z: z.index_put_((ROWS,), x)),
    "added in place": lambda x, i: _changed(torch.zeros(3, 4, 6), lambda z: z[1:].add_(x[:2])),
    "filled": lambda x, i: _changed(x.clone(), lambda z: z[0].fill_(2.0)),
    "ones like": lambda x, i: torch.ones_like(x) + torch.zeros_like(i).sum(),
    "spectrum": lambda x, i: torch.fft.rfft(x).abs(),
    "einsum": lambda x, i: torch.einsum("bij,bkj,jl->bil", x, x, W),
    "distances": lambda x, i: (x[:, :, None] - x[:, None]).square().sum(-1).sqrt(),
    "cross": lambda x, i: torch.linalg.cross(x[:, :, :3], x[:, :, 3:]),
}


def _changed(z: Tensor, change) -> Tensor:
    change(z)
    return z


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_changes_with_its_owner_only(name):
    """The oracle: change one example after the other, and see which numbers move."""
    x, i = _drawn(3, 4, 6), torch.randint(4, (3, 4), generator=Key(6).torch())
    owners, apply = Owners(), OPERATIONS[name]
    one, other = x.clone(), i.clone()
    owners.begin(Owners.numbers(3, x.device), (), [one, other])
    with owners:
        before = apply(one, other)
    said = owners.of(before)
    assert torch.equal(before, apply(x, i))
    for example in range(3):
        for seed in range(4):
            y, j = x.clone(), i.clone()
            y[example] = _drawn(4, 6, seed=10 + seed)
            j[example] = torch.randint(4, (4,), generator=Key(10 + seed).torch())
            moved = apply(y, j) != before
            assert bool((said[moved] == 2 + example).all())
