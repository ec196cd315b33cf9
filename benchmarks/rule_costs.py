"""How fast and how exact the rules are: times relative to the plain mean, and errors against float64.

Every time is the best of several, divided by the best of `X.mean(0)` on the same X, taken in turns with it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilemma.aggregation.passes.stream import stream
from trilemma.aggregation.steps.parsing import parse
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from turns import alone, take_turns, timed

RATIO_BARS = {
    "caf": 4.0,
    "smea": 10.0,
    "krum": 5.0,
    "multikrum": 5.0,
    "nnm+caf": 5.0,
    "geomed": 5.0,
    "cwmed": 6.0,
    "cwtm": 6.0,
    "meamed": 10.0,
    "nnm+cwmed": 12.0,
}
"""The most times the plain mean a rule may cost: n = 30, f = 3, float32, two cores."""

CUDA_BARS = {"caf": 10e-3, "cwmed": 8e-3}
"""The most seconds on an H200: n = 100, d = 10⁷, float32."""

PEERS: dict[str, Callable[[Any, int], Callable[[Tensor], Any]]] = {
    "caf": lambda peer, f: peer.CAF(f),
    "krum": lambda peer, f: peer.Krum(f),
    "multikrum": lambda peer, f: peer.MultiKrum(f),
    "geomed": lambda peer, f: peer.GeometricMedian(),
    "cwmed": lambda peer, f: peer.Median(),
    "cwtm": lambda peer, f: peer.TrMean(f),
    "meamed": lambda peer, f: peer.Meamed(f),
    "nnm+caf": lambda peer, f: lambda X: peer.CAF(f)(peer.NNM(f)(X)),
    "nnm+cwmed": lambda peer, f: lambda X: peer.Median()(peer.NNM(f)(X)),
}
"""The same rules in ByzFL. Its SMEA enumerates all subsets in d dimensions: no run would end."""

OTHER_DEFINITION = frozenset({"krum", "multikrum"})
"""ByzFL counts n − f − 1 neighbours where Blanchard et al. count n − f − 2: values are not comparable."""


@dataclass(frozen=True)
class RuleTiming:
    """How long a rule takes on (n, d) float32 messages.

    `ratio` is to the mean; `busy_ratio` the same in processor time, which other programs on the machine
    disturb less (it says nothing on a CUDA device). `extra` is the peak of additional memory as a fraction
    of X (None where it cannot be read), `peer_ratio` the peer's time relative to the mean, infinite where
    it runs out of memory.
    """

    rule: str
    n: int
    f: int
    d: int
    seconds: float
    ratio: float
    busy_ratio: float
    extra: float | None
    bar: float | None
    peer_ratio: float | None


@dataclass(frozen=True)
class Error:
    """How far answers in float32 are from the exact one rounded to float32, over the honest spread.

    Exact is the rule on float64 copies of the same messages. A peer that gives no number has error infinity.
    """

    rule: str
    case: str
    error: float
    peer_error: float | None


@dataclass(frozen=True)
class Streamed:
    """How long a rule takes on messages that come in chunks, per thousand million numbers."""

    rule: str
    n: int
    d: int
    seconds: float
    per_billion: float


def load_peer(folder: Path) -> Any:
    """Import ByzFL's aggregators alone from a folder it was installed into without its dependencies."""
    if not (folder / "byzfl" / "aggregators").is_dir():
        raise UserError(f"no byzfl in {folder}; pip install --no-deps --target {folder} byzfl==0.0.11")
    package = types.ModuleType("byzfl")
    package.__path__ = [str(folder / "byzfl")]  # its own __init__ would import what is not installed
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")


def timings(
    rules: Iterable[str], n: int, f: int, d: int, *, device: str, repeats: int, peer: Any = None
) -> Iterator[RuleTiming]:
    """Time rules on the same normally distributed messages."""
    X = messages(n, d, device)
    bars = CUDA_BARS if device == "cuda" else RATIO_BARS
    for name in rules:
        rule = functools.partial(parse(name, f=f), X)
        mean, ours = take_turns({"mean": lambda: X.mean(0), "rule": rule}, repeats, device).values()
        extra = extra_memory(rule, X)
        theirs = None
        if peer is not None and name in PEERS:
            theirs = _peer_seconds(functools.partial(PEERS[name](peer, f), X), device) / mean.seconds
        ratios = ours.seconds / mean.seconds, ours.busy / mean.busy
        yield RuleTiming(name, n, f, d, ours.seconds, *ratios, extra, bars.get(name), theirs)


def _peer_seconds(action: Callable[[], object], device: str) -> float:
    """Return the time of a peer's rule; infinity where memory does not suffice."""
    try:
        return alone(action, 1, device).seconds
    except RuntimeError as error:  # torch's way to say so
        if "memory" not in str(error):
            raise
        return math.inf


def errors(rules: Iterable[str], n: int, f: int, d: int, *, device: str, peer: Any = None) -> Iterator[Error]:
    """Compare answers in float32 with those for float64 copies of the same messages."""
    plain = messages(n, d, device)
    huge = plain.clone()
    huge[-1] *= 1e30
    shifted = plain.clone()
    shifted[n - f :] += 1.0
    cases = {
        "plain": plain,
        "f rows shifted": shifted,
        "offset 1e6": plain + 1e6,
        "one row 1e30": huge,
        "all 1e-30": plain * 1e-30,
    }
    for name in rules:
        rule = parse(name, f=f)
        for case, X in cases.items():
            exact = rule(X.double()).value.float()
            honest = X[: n - f].double()
            spread = float((honest - honest.mean(0)).square().sum(1).mean().sqrt())
            ours = float((rule(X).value.double() - exact.double()).norm()) / spread
            theirs = None
            if peer is not None and name in PEERS and name not in OTHER_DEFINITION:
                answer = PEERS[name](peer, f)(X)
                theirs = math.inf
                if answer is not None and bool(answer.isfinite().all()):
                    theirs = float((answer.double() - exact.double()).norm()) / spread
            yield Error(name, case, ours, theirs)


def streamed(
    rules: Iterable[str], sizes: Iterable[tuple[int, int]], f: int, chunk: int
) -> Iterator[Streamed]:
    """Time rules on streams of (n, d) messages; every chunk holds the same numbers, so that none is drawn."""
    names = list(rules)
    for n, d in sizes:
        block = messages(n, min(chunk, d), "cpu")

        def chunks(block: Tensor = block, d: int = d) -> Iterator[Tensor]:
            for lo in range(0, d, block.shape[1]):
                yield block[:, : min(block.shape[1], d - lo)]

        for name in names:
            rule = parse(name, f=f)
            stream(rule, [block])  # compiled once, outside the measurement
            seconds = timed(functools.partial(stream, rule, chunks)).seconds
            yield Streamed(name, n, d, seconds, seconds / (n * d) * 1e9)


def messages(n: int, d: int, device: str) -> Tensor:
    """Return normally distributed messages (n, d), float32, the same every time."""
    generator = Key(0).fold("benchmark", n, d).torch(device)
    return torch.randn(n, d, generator=generator, device=device)


def extra_memory(action: Callable[[], object], X: Tensor) -> float | None:
    """Return the peak of memory that an action adds, without its result, as a fraction of X."""
    size = X.numel() * X.element_size()
    if X.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = action()
        peak = torch.cuda.max_memory_allocated()
    else:
        before = _resident(reset=True)
        result = action()
        peak = _resident(reset=False)
        if not before or not peak:
            return None
    del result
    value = X.shape[1] * X.element_size()
    return max(peak - before - value, 0) / size


def _resident(*, reset: bool) -> int:
    """Return the resident memory in bytes: now (and restart the peak), or its peak. 0 where unknown."""
    try:
        if reset:
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
            Path("/proc/self/clear_refs").write_text("5")
        field = "VmRSS" if reset else "VmHWM"
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except (OSError, AttributeError):  # not Linux, or not glibc
        pass
    return 0
