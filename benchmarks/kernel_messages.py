"""The kernels of aggregation on messages (n, d): Gram matrix, weighted sum, windows of sorted columns."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_cases import KernelCase
from trilemma.aggregation.kernels import cuda
from trilemma.aggregation.passes import blocks, columns, combine
from trilemma.aggregation.passes.columns import Columns, Mixture, Window

gram = importlib.import_module(
    "trilemma.aggregation.passes.gram"
)  # the package exports a function of that name

BLOCK = 1024
"""Columns over which a plain version may sum in float32, as the kernels do."""


def cases(device: str, clients: list[int], dims: list[int]) -> Iterator[KernelCase]:
    """Yield all kernels on all sizes."""
    for d in dims:
        for n in clients:
            X = torch.randn(n, d, generator=torch.Generator(device).manual_seed(n), device=device)
            work = f"n = {n}, d = {d:,}"
            yield from gram_cases(X, work)
            yield from sum_cases(X, work)
            yield from window_cases(X, work)
            yield from mixing_cases(X, work)
            if device == "cuda":
                yield from tally_cases(X, work)


def gram_cases(X: Tensor, work: str) -> Iterator[KernelCase]:
    """Inner products around a row: float64 below 2²⁰ columns, float32 within blocks from there on."""
    precise = X.shape[1] < gram.WIDE
    plain: dict[str, Callable[[], Any]] = {"float64": lambda: gram.plain_pass(X, 0)}
    if precise and X.is_cuda:
        return  # no kernel: float64 products are the library's
    if not precise:
        plain["float32 by blocks"] = lambda: gram_by_blocks(X, 0)
    name = "Triton Gram" if X.is_cuda else f"numba Gram, float{64 if precise else 32}"
    yield KernelCase(name, work, lambda: gram.fast_pass(X, 0, precise), plain)


def gram_by_blocks(X: Tensor, k: int) -> Any:
    """What float32 products within blocks are in plain torch: a batched product, added up in float64."""
    n, d = X.shape
    total = torch.zeros(n + 1, n + 1, dtype=torch.float64, device=X.device)
    for lo, hi in blocks.spans(d, 16 * blocks.WIDE_SPAN if X.is_cuda else blocks.SPAN):
        shifted = X.new_zeros(n + 1, -(-(hi - lo) // BLOCK) * BLOCK)
        torch.sub(X[:, lo:hi], X[k, lo:hi], out=shifted[:n, : hi - lo])
        torch.neg(X[k, lo:hi], out=shifted[n, : hi - lo])
        stacked = shifted.view(n + 1, -1, BLOCK).transpose(0, 1)
        total += torch.bmm(stacked, stacked.mT).sum(0, dtype=torch.float64)
    return gram.clean(total.cpu().numpy())


def sum_cases(X: Tensor, work: str) -> Iterator[KernelCase]:
    """Σ w_i x_i over nine of ten rows, summed in float64 and rounded once."""
    weights = np.full(len(X), 1.0 / len(X))
    weights[::10] = 0.0
    rows = np.flatnonzero(weights)
    used = weights[rows]
    plain = {
        "float64 product": lambda: combine.plain_weighted_sum(X, rows, used),
        "row by row": lambda: sum_by_rows(X, rows, used),
    }
    name = "Triton weighted sum" if X.is_cuda else "numba weighted sum"
    yield KernelCase(name, work, lambda: combine.weighted_sum(X, weights), plain)


def sum_by_rows(X: Tensor, rows: Any, used: Any) -> Tensor:
    """Plain torch without a copy of the rows."""
    parts = []
    for lo, hi in blocks.spans(X.shape[1], blocks.WIDE_SPAN):
        total = torch.zeros(hi - lo, dtype=torch.float64, device=X.device)
        for row, weight in zip(rows.tolist(), used.tolist(), strict=True):
            total.add_(X[row, lo:hi], alpha=weight)
        parts.append(total.to(X.dtype))
    return torch.cat(parts)


def window_cases(X: Tensor, work: str) -> Iterator[KernelCase]:
    """Median, trimmed mean and Meamed with a tenth of the clients Byzantine."""
    n, f = len(X), len(X) // 10
    name = "PTX network and tallies" if X.is_cuda else "numba selection"
    for rule, window in (
        ("median", Window(2 - n % 2)),
        ("trimmed mean", Window(n - 2 * f)),
        ("Meamed", Window(n - f, around_median=True)),
    ):
        given = X, np.arange(n), window
        plain = {
            "float64 sort": lambda given=given: parts(columns.plain_window_means(*given)),
            "float32 sort": lambda given=given: parts(sorted_columns(*given)),
        }
        yield KernelCase(
            f"{name}: {rule}", work, lambda given=given: parts(columns.window_means(*given)), plain, 1e-4
        )


def parts(out: Columns) -> tuple[Any, ...]:
    """Return everything that is computed."""
    return out.value, out.shares, out.squares


def sorted_columns(X: Tensor, rows: Any, window: Window) -> Columns:
    """Plain torch in float32, columns laid out along memory; equal values do not share their places."""
    n = len(rows)
    totals = torch.zeros(2, n, dtype=torch.float64, device=X.device)
    values = []
    for lo, hi in blocks.spans(X.shape[1], blocks.WIDE_SPAN if X.is_cuda else blocks.SPAN):
        V = X[:, lo:hi]
        S, order = V.T.contiguous().sort(dim=1)
        start = torch.full((hi - lo, 1), (n - window.size) // 2, device=X.device)
        if window.around_median:
            centre = (S[:, (n - 1) // 2, None] + S[:, n // 2, None]) / 2
            start = ((S[:, : n - window.size] + S[:, window.size :]) / 2 < centre).sum(1, keepdim=True)
        kept = start + torch.arange(window.size, device=X.device)
        value = S.gather(1, kept).mean(1, dtype=torch.float64)
        totals[0] += torch.bincount(order.gather(1, kept).flatten(), minlength=n)
        totals[1] += (V - value).square().sum(1)
        values.append(value.to(X.dtype))
    shares, squares = totals.cpu().numpy()
    return Columns(torch.cat(values), shares / window.size, squares)


def mixing_cases(X: Tensor, work: str) -> Iterator[KernelCase]:
    """The median after every row is replaced by the mean of nine tenths of the rows, as `nnm+cwmed` does."""
    n = len(X)
    A = np.ones((n, n))
    for i in range(n):
        A[i, (i + np.arange(max(1, n // 10))) % n] = 0.0
    A /= A.sum(1, keepdims=True)
    rows, window = np.arange(n), Window(2 - n % 2)
    plain = {"float64 sort": lambda: parts(columns.plain_window_means(X, rows, window, Mixture(A, 0)))}
    if not X.is_cuda:
        plain["product in torch"] = lambda: parts(mixed_in_torch(X, rows, window, A))
    name = "torch product, PTX network" if X.is_cuda else "numba selection with mixing"
    ours = partial(columns.window_means, X, rows, window, Mixture(A, 0))
    yield KernelCase(name, work, lambda: parts(ours()), plain, 1e-3)  # rows are alike: ties break either way


def mixed_in_torch(X: Tensor, rows: Any, window: Window, A: Any) -> Columns:
    """The product by torch, the selection by the kernel that does not mix."""
    B, found = torch.from_numpy(A).float(), []
    for lo, hi in blocks.spans(X.shape[1], blocks.WIDE_SPAN):
        offset = X[0, lo:hi]
        shifted = X[:, lo:hi] - offset
        out = columns.window_means(B @ shifted, rows, window)
        squares = (shifted - out.value).square().sum(1, dtype=torch.float64)
        found.append((out.value + offset, out.shares, squares.numpy()))
    values, shares, squares = zip(*found, strict=True)
    return Columns(torch.cat(values), np.sum(shares, axis=0), np.sum(squares, axis=0))


def tally_cases(X: Tensor, work: str) -> Iterator[KernelCase]:
    """The three CUDA kernels of a window, each alone, for the trimmed mean."""
    n = len(X)
    window = Window(n - 2 * (n // 10))
    trim = (n - window.size) // 2

    @functools.cache
    def found() -> cuda.Windows:
        return cuda.sorted_windows(X, window)

    def by_sorting() -> tuple[Tensor, Tensor, Tensor]:
        values, low, high = [], [], []
        for lo, hi in blocks.spans(X.shape[1], 16 * blocks.WIDE_SPAN):
            S = X[:, lo:hi].sort(dim=0).values
            values.append(S[trim : n - trim].mean(0, dtype=torch.float64).float())
            low.append(S[trim].clone())
            high.append(S[n - trim - 1].clone())
        return torch.cat(values), torch.cat(low), torch.cat(high)

    def counted() -> Tensor:
        total = torch.zeros(n, dtype=torch.float64, device=X.device)
        for lo, hi in blocks.spans(X.shape[1], 16 * blocks.WIDE_SPAN):
            (low, high), V = found().edges[:, lo:hi], X[:, lo:hi]
            total += ((low <= V) & (high >= V)).sum(1)
        return total

    def summed() -> Tensor:
        total = torch.zeros(n, dtype=torch.float64, device=X.device)
        for lo, hi in blocks.spans(X.shape[1], 16 * blocks.WIDE_SPAN):
            total += (X[:, lo:hi].double() - found().value[lo:hi]).square().sum(1)
        return total

    def network() -> tuple[Tensor, ...]:
        again = cuda.sorted_windows(X, window)
        return again.value, again.edges[0], again.edges[1]

    yield KernelCase("PTX network alone", work, network, {"sort": by_sorting})
    counts = {"comparisons, no ties": counted}
    yield KernelCase("Triton shares alone", work, lambda: cuda.tally_shares(X, found(), window), counts, 1e-4)
    sums = {"torch": summed}
    yield KernelCase("Triton squares alone", work, lambda: cuda.tally_squares(X, found().value), sums)
