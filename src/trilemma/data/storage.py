"""Where data files come from: a folder the user names, else a cache filled from the official addresses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch

from trilemma.base.errors import DataUnavailable

CONNECT_SECONDS, READ_SECONDS = 10, 60
"""How long to wait for a server to answer, and between two pieces of a file."""
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class RemoteFile:
    """A file on the official servers: `checksum` is "sha256:…" or "md5:…", `addresses` are tried in order."""

    name: str
    checksum: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Storage:
    """Where to look for data files, and whether they may be downloaded.

    >>> Storage(directory=None, cache=Path("cache"), download=False).find(["mnist.npz"]) is None
    True
    """

    directory: Path | None
    cache: Path
    download: bool = True

    @staticmethod
    def from_environment(directory: Path | None = None) -> Storage:
        """Read TRILEMMA_DATA (a folder), TRILEMMA_CACHE (a folder) and TRILEMMA_OFFLINE (1: no download)."""
        named = os.environ.get("TRILEMMA_DATA")
        return Storage(
            directory=directory or (Path(named) if named else None),
            cache=Path(os.environ.get("TRILEMMA_CACHE") or pooch.os_cache("trilemma")),
            download=os.environ.get("TRILEMMA_OFFLINE", "0") in ("", "0"),
        )

    def find(self, names: Sequence[str]) -> Path | None:
        """Return the first of `names` that the data folder has, or None."""
        if self.directory is None:
            return None
        return next((path for name in names if (path := self.directory / name).is_file()), None)

    def fetch(self, folder: str, files: Sequence[RemoteFile]) -> list[Path]:
        """Return `files` from the cache, downloading what is missing; checksums are verified every time."""
        return [self._fetch_one(self.cache / folder, file) for file in files]

    def _fetch_one(self, folder: Path, file: RemoteFile) -> Path:
        if not self.download:
            path = folder / file.name
            if path.is_file() and pooch.hashes.hash_matches(path, file.checksum):
                return path
            raise DataUnavailable(f"{path} is absent or damaged and TRILEMMA_OFFLINE forbids a download")
        patience = (CONNECT_SECONDS, READ_SECONDS)
        downloader = pooch.HTTPDownloader(progressbar=True, chunk_size=CHUNK_BYTES, timeout=patience)
        failures = []
        for address in file.addresses:
            try:
                return Path(pooch.retrieve(address, file.checksum, file.name, folder, downloader=downloader))
            except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong hash: ValueError
                failures.append(f"{address}: {_first_line(error)}")
        raise DataUnavailable("; ".join(failures))


def read_npz(path: Path, names: Sequence[str] | None = None) -> Mapping[str, np.ndarray]:
    """Read arrays of an npz file, all or the named (members may be LZMA-compressed); none may be objects."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files if names is None else names
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DataUnavailable(
                    f"{path} lacks {', '.join(missing)}; it must hold the arrays {', '.join(names)}"
                )
            return {name: archive[name] for name in names}
    except DataUnavailable:
        raise
    except Exception as error:
        raise DataUnavailable(f"{path} is not a readable npz file: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """Say what went wrong; of a connection that failed again and again, why it failed the last time."""
    last = getattr(error.args[0], "reason", None) if error.args else None
    text = str(last or error).strip().split("\n")[0]
    return text or type(error).__name__
