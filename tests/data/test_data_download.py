"""The download path, against a server on loopback that speaks the official formats."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma.base.errors import DataUnavailable
from trilemma.base.keys import Key
from trilemma.data import Dataset, Storage
from trilemma.data.sets.formats import parse_idx
from trilemma.data.sets.images import Cifar10, Emnist, ImageSet, ImageSource, Mnist
from trilemma.data.storage import RemoteFile

RNG = np.random.default_rng(7)
X_TRAIN = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)
Y_TRAIN = RNG.integers(0, 10, 20, dtype=np.uint8)
X_TEST = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
Y_TEST = RNG.integers(0, 10, 6, dtype=np.uint8)


@dataclass
class Server:
    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def offer(self, name: str, content: bytes, checksum: str | None = None) -> RemoteFile:
        self.files[f"/{name}"] = content
        digest = checksum or hashlib.sha256(content).hexdigest()
        return RemoteFile(name, f"sha256:{digest}", (f"{self.address}/{name}",))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            offered.requests.append(self.path)
            content = offered.files.get(self.path)
            self.send_response(200 if content is not None else 404)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    offered = Server(f"http://127.0.0.1:{listener.server_port}")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield offered
    listener.shutdown()
    listener.server_close()
    thread.join(timeout=60)


def idx(array: np.ndarray) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes()


def mnist_files(server: Server) -> tuple[RemoteFile, ...]:
    arrays = (X_TRAIN, Y_TRAIN, X_TEST, Y_TEST)
    names = [file.name for file in Mnist.source.remote]
    return tuple(server.offer(n, gzip.compress(idx(a))) for n, a in zip(names, arrays, strict=True))


def load(kind: type[ImageSet], remote: tuple[RemoteFile, ...], storage: Storage) -> Dataset:
    class Local(kind):  # type: ignore[misc, valid-type]
        source = replace(kind.source, remote=remote)

    loaded: Dataset = Local().load(Key(1), storage)
    return loaded


def pixels(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images.astype(np.float32)) / 255


def test_idx_files_are_downloaded_once_with_a_progress_bar(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote, storage = mnist_files(server), Storage(None, tmp_path)
    loaded = load(Mnist, remote, storage)
    assert torch.equal(loaded.x_train[:, 0], pixels(X_TRAIN))
    assert torch.equal(loaded.x_test[:, 0], pixels(X_TEST))
    assert loaded.y_train.tolist() == Y_TRAIN.tolist()
    assert loaded.y_test.tolist() == Y_TEST.tolist()
    assert "from the official files" in loaded.description
    assert len(server.requests) == 4
    printed = capsys.readouterr()
    assert "100%" in printed.err
    assert printed.out == ""

    load(Mnist, remote, storage)
    load(Mnist, remote, replace(storage, download=False))
    assert len(server.requests) == 4


def test_cifar_binary_archive(server: Server, tmp_path: Path) -> None:
    labels = RNG.integers(0, 10, (6, 4), dtype=np.uint8)
    images = RNG.integers(0, 256, (6, 4, 3, 32, 32), dtype=np.uint8)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            rows = [bytes([y]) + x.tobytes() for y, x in zip(labels[number], images[number], strict=True)]
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(b"".join(rows))
            archive.addfile(member, io.BytesIO(b"".join(rows)))
    remote = server.offer("cifar-10-binary.tar.gz", buffer.getvalue())
    loaded = load(Cifar10, (remote,), Storage(None, tmp_path))
    assert torch.equal(loaded.x_train, pixels(images[:5].reshape(20, 3, 32, 32)))
    assert torch.equal(loaded.x_test, pixels(images[5]))
    assert loaded.y_train.tolist() == labels[:5].flatten().tolist()
    assert loaded.y_test.tolist() == labels[5].tolist()


def test_emnist_zip_comes_out_upright(server: Server, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for part, x, y in (("train", X_TRAIN, Y_TRAIN), ("test", X_TEST, Y_TEST)):
            stored = np.ascontiguousarray(x.transpose(0, 2, 1))
            archive.writestr(f"gzip/emnist-byclass-{part}-images-idx3-ubyte.gz", gzip.compress(idx(stored)))
            archive.writestr(f"gzip/emnist-byclass-{part}-labels-idx1-ubyte.gz", gzip.compress(idx(y)))
    remote = server.offer("gzip.zip", buffer.getvalue())
    loaded = load(Emnist, (remote,), Storage(None, tmp_path))
    assert torch.equal(loaded.x_train[:, 0], pixels(X_TRAIN))
    assert torch.equal(loaded.x_test[:, 0], pixels(X_TEST))
    assert loaded.y_train.tolist() == Y_TRAIN.tolist()


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    first, *others = mnist_files(server)
    tampered = server.offer(first.name, server.files[f"/{first.name}"] + b"\0", first.checksum[7:])
    with pytest.raises(DataUnavailable, match="does not match the known hash"):
        load(Mnist, (tampered, *others), Storage(None, tmp_path))
    assert not list(tmp_path.rglob("*.gz"))


def test_a_damaged_cache_is_downloaded_again_and_refused_offline(server: Server, tmp_path: Path) -> None:
    remote, storage = mnist_files(server), Storage(None, tmp_path)
    load(Mnist, remote, storage)
    (tmp_path / "mnist" / remote[0].name).write_bytes(b"damaged")
    with pytest.raises(DataUnavailable, match="absent or damaged and TRILEMMA_OFFLINE"):
        load(Mnist, remote, replace(storage, download=False))
    load(Mnist, remote, storage)
    assert len(server.requests) == 5


def test_the_next_address_is_tried(server: Server, tmp_path: Path) -> None:
    first, *others = mnist_files(server)
    missing = f"{server.address}/elsewhere/{first.name}"
    moved = replace(first, addresses=(missing, *first.addresses))
    load(Mnist, (moved, *others), Storage(None, tmp_path))
    assert server.requests[0] == f"/elsewhere/{first.name}"


def test_no_server_and_no_file_name_the_ways(server: Server, tmp_path: Path) -> None:
    gone = RemoteFile("train-images-idx3-ubyte.gz", "sha256:00", ("http://127.0.0.1:9/absent",))
    with pytest.raises(DataUnavailable) as caught:
        load(Mnist, (gone,), Storage(None, tmp_path))
    for way in ("mnist.npz", "TRILEMMA_DATA", "http://127.0.0.1:9/absent", "phishing, synthetic"):
        assert way in str(caught.value)
    unknown = replace(gone, addresses=(f"{server.address}/absent",))
    with pytest.raises(DataUnavailable, match="404"):
        load(Mnist, (unknown,), Storage(None, tmp_path))


def test_the_environment_sets_cache_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRILEMMA_DATA", raising=False)
    monkeypatch.setenv("TRILEMMA_CACHE", str(tmp_path))
    monkeypatch.setenv("TRILEMMA_OFFLINE", "1")
    assert Storage.from_environment() == Storage(None, tmp_path, download=False)
    monkeypatch.delenv("TRILEMMA_OFFLINE")
    monkeypatch.delenv("TRILEMMA_CACHE")
    standard = Storage.from_environment()
    assert standard.download
    assert standard.cache.name == "trilemma"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"\1" + content[1:],
        lambda content: content[:2] + b"\x0d" + content[3:],
    ],
)
def test_idx_that_is_not_idx_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    assert np.array_equal(parse_idx(idx(X_TEST)), X_TEST)
    with pytest.raises(ValueError, match="IDX"):
        parse_idx(spoil(idx(X_TEST)))


@pytest.mark.parametrize("kind", [Mnist, Cifar10, Emnist])
def test_official_files_have_sha256_and_web_addresses(kind: type[ImageSet]) -> None:
    source: ImageSource = kind.source
    for file in source.remote:
        algorithm, digest = file.checksum.split(":")
        assert algorithm == "sha256"
        assert len(bytes.fromhex(digest)) == 32
        assert file.addresses
        assert all(address.startswith(("https://", "http://")) for address in file.addresses)
