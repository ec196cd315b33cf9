"""Normalisations: layer, RMS and group norms are written down, batch normalisation stays within a client."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.clipping import PER_CLIENT
from trilemma.models.modules.affine import spread
from trilemma.models.modules.flat import FlatFrame
from trilemma.models.modules.recorder import Recorder
from trilemma.models.modules.statistics import Statistics, frozen


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
    beside = (1,) * (input.dim() - len(shape)) + shape

    def normalise(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape, eps=eps)

    return spread(recorder, "layer_norm", input, output, beside, gain, shift, normalise, held=True)


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
    beside = (1,) * (input.dim() - len(shape)) + shape

    def normalise(x: Tensor) -> Tensor:
        return F.rms_norm(x, shape, eps=eps)

    return spread(recorder, "rms_norm", input, output, beside, gain, None, normalise, held=True)


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
    output = F.group_norm(input, num_groups, recorder.value(weight), recorder.value(bias), eps)
    beside = (1, input.shape[1], *[1] * (input.dim() - 2))

    def normalise(x: Tensor) -> Tensor:
        return F.group_norm(x.flatten(0, 2), num_groups, eps=eps).view(x.shape)

    return spread(recorder, "group_norm", input, output, beside, gain, shift, normalise, held=True)


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
    statistics = recorder.statistics
    mean, variance = running_mean, running_var
    if statistics is not None and not training:
        mean, variance = statistics.running(mean), statistics.running(variance)
    gain, shift = recorder.slot(weight), recorder.slot(bias)
    if not training and isinstance(recorder.frame, FlatFrame) and recorder.recording(gain, shift):
        output = _by(input, mean, variance, recorder.value(weight), recorder.value(bias), eps)
        shape = (1, input.shape[1], *[1] * (input.dim() - 2))

        def normalise(inputs: Tensor) -> Tensor:
            assert mean is not None
            assert variance is not None
            return frozen(inputs.flatten(0, 2), mean, variance, epsilon=eps).view(inputs.shape)

        return spread(recorder, "batch_norm", input, output, shape, gain, shift, normalise)
    affine: tuple[Tensor | None, Tensor | None] = recorder.own((weight, bias), "batch_norm")
    input = recorder.own(input, "batch_norm")
    if training and running_mean is None and (statistics is None or not statistics.masks(input)):
        # A weight, standardised; that it is no batch is seen by whose the numbers are.
        statistics = Statistics({}, {})
    if training and statistics is not None:
        return statistics.normalise(input, (running_mean, running_var), affine, momentum, eps)
    if training:
        raise MixesExamples(
            "batch normalisation mixes the examples of a batch, so no example has a gradient of its own: "
            f"{PER_CLIENT}, or use nn.GroupNorm"
        )
    return _by(input, mean, variance, *affine, eps)


def _by(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Normalise by given statistics: by torch, but for a batch of one, which it gets wrong."""
    if torch.is_grad_enabled() and len(x) == 1 and mean is not None and variance is not None:
        return frozen(x, mean, variance, weight, bias, epsilon)
    return F.batch_norm(x, mean, variance, weight, bias, eps=epsilon)


class MixesExamples(UserError):
    """No example has a gradient of its own."""
