from __future__ import annotations

import math

import pytest

from trilemma import learning
from trilemma.learning.steps.schedules import NonConvex, StronglyConvex


def test_strongly_convex_starts_at_one_over_24_smoothness() -> None:
    lr, beta = StronglyConvex(kind="strongly_convex", smoothness=2.0, convexity=0.5).at(10)
    assert lr(0) == pytest.approx(1 / (24 * 2.0))
    assert beta(0) == pytest.approx(0.0)
    assert lr(7) == pytest.approx(10 / (0.5 * (7 + 240 * 4)))
    assert beta(7) == pytest.approx(1 - 24 * 2.0 * lr(7))


def test_non_convex_is_the_smaller_of_both_steps() -> None:
    lr, beta = NonConvex(kind="non_convex", smoothness=1.0, gap=2.0, noise=50.0).at(400)
    assert lr(0) == pytest.approx(math.sqrt(270 * 2.0) / (2 * 50 * math.sqrt(5760 * 400)))
    assert beta(3) == pytest.approx(1 - 24 * lr(3))
    capped, _ = NonConvex(kind="non_convex", smoothness=1.0, gap=2.0, noise=1e-9).at(400)
    assert capped(0) == pytest.approx(1 / 24)


def test_an_algorithm_takes_a_schedule() -> None:
    settings = learning.algorithms["cafcor"].model_validate(
        {"schedule": {"kind": "strongly_convex", "smoothness": 1.0, "convexity": 0.1}}
    )
    lr, _ = settings.schedules(100)
    assert lr(0) > lr(99)
