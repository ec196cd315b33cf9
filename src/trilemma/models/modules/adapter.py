"""From a `torch.nn.Module` to a model: one flat vector of what is trained, and back to a state_dict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.flat import unflatten
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.modules.passes import PassSource
from trilemma.models.modules.randomness import Draws
from trilemma.models.modules.recorder import Log, Recorder, functions_seen
from trilemma.models.modules.reference import copied
from trilemma.models.modules.statistics import Statistics
from trilemma.models.types import Buffers, Inputs, Model, Params

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> the mean loss of a batch, or the loss of every example."""


def from_module(
    module: nn.Module | Callable[[], nn.Module],
    loss: Loss,
    *,
    name: str = "",
    predict: Callable[[Tensor], Tensor] | None = None,
    coupled: bool = False,
) -> Model:
    """Return the model of a module, as its author wrote it.

    Parameters with `requires_grad` are trained: they travel as one flat vector, in the order and under the
    names of `named_parameters`, tied ones once. Frozen parameters and buffers stay as they are, and every
    part of the module trains in the mode (`train`, `eval`) it was given in. `init` gives the values of a
    module; a function that makes modules is called anew for every key, with torch's generator set by it.

    `loss(outputs, targets)` is called on one example at a time, as a batch of one, so a mean is the example's
    own. A loss that couples the examples of a batch (`coupled=True`) sees a client's whole batch.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> model = from_module(net, nn.CrossEntropyLoss())
    >>> model.dim, [segment.name for segment in model.tensors]
    (23, ['0.weight', '0.bias', '2.weight', '2.bias'])
    """
    given = module if isinstance(module, nn.Module) else _seeded(module, Key(0))
    skeleton = copied(given)
    trained = {key: part for key, part in skeleton.named_parameters() if part.requires_grad}
    _refuse(given, trained, loss)
    start = torch.cat([part.detach().flatten().float().cpu() for part in trained.values()])
    for part in trained.values():
        part.data.fill_(
            torch.nan
        )  # never read: every use goes through the recorder, and a miss would be seen
    shapes = tuple((key, tuple(part.shape)) for key, part in trained.items())
    norms = {
        key: part
        for key, part in skeleton.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training and part.track_running_stats
    }
    buffers = {
        f"{key}.{kind}": buffer
        for key, part in norms.items()
        for kind, buffer in (("mean", part.running_mean), ("variance", part.running_var))
        if buffer is not None
    }
    one = _one(loss)
    source = PassSource(
        module=skeleton,
        trained=trained,
        given=loss,
        loss=loss if coupled else one,
        many=None if coupled else _many(loss),
        statistics={id(part): key for key, part in buffers.items()},
        coupled=coupled,
    )
    engine = ModuleEngine(source, place=_placed)

    def init(key: Key) -> Tensor:
        if isinstance(module, nn.Module):
            return start.clone()
        fresh = dict(_seeded(module, key).named_parameters())
        return torch.cat([fresh[part].detach().flatten().float().cpu() for part, _ in shapes])

    return Model(
        name=name or type(given).__name__,
        shapes=shapes,
        forward=partial(forward, engine),
        init=init,
        loss=lambda outputs, y: vmap(vmap(one))(outputs.unsqueeze(2), y.unsqueeze(2)),
        predict=predict or predictor(loss),
        buffers=tuple((key, tuple(part.shape)) for key, part in buffers.items()),
        statistics={key: part.detach().clone() for key, part in buffers.items()},
        engine=engine,
    )


def _refuse(module: nn.Module, trained: Mapping[str, nn.Parameter], loss: Loss) -> None:
    """Refuse what cannot be trained, or not rightly."""
    name = type(module).__name__
    if not trained:
        raise UserError(f"{name} has no parameter with requires_grad: nothing to train")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError(
            f"{name} has scripted parts (torch.jit): which operations use their parameters cannot be seen. "
            "Use the modules that they were made from"
        )
    for key, part in trained.items():
        if isinstance(part, nn.parameter.UninitializedParameter):
            raise UserError(
                f"{key} of {name} has no shape yet: call a lazy module on an example once before it is used"
            )
        if part.is_complex():
            raise UserError(
                f"{key} of {name} is complex, and what is trained are real numbers: make the parameter real, "
                "(…, 2), and use torch.view_as_complex of it in forward"
            )
    if isinstance(loss, nn.Module):
        own = [key for key, part in loss.named_parameters() if part.requires_grad]
        if own:
            raise UserError(
                f"the loss {type(loss).__name__} has parameters {own}, which would not be trained: make them "
                "parts of the module, or requires_grad_(False)"
            )


def _one(loss: Loss) -> Loss:
    """Return the loss of a batch of one as a number.

    A mean weighted by classes divides by the example's own class weight, which would cancel it: such a loss
    is taken without its mean.
    """
    plain = loss
    if (
        isinstance(loss, nn.modules.loss._WeightedLoss)
        and loss.weight is not None
        and loss.reduction == "mean"
    ):
        plain = copy.deepcopy(loss)
        plain.reduction = "none"

    def one(outputs: Any, targets: Tensor) -> Tensor:
        return plain(outputs, targets).mean()

    return one


def _many(loss: Loss) -> Loss | None:
    """Return the losses of a batch's examples where torch's own code has them, else None."""
    kinds = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss)
    if not isinstance(loss, kinds) or type(loss) not in kinds or loss.reduction != "mean":
        return None
    own = vars(loss)
    if own.keys() - vars(type(loss)()) or any(own[name] for name in own if "_hooks" in name):
        return None  # a forward pass of its own, or hooks: not torch's code alone
    single: nn.modules.loss._Loss = copy.deepcopy(loss)
    single.reduction = "none"
    one = _one(loss)

    def many(outputs: Any, targets: Tensor) -> Tensor:
        if isinstance(single, nn.CrossEntropyLoss) and targets.dim() != 1:
            # Positions to be ignored do not count in an example's mean.
            return vmap(one)(outputs.unsqueeze(1), targets.unsqueeze(1))
        found: Tensor = type(single).forward(single, outputs, targets)
        return found if found.dim() == 1 else found.flatten(1).mean(1)

    return many


def token_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens: outputs (…, tokens, classes), labels (…, tokens), −100: none.

    An example without any token has loss 0.
    """
    found = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum")
    return found / (labels != -100).sum().clamp(min=1)


def predictor(loss: Loss) -> Callable[[Tensor], Tensor]:
    """Return how outputs (k, n, …) become labels under a loss; under one of numbers they stay."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return lambda outputs: outputs.argmax(2)
    if loss in (token_cross_entropy, nn.functional.cross_entropy, nn.functional.nll_loss):
        return lambda outputs: outputs.argmax(-1)
    if isinstance(loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss):
        return lambda outputs: (outputs > 0).long()
    return lambda outputs: outputs


def _seeded(make: Callable[[], nn.Module], key: Key) -> nn.Module:
    """Call a function that makes a module, torch's generator set by the key and put back afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(key.fold("init").integer())
        return make()


def _placed(source: PassSource, device: torch.device) -> PassSource:
    """Return the source on a device."""
    if all(part.device == device for part in source.trained.values()):
        return source
    module = copied(source.module).to(device)
    trained = {key: part for key, part in module.named_parameters() if key in source.trained}
    names = {
        key: source.statistics[id(part)]
        for key, part in source.module.named_buffers()
        if id(part) in source.statistics
    }
    moved = dict(module.named_buffers())
    return replace(
        source,
        module=module,
        trained=trained,
        statistics={id(moved[key]): value for key, value in names.items()},
    )


def forward(engine: ModuleEngine, params: Params, x: Inputs, saved: SavedActivations | None = None) -> Tensor:
    """Map examples (k, b, …) to outputs (k, b, …) for scoring: every part in eval mode."""
    columns = {"": x} if isinstance(x, Tensor) else dict(x)
    first = next(iter(columns.values()))
    source = engine.at(first.device)
    buffers = {} if saved is None else saved.buffers
    personal = any(value.dim() > source.trained[name].dim() for name, value in params.items())
    apart = personal or any(len(part) > 1 for part in buffers.values())
    outputs = []
    # One model on the examples of several clients: they are one batch.
    for row in range(len(first)) if apart else [0]:
        own = {name: value[row] if personal else value for name, value in params.items()}
        mine = {name: part[row] if apart else part.flatten(0, 1) for name, part in columns.items()}
        statistics = Statistics(
            source.statistics, {name: part[row if len(part) > 1 else 0] for name, part in buffers.items()}
        )
        outputs.append(outputs_of(source, own, mine[""] if isinstance(x, Tensor) else mine, statistics))
    if apart:
        return torch.stack(outputs)
    result: Tensor = outputs[0].unflatten(0, first.shape[:2])
    return result


def outputs_of(source: PassSource, params: Params, x: Inputs, statistics: Statistics | None = None) -> Any:
    """Run a module on a batch (n, …) with parameters of one model, every part in eval mode."""
    recorder = Recorder(source.slots(params, params), None, Log(), Draws(None), statistics)
    with torch.no_grad(), scoring(source.module), functions_seen(), recorder:
        return source.call(x)


@contextmanager
def scoring(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode for a while."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def state_dict(model: Model, flat: Tensor, buffers: Buffers | None = None) -> dict[str, Tensor]:
    """Return parameters (d,) under the module's own names, with what is frozen, for `load_state_dict`.

    `buffers` are running statistics of batch normalisation, (1, …) or (…) each; else those it started from.

    >>> net = nn.Linear(2, 1)
    >>> model = from_module(net, nn.MSELoss())
    >>> state_dict(model, torch.tensor([1.0, 2.0, 3.0]))
    {'weight': tensor([[1., 2.]]), 'bias': tensor([3.])}
    """
    if model.export is not None:
        return model.export(flat, buffers)
    engine = model.engine
    if not isinstance(engine, ModuleEngine):
        return {name: part.clone() for name, part in unflatten(model, flat.detach()).items()}
    source = engine.source
    names = {id(part): name for name, part in source.trained.items()}
    tensors = unflatten(model, flat.detach().cpu())
    found: dict[str, Tensor] = {}
    for key, part in source.module.state_dict(keep_vars=True).items():
        if id(part) in names:
            found[key] = tensors[names[id(part)]].to(part.dtype).clone()
        elif id(part) in source.statistics and buffers is not None:
            found[key] = buffers[source.statistics[id(part)]].detach().cpu().reshape(part.shape).clone()
        else:
            found[key] = part.detach().cpu().clone()
    return found
