"""The frontier: liars who know the defence against the rules, worst case first.

    python benchmarks/frontier.py arena     accuracy of every rule under every adversary, and the worst
    python benchmarks/frontier.py honest    honest rounds with evidence: how many clients are expelled (none)
    python benchmarks/frontier.py cost      a round's server step with evidence+mean against caf

Options: --seeds 1,2 --liars 5,10 --rules mean,caf,evidence+mean --rounds 30 --set key=value
"""

from __future__ import annotations

import argparse
import time

import torch

from trilemma import aggregation, config
from trilemma.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.evidence import guarded
from trilemma.models import build
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.simulate import engine
from trilemma.simulate.evaluation import evaluate
from trilemma.simulate.experiment import assemble

ADVERSARIES = {
    "gradient": ["attack.name=adaptive"],
    "unseen": ["attack.name=adaptive", "attack.greedy=false"],
    "rotated": ["attack.name=adaptive", "attack.noise=rotated"],
    "sleeper": ["attack.name=adaptive", "attack.start=15"],
    "burst": ["attack.name=adaptive", "attack.stop=10"],
    "ones": ["attack.name=adaptive", "attack.direction=ones"],
    "alie": ["attack.name=alie"],
    "foe": ["attack.name=foe"],
}
READY = "few-coordinates-mnist"
THREATS = ("secldp", "byzldp", "ldp")
PARTITIONS = ("homogeneous", "{name='dirichlet', alpha=0.1}", "extreme")


def score(changes: list[str], seed: int) -> tuple[float, int, int]:
    """Return the final accuracy, and how many honest clients and liars were expelled."""
    ready = assemble(config.load(READY).with_(*changes), seed)
    progress, expelled = engine.start(ready), set()
    for _ in range(ready.config.run.rounds):
        progress, record = engine.step(ready, progress)
        expelled |= {one["client"] for one in record.expelled}
    accuracy = evaluate(ready, progress.chosen, {}).plain()["accuracy"]
    return accuracy, len(expelled - set(ready.byzantine)), len(expelled & set(ready.byzantine))


def arena(given: argparse.Namespace) -> None:
    """Print a row for every rule and number of liars: accuracy under every adversary, and the worst."""
    print("| rule | f | " + " | ".join(ADVERSARIES) + " | worst | honest expelled |")
    print("|---" * (len(ADVERSARIES) + 4) + "|")
    for liars in map(int, given.liars.split(",")):
        for rule in given.rules.split(","):
            cells, worst, honest = [], 1.0, 0
            for attack in ADVERSARIES.values():
                base = [f"federation.byzantine={liars}", f"aggregation.rule={rule}", "algorithm.lr=0.2"]
                base += [f"run.rounds={given.rounds}", *attack, *given.set]
                found = [score(base, seed) for seed in map(int, given.seeds.split(","))]
                least = min(accuracy for accuracy, _, _ in found)
                cells.append(f"{least:.2f}")
                worst, honest = min(worst, least), honest + sum(lost for _, lost, _ in found)
            print(
                f"| {rule} | {liars} | " + " | ".join(cells) + f" | **{worst:.2f}** | {honest} |", flush=True
            )


def honest(given: argparse.Namespace) -> None:
    """Run honest federations of every threat model and partition, and count whom evidence expels."""
    rounds = 0
    for seed in map(int, given.seeds.split(",")):
        for threat in THREATS:
            for partition in PARTITIONS:
                base = [
                    f"privacy.threat={threat}",
                    f"data.partition={partition}",
                    "aggregation.rule=evidence+mean",
                ]
                base += ["federation.byzantine=0", "federation.tolerate=10", f"run.rounds={given.rounds}"]
                accuracy, lost, _ = score([*base, *given.set], seed)
                rounds += given.rounds
                print(
                    f"{threat} {partition} seed {seed}: expelled {lost}, accuracy {accuracy:.3f}", flush=True
                )
    print(f"{rounds} rounds of 100 clients")


def _honest(clients: int, dim: int, law: NoiseLaw) -> torch.Tensor:
    """Return honest noise (n, d): own, and shared by all pairs, which cancels in the sum."""
    shared = torch.randn(clients, dim)
    return law.sigma_ind * torch.randn(clients, dim) + law.sigma_cor * clients**0.5 * (
        shared - shared.mean(0)
    )


def cost(given: argparse.Namespace) -> None:
    """Time a server step at n = 100, d = 431,080 with caf and with evidence+mean."""
    n, model = 100, build("cnn", (1, 28, 28), 10)
    release = Release(clip=2.25, law=NoiseLaw(1.0, 0.65))
    noise = [_honest(n, model.dim, release.law) for _ in range(4)]
    for rule in ("caf", "evidence+mean", "evidence(correct=0)+mean"):
        setup = Setup(n, 10, 8, aggregation.parse(rule, f=10), release)
        options = algorithms["cafcor"]()
        beta, algorithm = options.momentum, guarded(options.build, setup)
        state = algorithm.init(model, tuple(range(n)), Key(1)).server
        taken, message = [], torch.zeros(n, model.dim)
        for round_, fresh in enumerate(noise):
            message = beta * message + (1 - beta) * fresh
            begin = time.perf_counter()
            state = algorithm.server(Messages(message), state, round_, Key(2)).state
            taken.append(time.perf_counter() - begin)
        print(f"{rule}: {min(taken[1:]):.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["arena", "honest", "cost"])
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--liars", default="5,10")
    parser.add_argument("--rules", default="mean,caf,evidence+mean,evidence+caf")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--set", action="append", default=[])
    chosen = parser.parse_args()
    {"arena": arena, "honest": honest, "cost": cost}[chosen.what](chosen)
