"""What attacks cost, beside one Gram pass over the same messages.

    python benchmarks/attacks.py [--clients 100] [--byzantine 10] [--dim 431080] [--rules caf,krum,cwmed]

One table: seconds per round (best of several) and the ratio to X @ Xᵀ on the honest messages. Searched
attacks are timed against every rule asked for; `rule` is the time of one aggregation by that rule itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from tables import table
from trilemma import aggregation
from trilemma.attacks import Target, View, attacks
from trilemma.keys import Key
from turns import alone

SEARCHED = ("alie", "foe")
UNSEARCHED = ("sf", "ipm", "min-max", "min-sum", "mimic", "same-value", "gaussian")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    seconds: float
    strength: float | None = None


def best(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the shortest of several times of `action`, in seconds."""
    return alone(action, repeats, device.type).seconds


def measure(view: View, rules: Iterable[str], repeats: int) -> Iterator[Row]:
    """Yield the rows of the table."""
    honest, device = view.honest, view.honest.device
    yield Row("X @ X.T", best(lambda: honest @ honest.T, repeats, device))
    yield Row("X.mean(0)", best(lambda: honest.mean(dim=0), repeats, device))
    for name in UNSEARCHED:
        craft = attacks[name]().build().craft
        assert craft is not None
        yield Row(name, best(lambda craft=craft: craft(view), repeats, device), craft(view).strength)
    yield from _alie_at(view, 1.5, repeats)
    for rule in rules:
        target: Target = aggregation.parse(rule, f=view.byzantine)
        aimed = View(honest, view.own, view.byzantine, target, view.round, view.key)
        stacked = aimed.stack(view.honest[: view.byzantine])
        yield Row(f"rule {rule}", best(lambda t=target, x=stacked: t(x), repeats, device))
        for name in SEARCHED:
            craft = attacks[name](strength="search").build().craft
            assert craft is not None
            seconds = best(lambda craft=craft, aimed=aimed: craft(aimed), repeats, device)
            yield Row(f"{name} searched against {rule}", seconds, craft(aimed).strength)


def _alie_at(view: View, strength: float, repeats: int) -> Iterator[Row]:
    craft = attacks["alie"](strength=strength).build().craft
    assert craft is not None
    yield Row("alie, fixed", best(lambda: craft(view), repeats, view.honest.device), strength)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--byzantine", type=int, default=10)
    parser.add_argument("--dim", type=int, default=431_080)
    parser.add_argument("--rules", default="mean,caf,krum,geomed,nnm+caf,cwmed,cwtm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    shape = (chosen.clients - chosen.byzantine, chosen.dim)
    # A gradient under privacy noise thirty times its size in every coordinate.
    honest = torch.randn(shape, generator=Key(1).torch()).add_(1.0 / 30.0).to(device)
    own = honest[: chosen.byzantine]
    view = View(honest, own, chosen.byzantine, aggregation.parse("mean", f=0), round=0, key=Key(2))
    rows = list(measure(view, chosen.rules.split(","), chosen.repeats))
    print(f"n = {chosen.clients}, f = {chosen.byzantine}, d = {chosen.dim}, float32, {device},", end=" ")
    print(f"{torch.get_num_threads()} threads\n")
    lines = table(
        (
            ("what", row.what),
            ("seconds", f"{row.seconds:.4f}"),
            ("/ X @ X.T", f"{row.seconds / rows[0].seconds:.1f}"),
            ("strength", "" if row.strength is None else f"{row.strength:.3g}"),
        )
        for row in rows
    )
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
