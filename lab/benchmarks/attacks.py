"""What attacks cost, beside one Gram pass over the same messages.

    export PYTHONPATH=benchmarks
    python lab/benchmarks/attacks.py [--clients 100] [--byzantine 10] [--dim 431080] [--rules caf,krum,cwmed]

One table: seconds per round (best of several) and the ratio to X @ Xᵀ on the honest messages. Searched
attacks are timed against every rule asked for; `rule` is the time of one aggregation by that rule itself.
`adaptive` also faces servers that remember (`--staged evidence+mean,evidence+caf`), in the third round of
eight of CafCor; `server` is the time of their step, a look at the sums included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from tables import table
from trilemma import aggregation
from trilemma.attacks import Target, View, attacks
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.stage import staged
from trilemma.models import build
from trilemma.privacy.types import NoiseLaw, Release
from trilemma_lab.adversary.adaptive import Adaptive
from trilemma_lab.adversary.informed import Informed
from trilemma_lab.adversary.lookahead import Lookahead
from turns import alone

SEARCHED = ("alie", "foe")
UNSEARCHED = ("sf", "ipm", "min-max", "min-sum", "mimic", "same-value", "gaussian")


@dataclass(frozen=True)
class AttackRow:
    """One line of the table."""

    what: str
    seconds: float
    strength: float | None = None


def best(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the shortest of several times of `action`, in seconds."""
    return alone(action, repeats, device.type).seconds


def measure(view: View, rules: Iterable[str], repeats: int) -> Iterator[AttackRow]:
    """Yield the rows of the table."""
    honest, device = view.honest, view.honest.device
    yield AttackRow("X @ X.T", best(lambda: honest @ honest.T, repeats, device))
    yield AttackRow("X.mean(0)", best(lambda: honest.mean(dim=0), repeats, device))
    for name in UNSEARCHED:
        craft = attacks[name]().build().craft
        assert craft is not None
        yield AttackRow(name, best(lambda craft=craft: craft(view), repeats, device), craft(view).strength)
    yield from _alie_at(view, 1.5, repeats)
    for rule in rules:
        target: Target = aggregation.parse(rule, f=view.byzantine)
        aimed = View(honest, view.own, view.byzantine, target, view.round, view.key)
        stacked = aimed.stack(view.honest[: view.byzantine])
        yield AttackRow(f"rule {rule}", best(lambda t=target, x=stacked: t(x), repeats, device))
        for name in SEARCHED:
            craft = attacks[name](strength="search").build().craft
            assert craft is not None
            seconds = best(lambda craft=craft, aimed=aimed: craft(aimed), repeats, device)
            yield AttackRow(f"{name} searched against {rule}", seconds, craft(aimed).strength)
        craft = Adaptive().build().craft
        assert craft is not None
        seconds = best(lambda craft=craft, aimed=aimed: craft(aimed), repeats, device)
        yield AttackRow(f"adaptive against {rule}", seconds, craft(aimed).strength)


def remembering(rule: str, view: View, repeats: int) -> Iterator[AttackRow]:
    """Yield what a step of a server that remembers takes, and what liars take who search against it."""
    n, dim, device = view.clients, view.honest.shape[1], view.honest.device
    model, law = build("multinomial", (dim // 2 - 1,), 2, start="zero"), NoiseLaw(1.0, 0.65)
    chain, release = aggregation.parse(rule, f=view.byzantine), Release(clip=2.25, law=law)
    setup = Setup(n, view.byzantine, 8, chain, release)
    options = algorithms["cafcor"]()
    algorithm, everyone = staged(options.build, setup), tuple(range(n))
    assert algorithm.trace is not None
    start = algorithm.init(model, everyone, Key(1)).server
    state = {name: part.to(device) for name, part in start.items()}
    truth = torch.full((model.dim,), 1.5 / dim**0.5, device=device)
    sent = torch.zeros(n, model.dim, device=device)
    for round_ in range(3):
        drawn = torch.randn(n, model.dim, generator=Key(2).fold(round_).torch()).to(device)
        spread = (law.sigma_ind**2 + n * law.sigma_cor**2) ** 0.5
        fresh = truth + spread * drawn + (law.sigma_ind - spread) * drawn.mean(0)
        kept, taken = algorithm.trace.keeps(round_), algorithm.trace.adds(round_)
        sent = (0.0 if round_ == 0 else kept) * sent + taken * fresh
        if round_ < 2:
            state = algorithm.server(Messages(sent), state, round_, Key(3)).state
    seconds = best(lambda: algorithm.server(Messages(sent), state, 2, Key(3)), repeats, device)
    yield AttackRow(f"server {rule}", seconds)
    knows = replace(
        Informed.of(view),
        honest=sent[: -view.byzantine],
        own=sent[-view.byzantine :],
        round=2,
        defence=lambda: Lookahead.of(algorithm.detector, state, sent, everyone, 2),
        truth=lambda: truth,
        members=everyone[-view.byzantine :],
    )
    for noise in ("protocol", "rotated"):
        craft = Adaptive(noise=noise).build().craft
        assert craft is not None
        seconds = best(lambda craft=craft: craft(knows), repeats, device)
        yield AttackRow(f"adaptive against {rule}, noise {noise}", seconds, craft(knows).strength)


def _alie_at(view: View, strength: float, repeats: int) -> Iterator[AttackRow]:
    craft = attacks["alie"](strength=strength).build().craft
    assert craft is not None
    yield AttackRow("alie, fixed", best(lambda: craft(view), repeats, view.honest.device), strength)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--byzantine", type=int, default=10)
    parser.add_argument("--dim", type=int, default=431_080)
    parser.add_argument("--rules", default="mean,caf,krum,geomed,nnm+caf,cwmed,cwtm")
    parser.add_argument("--staged", default="evidence+mean,evidence+caf")
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
    for rule in filter(None, chosen.staged.split(",")):
        rows += remembering(rule, view, chosen.repeats)
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
