"""The image sets: MNIST, Fashion-MNIST, EMNIST ByClass and CIFAR-10.

A set is read from `<name>.npz` in the data folder (arrays x_train, y_train, x_test, y_test of unsigned
bytes), else from the official files, downloaded once into the cache and checked against their SHA-256.

References: LeCun, Cortes, Burges (MNIST); Xiao, Rasul, Vollgraf, arXiv:1708.07747 (Fashion-MNIST); Cohen,
Afshar, Tapson, van Schaik, arXiv:1702.05373 (EMNIST); Krizhevsky 2009 (CIFAR-10).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from trilemma.base.errors import DataUnavailable
from trilemma.base.keys import Key
from trilemma.data.batches.augment import horizontal_flip
from trilemma.data.catalogue import DatasetOptions, datasets
from trilemma.data.sets.formats import Arrays, read_cifar_binary, read_emnist_zip, read_idx_files
from trilemma.data.storage import RemoteFile, Storage, read_npz
from trilemma.data.types import Dataset


@dataclass(frozen=True)
class Norm:
    """Per-channel mean and standard deviation of pixels in [0, 1]: x ↦ (x − mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


UNIT = Norm((0.0,), (1.0,))


@dataclass(frozen=True)
class ImageSource:
    """What is known of an image set: where it is, what it looks like, how it is scaled.

    `packed` are the npz files looked for, the full set's name first; `standard` is the published scaling,
    `lp_proj` the one of the experiments of lp-proj.
    """

    name: str
    title: str
    packed: tuple[str, ...]
    remote: tuple[RemoteFile, ...]
    read: Callable[[Sequence[Path]], Arrays]
    shape: tuple[int, ...]
    examples: tuple[int, int]
    classes: int
    standard: Norm
    lp_proj: Norm

    def arrays(self, storage: Storage) -> tuple[Arrays, str]:
        """Return the bytes of the set and where they came from."""
        try:
            path = storage.find(self.packed)
            if path is not None:
                arrays, origin = Arrays(**read_npz(path, Arrays._fields)), path.name
            else:
                files = storage.fetch(self.name, self.remote)
                arrays, origin = self.read(files), "the official files"
            self._check(arrays)
        except (DataUnavailable, ValueError, KeyError, OSError, EOFError, zlib.error) as error:
            raise DataUnavailable(self._ways(storage, str(error))) from error
        return arrays, origin

    def _check(self, arrays: Arrays) -> None:
        for x, y in ((arrays.x_train, arrays.y_train), (arrays.x_test, arrays.y_test)):
            if x.dtype != np.uint8 or x.shape[1:] != self.shape or y.shape != x.shape[:1]:
                raise ValueError(f"images of shape {x.shape} {x.dtype} with labels {y.shape}")
            if y.size and int(y.max()) >= self.classes:
                raise ValueError(f"label {int(y.max())} where only 0 to {self.classes - 1} are possible")

    def _ways(self, storage: Storage, reason: str) -> str:
        folder = f"now {storage.directory}" if storage.directory else "now unset"
        if storage.directory and not storage.directory.is_dir():
            folder += ", which does not exist"
        return (
            f"{self.name} is not available: {reason}\n"
            f"Ways to get it: (1) put {self.packed[0]} (arrays {', '.join(Arrays._fields)}; uint8) into "
            f"the folder named by TRILEMMA_DATA ({folder}); (2) online, without TRILEMMA_OFFLINE, it is "
            f"downloaded from {self.remote[0].addresses[0]} into {storage.cache}; (3) offline, use a data "
            f"set that needs no files: phishing, synthetic"
        )


class ImageSet(DatasetOptions):
    """Options that all image sets share."""

    source: ClassVar[ImageSource]

    scaling: Literal["unit", "standard", "lp-proj"] = "unit"
    """`unit`: pixels in [0, 1]; `standard`: by the published mean and deviation; `lp-proj`: as that paper."""
    flat: bool = False
    """Give images as vectors instead of (channels, height, width)."""
    flip: bool = False
    """Flip training images left to right with probability one half whenever they are drawn."""

    @model_validator(mode="after")
    def _flips_need_images(self) -> Self:
        if self.flip and self.flat:
            raise ValueError("flip = true needs images: allowed with flat = false only")
        return self

    def origin(self, storage: Storage) -> tuple[str, int, int]:
        """The file in the data folder as it is now, else the official files, whose digests are known."""
        path = storage.find(self.source.packed)
        if path is None:
            return ("official", 0, 0)
        status = path.stat()
        return (str(path), status.st_mtime_ns, status.st_size)

    def load(self, key: Key, storage: Storage) -> Dataset:
        """Return the data set; nothing depends on `key`."""
        source = self.source
        arrays, origin = source.arrays(storage)
        counts = (len(arrays.y_train), len(arrays.y_test))
        full = source.examples
        part = "" if counts == full else f", a subset of {full[0]:,}/{full[1]:,}"
        return Dataset(
            name=f"{source.name}-subset" if part else source.name,
            x_train=self._features(arrays.x_train),
            y_train=_labels(arrays.y_train),
            x_test=self._features(arrays.x_test),
            y_test=_labels(arrays.y_test),
            classes=source.classes,
            description=f"{source.title}, {counts[0]:,}/{counts[1]:,} images{part}, from {origin}, "
            f"scaling {self.scaling}",
            augment=horizontal_flip if self.flip else None,
        )

    def _features(self, images: np.ndarray) -> Tensor:
        norm = {"unit": UNIT, "standard": self.source.standard, "lp-proj": self.source.lp_proj}[self.scaling]
        channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        x = torch.from_numpy(channels_first.astype(np.float32, order="C")).div_(255.0)
        if norm is not UNIT:
            x.sub_(torch.tensor(norm.mean)[:, None, None]).div_(torch.tensor(norm.std)[:, None, None])
        return x.flatten(1) if self.flat else x


def _labels(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _idx_files(folders: tuple[str, ...], checksums: tuple[str, str, str, str]) -> tuple[RemoteFile, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        RemoteFile(
            f"{name}-ubyte.gz", f"sha256:{checksum}", tuple(f"{folder}{name}-ubyte.gz" for folder in folders)
        )
        for name, checksum in zip(names, checksums, strict=True)
    )


MNIST_NORM = Norm((0.1307,), (0.3081,))


@datasets.register("mnist")
class Mnist(ImageSet):
    """MNIST: handwritten digits, 60,000/10,000 images of 28 × 28, 10 classes."""

    source: ClassVar[ImageSource] = ImageSource(
        name="mnist",
        title="MNIST",
        packed=("mnist.npz",),
        remote=_idx_files(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        read=read_idx_files,
        shape=(28, 28),
        examples=(60_000, 10_000),
        classes=10,
        standard=MNIST_NORM,
        lp_proj=UNIT,
    )


@datasets.register("fashion-mnist")
class FashionMnist(ImageSet):
    """Fashion-MNIST: articles of clothing, 60,000/10,000 images of 28 × 28, 10 classes."""

    source: ClassVar[ImageSource] = ImageSource(
        name="fashion-mnist",
        title="Fashion-MNIST",
        packed=("fashion_mnist.npz",),
        remote=_idx_files(
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            ),
            (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        read=read_idx_files,
        shape=(28, 28),
        examples=(60_000, 10_000),
        classes=10,
        standard=Norm((0.2860,), (0.3530,)),
        lp_proj=MNIST_NORM,
    )


@datasets.register("emnist")
class Emnist(ImageSet):
    """EMNIST ByClass: handwritten characters, 697,932/116,323 images of 28 × 28, 62 classes."""

    source: ClassVar[ImageSource] = ImageSource(
        name="emnist",
        title="EMNIST ByClass",
        packed=("emnist.npz", "emnist_byclass_subset.npz"),
        remote=(
            RemoteFile(
                "emnist-gzip.zip",
                "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                ),
            ),
        ),
        read=read_emnist_zip,
        shape=(28, 28),
        examples=(697_932, 116_323),
        classes=62,
        standard=Norm((0.1736,), (0.3317,)),
        lp_proj=UNIT,
    )


@datasets.register("cifar10")
class Cifar10(ImageSet):
    """CIFAR-10: small colour photographs, 50,000/10,000 images of 3 × 32 × 32, 10 classes."""

    source: ClassVar[ImageSource] = ImageSource(
        name="cifar10",
        title="CIFAR-10",
        packed=("cifar10.npz", "cifar10_20k.npz"),
        remote=(
            RemoteFile(
                "cifar-10-binary.tar.gz",
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            ),
        ),
        read=read_cifar_binary,
        shape=(32, 32, 3),
        examples=(50_000, 10_000),
        classes=10,
        standard=Norm((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        lp_proj=Norm((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    )
