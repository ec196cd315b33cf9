"""Data sets, who holds which examples, and stacked batches.

>>> from trilemma import data
>>> from trilemma.base.keys import Key
>>> phishing = data.load("phishing", key=Key(1))
>>> holdings = data.divide("dirichlet", phishing, 4, key=Key(1), alpha=1.0)
>>> federated = data.FederatedData(phishing, holdings)
>>> federated.sample(ids=(0, 1, 2, 3), size=25, key=Key(1).fold("round", 0)).x.shape
torch.Size([4, 25, 68])
"""

from trilemma.base.registry import discover
from trilemma.data.batches.augment import horizontal_flip
from trilemma.data.batches.federated import EpochBatches, FederatedData, Split
from trilemma.data.catalogue import (
    DatasetOptions,
    FeatureMap,
    FeatureOptions,
    PartitionOptions,
    datasets,
    divide,
    feature_maps,
    load,
    loaded,
    partitions,
)
from trilemma.data.dealing import mirror, set_aside
from trilemma.data.features.centred import around_own, centred
from trilemma.data.features.maps import features_of, with_features
from trilemma.data.own.clients import from_clients
from trilemma.data.own.declared import Declaration, Values, declaration_of, made_up
from trilemma.data.own.fitted import fitted, outside, stand_in, within
from trilemma.data.own.recordwise import fill, split
from trilemma.data.own.table_files import read_table
from trilemma.data.own.tables import from_folder, from_table
from trilemma.data.own.targets import Target
from trilemma.data.storage import Storage
from trilemma.data.types import IGNORED, Augment, Batch, Dataset, Features, Holdings, columns_of, each

__all__ = [
    "IGNORED",
    "Augment",
    "Batch",
    "Dataset",
    "DatasetOptions",
    "Declaration",
    "EpochBatches",
    "FeatureMap",
    "FeatureOptions",
    "Features",
    "FederatedData",
    "Holdings",
    "PartitionOptions",
    "Split",
    "Storage",
    "Target",
    "Values",
    "around_own",
    "centred",
    "columns_of",
    "datasets",
    "declaration_of",
    "divide",
    "each",
    "feature_maps",
    "features_of",
    "fill",
    "fitted",
    "from_clients",
    "from_folder",
    "from_table",
    "horizontal_flip",
    "load",
    "loaded",
    "made_up",
    "mirror",
    "outside",
    "partitions",
    "read_table",
    "set_aside",
    "split",
    "stand_in",
    "with_features",
    "within",
]

discover(__name__)
