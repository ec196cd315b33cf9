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

from trilemma.aggregation.bulyan import bulyan
from trilemma.aggregation.caf import caf
from trilemma.aggregation.centred_clipping import cc
from trilemma.aggregation.chain import Chain, Mixing, chain
from trilemma.aggregation.coordinate import cwmed, cwtm, meamed
from trilemma.aggregation.distributed import sharded
from trilemma.aggregation.filter import filter_ as filter
from trilemma.aggregation.geomed import geomed
from trilemma.aggregation.gram import Geometry, geometry, gram
from trilemma.aggregation.krum import krum, multikrum
from trilemma.aggregation.mda import mda
from trilemma.aggregation.mean import mean
from trilemma.aggregation.mixing import arc, bucketing, clip, nnm
from trilemma.aggregation.monna import monna
from trilemma.aggregation.parsing import parse
from trilemma.aggregation.registry import mixings, rules
from trilemma.aggregation.rule import Coordinate, Geometric, Rule
from trilemma.aggregation.smea import smea
from trilemma.aggregation.stream import stream
from trilemma.aggregation.types import Aggregate, Info

__all__ = [
    "Aggregate",
    "Chain",
    "Coordinate",
    "Geometric",
    "Geometry",
    "Info",
    "Mixing",
    "Rule",
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
    "gram",
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
