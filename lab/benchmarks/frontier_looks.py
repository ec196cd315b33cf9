"""What liars gain where sums are looked at in some rounds only: how far they move the model in a run.

    python lab/benchmarks/frontier_looks.py --seeds 1,2,3

Byz-Clip-SGD without momentum, n = 24, f = 4, d = 400, T = 30, honest contributions half as long as the clip
of 1; liars push at right angles to them and send, every round, the strongest lie that passes. Four ways:

    every     the server looks at sums in every round (evidence(pace=1))
    careful   it looks as scheduled; liars reckon as if it looked in every round
    bold      they keep to what messages let pass, and are expelled at the next look
    late      likewise, but behave until only the last look is left

Printed is the worst of all seeds, at the end of the run, and how many of the liars are left then on average,
beside `left` of the bound: what can be hidden for good (docs/frontier.md).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from trilemma import aggregation
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.evidence import hidden_shift
from trilemma.learning.defences.evidence.schedule import looks
from trilemma.learning.defences.stage import staged
from trilemma.models import build
from trilemma.privacy import SimulatedNoise
from trilemma.privacy.types import NoiseLaw, Release
from trilemma_lab.adversary.candidate import Candidates
from trilemma_lab.adversary.lookahead import Lookahead

CLIENTS, LIARS, ROUNDS, CLIP = 24, 4, 30, 1.0
LAWS = {"ldp": NoiseLaw(1.0, 0.0), "secldp": NoiseLaw(1.0, 0.5), "mostly shared": NoiseLaw(0.2, 1.0)}
LAST = looks(ROUNDS)[-2] + 1
WAYS = {
    "every": ("evidence(pace=1)", False, 0),
    "careful": ("evidence", False, 0),
    "bold": ("evidence", True, 0),
    "late": ("evidence", True, LAST),
}


def reached(rule: str, law: NoiseLaw, noise: str, bold: bool, start: int, seed: int) -> tuple[float, int]:
    """Return how far liars move the model along their way in a run, and how many of them are left."""
    setup = Setup(CLIENTS, LIARS, ROUNDS, aggregation.parse(rule, f=LIARS), Release(clip=CLIP, law=law))
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)
    model, source = build("logistic", (399,), 2), SimulatedNoise(Key(seed), CLIENTS)
    way, given = torch.eye(1, model.dim, dtype=torch.float64), 0.5 * CLIP * torch.eye(2, model.dim)[1]
    ends, left = [], []
    for lying in (True, False):
        state = algorithm.init(model, tuple(range(CLIENTS)), Key(seed)).server
        for round_ in range(ROUNDS):
            members = algorithm.members(state)
            drawn = source.among(members).draw(law, members, model.dim, round_, torch.device("cpu"))
            sent, rows = given + drawn, [row for row, i in enumerate(members) if i >= CLIENTS - LIARS]
            if lying and rows and round_ >= start:
                lookahead = Lookahead.of(algorithm.detector, state, sent, members, round_)
                lookahead = lookahead if bold else lookahead.looked()
                names = tuple(members[row] for row in rows)
                candidates = Candidates(lookahead, names, np.ones(len(rows)), way, -way[0], noise)
                lies = candidates.lies(0, [*(CLIP * np.geomspace(0.1, 100, 40)), *candidates.furthest(0)])
                harm = candidates.judged(lies).harm
                if harm.max(initial=-np.inf) > candidates.judged(candidates.honest).harm[0]:
                    sent[rows] += candidates.sent(lies, int(harm.argmax())).to(sent)
            state = algorithm.server(Messages(sent, senders=members), state, round_, Key(seed)).state
        ends.append(float(state["params"][0]))
        left.append(sum(i >= CLIENTS - LIARS for i in algorithm.members(state)))
    return abs(ends[0] - ends[1]), left[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    for name, law in LAWS.items():
        bound = hidden_shift(law, CLIP, CLIENTS, LIARS, 400, ROUNDS).left * ROUNDS
        for noise in ("protocol", "rotated"):
            for rule in ("mean", "caf"):
                said = []
                for way, (stage, bold, start) in WAYS.items():
                    found = [reached(f"{stage}+{rule}", law, noise, bold, start, seed) for seed in seeds]
                    worst, left = max(one[0] for one in found), np.mean([one[1] for one in found])
                    said.append(f"{way} {worst:.1f} ({left:.1f})")
                print(f"{name}, {noise}, {rule}: {', '.join(said)}; bound {bound:.1f}", flush=True)


if __name__ == "__main__":
    main()
