"""The frontier: what evidence costs, whom it expels among honest clients, and what can be hidden from it.

    python lab/benchmarks/frontier.py laws    honest messages drawn from their laws: whom evidence expels
    python lab/benchmarks/frontier.py rates   false alarms of each test at a level where they can be counted
    python lab/benchmarks/frontier.py hidden  what adaptive liars hide, against the bound; --picture draws it
    python lab/benchmarks/frontier.py honest  rounds with evidence: how many honest clients are expelled
    python lab/benchmarks/frontier.py cost    a server step with evidence+caf against caf; --device cuda

Rules against adversaries are `trilemma arena`. Options: --seeds 1,2 --rounds 30 --set key=value; --out FILE
keeps what laws, rates and hidden measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frontier_cost import cost, honest_noise
from trilemma import aggregation, config
from trilemma.base import files
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.evidence import Law, convict, hidden_shift
from trilemma.learning.defences.evidence.conviction import apart
from trilemma.learning.defences.evidence.directions import visible
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.defences.stage import staged
from trilemma.models import Model, build
from trilemma.privacy import SimulatedNoise
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.simulate import engine
from trilemma.simulate.evaluation import evaluate
from trilemma.simulate.experiment import assemble
from trilemma_lab.adversary.candidate import Candidates
from trilemma_lab.adversary.lookahead import Lookahead

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


ALGORITHMS = ("cafcor", "safe-dshb", "byz-clip-sgd", "byz-clip21-sgd2m", "fedavg", "lp-proj")
LAWS = {
    "secldp": NoiseLaw(0.5, 0.3),
    "secldp, published": NoiseLaw(0.0, 0.3),
    "byzldp": NoiseLaw(0.54, 0.33),
    "ldp": NoiseLaw(1.0, 0.0),
}
DATA = ("homogeneous", "different", "one label each")
DIM = 40
OPTIONS = {"lp-proj": {"dim": DIM}}  # its messages are as long as the others': a model of so many numbers


def laws(given: argparse.Namespace) -> None:
    """Send honest messages through the defended server: contributions as long as the clip, and noise.

    Contributions are the same for all, of random directions, or at right angles to each other; a fifth of the
    clients is not heard in a round. With --neighbours each shares secrets with so many others. Prints how
    many were expelled, which should be none.
    """
    clients, total, expelled, counted = 10, 0, 0, []
    graph = {} if given.neighbours is None else {"neighbours": given.neighbours}
    model = build("logistic", (DIM - 1,), 2)
    for seed in map(int, given.seeds.split(",")):
        for name in ALGORITHMS:
            for threat, law in LAWS.items():
                for data in DATA:
                    lost = _expelled(name, law, data, clients, model, given.rounds, seed, given.neighbours)
                    total, expelled = total + given.rounds, expelled + lost
                    place = {"algorithm": name, "law": threat, "data": data, "seed": seed, **graph}
                    counted.append({**place, "clients": clients, "rounds": given.rounds, "expelled": lost})
                    if lost:
                        print(f"{name}, {threat}, {data}, seed {seed}: {lost}", flush=True)
        print(f"seed {seed}: {total:,} rounds of {clients} clients so far, {expelled} expelled", flush=True)
        keep(given.out, counted)


def _expelled(
    name: str,
    law: NoiseLaw,
    data: str,
    clients: int,
    model: Model,
    rounds: int,
    seed: int,
    neighbours: int | None = None,
) -> int:
    release = Release(clip=1.0, law=law)
    rule = aggregation.parse("evidence+mean", f=2)
    setup = Setup(clients, 2, rounds, rule, release, neighbours=neighbours)
    algorithm = staged(algorithms[name](**OPTIONS.get(name, {})).build, setup)
    trace, everyone, key = algorithm.trace, tuple(range(clients)), Key(seed)
    assert trace is not None
    assert algorithm.members is not None
    generator, source = key.fold("data").torch(), SimulatedNoise(key.fold("noise"), clients, neighbours)
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


def rates(given: argparse.Namespace) -> None:
    """Count false alarms of each test at level 0.01, where theory says at most (direction: about) as many.

    A look at n = 20 sums of noise without contributions, as tight as thresholds can be; every test is asked
    alone: lengths and pairs with their own share of the level, directions with one planted in everybody.
    """
    level, clients, dim, tries = 0.01, 20, 60, 100 * given.rounds
    spread, one = np.full(1, 0.7**2 + clients * 0.5**2), np.ones((clients, 1))
    law = Law.of(np.full(1, 0.5**2), one, spread, np.zeros(1), dim)
    alarms = dict.fromkeys(("length", "pairs", "direction"), 0)
    for attempt in range(tries):
        generator = Key(int(given.seeds.split(",")[0])).fold("rates", attempt).torch()
        noise = honest_noise(clients, dim, NoiseLaw(0.7, 0.5), generator).double().numpy()
        gram = noise @ noise.T
        # The level is shared by all 2n² bounds, of which 2n are lengths': alone they get n times as much.
        alarms["length"] += any(one.test == "length" for one in convict(gram, law, 3, level * clients))
        pairs = {one.test for one in convict(gram, law, 3, level)}
        alarms["pairs"] += bool(pairs & {"pairs", "one of a pair"})
        planted = noise + 3.0 * np.eye(1, dim)
        look = LookLimits.of(law, 3, level)
        [seen] = visible(torch.from_numpy(planted @ planted.T)[None, None], [look])
        alarms["direction"] += bool(apart(seen, look).any())
    kept = [{"test": test, "level": level, "looks": tries, "alarms": count} for test, count in alarms.items()]
    for row in kept:
        print(row)
    keep(given.out, kept)


LAYOUT = {"n": 40, "f": 4, "d": 1000, "noise": 1.0}
VARIED = {"d": (100, 300, 3000, 10000), "n": (20, 80), "f": (2, 8, 12), "noise": (0.3, 3.0)}


def hidden(given: argparse.Namespace) -> None:
    """Measure how far liars who know the defence move the mean unseen, per round, against the bound.

    Byz-Clip-SGD without momentum, five rounds, equal contributions half as long as the clip; liars push at
    right angles to them, with the strongest lie of each round that lets nobody be expelled. What is measured
    is the model's move along the push, less that of the same rounds without lies.
    """
    found = []
    cells = [LAYOUT] + [{**LAYOUT, key: value} for key, values in VARIED.items() for value in values]
    for cell in cells if not given.picture else []:
        for seed in map(int, given.seeds.split(",")):
            law = NoiseLaw(1.0 * cell["noise"], 0.65 * cell["noise"])
            n, f, dim = int(cell["n"]), int(cell["f"]), int(cell["d"])
            bound = hidden_shift(law, 2.25, n, f, dim, ROUNDS)
            row = {**cell, "seed": seed, "left": bound.left, "most": bound.most}
            row |= {
                f"measured {noise}": _moved(n, f, dim, law, noise, seed) for noise in ("protocol", "rotated")
            }
            found.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)
            keep(given.out, found)
    if given.picture:
        _draw(json.loads(Path(given.out).read_text()), given.picture)


ROUNDS = 5


def _moved(n: int, f: int, dim: int, law: NoiseLaw, noise: str, seed: int) -> float:
    """Return how far the mean is moved along the liars' direction, per round."""
    setup = Setup(n, f, ROUNDS, aggregation.parse("evidence+mean", f=f), Release(clip=2.25, law=law))
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)
    model = build("multinomial", (dim // 2 - 1,), 2, start="zero")
    everyone, source = tuple(range(n)), SimulatedNoise(Key(seed), n)
    honest, way = 1.125 * torch.eye(1, model.dim), torch.eye(2, model.dim, dtype=torch.float64)[1:]
    ends = []
    for lying in (True, False):
        state = algorithm.init(model, everyone, Key(seed)).server
        for round_ in range(ROUNDS):
            sent = honest + source.draw(law, everyone, model.dim, round_, torch.device("cpu"))
            if lying:
                lookahead = Lookahead.of(algorithm.detector, state, sent, everyone, round_)
                candidates = Candidates(lookahead, everyone[-f:], np.ones(f), way, -way[0], noise)
                strengths = 0.1 * 1000 ** np.linspace(0, 1, 40) * law.sigma_cor
                lies = candidates.lies(0, [*strengths, *candidates.furthest(0)])
                harm = candidates.judged(lies).harm
                if harm.max(initial=-np.inf) > candidates.judged(candidates.honest).harm[0]:
                    sent[-f:] += candidates.sent(lies, int(harm.argmax())).to(sent)
            state = algorithm.server(Messages(sent), state, round_, Key(seed)).state
        ends.append(float(state["params"] @ way[0].float()))
    return abs(ends[0] - ends[1]) / ROUNDS


def _draw(rows: list[dict[str, float]], path: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    picture = Figure(figsize=(8.0, 3.8), dpi=110, layout="constrained")
    for axes, bound, noise in zip(
        picture.subplots(1, 2), ("left", "most"), ("protocol", "rotated"), strict=True
    ):
        for number, key in enumerate(VARIED):
            some = [
                row for row in rows if all(row[other] == LAYOUT[other] for other in LAYOUT if other != key)
            ]
            x, y = [row[bound] for row in some], [row[f"measured {noise}"] for row in some]
            axes.loglog(x, y, "osD^"[number], mfc="none", label=f"{key} varied")
        ends = [min(row[bound] for row in rows), max(row[bound] for row in rows)]
        axes.loglog(ends, ends, "k--", lw=0.8, label="the bound")
        axes.set(xlabel="bound on the mean's shift, per round", title=f"noise: {noise}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # powers of ten alone are one or two here
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.grid(alpha=0.3, which="both")
    picture.axes[0].set_ylabel("measured")
    picture.axes[0].legend(frameon=False, fontsize="small")
    picture.savefig(path)


def keep(path: str | None, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON, one a line, if a file is given."""
    if path:
        lines = ",\n".join(json.dumps(row) for row in rows)
        files.write_atomically(Path(path), f"[\n{lines}\n]\n".encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["laws", "rates", "hidden", "honest", "cost"])
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--neighbours", type=int, help="for laws: how many each shares secrets with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--picture")
    parser.add_argument("--set", action="append", default=[])
    chosen = parser.parse_args()
    {
        "laws": laws,
        "rates": rates,
        "hidden": hidden,
        "honest": honest,
        "cost": lambda given: cost(given.device),
    }[chosen.what](chosen)
