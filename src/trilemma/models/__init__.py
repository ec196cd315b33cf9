"""The models room: classifiers as pure functions of one flat parameter vector, for k clients at once.

`build` makes a model by name, `from_module` one of any `torch.nn.Module`; `gradients` gives the stacked
gradients of k clients, plain or clipped; `choose` says what of a model is trained; `evaluate` scores
parameters. Parameters are flat vectors: (d,) shared by all clients or (k, d), one model each.

A new model is one file here with a `ModelOptions` class, entered in `models`.
"""

from trilemma.base.registry import discover
from trilemma.models.catalogue import ModelOptions, build, models
from trilemma.models.coordinates import Lora, Subspace, Train, choose
from trilemma.models.engines.clipping import Clip
from trilemma.models.engines.stacked import Gradients, gradients
from trilemma.models.flat import flatten, unflatten
from trilemma.models.modules import (
    Paths,
    compared,
    couples,
    from_module,
    paths,
    state_dict,
    token_cross_entropy,
    verify,
)
from trilemma.models.scoring import Score, evaluate, outputs
from trilemma.models.types import Buffers, Examples, Inputs, Model, Params, Segment

__all__ = [
    "Buffers",
    "Clip",
    "Examples",
    "Gradients",
    "Inputs",
    "Lora",
    "Model",
    "ModelOptions",
    "Params",
    "Paths",
    "Score",
    "Segment",
    "Subspace",
    "Train",
    "build",
    "choose",
    "compared",
    "couples",
    "evaluate",
    "flatten",
    "from_module",
    "gradients",
    "models",
    "outputs",
    "paths",
    "state_dict",
    "token_cross_entropy",
    "unflatten",
    "verify",
]

discover(__name__)
