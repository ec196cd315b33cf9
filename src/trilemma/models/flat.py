"""Between one flat vector and named parameter tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.types import Model, Params


def unflatten(model: Model, flat: Tensor) -> dict[str, Tensor]:
    """Return the parameter tensors as views of `flat`: (d,) gives their shapes, (k, d) a client axis first.

    >>> from trilemma import models
    >>> model = models.build("logistic", (68,), 2)
    >>> {name: tuple(part.shape) for name, part in unflatten(model, torch.zeros(3, 69)).items()}
    {'linear.weight': (3, 1, 68), 'linear.bias': (3, 1)}
    """
    if flat.dim() not in (1, 2) or flat.shape[-1] != model.dim:
        raise UserError(
            f"{model.name} has {model.dim} parameters: expected a vector ({model.dim},) or one per client "
            f"(k, {model.dim}), got {tuple(flat.shape)}"
        )
    lead = flat.shape[:-1]
    return {
        name: flat.narrow(-1, span.start, span.size).view((*lead, *shape))
        for (name, shape), span in zip(model.shapes, model.tensors, strict=True)
    }


def flatten(model: Model, params: Params) -> Tensor:
    """Return the flat vector (d,) or (k, d) of named tensors; the inverse of `unflatten`.

    >>> from trilemma import models
    >>> model = models.build("logistic", (68,), 2)
    >>> flat = torch.arange(69.0)
    >>> torch.equal(flatten(model, unflatten(model, flat)), flat)
    True
    """
    parts = []
    for name, shape in model.shapes:
        tensor = params[name]
        parts.append(tensor.reshape(*tensor.shape[: tensor.dim() - len(shape)], -1))
    return torch.cat(parts, -1)
