"""Beyond one machine's memory: streams of chunks, and columns spread over processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trilemma import aggregation as agg
from trilemma.base.errors import UserError
from trilemma.base.keys import Key

RULES = ["caf", "smea", "geomed", "cwtm", "nnm+cwmed", "bucketing+krum", "arc+mean"]


def messages() -> torch.Tensor:
    X = torch.randn(12, 3001, generator=torch.Generator().manual_seed(5)) + 1e4
    X[-1] *= 1e20
    X[2, 2500] = torch.nan  # in the second shard only
    return X


def tolerance(name: str) -> float:
    """Rows mixed in float32 may change places in a coordinate or two of three thousand; nothing else may."""
    return 1e-4 if name == "nnm+cwmed" else 1e-9


def work(rank: int, folder: str, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    X = messages()
    shard = X[:, :1000] if rank == 0 else X[:, 1000:]
    found = {}
    for name in RULES:
        out = agg.sharded(agg.parse(name, f=3), shard, key=Key(4))
        found[name] = (out.value.numpy(), out.weights.numpy(), out.scores.numpy(), out.info.nonfinite)
    try:
        agg.sharded(agg.caf(f=1), shard[: 5 + rank])
    except UserError as error:
        found["error"] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    results.put((rank, found))


@pytest.mark.slow
def test_two_processes_give_the_same_weights(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, str(tmp_path), results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        parts = dict(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
    X = messages()
    for name in RULES:
        whole = agg.parse(name, f=3)(X, key=Key(4))
        (first, weights, scores, bad), (second, weights_1, scores_1, _) = parts[0][name], parts[1][name]
        np.testing.assert_array_equal(weights, weights_1)
        np.testing.assert_array_equal(scores, scores_1)
        np.testing.assert_allclose(weights, whole.weights, atol=tolerance(name))
        np.testing.assert_allclose(np.concatenate([first, second]), whole.value, rtol=1e-6)
        assert bad == whole.info.nonfinite == 1
    assert "different numbers of rows" in parts[0]["error"]


def test_sharding_needs_a_process_group():
    with pytest.raises(UserError, match="init_process_group"):
        agg.sharded(agg.caf(f=1), messages())


@pytest.mark.parametrize("name", RULES)
def test_streams_from_lists_functions_and_arrays(name: str):
    X = messages()
    rule = agg.parse(name, f=3)
    whole = rule(X, key=Key(4))
    chunks = [X[:, :1], X[:, 1:2000], X[:, 2000:]]
    streamed = agg.stream(rule, chunks, key=Key(4))
    called = agg.stream(rule, lambda: iter(chunks), key=Key(4))
    arrays = agg.stream(rule, [chunk.numpy() for chunk in chunks], key=Key(4))
    np.testing.assert_allclose(streamed.value, whole.value, rtol=1e-6)
    np.testing.assert_allclose(streamed.weights, whole.weights, atol=tolerance(name))
    np.testing.assert_allclose(streamed.scores, whole.scores, rtol=1e-6)
    assert torch.equal(called.value, streamed.value)
    assert isinstance(arrays.value, np.ndarray)
    assert streamed.info.nonfinite == whole.info.nonfinite == 1
    assert (streamed.info.exact, streamed.info.f) == (whole.info.exact, 2)


def test_streams_that_cannot_be_read_twice_or_at_all():
    X = messages()
    with pytest.raises(UserError, match="read twice"):
        agg.stream(agg.caf(f=3), iter([X]))
    with pytest.raises(UserError, match="empty stream"):
        agg.stream(agg.caf(f=3), [])
    with pytest.raises(UserError, match="12 and then 11 rows"):
        agg.stream(agg.caf(f=3), [X, X[1:]])
