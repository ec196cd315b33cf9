"""CafCor's Table 1: what rules cost beside plain averaging, n = 30, f = 3 (ICML 2025, appendix D.2).

Times are the best of several, taken in turns with the mean's on the same messages: ratios of one machine. The
paper enumerates subsets for SMEA in d dimensions; ours reads everything off the n × n Gram matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from trilemma.aggregation import parse
from trilemma.base.keys import Key
from trilemma.base.records import Spread
from trilemma_lab.studies.measured import Measured
from trilemma_lab.studies.study import Study, studies

RULES = {"SMEA": "smea", "CAF": "caf", "Meamed": "meamed", "GM": "geomed"}
CLIENTS, LIARS = 30, 3
DIMENSIONS = (2_500_000, 5_000_000, 10_000_000)
REPEATS = 5


def cells(quick: bool) -> list[Measured]:
    """Measure the table; a quick look takes the smallest dimension."""
    return [_cell(d, row) for d in DIMENSIONS[: 1 if quick else None] for row in RULES]


def _cell(d: int, row: str) -> Measured:
    generator = Key(1).fold("costs", d).torch("cpu")
    messages = torch.randn(CLIENTS, d, generator=generator)
    rule = parse(RULES[row], f=LIARS)
    ours, mean = _in_turns([lambda: rule(messages), lambda: messages.mean(0)])
    ratio = Spread.of({1: round(ours / mean, 3)})
    threads = torch.get_num_threads()
    settings = {"rule": RULES[row], "clients": CLIENTS, "f": LIARS, "d": d, "threads": threads}
    return Measured("times the mean's", row, f"d = {d:g}", {"ratio": ratio}, (1,), settings=settings)


def _in_turns(actions: Sequence[Callable[[], object]]) -> list[float]:
    """Return the least time of each action; the first turn compiles and does not count."""
    least = [float("inf")] * len(actions)
    for turn in range(REPEATS + 1):
        for index, action in enumerate(actions):
            begin = time.perf_counter()
            action()
            if turn:
                least[index] = min(least[index], time.perf_counter() - begin)
    return least


studies.register("cafcor-costs", "CafCor, Table 1: what rules cost beside averaging, n = 30, f = 3")(
    Study(
        paper="cafcor",
        figures="Table 1",
        compute=cells,
        left_out="d = 5e6 and 1e7",
    )
)
