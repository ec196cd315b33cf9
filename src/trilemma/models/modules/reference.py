"""The plain loop over examples, by autograd alone: what every other way of computing gradients is held to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.utils._python_dispatch import TorchDispatchMode

from trilemma.base.errors import UserError
from trilemma.models.engines.engine import Pass, PassRequest
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.flat import unflatten
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.modules.passes import leaves, losses, plainly
from trilemma.models.modules.randomness import Draws
from trilemma.models.modules.recorder import Log, Recorder
from trilemma.models.modules.statistics import Statistics
from trilemma.models.types import Inputs, Model, each_column

TOLERANCE = 1e-3
"""How far gradients may be from the plain loop's, in single precision."""

COMPARED = 3
"""Examples that are compared."""


@dataclass(frozen=True)
class Comparison:
    """How far gradients are from the plain loop's, relative to its own, and how far they may be.

    `excess` is by what share the lengths that clipping counts with are above those of examples' gradients.
    """

    error: float
    allowed: float
    excess: float = 0.0

    @property
    def right(self) -> bool:
        """Whether they are right but for rounding."""
        return self.error <= self.allowed


class Reference:
    """What a plain loop gives for examples (n, …): by example, and for two clients with weights of their own.

    Dropout is off. Examples whose gradients are not finite are left out.
    """

    def __init__(self, model: Model, theta: Tensor, x: Inputs, y: Tensor) -> None:
        engine = model.engine
        self.model, self.theta = model, theta
        self.whole = engine.whole(model) if isinstance(engine, ModuleEngine) else bool(model.buffers)
        with Precision() as seen:  # type: ignore[no-untyped-call]
            gradient = by_autograd(model, theta)
            if not self.whole:
                one, rows = torch.ones(1, device=y.device), [slice(i, i + 1) for i in range(len(y))]
                each = [gradient(each_column(x, itemgetter(row)), y[row], one) for row in rows]
                sound = [number for number, found in enumerate(each) if bool(torch.isfinite(found).all())]
                x, y = each_column(x, itemgetter(sound)), y[sound]
                self.each = [each[number] for number in sound]
            self.x, self.y = x, y
            rising = torch.arange(1.0, len(y) + 1, device=y.device)
            self.share = torch.stack([rising, rising.flip(0)]) / rising.sum()
            if len(y):
                self.expected = torch.stack(
                    [gradient(x, y, weight) for weight in self.share]
                    if self.whole
                    else [*(self.share @ torch.stack(self.each))]
                )
        self.allowed = seen.tolerance

    def compare(self, run: Callable[[PassRequest], Pass]) -> Comparison:
        """Hold what `run` makes of the same examples to it."""
        if not len(self.y):
            return Comparison(0.0, self.allowed)
        request = PassRequest(
            params=self.theta,
            x=each_column(self.x, lambda column: column.expand(2, *column.shape)),
            y=self.y.expand(2, *self.y.shape),
            share=self.share,
            padded=False,
            buffers=self.model.initial_buffers(2, self.y.device),
            dropout=False,
        )
        worst = excess = 0.0
        for params in (self.theta, self.theta.expand(2, -1)):
            done = run(replace(request, params=params))
            worst = max(worst, _away(self.model, done, None, self.expected))
            if self.whole:
                continue
            done = run(replace(request, params=params, share=torch.ones_like(self.share), by_example=True))
            norms = done.lengths().norms
            for number, own in enumerate(self.each):
                chosen = torch.zeros_like(self.share)
                chosen[:, number] = 1.0
                worst = max(worst, _away(self.model, done, chosen, own.expand(2, -1)))
                # A length may be a bound: it must not fall short.
                if length := float(own.norm()):
                    worst = max(worst, 1.0 - float(norms[:, number].min()) / length)
                    excess = max(excess, float(norms[:, number].max()) / length - 1.0)
        return Comparison(worst, self.allowed, excess)


def _away(model: Model, done: Pass, factor: Tensor | None, expected: Tensor) -> float:
    """Return the largest distance of a tensor from what is expected (k, d), relative to its length.

    A tensor whose gradient is zero but for rounding, as that of a key's bias in attention, says little: a
    hundredth of the whole gradient's length counts too.
    """
    out = torch.full_like(expected, torch.nan, dtype=torch.float32)
    done.write(unflatten(model, out), factor)
    worst = 0.0
    for mine, right in zip(out, expected, strict=True):
        whole = float(right.norm())
        if not math.isfinite(whole):
            continue
        for segment in model.tensors:
            own = right[segment.slice]
            distance = float((mine[segment.slice] - own).norm()) / (float(own.norm()) + 0.01 * whole or 1.0)
            worst = max(worst, distance if math.isfinite(distance) else math.inf)
    return worst


class Precision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees how coarse the numbers are that are computed with."""

    epsilon = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: torch would import its whole compiler, a second and 60 MB, to tell it to look away."""
        return False

    @property
    def tolerance(self) -> float:
        """How far results may be apart that should be the same."""
        return max(TOLERANCE, 16 * self.epsilon)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **kwargs or {})
        if isinstance(found, Tensor) and found.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(found.dtype).eps)
        return found


@runtime_checkable
class Projecting(Protocol):
    """An engine whose parameters are coordinates of another model's, as a random subspace's are."""

    @property
    def whole(self) -> Model:
        """The other model."""

    def expand(self, params: Tensor) -> Tensor:
        """Return the other model's parameters (D,) for coordinates (d,)."""

    def project(self, gradient: Tensor) -> Tensor:
        """Return the gradient in the coordinates (d,) for one of the other model (D,)."""


def by_autograd(model: Model, theta: Tensor) -> Callable[[Inputs, Tensor, Tensor], Tensor]:
    """Return how autograd alone gets the gradient of Σ_i w_i ℓ_i from examples (n, …), targets, weights."""
    engine: object = model.engine
    if isinstance(engine, Projecting):
        project, gradient = engine.project, by_autograd(engine.whole, engine.expand(theta))
        return lambda x, y, share: project(gradient(x, y, share))
    flat = theta.clone().requires_grad_()

    def by_layers(x: Inputs, y: Tensor, share: Tensor) -> Tensor:
        features = each_column(x, lambda column: column[None])
        saved = SavedActivations(train=True, buffers=model.initial_buffers(1, y.device))
        with torch.enable_grad():
            found = model.loss(model.forward(unflatten(model, flat), features, saved), y[None])
            return torch.autograd.grad((found * share).sum(), flat)[0]

    if not isinstance(engine, ModuleEngine):
        return by_layers
    source, whole = engine.at(theta.device), engine.whole(model)
    net = copied(source.module)
    own = dict(net.named_parameters())
    with torch.no_grad():
        for name, value in unflatten(model, theta).items():
            own[name].copy_(value)
    trained = [own[segment.name] for segment in model.tensors]

    def by_module(x: Inputs, y: Tensor, share: Tensor) -> Tensor:
        with torch.enable_grad():
            with plainly(), Recorder({}, None, Log(), Draws(None, off=True), Statistics({}, {})):
                outputs = net(x) if isinstance(x, Tensor) else net(**x)
            outputs = getattr(outputs, "logits", outputs)
            loss = losses(source, outputs, y, share).sum() if whole else source.loss(outputs, y) * share[0]
            _refuse_strangers(model, loss, own.values())
            found = torch.autograd.grad(loss, trained, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
        return torch.cat([part.to_dense().float().flatten() for part in parts])

    return by_module


def _refuse_strangers(model: Model, loss: Tensor, own: Iterable[Tensor]) -> None:
    """Refuse a loss that depends on parameters which are not the module's: they would never be trained.

    Or it reads the module's own behind its back, as a penalty on weights does, and their gradients are lost.
    """
    known = {id(part) for part in own}
    for stranger in leaves(loss):
        if isinstance(stranger, nn.Parameter) and id(stranger) not in known:
            raise UserError(
                f"the loss of {model.name!r} depends on a parameter {tuple(stranger.shape)} that is not "
                "reached through the module's own forward pass, so its gradient would be left out. A penalty "
                "on weights is weight_decay; a parameter of the loss belongs into the module, or has "
                "requires_grad_(False)"
            )


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module; what it computed and kept, as the old weight_norm does, loses history."""
    kept = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    memo = {
        id(value): torch.empty(0) if _functorch.is_functorch_wrapped_tensor(value) else value.detach().clone()
        for value in kept
        if _functorch.is_functorch_wrapped_tensor(value) or not value.is_leaf
    }
    return copy.deepcopy(module, memo)
