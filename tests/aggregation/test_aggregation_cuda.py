"""The CUDA path: the PTX it runs, checked on any machine, and the whole path, where there is a device."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
import torch

from trilemma import aggregation as agg
from trilemma.aggregation.kernels.cuda import (
    CHUNK,
    PIECE,
    around_origin,
    in_range,
    pass_in_pieces,
    products,
)
from trilemma.aggregation.kernels.cuda_network import window_program
from trilemma.aggregation.passes.columns import Window, plain_window_means

cuda = pytest.mark.cuda
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WINDOWS = [
    *((n, Window(2 - n % 2)) for n in (1, 2, 3, 7, 10, 30, 33)),
    *((n, Window(n - 2 * f)) for n, f in ((5, 1), (10, 3), (30, 3))),
    *((n, Window(n - f, around_median=True)) for n, f in ((1, 0), (3, 1), (10, 3), (30, 14), (16, 1))),
    (9, Window(9)),
    (9, Window(1, around_median=True)),
]


def run_ptx(text: str, values: np.ndarray) -> list[np.ndarray]:
    """Execute the few PTX instructions that the programs use, on all columns of `values` at once."""
    registers: dict[str, np.ndarray] = {f"${4 + i}": row for i, row in enumerate(values)}

    def read(name: str) -> np.ndarray:
        if name.startswith("0d"):
            return np.full(values.shape[1], struct.unpack(">d", bytes.fromhex(name[2:]))[0])
        if name.startswith("0f"):
            return np.full(values.shape[1], struct.unpack(">f", bytes.fromhex(name[2:]))[0], np.float32)
        return np.full(values.shape[1], int(name)) if name.lstrip("-").isdigit() else registers[name]

    for line in filter(None, text.strip("{}\n").split("\n")):
        if line.startswith(".reg"):
            continue
        guard, operation, operands = re.fullmatch(r"(?:@(p\d+) )?([\w.]+) (.*);", line).groups()
        target, *arguments = (name.strip() for name in operands.split(","))
        x = [read(name) for name in arguments]
        result = {
            "mov": lambda x: x[0],
            "min": lambda x: np.minimum(x[0], x[1]),
            "max": lambda x: np.maximum(x[0], x[1]),
            "cvt": lambda x: x[0].astype(np.float64),
            "mul": lambda x: x[0] * x[1],
            "fma": lambda x: x[0] * x[1] + x[2],
            "or": lambda x: x[0] | x[1],
            "setp.eq": lambda x: x[0] == x[1],
            "setp.ne": lambda x: x[0] != x[1],
            "setp.lt": lambda x: x[0] < x[1],
            "selp": lambda x: np.where(x[2], x[0], x[1]),
        }[".".join(operation.split(".")[: 2 if operation.startswith("setp") else 1])](x)
        registers[target] = np.where(registers[guard], result, registers[target]) if guard else result
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("columns", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 17])
def test_noise_around_the_origin_is_measured_around_it_up_to_the_rounding_of_float32(columns: int):
    X = torch.randn(7, columns, generator=torch.Generator().manual_seed(1))
    exact = (X.double() @ X.double().T).numpy()
    found = around_origin(products(X).numpy())
    assert found.base == 7
    np.testing.assert_allclose(found.gram, exact, atol=1e-6 * columns)


@pytest.mark.parametrize("case", ["offset", "tiny", "alike", "huge", "nan", "one"])
def test_whatever_else_is_left_to_a_closer_look(case: str):
    X = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))
    if case == "offset":
        X += 20.0
    elif case == "tiny":
        X *= 1e-20
    elif case == "alike":
        X[:] = X[0].clone()
    elif case == "huge":
        X[2] *= 1e30
    elif case == "nan":
        X[2, 4] = torch.nan
    else:
        X = X[:1]
    assert around_origin(products(X).numpy()) is None


def test_rows_whose_squares_float32_rounds_to_nothing_are_not_taken_for_nothing():
    """To a server that sees nothing where noise should be all lie; who sent nothing yet is no reason."""
    X = torch.randn(5, 3 * CHUNK, generator=torch.Generator().manual_seed(1))
    X[4] = 0.0
    assert in_range(X, products(X))
    assert not in_range(1e-23 * X, products(1e-23 * X))


@cuda
@needs_device
@pytest.mark.parametrize("case", ["plain", "few liars far away", "offset", "huge", "nan"])
def test_device_geometry_in_float32(case: str):
    X = torch.randn(20, 70_001, generator=torch.Generator().manual_seed(4))
    if case == "few liars far away":
        X[:3] += 100.0
    elif case == "offset":
        X += 1e4
    elif case == "huge":
        X[3] *= 1e30
    elif case == "nan":
        X[3, 7] = torch.nan
    exact, found = agg.geometry(X), agg.geometry(X.cuda(), single=True)
    np.testing.assert_array_equal(found.finite, exact.finite)
    kept = np.flatnonzero(exact.finite)
    kept = kept[kept > 3] if case in ("huge", "few liars far away") else kept  # of these no more is promised
    np.testing.assert_allclose(
        found.select(kept).distances, exact.select(kept).distances, rtol=1e-5, atol=1e-5 * 70_001
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("together", [1, 5 * PIECE * 8], ids=["a piece at a time", "five pieces at a time"])
@pytest.mark.parametrize("columns", [0, 1, PIECE - 1, PIECE, 12 * PIECE + 17])
def test_the_pass_of_a_gpu_is_that_of_float64_whatever_it_takes_at_once(
    columns: int, together: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trilemma.aggregation.kernels.cuda.TOGETHER", together)
    X = torch.randn(7, columns, generator=torch.Generator().manual_seed(1)).to(dtype) + 100
    rows = torch.cat([X.double(), torch.zeros(1, columns)])
    shifted = rows - rows[2]
    expected = (shifted @ shifted.T).numpy()
    np.testing.assert_allclose(pass_in_pieces(X, 2), expected, rtol=1e-13, atol=1e-11)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "window"), WINDOWS, ids=str)
def test_ptx_computes_the_window(n: int, window: Window, ties: bool):
    X = np.random.default_rng(n).standard_normal((n, 200)).astype(np.float32)
    X = np.round(X) if ties else X
    mean, low, high, code = run_ptx(window_program(n, window)[0], X)
    expected = plain_window_means(torch.from_numpy(X), np.arange(n), window).value.numpy()
    np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-6)
    ranked = np.sort(X, axis=0)
    start = code >> 1
    columns = np.arange(X.shape[1])
    np.testing.assert_array_equal(low, ranked[start, columns])
    np.testing.assert_array_equal(high, ranked[start + window.size - 1, columns])
    fenced = np.pad(ranked, ((1, 1), (0, 0)), constant_values=np.nan)
    outside = (fenced[start, columns] == low) | (fenced[start + window.size + 1, columns] == high)
    np.testing.assert_array_equal(code & 1, outside)


RULES = [
    "mean",
    "caf",
    "smea",
    "krum",
    "geomed",
    "cwmed",
    "cwtm",
    "meamed",
    "bulyan",
    "nnm+cwmed",
    "nnm+caf",
    "arc+cwtm",
]


@cuda
@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("n", "d"), [(15, 1000), (30, 70_001), (60, 5000)])
@pytest.mark.parametrize("name", RULES)
def test_device_equals_host(name: str, n: int, d: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(n)
    X = (torch.randn(n, d, generator=generator) + 10).to(dtype)
    X[-2:] += 3
    rule = agg.parse(name, f=3)
    host, device = rule(X), rule(X.cuda())
    spread = float((X.double() - X.double().mean(0)).square().sum(1).mean().sqrt())
    rounding = torch.finfo(dtype).eps * float(X.double().norm()) / n**0.5
    error = float((host.value.double() - device.value.cpu().double()).norm())
    assert device.value.is_cuda
    assert error <= 1e-4 * spread + rounding
    # Half precision is full of ties, which mixing in float32 may break either way.
    half = torch.finfo(dtype).bits == 16
    np.testing.assert_allclose(device.weights.cpu(), host.weights, atol=3e-2 if half else 1e-3)
    np.testing.assert_allclose(device.scores.cpu(), host.scores, rtol=1e-2 if half else 1e-3)


@cuda
@needs_device
@pytest.mark.parametrize("name", ["caf", "krum", "cwmed", "nnm+cwmed"])
def test_device_wide_messages(name: str):
    """More than 2²⁰ columns: the float32 tensor-core products, and what they must leave to float64."""
    n, d = 20, (1 << 20) + 77
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(1))
    rule = agg.parse(name, f=3)
    for case in ("plain", "offset", "huge", "nan"):
        Y = X.clone()
        if case == "offset":
            Y += 1e6
        elif case == "huge":
            Y[3] *= 1e30
        elif case == "nan":
            Y[3, d // 2] = torch.nan
        host, device = rule(Y), rule(Y.cuda())
        assert device.info.nonfinite == host.info.nonfinite == (case == "nan")
        np.testing.assert_allclose(device.weights.cpu(), host.weights, atol=1e-4, err_msg=case)
        np.testing.assert_allclose(device.value.cpu(), host.value, rtol=1e-6, atol=1e-4, err_msg=case)


@cuda
@needs_device
def test_device_gram_of_a_row_whose_square_is_no_float32():
    X = torch.randn(5, 3000, generator=torch.Generator().manual_seed(3))
    X[2] = 1e25
    exact = (X.double() @ X.double().T).numpy()
    np.testing.assert_allclose(agg.gram(X.cuda(), single=True).numpy(), exact, rtol=1e-4)


@cuda
@needs_device
def test_device_gram_of_rows_whose_squares_are_too_small_for_float32():
    """Short sums are measured as they are: to a server that sees nothing where noise should be, all lie."""
    X = 1e-23 * torch.randn(5, 70_000, generator=torch.Generator().manual_seed(1))
    found, expected = agg.gram_later(X.cuda())(), X.double() @ X.double().T
    np.testing.assert_allclose(found.diagonal(), expected.diagonal(), rtol=1e-6)


@cuda
@needs_device
@pytest.mark.parametrize("case", ["noise", "offset", "nan"])
def test_device_geometry_that_is_asked_for_later_is_the_one_asked_for_now(case: str):
    """Whatever is done to other memory meanwhile; messages that are no noise are measured from near by."""
    X = torch.randn(9, 70_000, generator=torch.Generator().manual_seed(1)).cuda()
    X += 50.0 if case == "offset" else 0.0
    X[3, 5] = torch.nan if case == "nan" else X[3, 5]
    later = agg.geometry_later(X, single=True)
    torch.add(X, X, alpha=-0.5)
    found, expected = later(), agg.geometry(X, single=True)
    np.testing.assert_array_equal(found.inner, expected.inner)
    assert found.base == expected.base


@cuda
@needs_device
def test_device_same_input_same_bits():
    X = torch.randn(40, 1_200_000, generator=torch.Generator().manual_seed(2)).cuda()
    for name in ("caf", "cwmed", "nnm+cwtm"):
        first, second = (agg.parse(name, f=5)(X) for _ in range(2))
        assert torch.equal(first.value, second.value)
        assert torch.equal(first.weights, second.weights)
        assert torch.equal(first.scores, second.scores)


@cuda
@needs_device
def test_ties_on_device_are_shared_as_on_host():
    X = torch.randn(12, 5000, generator=torch.Generator().manual_seed(3)).round()
    for name in ("cwmed", "cwtm", "meamed"):
        rule = agg.parse(name, f=2)
        np.testing.assert_allclose(rule(X.cuda()).weights.cpu(), rule(X).weights, atol=1e-6)
