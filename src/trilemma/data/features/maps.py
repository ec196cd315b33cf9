"""Fixed features in place of raw examples: computed once, in pieces, and kept in the cache.

What is trained on features has few coordinates, and few coordinates are what privacy and robustness are paid
in. A map is frozen, treats every example by itself, and whatever it has comes from elsewhere than the
clients' records; so it costs no privacy, and each client can apply it alone.

* `features`: a registered map (as `scattering`), or any `nn.Module`, in evaluation mode;
* `project`: a random projection to that many numbers, xP with P's entries from N(0, 1/project): lengths
  and angles stay as they are, up to √(1/project). P comes from the key, so it is public;
* `norm`: examples longer than this are shortened to it, for whatever needs a bound on one example's size. It
  must be a public constant: the longest example of the data is a record.
"""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trilemma.base.errors import DataUnavailable, UserError
from trilemma.base.keys import Key
from trilemma.data.catalogue import FeatureMap, FeatureOptions, feature_maps
from trilemma.data.storage import Storage, read_npz
from trilemma.data.types import Dataset, Features, columns_of, each

CHUNK = {"cpu": 64, "cuda": 2048}
"""Examples that go through a map at a time; on a CPU as many as stay in its caches."""

PROBED = 3
"""Examples on which a map, and what the cache holds of it, are tried."""


@feature_maps.register("none")
class Unchanged(FeatureOptions):
    """The examples as they are."""

    def build(self, shape: tuple[int, ...]) -> FeatureMap:
        """Return what changes nothing."""
        return lambda rows: rows


UNCHANGED = Unchanged()


def with_features(
    dataset: Dataset,
    features: FeatureOptions | nn.Module = UNCHANGED,
    *,
    project: int | None = None,
    norm: float | None = None,
    key: Key,
    storage: Storage | None = None,
    device: torch.device | str = "cpu",
) -> Dataset:
    """Return the data set with features in place of its examples; see the module for the steps.

    What was computed before for the same examples and the same steps is read from the cache. A module is
    known there by its parameters, buffers and printed form, and tried anew on a few examples.

    >>> from trilemma.data import load
    >>> phishing, nowhere = load("phishing", key=Key(1)), Storage(None, Path(os.devnull), download=False)
    >>> with_features(phishing, project=16, key=Key(1), storage=nowhere).x_train.shape
    torch.Size([8400, 16])
    """
    if features == UNCHANGED and project is None and norm is None:
        return dataset
    if dataset.augment is not None:
        raise UserError(
            f"{dataset.name} changes its examples whenever they are drawn (flip = true), and features are "
            "computed once: allowed is one of the two"
        )
    steps = _Steps(features, project, norm, key.fold("project"), torch.device(device))
    cache = (storage or Storage.from_environment()).cache / "features"
    act = steps.build(dataset.x_train)
    train = _computed(dataset.x_train, act, steps, cache)
    test = _computed(dataset.x_test, act, steps, cache) if len(dataset.y_test) else train[:0]
    description = "; ".join(part for part in (dataset.description, str(steps)) if part)
    return replace(dataset, x_train=train, x_test=test, description=description, names=())


def features_of(
    examples: Features,
    features: FeatureOptions | nn.Module = UNCHANGED,
    *,
    project: int | None = None,
    norm: float | None = None,
    key: Key,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the features that `with_features` would put in the place of these examples; nothing is kept.

    >>> features_of(torch.ones(2, 9), project=4, norm=1.0, key=Key(1)).shape
    torch.Size([2, 4])
    """
    if not len(next(iter(columns_of(examples).values()))):
        raise UserError("there is no example to compute features of")
    steps = _Steps(features, project, norm, key.fold("project"), torch.device(device))
    return _in_pieces(examples, steps.build(examples), steps.device)


@dataclass(frozen=True)
class _Steps:
    """What is done to an example, and where."""

    features: FeatureOptions | nn.Module
    project: int | None
    norm: float | None
    key: Key
    device: torch.device

    def __str__(self) -> str:
        return ", ".join(
            part
            for part in (
                f"features {self._title()}" if self.features != UNCHANGED else "",
                f"projected to {self.project}" if self.project else "",
                f"norm at most {self.norm:g}" if self.norm else "",
            )
            if part
        )

    def build(self, x: Features) -> FeatureMap:
        """Return all steps as one map, tried on the first examples of `x`."""
        for name, value in (("project", self.project), ("norm", self.norm)):
            if value is not None and not value > 0:
                raise UserError(f"{name} = {value:g}: it must be positive")
        frozen = self._frozen(x)
        first = _checked(frozen, _rows(x, slice(PROBED), self.device))
        width = first.flatten(1).shape[1]
        if self.project is not None and self.project >= width:
            raise UserError(f"project = {self.project}: examples have {width} features; allowed: fewer")
        matrix = None if self.project is None else _projection(width, self.project, self.key).to(self.device)

        def act(rows: Features) -> Tensor:
            values = frozen(rows)
            if matrix is not None:
                values = values.flatten(1) @ matrix
            if self.norm is not None:
                lengths = torch.linalg.vector_norm(values.flatten(1), dim=1)
                shorter = (self.norm / lengths.clamp(min=self.norm)).view(-1, *[1] * (values.dim() - 1))
                values = values * shorter
            return values

        return act

    def identity(self) -> bytes:
        """Return what makes these steps differ from others."""
        drawn = self.key.integer() if self.project is not None else 0
        parts = ["features 1", self._title(), repr(self.project), repr(self.norm), repr(drawn)]
        digest = hashlib.blake2b("\x1f".join(parts).encode())
        if isinstance(self.features, nn.Module):
            _add(digest, self.features.state_dict())
        return digest.digest()

    def _title(self) -> str:
        if isinstance(self.features, FeatureOptions):
            options = ", ".join(f"{name} = {value}" for name, value in self.features if value is not None)
            return f"{type(self.features).__qualname__.removesuffix('Options').lower()} ({options})"
        return f"{type(self.features).__qualname__}: {self.features}"

    def _frozen(self, x: Features) -> FeatureMap:
        if isinstance(self.features, nn.Module):
            module = copy.deepcopy(self.features).to(self.device).eval()
            return torch.no_grad()(lambda rows: module(**rows) if isinstance(rows, Mapping) else module(rows))
        if isinstance(x, Mapping):
            raise UserError(f"examples have the columns {', '.join(x)}: only a module can make one of them")
        return self.features.build(tuple(x.shape[1:]))


def _checked(act: FeatureMap, rows: Features) -> Tensor:
    """Return the features of a few examples; refuse what is not a map of single examples."""
    together = act(rows)
    count = len(next(iter(columns_of(rows).values())))
    if not isinstance(together, Tensor) or together.shape[:1] != (count,):
        raise UserError("a feature map returns one tensor with a row for each example it is given")
    if not bool(torch.isfinite(together).all()):
        raise UserError("the feature map gives numbers that are not finite")
    alone = act(each(rows, lambda column: column[:1]))
    if alone.shape[1:] != together.shape[1:] or not torch.allclose(alone, together[:1], rtol=1e-3, atol=1e-4):
        raise UserError(
            "the features of an example depend on what is given beside it: no privacy guarantee would hold"
        )
    return together


def _computed(x: Features, act: FeatureMap, steps: _Steps, cache: Path) -> Tensor:
    """Return the features of all examples: from the cache, else computed and put there."""
    path = cache / f"{_name(x, steps)}.npz"
    probe = act(_rows(x, slice(PROBED), steps.device)).cpu()
    kept = _kept(path, len(next(iter(columns_of(x).values()))), probe)
    if kept is not None:
        return kept
    computed = _in_pieces(x, act, steps.device)
    _keep(path, computed)
    return computed


def _in_pieces(x: Features, act: FeatureMap, device: torch.device) -> Tensor:
    count = len(next(iter(columns_of(x).values())))
    size = CHUNK.get(device.type, CHUNK["cpu"])
    out: Tensor | None = None
    for start in range(0, count, size):
        values = act(_rows(x, slice(start, start + size), device)).cpu()
        if out is None:
            out = values.new_empty((count, *values.shape[1:]))
        out[start : start + size] = values
    assert out is not None
    return out


def _rows(x: Features, rows: slice, device: torch.device) -> Features:
    return each(x, lambda column: column[rows].to(device))


def _projection(width: int, project: int, key: Key) -> Tensor:
    return torch.randn(width, project, generator=key.torch()).div_(project**0.5)


def _name(x: Features, steps: _Steps) -> str:
    digest = hashlib.blake2b(steps.identity(), digest_size=20)
    _add(digest, columns_of(x))
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _kept(path: Path, count: int, probe: Tensor) -> Tensor | None:
    """Return what the cache holds, if it is whole and agrees with the probe."""
    if not path.is_file():
        return None
    try:
        kept = torch.from_numpy(read_npz(path, ("features",))["features"])
    except DataUnavailable:
        return None
    agrees = kept.shape == (count, *probe.shape[1:]) and torch.allclose(
        kept[: len(probe)], probe, rtol=1e-3, atol=1e-4
    )
    return kept if agrees else None


def _keep(path: Path, features: Tensor) -> None:
    """Write a file whole or not at all; a cache that cannot be written is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, features=features.numpy())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return
