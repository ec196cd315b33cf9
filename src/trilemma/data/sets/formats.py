"""The formats in which the image sets are published, read into plain arrays. No format here can run code.

* IDX (MNIST and its relatives): big-endian header 00 00 type rank, one 32-bit length per axis, then the data.
* CIFAR-10 binary: per image one label byte, then 1024 red, 1024 green, 1024 blue bytes in row order. The
  Python version of the archive is a pickle, which this library does not open.
* EMNIST: a zip of gzipped IDX files; images are stored transposed.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

IDX_UNSIGNED_BYTE = 0x08


class Arrays(NamedTuple):
    """A data set as unsigned bytes: images (N, height, width[, channels]) and labels (N,)."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def parse_idx(content: bytes) -> np.ndarray:
    """Return the array of an IDX file of unsigned bytes.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
    [7, 8, 9]
    """
    if len(content) < 4 or content[:2] != b"\x00\x00" or content[2] != IDX_UNSIGNED_BYTE:
        raise ValueError("not an IDX file of unsigned bytes")
    rank = content[3]
    shape = tuple(int(length) for length in np.frombuffer(content, dtype=">u4", count=rank, offset=4))
    start = 4 + 4 * rank
    if len(content) - start != math.prod(shape):
        raise ValueError(f"an IDX file of shape {shape} with {len(content) - start} bytes of data")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_idx_files(paths: Sequence[Path]) -> Arrays:
    """Read four gzipped IDX files: training images and labels, test images and labels."""
    return Arrays(*(parse_idx(gzip.decompress(path.read_bytes())) for path in paths))


def read_emnist_zip(paths: Sequence[Path]) -> Arrays:
    """Read the ByClass split of EMNIST's zip of gzipped IDX files; images come out upright."""
    (path,) = paths
    with zipfile.ZipFile(path) as archive:

        def member(part: str, kind: str) -> np.ndarray:
            with archive.open(f"gzip/emnist-byclass-{part}-{kind}-ubyte.gz") as packed:
                return parse_idx(gzip.decompress(packed.read()))

        def upright(images: np.ndarray) -> np.ndarray:
            return images.transpose(0, 2, 1)

        return Arrays(
            upright(member("train", "images-idx3")),
            member("train", "labels-idx1"),
            upright(member("test", "images-idx3")),
            member("test", "labels-idx1"),
        )


def read_cifar_binary(paths: Sequence[Path]) -> Arrays:
    """Read CIFAR-10's binary tar archive; nothing is unpacked to disk."""
    (path,) = paths
    with tarfile.open(path, "r:gz") as archive:

        def member(name: str) -> tuple[np.ndarray, np.ndarray]:
            handle = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
            if handle is None:
                raise ValueError(f"{name}.bin is not a plain file")
            return _cifar_records(handle)

        batches = [member(f"data_batch_{number}") for number in range(1, 6)]
        x_test, y_test = member("test_batch")
    x_train, y_train = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Arrays(x_train, y_train, x_test, y_test)


def _cifar_records(handle: IO[bytes]) -> tuple[np.ndarray, np.ndarray]:
    records = np.frombuffer(handle.read(), dtype=np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
