"""Robust aggregation: a geometric rule is a map from the Gram matrix to weights.

>>> import torch
>>> from trilemma import aggregation as agg
>>> X = torch.tensor([[1.0, 1.0], [1.5, 1.0], [0.5, 1.0], [50.0, -50.0]])
>>> out = agg.caf(f=1)(X)
>>> out.value.round(decimals=2), out.weights[3].item()
(tensor([1., 1.]), 0.0)
>>> agg.parse("nnm+cwmed", f=1)(X).value
tensor([1., 1.])
"""

from trilemma.aggregation.bulyan import Bulyan as bulyan
from trilemma.aggregation.caf import Caf as caf
from trilemma.aggregation.centred_clipping import CentredClipping as cc
from trilemma.aggregation.coordinate import MeanAroundMedian as meamed
from trilemma.aggregation.coordinate import Median as cwmed
from trilemma.aggregation.coordinate import TrimmedMean as cwtm
from trilemma.aggregation.filter import Filter as filter
from trilemma.aggregation.geomed import GeometricMedian as geomed
from trilemma.aggregation.krum import Krum as krum
from trilemma.aggregation.krum import MultiKrum as multikrum
from trilemma.aggregation.mda import MinimumDiameter as mda
from trilemma.aggregation.mean import Mean as mean
from trilemma.aggregation.mixing import Arc as arc
from trilemma.aggregation.mixing import Bucketing as bucketing
from trilemma.aggregation.mixing import Clipping as clip
from trilemma.aggregation.mixing import NearestNeighbours as nnm
from trilemma.aggregation.monna import Monna as monna
from trilemma.aggregation.passes.distributed import sharded
from trilemma.aggregation.passes.gram import Geometry, geometry, gram
from trilemma.aggregation.passes.later import geometry_later, gram_later
from trilemma.aggregation.passes.stream import stream
from trilemma.aggregation.smea import Smea as smea
from trilemma.aggregation.steps.chain import Chain, Mixing, chain
from trilemma.aggregation.steps.parsing import parse
from trilemma.aggregation.steps.registry import mixings, rules
from trilemma.aggregation.steps.rule import Coordinate, Geometric, Rule
from trilemma.aggregation.steps.types import Aggregate, Info, Weighing
from trilemma.base.registry import discover

__all__ = [
    "Aggregate",
    "Chain",
    "Coordinate",
    "Geometric",
    "Geometry",
    "Info",
    "Mixing",
    "Rule",
    "Weighing",
    "arc",
    "bucketing",
    "bulyan",
    "caf",
    "cc",
    "chain",
    "clip",
    "cwmed",
    "cwtm",
    "filter",
    "geomed",
    "geometry",
    "geometry_later",
    "gram",
    "gram_later",
    "krum",
    "mda",
    "meamed",
    "mean",
    "mixings",
    "monna",
    "multikrum",
    "nnm",
    "parse",
    "rules",
    "sharded",
    "smea",
    "stream",
]

discover(__name__)
globals().update(mixings)  # those of new files too: `agg.name` is the class registered as "name"
globals().update(rules)
