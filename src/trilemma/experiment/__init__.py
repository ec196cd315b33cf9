"""Configurations: read, validated, resolved into a release and an algorithm.

>>> from trilemma import config
>>> settings = config.parse({}, ["federation.clients=9", "federation.byzantine=2", "aggregation.rule=cwmed"])
>>> settings.federation.f, settings.aggregation.rule
(2, 'cwmed')
"""

from trilemma.experiment import auto
from trilemma.experiment.model_inputs import Inputs, inputs
from trilemma.experiment.own import OWN, Own
from trilemma.experiment.parsing import Choice, Config, load, parse
from trilemma.experiment.ready import ready
from trilemma.experiment.schema import parse_seeds
from trilemma.experiment.sweep import Cell, Sweep, described, load_sweep

__all__ = [
    "OWN",
    "Cell",
    "Choice",
    "Config",
    "Inputs",
    "Own",
    "Sweep",
    "auto",
    "described",
    "inputs",
    "load",
    "load_sweep",
    "parse",
    "parse_seeds",
    "ready",
]
