"""The operations whose gradients are taken from inputs and outputs, and those that need a hand.

Each takes the recorder, the torch function and its arguments, and returns the output, or NotImplemented where
it does not know this use: then autograd forms the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models.modules.convolutions import Convolved, Window
from trilemma.models.modules.frame import Frame
from trilemma.models.modules.recorder import Part, Recorder, Slot
from trilemma.models.modules.sequences import gru, lstm, multi_head_attention
from trilemma.models.modules.terms import Lookup, Product, Scale, Shift

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
    inputs = None if matrix is None else _floats(recorder.frame.plain(input))

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
        window = Window(tuple(weight.shape), _each(stride, axes), _each(padding, axes), steps, groups)
        output = function(
            input, recorder.value(weight), recorder.value(bias), stride, padding, dilation, groups
        )
        lone = input.dim() == axes + 1
        inputs = None if kernel is None else _floats(recorder.frame.plain(input))

        def terms(grad: Tensor) -> list[Part]:
            grad = grad.unsqueeze(2) if lone else grad
            parts: list[Part] = []
            if kernel is not None and inputs is not None:
                parts.append((kernel.block, Convolved(inputs.unsqueeze(2) if lone else inputs, grad, window)))
            if shift is not None:
                parts.append((shift.block, Shift(grad.flatten(4).sum(4))))
            return parts

        slots = [slot for slot in (kernel, shift) if slot is not None]
        return recorder.write(f"conv{axes}d", slots, output, terms)

    return convolution


def layer_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Z = γ (x − μ)/σ + β over the last axes."""
    gain, shift = recorder.slot(weight), recorder.slot(bias)
    if not recorder.recording(gain, shift):
        return NotImplemented
    shape = tuple(normalized_shape)
    output = F.layer_norm(input, shape, recorder.value(weight), recorder.value(bias), eps)
    return _affine(
        recorder, "layer_norm", input, output, gain, shift, lambda x: F.layer_norm(x, shape, eps=eps)
    )


def rms_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Z = γ x/√(mean x²) over the last axes."""
    gain = recorder.slot(weight)
    if not recorder.recording(gain):
        return NotImplemented
    shape = tuple(normalized_shape)
    output = F.rms_norm(input, shape, recorder.value(weight), eps)
    return _affine(recorder, "rms_norm", input, output, gain, None, lambda x: F.rms_norm(x, shape, eps=eps))


def _affine(
    recorder: Recorder,
    name: str,
    input: Tensor,
    output: Tensor,
    gain: Slot | None,
    shift: Slot | None,
    normalise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Write down z = γ x̂ + β whose γ and β have the last axes of z."""
    assert recorder.frame is not None
    inputs = None if gain is None else _floats(recorder.frame.plain(input))
    slot = gain or shift
    assert slot is not None
    axes = slot.value.dim()

    def rows(values: Tensor) -> Tensor:
        return values.flatten(2, -axes - 1) if values.dim() > 2 + axes else values.unsqueeze(2)

    def terms(grad: Tensor) -> list[Part]:
        parts: list[Part] = []
        if gain is not None and inputs is not None:
            parts.append((gain.block, Scale(rows(grad), lambda: rows(normalise(inputs)))))
        if shift is not None:
            parts.append((shift.block, Shift(rows(grad))))
        return parts

    return recorder.write(name, [each for each in (gain, shift) if each is not None], output, terms)


def group_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Z = γ (x − μ)/σ + β per channel, statistics per group of channels of an example."""
    gain, shift = recorder.slot(weight), recorder.slot(bias)
    if not recorder.recording(gain, shift):
        return NotImplemented
    assert recorder.frame is not None
    output = F.group_norm(input, num_groups, recorder.value(weight), recorder.value(bias), eps)
    inputs = None if gain is None else _floats(recorder.frame.plain(input))

    def channels(values: Tensor) -> Tensor:
        return values.flatten(4).sum(4) if values.dim() > 4 else values  # (k, b, n, c, …) -> (k, b, n, c)

    def terms(grad: Tensor) -> list[Part]:
        parts: list[Part] = []
        if gain is not None and inputs is not None:

            def scaled() -> Tensor:
                normal = F.group_norm(inputs.flatten(0, 2), num_groups, eps=eps).view(inputs.shape)
                return channels(grad * normal)

            one = torch.ones((), dtype=grad.dtype, device=grad.device)
            parts.append((gain.block, Scale(one, scaled)))
        if shift is not None:
            parts.append((shift.block, Shift(channels(grad))))
        return parts

    return recorder.write("group_norm", [each for each in (gain, shift) if each is not None], output, terms)


def batch_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Within a client's batch in training, by running statistics else."""
    affine: tuple[Tensor | None, Tensor | None] = recorder.own((weight, bias), "batch_norm")
    options: dict[str, Any] = {"weight": affine[0], "bias": affine[1], "eps": eps}
    if recorder.statistics is None:
        if training:
            raise MixesExamples(
                "batch normalisation mixes the examples of a batch, so no example has a gradient of its own: "
                "clip per client (Clip.client), or use nn.GroupNorm"
            )
        return F.batch_norm(input, running_mean, running_var, **options)
    if training:
        return recorder.statistics.normalise(input, (running_mean, running_var), affine, momentum, eps)
    mean, variance = (recorder.statistics.running(each) for each in (running_mean, running_var))
    return F.batch_norm(input, mean, variance, **options)


class MixesExamples(UserError):
    """No example has a gradient of its own."""


def dropout(
    recorder: Recorder, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop single values."""
    if not training or p == 0.0:
        return recorder.value(input)
    return recorder.own(input, "dropout") * recorder.draws.kept(input.shape, p, input)


def feature_dropout(
    recorder: Recorder, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop whole channels (n, c, …)."""
    if not training or p == 0.0:
        return input
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    return input * recorder.draws.kept(shape, p, input)


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
    if enable_gqa or (dropout_p == 0.0 and not isinstance(recorder.frame, Frame)):
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
    return (weights * recorder.draws.kept(weights.shape, dropout_p, weights)) @ value


def random(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse draws that do not come from keys; in scoring they are the module's affair."""
    if not torch.is_grad_enabled() or recorder.draws.off:
        return NotImplemented
    raise UserError(
        f"the module's forward pass draws from torch's own generator ({func.__name__}): gradients would "
        "differ from run to run. Use nn.Dropout, which draws from keys, or draw outside the module"
    )


def positions(values: Tensor) -> Tensor:
    """Return (k, b, P, c) of values (k, b, …, c)."""
    return values.unsqueeze(2) if values.dim() == 3 else values.flatten(2, -2)


def _floats(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


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
}
