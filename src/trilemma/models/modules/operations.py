"""The operations whose gradients follow from inputs and outputs, and those that need special care.

Each takes the recorder, the torch function and its arguments, and returns the output, or NotImplemented where
it does not know this use: then autograd forms the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.engine import Part
from trilemma.models.engines.terms import Lookup, Product, Shift
from trilemma.models.modules.affine import PRODUCTS, SUMS, scaled, shifted
from trilemma.models.modules.convolutions import ConvolutionWindow, kernel_gradients
from trilemma.models.modules.frame import CallFrame
from trilemma.models.modules.normalisations import batch_norm, group_norm, layer_norm, rms_norm
from trilemma.models.modules.recorder import Recorder, Slot, at_least_single
from trilemma.models.modules.sequences import gru, lstm, multi_head_attention, rnn_relu, rnn_tanh

Operation = Callable[..., Any]


def linear(recorder: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Z = a Wᵀ + β."""
    matrix, shift = recorder.slot(weight), recorder.slot(bias)
    if not recorder.recording(matrix, shift) or weight.dim() != 2:
        return NotImplemented
    output = F.linear(input, recorder.value(weight), recorder.value(bias))
    return _matrix(recorder, "linear", input, output, matrix, shift, turned=False)


def addmm(recorder: Recorder, func: Any, bias: Tensor, input: Tensor, weight: Tensor, **options: Any) -> Any:
    """Z = β + a W, as `transformers`' Conv1D computes it."""
    matrix, shift = recorder.slot(weight), recorder.slot(bias)
    known = matrix is not None and recorder.slot(input) is None and bias.dim() == 1
    if options or not known or not recorder.recording(matrix):
        return NotImplemented
    output = torch.addmm(recorder.value(bias), input, recorder.value(weight))
    return _matrix(recorder, "addmm", input, output, matrix, shift, turned=True)


def matmul(recorder: Recorder, func: Any, input: Tensor, weight: Tensor, **options: Any) -> Any:
    """Z = a W."""
    matrix = recorder.slot(weight)
    known = matrix is not None and recorder.slot(input) is None
    if options or not known or not recorder.recording(matrix) or weight.dim() != 2 or input.dim() < 2:
        return NotImplemented
    output = torch.matmul(input, recorder.value(weight))
    return _matrix(recorder, "matmul", input, output, matrix, None, turned=True)


def _matrix(
    recorder: Recorder,
    name: str,
    input: Tensor,
    output: Tensor,
    matrix: Slot | None,
    shift: Slot | None,
    turned: bool,
) -> Tensor:
    assert recorder.frame is not None
    inputs = None if matrix is None else at_least_single(recorder.frame.plain(input))

    def terms(grad: Tensor) -> list[Part]:
        right = positions(grad)
        parts: list[Part] = []
        if matrix is not None and inputs is not None:
            factors = right, positions(inputs)
            # Either the parameter was turned before the use or the use takes it turned; both: neither.
            left, other = factors[::-1] if turned != matrix.transposed else factors
            parts.append((matrix.block, Product(left, other)))
        if shift is not None:
            parts.append((shift.block, Shift(right)))
        return parts

    return recorder.write(name, [slot for slot in (matrix, shift) if slot is not None], output, terms)


def embedding(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """z_p = W[ids_p]; rows at `padding_idx` have no gradient."""
    table = recorder.slot(weight)
    if table is None:
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq:
        raise UserError(
            "an Embedding with max_norm changes its own weights and one with scale_grad_by_freq mixes the "
            "examples of a batch: neither has a gradient per example. Leave these options out"
        )
    if not recorder.recording(table) or table.transposed:
        return NotImplemented
    assert recorder.frame is not None
    rows = table.value.shape[0]
    ids = recorder.frame.plain(input).flatten(2)
    skip = None if padding_idx is None else padding_idx % rows
    output = F.embedding(input, table.value)

    def terms(grad: Tensor) -> list[Part]:
        right = positions(grad)
        if skip is not None:
            right = right.masked_fill((ids == skip)[..., None], 0.0)
        return [(table.block, Lookup(ids, right, rows))]

    return recorder.write("embedding", [table], output, terms)


def _convolution(axes: int) -> Operation:
    function = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]

    def convolution(
        recorder: Recorder,
        func: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        """Z = W ∗ a + β."""
        kernel, shift = recorder.slot(weight), recorder.slot(bias)
        if not recorder.recording(kernel, shift):
            return NotImplemented
        assert recorder.frame is not None
        steps = _each(dilation, axes)
        reach = [step * (size - 1) for step, size in zip(steps, weight.shape[2:], strict=True)]
        if padding == "valid":
            padding = 0
        if padding == "same":
            if any(total % 2 for total in reach):
                return NotImplemented
            padding = [total // 2 for total in reach]
        window = ConvolutionWindow(
            tuple(weight.shape), _each(stride, axes), _each(padding, axes), steps, groups
        )
        output = function(
            input, recorder.value(weight), recorder.value(bias), stride, padding, dilation, groups
        )
        lone = input.dim() == axes + 1
        inputs = None if kernel is None else at_least_single(recorder.frame.plain(input))

        def terms(grad: Tensor) -> list[Part]:
            grad = grad.unsqueeze(2) if lone else grad
            parts: list[Part] = []
            if kernel is not None and inputs is not None:
                images = inputs.unsqueeze(2) if lone else inputs
                parts.append((kernel.block, kernel_gradients(images, grad, window)))
            if shift is not None:
                parts.append((shift.block, Shift(grad.flatten(4).sum(4))))
            return parts

        slots = [slot for slot in (kernel, shift) if slot is not None]
        return recorder.write(f"conv{axes}d", slots, output, terms)

    return convolution


def dropout(
    recorder: Recorder, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop single values."""
    if not training or p == 0.0:
        return recorder.value(input)
    return recorder.own(input, "dropout") * recorder.dropped(input.shape, p, input)


def feature_dropout(
    recorder: Recorder, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop whole channels (n, c, …)."""
    if not training or p == 0.0:
        return input
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    return input * recorder.dropped(shape, p, input)


def attention(
    recorder: Recorder,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by hand, where its weights are dropped by keys or vmap has no rule for the kernels."""
    if enable_gqa or (dropout_p == 0.0 and not isinstance(recorder.frame, CallFrame)):
        return NotImplemented
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if attn_mask is not None:
        mask = recorder.own(attn_mask, "attention")
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if dropout_p == 0.0:
        return weights @ value
    return (weights * recorder.dropped(weights.shape, dropout_p, weights)) @ value


def random(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse draws that do not come from keys; in scoring they are the module's affair."""
    if not torch.is_grad_enabled():
        return NotImplemented
    raise UserError(
        f"the module's forward pass draws from torch's own generator ({func.__name__}): gradients would "
        "differ from run to run. Use nn.Dropout, which draws from keys, or draw outside the module"
    )


def positions(values: Tensor) -> Tensor:
    """Return (k, b, P, c) of values (k, b, …, c)."""
    return values.unsqueeze(2) if values.dim() == 3 else values.flatten(2, -2)


def _each(setting: Any, axes: int) -> tuple[int, ...]:
    return (
        (int(setting),) * axes
        if isinstance(setting, int)
        else tuple(int(part) for part in setting) * (axes if len(tuple(setting)) == 1 else 1)
    )


RANDOM = (
    *(
        torch.rand,
        torch.randn,
        torch.randint,
        torch.rand_like,
        torch.randn_like,
        torch.bernoulli,
        torch.normal,
    ),
    *(
        torch.multinomial,
        torch.randperm,
        torch.Tensor.bernoulli,
        torch.Tensor.bernoulli_,
        torch.Tensor.normal_,
    ),
    *(torch.Tensor.uniform_, torch.Tensor.multinomial, torch.Tensor.exponential_, F.alpha_dropout),
    *(F.feature_alpha_dropout, F.gumbel_softmax),
)
"""Functions that draw from torch's own generator."""

OPERATIONS: dict[Any, Operation] = {
    **dict.fromkeys(RANDOM, random),
    **dict.fromkeys(PRODUCTS, scaled),
    **dict.fromkeys(SUMS, shifted),
    F.linear: linear,
    torch.addmm: addmm,
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.mm: matmul,
    torch.Tensor.__matmul__: matmul,
    F.embedding: embedding,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.dropout: dropout,
    torch.dropout: dropout,
    F.dropout1d: feature_dropout,
    F.dropout2d: feature_dropout,
    F.dropout3d: feature_dropout,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention,
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn_tanh,
    torch.rnn_relu: rnn_relu,
}
