"""Every way to convolve, and to find weight gradients, against autograd through torch's convolution."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cudnn

from trilemma import models
from trilemma.base.keys import Key
from trilemma.models.layers import convolution, normalisation, pooling
from trilemma.models.layers.convolution import Stencil

GEOMETRIES = [
    (Stencil(5), 12),
    (Stencil(3, 1, 1), 7),
    (Stencil(3, 2, 1), 8),
    (Stencil(7, 2, 3), 28),
    (Stencil(1, 2), 7),
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


def problem(stencil: Stencil, size: int, channels: int, innermost: bool, device: str):
    """Return inputs, personal weights and biases, and gradients at the output: 3 clients with 2 examples."""
    generator = Key(9).torch()
    x = torch.randn(3, 2, channels, size, size, generator=generator).to(device)
    if innermost:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    weight = torch.randn(3, 4, channels, stencil.kernel, stencil.kernel, generator=generator).to(device)
    bias = torch.randn(3, 4, generator=generator).to(device)
    reached = stencil.output(size)
    grad = torch.randn(3, 2, 4, reached, reached, generator=generator).to(device)
    return x, weight, bias, grad


def autograd(x, weight, bias, grad, stencil):
    """Return output, input gradient and weight gradient of one client, in double precision."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    z = F.conv2d(x, weight, bias.double(), stencil.stride, stencil.padding)
    return z.detach().float(), *(part.float() for part in torch.autograd.grad(z, (x, weight), grad.double()))


@pytest.fixture
def reproducible():
    with convolution.reproducible():
        yield


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("innermost", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("stencil", "size"), GEOMETRIES)
def test_all_ways_agree(stencil, size, channels, innermost, device):
    x, weight, bias, grad = problem(stencil, size, channels, innermost, device)
    close = {"atol": 1e-5 * stencil.kernel**2, "rtol": 1e-4}
    exact = [autograd(*parts, stencil) for parts in zip(x, weight, bias, grad, strict=True)]
    values, inputs, weights = (torch.stack(part) for part in zip(*exact, strict=True))

    for way in (convolution.forward, convolution.forward_batched):
        leaf = x.clone().requires_grad_()
        z = way(leaf, weight, bias, stencil)
        torch.testing.assert_close(z.detach(), values, **close)
        torch.testing.assert_close(torch.autograd.grad(z, leaf, grad)[0], inputs, **close)
        own = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        found = torch.autograd.grad(way(x, *own, stencil), own, grad)
        for part, expected in zip(found, (weights, grad.sum((1, 3, 4))), strict=True):
            torch.testing.assert_close(part, expected, **close)

    leaf, kernel, shift = (part[0].clone().requires_grad_() for part in (x, weight, bias))
    z = convolution.forward(leaf, kernel, shift, stencil)
    torch.testing.assert_close(z.detach(), values[0], **close)
    found = torch.autograd.grad(z, (leaf, kernel, shift), grad[0])
    for part, expected in zip(found, (inputs[0], weights[0], grad[0].sum((0, 2, 3))), strict=True):
        torch.testing.assert_close(part, expected, **close)

    for find in (convolution.client_gradients, convolution.client_gradients_batched):
        torch.testing.assert_close(find(x, grad, stencil), weights, **close)

    kept = convolution._columns(x, stencil)
    torch.testing.assert_close(convolution.client_gradients(x, grad, stencil, kept), weights, **close)
    found = convolution.client_gradients_batched(x, grad, stencil, kept)
    assert torch.equal(found, convolution.client_gradients_batched(x, grad, stencil))
    written = torch.zeros(3, 5 + weight[0].numel(), device=device)[:, 5:].view_as(weight)
    convolution.KernelGradients(x, grad, stencil).write(written, None)
    torch.testing.assert_close(written, weights, **close)
    factor = torch.tensor([[0.5, 2.0]], device=device).expand(3, 2)
    each = convolution.example_gradients(x, grad, stencil)
    torch.testing.assert_close(each.summed(None), weights, **close)
    scaled = convolution.client_gradients(x, grad * factor[..., None, None, None], stencil)
    torch.testing.assert_close(each.summed(factor), scaled, **close)
    for i in range(3):
        for j in range(2):
            own = autograd(x[i, j : j + 1], weight[i], bias[i], grad[i, j : j + 1], stencil)[2]
            square = each.lengths().norms[i, j].square().float()
            torch.testing.assert_close(square, own.square().sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("innermost", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("stencil", [Stencil(3, 1, 1), Stencil(3, 2, 1), Stencil(1, 2), Stencil(5)], ids=str)
def test_windows_are_read_where_they_lie_and_rounded_by_ten_bits_only_where_asked_for(stencil, innermost):
    generator = Key(3).torch()
    high, wide = stencil.output(7), stencil.output(9)
    x = torch.randn(3, 5, 64, 7, 9, generator=generator).cuda()
    weight = torch.randn(3, 96, 64, stencil.kernel, stencil.kernel, generator=generator).cuda()
    bias = torch.randn(3, 96, generator=generator).cuda()
    grad = torch.randn(3, 5, 96, high, wide, generator=generator).cuda()
    if innermost:
        x, grad = (part.movedim(2, -1).contiguous().movedim(-1, 2) for part in (x, grad))

    def found() -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        with convolution.reproducible():
            z, columns = convolution.forward_kept(leaf, weight, bias, stencil)
            slope = torch.autograd.grad(z, leaf, grad)[0]
        assert columns is None
        assert z.stride(2) == slope.stride(2) == 1
        written = torch.zeros(3, 7 + weight[0].numel(), device="cuda")[:, 7:].view_as(weight)
        convolution.KernelGradients(x, grad, stencil).write(written, None)
        assert torch.equal(written, convolution.client_gradients(x, grad, stencil))
        parts = z.detach(), slope, written
        return [part.cpu() for part in parts]

    exact = [autograd(*parts, stencil) for parts in zip(x, weight, bias, grad, strict=True)]
    truth = [torch.stack(part).cpu() for part in zip(*exact, strict=True)]
    plain = found()
    torch.set_float32_matmul_precision("high")
    try:
        rounded, again = found(), found()
    finally:
        torch.set_float32_matmul_precision("highest")
    for expected, fine, coarse, repeated in zip(truth, plain, rounded, again, strict=True):
        size = expected.std()
        assert (fine - expected).abs().max() < 1e-5 * size
        assert 1e-5 * size < (coarse - expected).abs().max() < 1e-2 * size
        assert torch.equal(coarse, repeated)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cut", [False, True], ids=["plain", "rectified"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_normalisation_of_innermost_channels_is_the_formula(padded, cut):
    generator = Key(4).torch()
    x, grad = (torch.randn(3, 20, 96, 5, 7, generator=generator) for _ in range(2))
    x = 3.0 + 2.0 * x
    scale, shift = torch.randn(2, 3, 96, generator=generator)
    present = torch.ones(3, 20)
    if padded:
        present[0, 13:] = 0.0
        present[2] = 0.0
        grad = grad * present[:, :, None, None, None]
    leaf = x.double().requires_grad_()
    expected, statistics = normalisation.train(leaf, scale.double(), shift.double(), present.double(), cut)
    assert not statistics.cut
    z_grad = grad.double() * (expected > 0) if cut else grad.double()
    slope = torch.autograd.grad(expected, leaf, z_grad)[0]
    own = normalisation.parameter_gradients(leaf.detach(), z_grad, statistics)

    there = x.movedim(2, -1).contiguous().movedim(-1, 2).cuda().requires_grad_()
    given = present.cuda() if padded else None
    z, found = normalisation.train(there, scale.cuda(), shift.cuda(), given, cut)
    assert found.cut == cut
    back = torch.autograd.grad(z, there, grad.cuda())[0]
    assert z.stride(2) == back.stride(2) == 1
    pairs = [
        (z, expected.clamp(min=0) if cut else expected),
        (back, slope),
        (found.mean, statistics.mean),
        (found.unbiased, statistics.unbiased),
        *zip(normalisation.parameter_gradients(there.detach(), grad.cuda(), found), own, strict=True),
    ]
    real = [0, 1] if padded else [0, 1, 2]  # the third client has no example then
    for actual, wanted in pairs:
        wanted, actual = wanted[real].detach(), actual[real].detach().cpu().double()
        assert (actual - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("channels", [32, 3])
@pytest.mark.parametrize("innermost", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize(
    "window", [Stencil(3, 2, 1), Stencil(2, 2), Stencil(3, 3), Stencil(3, 1, 1)], ids=str
)
def test_pooling_is_the_library_s(window, innermost, channels):
    generator = Key(6).torch()
    x = torch.randint(4, (3, 5, channels, 14, 13), generator=generator).float().cuda()  # many equal values
    x[0, 0, 0, 2, 2] = torch.nan
    lies = x.movedim(2, -1).contiguous().movedim(-1, 2) if innermost else x.clone()
    leaves = x.requires_grad_(), lies.requires_grad_()
    expected = F.max_pool2d(leaves[0].flatten(0, 1), window.kernel, window.stride, window.padding)
    grad = torch.randn(expected.shape, generator=generator).cuda()
    z = pooling.largest(leaves[1], window)
    if innermost and channels == 32:
        assert z.stride(2) == 1
    torch.testing.assert_close(z.detach().flatten(0, 1), expected.detach(), rtol=0, atol=0, equal_nan=True)
    slope = torch.autograd.grad(expected, leaves[0], grad)[0]
    torch.testing.assert_close(torch.autograd.grad(z, leaves[1], grad.view(z.shape))[0], slope)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("innermost", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize(("stencil", "size"), GEOMETRIES)
def test_columns_made_in_one_launch_are_those_of_plain_torch_and_fold_back_up_to_the_order_of_sums(
    stencil, size, innermost, monkeypatch
):
    x, *_ = problem(stencil, size, 3, innermost, "cuda")
    leaf = x.requires_grad_()
    found = []
    for own in (convolution._columns_kernels, lambda *_: None):
        monkeypatch.setattr(convolution, "_columns_kernels", own)
        columns = convolution._columns(leaf, stencil)
        grad = torch.randn(columns.shape, generator=Key(2).torch()).cuda()
        found.append((columns.detach(), torch.autograd.grad(columns, leaf, grad)[0]))
    assert convolution.kernels("cuda_columns", x) is not None
    (ours, back), (plain, slope) = found
    assert torch.equal(ours, plain)
    torch.testing.assert_close(back, slope, rtol=1e-5, atol=1e-5)


def test_gradients_ask_for_reproducible_sums_on_the_way_back_too():
    """Settings of cuDNN are read when it is called, which for a backward pass is then."""
    model = models.build("cnn", (1, 28, 28), 10)
    seen = []

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits.register_hook(lambda _: seen.append((cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark)))
        return model.loss(logits, labels)

    batch = SimpleNamespace(x=torch.ones(2, 3, 1, 28, 28), y=torch.zeros(2, 3).long(), weight=None)
    before = cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark
    models.gradients(dataclasses.replace(model, loss=loss), model.init(Key(1)), batch)
    assert seen == [(True, False, False)]
    assert (cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark) == before
