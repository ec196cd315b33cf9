"""Local steps of k stacked models: how clients train between two messages, and their initial models.

One local step of client k on a mini-batch B, with weight decay wd and an optional additional force:

    x_k ← x_k − η (clip(∇f_B(x_k), C) + wd · x_k + force(x_k))

Only the gradient of the data is clipped, not weight decay and force. Running statistics of batch
normalisation belong to the client: they are in its state, under the names the model gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma import models
from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning.protocol import State
from trilemma.learning.steps.total import gradients
from trilemma.models.types import Model

GRADIENT_CLIP = 60.0
"""The norm to which the experiments of lp-proj and its rivals clip every mini-batch gradient."""


@dataclass(frozen=True)
class LocalStep:
    """How a local step is taken: learning rate η, gradient clip C (None: no clip), weight decay wd."""

    rate: float
    clip: float | None = GRADIENT_CLIP
    decay: float = 0.0

    def gradient(
        self,
        model: Model,
        params: Tensor,
        batch: Batch,
        statistics: Mapping[str, Tensor],
        keys: Sequence[Key] | None = None,
    ) -> models.Gradients:
        """Return clip(∇f_B(x), C) + wd · x for stacked models."""
        return gradients(
            model,
            params,
            batch,
            clip=models.Clip.none() if self.clip is None else models.Clip.client(self.clip),
            weight_decay=self.decay,
            buffers=statistics or None,
            keys=keys,
        )


@dataclass(frozen=True)
class Walk:
    """The result of local training.

    `params` (k, D) are the models. `loss` (k,) is the mean over all steps, not finite if any step's is not.
    `travelled` (k, D) is the sum of the steps' directions. `statistics` are the running statistics.
    """

    params: Tensor
    loss: Tensor
    travelled: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


def walk(
    model: Model,
    params: Tensor,
    batches: Iterable[Batch],
    step: LocalStep,
    statistics: Mapping[str, Tensor],
    force: Callable[[Tensor], Tensor] | None = None,
    keys: Sequence[Key] | None = None,
) -> Walk:
    """Take one local step per batch, starting from parameters (D,) of all clients or (k, D), one row each.

    `keys`, one per client, are for models with dropout; each step draws from a key of its own.

    >>> from types import SimpleNamespace
    >>> model = models.build("logistic", (2,), 2)
    >>> batch = SimpleNamespace(x=torch.ones(4, 8, 2), y=torch.zeros(4, 8).long(), weight=None)
    >>> walk(model, torch.zeros(3), [batch, batch], LocalStep(0.1), {}).params.shape
    torch.Size([4, 3])
    """
    travelled: Tensor | None = None
    losses: list[Tensor] = []
    for number, batch in enumerate(batches):
        drawn = None if keys is None else step_keys(keys, number)
        found = step.gradient(model, params, batch, statistics, drawn)
        direction = found.value if force is None else found.value + force(params)
        params = params - step.rate * direction
        travelled = direction if travelled is None else travelled + direction
        losses.append(found.loss)
        statistics = found.buffers
    if travelled is None:
        raise ValueError("local training needs at least one batch")
    return Walk(params, torch.stack(losses).mean(0), travelled, statistics)


def step_keys(keys: Sequence[Key], number: int) -> list[Key]:
    """Return each client's key for local step `number`, given the `keys` of the round."""
    return [key.fold("step", number) for key in keys]


def initial_models(model: Model, ids: tuple[int, ...], key: Key) -> Tensor:
    """Return every client's own initial model (k, D), which depends on its id and not on the other clients.

    >>> model = models.build("logistic", (2,), 2)
    >>> torch.equal(initial_models(model, (0, 5), Key(1))[1], initial_models(model, (5,), Key(1))[0])
    True
    """
    return torch.stack([initial_model(model, i, key) for i in ids])


def initial_model(model: Model, client: int, key: Key) -> Tensor:
    """Return the initial model (D,) of one client; global models start from that of client 0."""
    return model.init(key.fold("client", client, "model"))


def clients_state(model: Model, ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the state of clients that keep only their ids and running statistics."""
    return {"id": torch.tensor(ids, dtype=torch.int64), **model.initial_buffers(len(ids))}


def statistics_of(model: Model, state: State) -> dict[str, Tensor]:
    """Return the running statistics kept in a client state; empty for models without any."""
    return {name: state[name] for name, _ in model.buffers}
