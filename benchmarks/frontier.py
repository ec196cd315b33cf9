"""The frontier: what evidence costs, and whom it expels among honest clients.

    python benchmarks/frontier.py laws      honest messages drawn from their laws: whom evidence expels
    python benchmarks/frontier.py honest    honest rounds with evidence: how many clients are expelled (none)
    python benchmarks/frontier.py cost      a round's server step with evidence+mean against caf

Rules against adversaries are `trilemma arena`. Options: --seeds 1,2 --rounds 30 --set key=value
"""

from __future__ import annotations

import argparse
import time

import torch

from trilemma import aggregation, config
from trilemma.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.evidence import guarded
from trilemma.models import Model, build
from trilemma.privacy import SimulatedNoise
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.simulate import engine
from trilemma.simulate.evaluation import evaluate
from trilemma.simulate.experiment import assemble

READY = "frontier-mnist"
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


ALGORITHMS = ("cafcor", "safe-dshb", "byz-clip-sgd", "byz-clip21-sgd2m", "fedavg")
LAWS = {"secldp": NoiseLaw(0.5, 0.3), "secldp, published": NoiseLaw(0.0, 0.3), "ldp": NoiseLaw(1.0, 0.0)}
DATA = ("homogeneous", "different", "one label each")


def laws(given: argparse.Namespace) -> None:
    """Send honest messages through the defended server: contributions as long as the clip, and noise.

    Contributions are the same for all, of random directions, or at right angles to each other; a fifth of the
    clients is not heard in a round. Prints how many were expelled, which should be none.
    """
    clients, dim, total, expelled = 10, 40, 0, 0
    model = build("logistic", (dim - 1,), 2)
    for seed in map(int, given.seeds.split(",")):
        for name in ALGORITHMS:
            for threat, law in LAWS.items():
                for data in DATA:
                    lost = _expelled(name, law, data, clients, model, given.rounds, seed)
                    total, expelled = total + given.rounds, expelled + lost
                    if lost:
                        print(f"{name}, {threat}, {data}, seed {seed}: {lost}", flush=True)
        print(f"seed {seed}: {total:,} rounds of {clients} clients so far, {expelled} expelled", flush=True)


def _expelled(name: str, law: NoiseLaw, data: str, clients: int, model: Model, rounds: int, seed: int) -> int:
    release = Release(clip=1.0, law=law)
    setup = Setup(clients, 2, rounds, aggregation.parse("evidence+mean", f=2), release)
    algorithm = guarded(algorithms[name]().build, setup)
    trace, everyone, key = algorithm.trace, tuple(range(clients)), Key(seed)
    assert trace is not None
    assert algorithm.members is not None
    generator, source = key.fold("data").torch(), SimulatedNoise(key.fold("noise"), clients)
    shape = (1, model.dim) if data == "homogeneous" else (clients, model.dim)
    given = torch.randn(shape, generator=generator).expand(clients, -1)
    given = torch.eye(clients, model.dim) if data == "one label each" else given
    given = given / torch.linalg.vector_norm(given, dim=1, keepdim=True)
    state = algorithm.init(model, everyone, key).server
    last = torch.zeros(clients, model.dim)
    for round_ in range(rounds):
        members = algorithm.members(state)
        left = torch.randperm(len(members), generator=generator)[: max(1, len(members) * 4 // 5)]
        heard = tuple(sorted(members[int(place)] for place in left))
        rows, cpu = list(heard), torch.device("cpu")
        fresh = given[rows] + source.among(members).draw(law, heard, model.dim, round_, cpu)
        last[rows] = trace.keeps(round_) * last[rows] + trace.adds(round_) * fresh
        sent = last[rows] + state[trace.model] if trace.around else last[rows]
        state = algorithm.server(Messages(sent, senders=heard), state, round_, key.fold(round_)).state
    return clients - len(algorithm.members(state))


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
    parser.add_argument("what", choices=["laws", "honest", "cost"])
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--set", action="append", default=[])
    chosen = parser.parse_args()
    {"laws": laws, "honest": honest, "cost": cost}[chosen.what](chosen)
