"""What goes into a model that was trained on features: computed from examples as the run computed it.

A model that was trained with `[data] features`, `project`, `norm`, `centre` or `whiten` takes no example as
it is. Beside such a model, exported, lies a file that says what it takes: those keys, and the seed that a
projection was drawn from. `trilemma.inputs` reads it, and computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from trilemma import data
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.base.plugins import Plugin
from trilemma.data import Features
from trilemma.experiment.own import OWN
from trilemma.experiment.parsing import Config, parse, read_tables

STEPS = ("project", "norm", "centre", "whiten")
"""Keys of `[data]` that change what a model is given; beside them, `features`."""


@dataclass(frozen=True)
class Inputs:
    """The way from examples to what a model takes, in a run of `config` with this seed.

    >>> inputs = Inputs(parse({"data": {"project": 4, "norm": 1.0}}), seed=1)
    >>> inputs(torch.ones(2, 68)).shape
    torch.Size([2, 4])
    """

    config: Config
    seed: int

    @property
    def computed(self) -> bool:
        """Whether anything is computed: a model may also take examples as they are."""
        return self.config.features.name != "none" or bool(self._steps)

    def __call__(self, examples: Features, device: torch.device | str = "cpu") -> Features:
        """Return what the model takes, given examples as the data set or the task of the run has them."""
        if not self.computed:
            return examples
        holding = self.config.holding
        found = data.features_of(
            examples,
            self.config.features.options,
            project=holding.project,
            norm=holding.norm,
            key=features_key(Key(self.seed)),
            device=device,
        )
        if not holding.around_own:
            return found
        if len(found) < 2:
            raise UserError(f"{holding.caveat}: one example is not enough; give all there are at once")
        return data.around_own(found, holding.whiten)

    def toml(self, model: str) -> str:
        """Return it as the text of a file that lies beside `model`, with what to do with it."""
        steps: dict[str, Any] = {**self._steps, "features": self.config.features.dump()}
        plugins = [plugin.reference for plugin in self._plugins()]
        named = {"plugins": plugins} if plugins else {}
        about = [
            f"What {model} takes in place of examples, which are as {self._examples}.",
            'In Python: net(trilemma.inputs("THIS FILE")(examples))',
        ]
        if self.config.holding.around_own:
            about.append(
                "Give all examples at once: what they are changed by is their own mean or covariance."
            )
        said = "".join(f"# {line}\n" for line in about)
        return said + tomli_w.dumps({"seed": self.seed, **named, "data": steps})

    @property
    def _steps(self) -> dict[str, Any]:
        """The keys of `[data]` that are set, but for `features`."""
        values = {key: getattr(self.config.holding, key) for key in STEPS}
        return {key: value for key, value in values.items() if value is not None and value is not False}

    @property
    def _examples(self) -> str:
        if self.config.data.name == OWN:
            return "the task gives them"
        name, *options = (f"{key} = {value}" for key, value in self.config.data.dump().items())
        return f"the data set gives them ({', '.join((name, *options))})"

    def _plugins(self) -> list[Plugin]:
        """Return the plugin that brings the feature map, if one does; refuse one that is on no record."""
        features, kind = self.config.features, data.feature_maps.kind
        found = [plugin for plugin in self.config.plugins if (kind, features.name) in plugin.entries]
        if not found and not type(features.options).__module__.startswith("trilemma."):
            raise UserError(
                f"features = {features.name!r}: the run does not say which file or package brings this "
                f"{kind}, and nobody could be told what the model takes; allowed: a run with it as a plugin"
            )
        return found


def features_key(key: Key) -> Key:
    """Return what features of a run with this key are drawn from."""
    return key.fold("features")


def inputs(path: Path | str) -> Inputs:
    """Read the file that `trilemma export` wrote beside a model: what it takes in place of examples."""
    tables = read_tables(path)
    seed, steps = tables.pop("seed", None), tables.pop("data", None)
    if type(seed) is not int or not isinstance(steps, dict) or tables.keys() != {"plugins"}:
        raise ConfigError(f"{str(path)!r} does not say what a model takes; trilemma export writes such files")
    return Inputs(parse({**tables, "data": {**steps, "name": OWN}}), seed)
