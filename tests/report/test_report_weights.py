"""Who stands out where clients have public weights: nobody for being small."""

from __future__ import annotations

from trilemma.base.records import Record
from trilemma.report.trust import verdict

WEIGHTS = (0.3, 0.2, 0.2, 0.1, 0.1, 0.1)


def run(*shares: float) -> list[Record]:
    return [Record(round_, weights=dict(enumerate(shares))) for round_ in range(1, 6)]


def test_a_small_site_is_no_suspect_and_one_below_its_weight_is() -> None:
    honest = run(0.301, 0.199, 0.2, 0.1, 0.0995, 0.1005)
    assert verdict("caf", 6, honest, 2, WEIGHTS).startswith("nobody stands out")
    lying = run(0.001, 0.299, 0.3, 0.135, 0.13, 0.135)
    assert verdict("caf", 6, lying, 2, WEIGHTS).startswith("client 0 (")
