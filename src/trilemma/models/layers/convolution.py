"""Convolutions for k clients, with shared or personal weights, and their gradients per client and example.

Everything follows from columns (im2col): with the window of output position p of example i as a row of
Cᵢ (positions × c·kernel²) and ∂ℓᵢ/∂z as Dᵢ (positions × out), the example's weight gradient is Dᵢᵀ Cᵢ, a
client's is the sum of its examples'. Where the library underneath has a better kernel it is used instead, and
on a GPU personal convolutions make no columns (`trilemma.models.kernels.cuda_windows`); the choice depends on
the device, the shapes and the precision asked for, and was made from measurements. Gains are over the best
plain torch version of the same operation, on an H200 (100 clients × 50 examples) or two threads of a CPU (4 ×
50), as `python benchmarks/kernels.py --only layers` measures them.

Products are in full float32 unless `torch.set_float32_matmul_precision` allows less: "high" lets a GPU's
tensor cores round the factors to TF32 (10 bits of mantissa), which `[run] precision = "tf32"` asks for.

Longer than most modules, so that every way of convolving stands beside the choice between them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.models.engines.clipping import Lengths
from trilemma.models.engines.terms import Term, total
from trilemma.models.kernels.compiled import kernels

TINY = 1 << 16
"""Numbers in a client's columns up to which one product for all clients is quicker on a CPU."""

FEW = 7
"""Where numbers are so many times as few, on a GPU gradients of examples are formed and then summed: at 7 the
first layers of CNN and ResNet, and not the second of the smaller CNN, which is slower so."""


@dataclass(frozen=True)
class Stencil:
    """A square kernel and how it moves.

    >>> Stencil(kernel=7, stride=2, padding=3).output(28)
    14
    """

    kernel: int
    stride: int = 1
    padding: int = 0

    def output(self, size: int) -> int:
        """Return the output's height (width) for an input of that height (width)."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1


def forward(x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
    """Convolve (…, b, c, h, w) with shared weights (out, c, ·, ·) or personal ones (k, out, c, ·, ·)."""
    if weight.dim() == 5 and x.is_cuda:
        return forward_kept(x, weight, bias, stencil)[0]
    if weight.dim() == 5:
        # One call per client: on a CPU each is large enough to fill it.
        each = zip(x, weight, bias, strict=True)
        return torch.stack([forward(one, own, shift, stencil) for one, own, shift in each])
    flat = x.flatten(0, -4)
    if x.requires_grad and _columns_kernels(flat[:, None], stencil):
        z: Tensor = _Shared.apply(flat, weight, bias, stencil)  # type: ignore[no-untyped-call]
    else:
        kernel = weight if x.is_cuda else _channels_last(weight)
        z = F.conv2d(flat, kernel, bias, stencil.stride, stencil.padding)
    return z.view(*x.shape[:-3], *z.shape[1:])


class _Shared(torch.autograd.Function):
    """The library's convolution, and back to its input by columns: ∂x is what Wᵀ ∂z folds to.

    Of the library's reproducible ways back the one it takes is a Fourier transform.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
        ctx.stencil, ctx.shape = stencil, x.shape
        ctx.save_for_backward(weight, x if ctx.needs_input_grad[1] else None)
        return F.conv2d(x, weight, bias, stencil.stride, stencil.padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight, x), (grad,), needs = ctx.saved_tensors, grads, ctx.needs_input_grad
        size, *each = ctx.shape
        back = None
        if needs[0]:
            columns = torch.matmul(weight.flatten(1).T, grad.flatten(2))
            own = _columns_kernels(grad[:, None], ctx.stencil)
            back = own.folded(columns, (size, 1, *each), ctx.stencil).view(ctx.shape)
        # The engine finds these two itself; they are for plain autograd through a model.
        return (
            back,
            _weight_gradient(x, grad, ctx.stencil) if needs[1] else None,
            grad.sum((0, 2, 3)) if needs[2] else None,
            None,
        )


def _channels_last(weight: Tensor) -> Tensor:
    """Store the channels innermost, which makes the result so too: convolution and pooling run faster.

    Even a single channel gets the strides of that format; `Tensor.contiguous` would leave it as it is.

    Gain on a CPU, with the pooling behind it: 4.4 and 1.3 on the CNN's convolutions, 1.1 on the smaller
    CNN's; 0.7 to 1.2 on the ResNet's.
    """
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def reproducible() -> AbstractContextManager[None]:
    """Ask cuDNN for algorithms whose sums are reproducible, and for TF32 only where products may use it.

    By default it rounds the operands of float32 convolutions to TF32 and may choose algorithms that add up in
    any order. It reads its settings when it is called: this goes around forward and backward passes.
    """
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=_tf32())


def _tf32() -> bool:
    """Whether factors may be rounded to TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def forward_windows(x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
    """Convolve (k, b, c, h, w) with personal weights (k, out, c, ·, ·), reading windows where they lie.

    The result lies in memory with channels innermost, as the next such convolution wants its input.

    Gain on an H200, forward and back: 5.5 and 2.7 on the ResNet's units 1 and 3; with TF32 1.0 and 1.9.
    """
    z: Tensor = _Windows.apply(x, weight, bias, stencil)  # type: ignore[no-untyped-call]
    return z


class _Windows(torch.autograd.Function):
    """The formulas of `trilemma.models.kernels.cuda_windows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
        windows = _windows_kernels(x, *weight.shape[1:3])
        forth, back = windows.by_tap(weight)
        ctx.windows, ctx.stencil, ctx.size = windows, stencil, x.shape[3:]
        ctx.save_for_backward(back, x if ctx.needs_input_grad[1] else None)
        z: Tensor = windows.convolve(windows.innermost(x), forth, bias.contiguous(), stencil)
        return z.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        taps, x = ctx.saved_tensors
        grad = ctx.windows.innermost(grads[0])
        needs = ctx.needs_input_grad
        return (
            ctx.windows.back(grad, taps, *ctx.size, ctx.stencil).movedim(-1, 2) if needs[0] else None,
            # The engine finds these two itself; they are for plain autograd through a model.
            client_gradients(x, grads[0], ctx.stencil) if needs[1] else None,
            grad.sum((1, 2, 3)) if needs[2] else None,
            None,
        )


def forward_batched(x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
    """Convolve (k, b, c, h, w) with personal weights (k, out, c, ·, ·) by one batched product.

    Gain on an H200, forward and back: 3.0 on the ResNet's first convolution, 1.5 on the smaller CNN's, 1.4 on
    the CNN's first and none on its second (0.9).
    """
    return _multiplied(_columns(x, stencil), x, weight, bias, stencil)


def forward_kept(x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> tuple[Tensor, Tensor | None]:
    """Convolve as `forward` does; also return the columns, where `client_gradients` has a use for them."""
    if weight.dim() == 4 or not x.is_cuda:
        return forward(x, weight, bias, stencil), None
    if _windows_kernels(x, *weight.shape[1:3]):
        return forward_windows(x, weight, bias, stencil), None
    columns = _columns(x, stencil)
    z = _multiplied(columns, x, weight, bias, stencil)
    return z, None if _small_products(x, z, stencil) else columns.detach()


def _windows_kernels(x: Tensor, *channels: int) -> Any:
    """Return the kernels that read windows where they lie, or None where columns have to be made."""
    return kernels("cuda_windows", x, *channels)


def _columns_kernels(x: Tensor, stencil: Stencil) -> Any:
    """Return the kernels that make columns in one launch, or None where plain torch has to."""
    found = kernels("cuda_columns", x)
    return None if found is None or x[0].numel() * stencil.kernel**2 >= found.MOST else found


def _columns(x: Tensor, stencil: Stencil) -> Tensor:
    columns: Tensor = _Columns.apply(x, stencil)  # type: ignore[no-untyped-call]
    return columns


def _multiplied(columns: Tensor, x: Tensor, weight: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
    """Return the convolution of x from its columns."""
    clients, size, _, height, width = x.shape
    high, wide = stencil.output(height), stencil.output(width)
    if _windows_kernels(x, weight.shape[1]):
        # Channels innermost, as the next convolution wants them.
        z = torch.baddbmm(bias[:, None], columns.mT, weight.flatten(2).mT)
        return z.view(clients, size, high, wide, -1).movedim(-1, 2)
    z = torch.baddbmm(bias[..., None], weight.flatten(2), columns)
    return z.view(clients, -1, size, high, wide).transpose(1, 2)


class _Columns(torch.autograd.Function):
    """(k, b, c, h, w) → (k, c·kernel², b·positions), and back by summing overlapping windows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stencil: Stencil) -> Tensor:
        ctx.shape, ctx.stencil, ctx.own = x.shape, stencil, _columns_kernels(x, stencil)
        if ctx.own is not None:
            columns: Tensor = ctx.own.unfolded(x, stencil)
            return columns
        windows = _windows(x, stencil)  # (k, b, c, high, wide, kernel, kernel)
        unfolded = x.shape[2] * stencil.kernel**2
        return windows.permute(0, 2, 5, 6, 1, 3, 4).reshape(x.shape[0], unfolded, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        clients, size, _, height, width = ctx.shape
        stencil: Stencil = ctx.stencil
        if ctx.own is not None:
            return ctx.own.folded(grads[0], ctx.shape, stencil), None
        each = grads[0].view(clients, grads[0].shape[1], size, -1).transpose(1, 2).flatten(0, 1)
        x = F.fold(each, (height, width), stencil.kernel, 1, stencil.padding, stencil.stride)
        return x.view(ctx.shape), None


def _windows(x: Tensor, stencil: Stencil) -> Tensor:
    """View (…, c, h, w) as its windows (…, c, high, wide, kernel, kernel), copying only to pad."""
    if stencil.padding:
        flat = F.pad(x.flatten(0, -4), (stencil.padding,) * 4)
        x = flat.view(*x.shape[:-2], *flat.shape[-2:])
    return x.unfold(-2, stencil.kernel, stencil.stride).unfold(-2, stencil.kernel, stencil.stride)


@dataclass(frozen=True)
class ExampleGradients(Term):
    """The weight gradient of every example, in the order in which the products come out."""

    products: Tensor
    """(k, b, out, c·kernel²) or, with `channels_innermost`, (k, b, out, kernel²·c)."""
    stencil: Stencil
    channels_innermost: bool

    def lengths(self) -> Lengths:
        """See `Term`."""
        return Lengths.formed(self.products)

    def formed(self) -> Tensor:
        """See `Term`."""
        each = self._ordered(self.products.flatten(0, 1))
        return each.reshape(*self.products.shape[:2], *each.shape[1:])

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return self._ordered(total(self.products, factor))

    def _ordered(self, flat: Tensor) -> Tensor:
        """Return (·, out, c, kernel, kernel) for the products (·, out, …)."""
        size, outputs = self.stencil.kernel, self.products.shape[2]
        if self.channels_innermost:
            return flat.view(len(flat), outputs, size, size, -1).permute(0, 1, 4, 2, 3)
        return flat.view(len(flat), outputs, -1, size, size)


def example_gradients(x: Tensor, grad: Tensor, stencil: Stencil) -> ExampleGradients:
    """Return the weight gradient of every example from inputs and ∂loss/∂output (k, b, …).

    Gain, with norms and a weighted sum: 27 to 45 on an H200, 1.5 to 6.9 on a CPU. Summed, it is also the way
    to the clients' gradients of one input channel, on a CPU (2.9 to 4.1 on the CNN's, 1.1 to 1.3 on the
    ResNet's) and on a GPU: there one product over columns takes 2.6 and 5.8 times as long on the CNN's, of
    100 × 50 and 25 × 32 examples.
    """
    lead, unfolded = x.shape[:2], x.shape[2] * stencil.kernel**2
    each = grad.flatten(0, 1).flatten(2)  # (k·b, out, positions)
    # Copy in the order in which memory lies, so that runs are long: channels, or else positions, innermost.
    innermost = x.stride(2) == 1 and x.shape[2] > 1
    if innermost:
        windows = _windows(x, stencil).flatten(0, 1)  # (k·b, c, high, wide, kernel, kernel)
        columns = windows.permute(0, 2, 3, 4, 5, 1).reshape(len(each), -1, unfolded)
    else:
        columns = _columns(x.flatten(0, 1)[:, None], stencil).transpose(1, 2)
    products: Tensor = torch.bmm(each, columns)
    return ExampleGradients(products.view(*lead, *products.shape[1:]), stencil, innermost)


@dataclass(frozen=True)
class KernelGradients(Term):
    """The weight gradients from inputs and ∂loss/∂output (k, b, …); `columns` as in `client_gradients`.

    If examples are clipped, every example's is formed: kernels are small, and summing what was formed is
    cheaper than the second product over positions that ghost norms need.
    """

    input: Tensor
    grad: Tensor
    stencil: Stencil
    columns: Tensor | None = None

    @property
    def floats(self) -> int:
        """See `Term`: columns, and the products of every example."""
        unfolded, outputs = self.input.shape[2] * self.stencil.kernel**2, self.grad.shape[2]
        return unfolded * (self.grad.numel() // outputs + self.grad.shape[:2].numel() * outputs)

    @cached_property
    def each(self) -> ExampleGradients:
        """Those of examples."""
        return example_gradients(self.input, self.grad, self.stencil)

    def lengths(self) -> Lengths:
        """See `Term`."""
        return self.each.lengths()

    def formed(self) -> Tensor:
        """See `Term`."""
        return self.each.formed()

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        if factor is None:
            return client_gradients(self.input, self.grad, self.stencil, self.columns)
        return self.each.summed(factor)

    def write(self, out: Tensor, factor: Tensor | None) -> None:
        """See `Term`."""
        fits = self.columns is None and out.dtype == self.grad.dtype
        if factor is None and fits and _reads_windows(self.input, self.grad):
            client_gradients_windows(self.input, self.grad, self.stencil, out)
        else:
            super().write(out, factor)


def _reads_windows(x: Tensor, grad: Tensor) -> bool:
    """Whether weight gradients are found by kernels that read windows where they lie."""
    return x.is_cuda and x.stride(2) == 1 and bool(_windows_kernels(x, x.shape[2], grad.shape[2]))


def client_gradients(x: Tensor, grad: Tensor, stencil: Stencil, columns: Tensor | None = None) -> Tensor:
    """Return each client's weight gradient (k, out, c, ·, ·) from inputs and ∂loss/∂output (k, b, …).

    `columns` are those of x, where the forward pass needed them too.
    """
    if columns is not None:
        return client_gradients_batched(x, grad, stencil, columns)
    columns_each = x.shape[1:3].numel() * grad.shape[3:].numel() * stencil.kernel**2
    if _small_products(x, grad, stencil) if x.is_cuda else x.shape[2] == 1 or columns_each < TINY:
        return example_gradients(x, grad, stencil).summed(None)
    if x.is_cuda:
        find = client_gradients_windows if _reads_windows(x, grad) else client_gradients_batched
        return find(x, grad, stencil)
    return torch.stack([_weight_gradient(a, g, stencil) for a, g in zip(x, grad, strict=True)])


def _small_products(x: Tensor, z: Tensor, stencil: Stencil) -> bool:
    """Whether the weight gradients of single examples are few numbers beside input and output of a layer.

    A sum over all positions of all of a client's examples with so few results keeps few of a GPU's processors
    busy; one for every example keeps all.
    """
    unfolded, outputs, positions = x.shape[2] * stencil.kernel**2, z.shape[2], z.shape[3:].numel()
    return FEW * unfolded * outputs <= positions * (unfolded + outputs)


def client_gradients_batched(
    x: Tensor, grad: Tensor, stencil: Stencil, columns: Tensor | None = None
) -> Tensor:
    """Return each client's weight gradient (k, out, c, ·, ·) by one batched product over its examples.

    Gain on an H200: 1.8 to 6.0. cuDNN's own weight gradients differ from these by up to 6e-4 on the CNN.
    """
    if columns is None:
        columns = _columns(x, stencil)
    innermost = grad.movedim(2, -1).is_contiguous()
    each = grad.movedim(2, -1).flatten(1, 3).mT if innermost else grad.transpose(1, 2).flatten(2)
    products = torch.bmm(each, columns.mT)  # (k, out, b·positions) times its columns
    return products.view(*each.shape[:2], x.shape[2], stencil.kernel, stencil.kernel)


def client_gradients_windows(x: Tensor, grad: Tensor, stencil: Stencil, out: Tensor | None = None) -> Tensor:
    """Return each client's weight gradient (k, out, c, ·, ·), reading windows where they lie.

    Gain on an H200: 3.4 to 5.2 on the ResNet's units; with TF32 1.5 to 2.0.
    """
    windows = _windows_kernels(x, x.shape[2], grad.shape[2])
    found: Tensor = windows.weights(windows.innermost(x), windows.innermost(grad), stencil, out)
    return found


def _weight_gradient(x: Tensor, grad: Tensor, stencil: Stencil) -> Tensor:
    """Return the weight gradient (out, c, ·, ·) of one client's examples (b, …)."""
    shape = grad.shape[1], x.shape[1], stencil.kernel, stencil.kernel
    weight = x.new_empty(()).expand(shape)  # only its shape is read
    move = [stencil.stride] * 2, [stencil.padding] * 2, [1, 1]
    backward: Any = torch.ops.aten.convolution_backward
    with reproducible() if x.is_cuda else nullcontext():  # once for every client: it takes 15 µs
        _, result, _ = backward(grad, x, weight, None, *move, False, [0, 0], 1, [False, True, False])
    return result  # type: ignore[no-any-return]
