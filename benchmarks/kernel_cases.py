"""One hand-written kernel against plain torch: what is compared, and the comparison."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tables import Cells
from turns import take_turns

WORTH = 1.3
"""A kernel has to be so many times faster than plain torch to stay."""


@dataclass(frozen=True)
class KernelCase:
    """A kernel on some work, and the plain versions of the same operation; the first one says what is right.

    Answers are tensors or arrays, or tuples of them; they may differ by `tolerance`, relative in norm.
    """

    kernel: str
    work: str
    ours: Callable[[], Any]
    plain: Mapping[str, Callable[[], Any]]
    tolerance: float = 1e-5


@dataclass(frozen=True)
class KernelRow:
    """Best times in milliseconds, the best plain version's over ours, and how far the answers differ."""

    kernel: str
    work: str
    ours: float
    plain: dict[str, float]
    ratio: float
    error: float
    right: bool

    def cells(self) -> Cells:
        """Return the row as it is printed."""
        best = min(self.plain, key=self.plain.__getitem__)
        return (
            ("kernel", self.kernel),
            ("work", self.work),
            ("ms", f"{self.ours:.3g}"),
            ("best plain", f"{best}: {self.plain[best]:.3g}"),
            ("plain ÷ ours", f"{self.ratio:.2f}"),
            ("", "" if self.ratio >= WORTH else "too little"),
            ("error", f"{self.error:.0e}" + ("" if self.right else " WRONG")),
        )


def measure(case: KernelCase, device: str, repeats: int, patience: float) -> KernelRow:
    """Compare the answers, then the times."""
    ways = {**case.plain, "": case.ours}
    answers = {name: way() for name, way in ways.items()}
    error = difference(answers.pop(""), answers[next(iter(case.plain))])
    answers.clear()
    times = take_turns(ways, repeats, device, patience, warm=True)
    taken = {name: 1e3 * best.seconds for name, best in times.items()}
    ours = taken.pop("")
    ratio = min(taken.values()) / ours
    return KernelRow(case.kernel, case.work, ours, taken, ratio, error, error <= case.tolerance)


def failed(case: KernelCase, error: Exception) -> KernelRow:
    """Return the row of a case that did not run."""
    print(f"{case.kernel}, {case.work}: {error!r:.500}", file=sys.stderr, flush=True)
    return KernelRow(case.kernel, case.work, math.nan, {"": math.nan}, math.nan, math.nan, False)


def difference(found: Any, expected: Any) -> float:
    """Return the largest ‖found − expected‖/‖expected‖ over the parts of an answer."""
    pairs = zip(_parts(found), _parts(expected), strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def _parts(answer: Any) -> Iterable[Tensor]:
    parts = answer if isinstance(answer, tuple | list) else (answer,)
    return [torch.as_tensor(part).detach().cpu().double() for part in parts]
