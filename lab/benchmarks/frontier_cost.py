"""What evidence costs a server, in time and in memory, against the rule it stands before.

python lab/benchmarks/frontier.py cost      --device cuda
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import torch

from trilemma import aggregation
from trilemma.base.keys import Key
from trilemma.learning import Algorithm, Messages, Setup, algorithms
from trilemma.learning.defences.evidence.schedule import looks
from trilemma.learning.defences.stage import staged
from trilemma.models import build
from trilemma.privacy.types import NoiseLaw, Release


def honest_noise(
    clients: int, dim: int, law: NoiseLaw, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return honest noise (n, d): own, and shared by all pairs, which cancels in the sum."""
    device = None if generator is None else generator.device
    shared, own = (torch.randn(clients, dim, generator=generator, device=device) for _ in range(2))
    return law.sigma_ind * own + law.sigma_cor * clients**0.5 * (shared - shared.mean(0))


LENGTHS = (30, 400)
"""Rounds of runs over which the price of looks at sums is shared."""


SINGLE = "caf, float32"
"""CAF on messages that are measured in float32, as evidence measures them."""

RULES = ("caf", SINGLE, "evidence+caf", "evidence(correct=0)+caf")


def cost(where: str) -> None:
    """Time a server step at n = 100, d = 431,080 with and without evidence: processor time, or a GPU's.

    Rounds in which sums are looked at and others are timed apart; what a run costs is both in the proportion
    in which its schedule has them. Memory is the most that was in use during a step, the state included, in
    numbers for each client and coordinate, beside the messages; bars: 1.15 of caf and 3.
    """
    device = torch.device(where)
    if device.type == "cpu":
        _on_one_thread()
    _memory("caf", device)  # whatever is compiled or loaded by the first step
    memory = {rule: _memory(rule, device) for rule in RULES}
    for rule, times in _times(device).items():
        look, plain = (
            {kind: np.median([one[kind] for one in times if one["look"] is due]) for kind in times[0]}
            for due in (True, False)
        )
        print(
            f"{rule}: {1e3 * plain['spent']:.1f} ms, with a look {1e3 * look['spent']:.1f} ms, "
            f"{memory[rule]:.2f} n d"
        )
        for other in (other for other in ("caf", SINGLE) if rule.startswith("evidence")):
            shares = {rounds: len(looks(rounds)) / rounds for rounds in LENGTHS}
            told = ", ".join(
                f"{share * look[other] + (1 - share) * plain[other]:.2f} over {rounds} rounds"
                for rounds, share in shares.items()
            )
            print(f"    of {other}: {plain[other]:.2f}, with a look {look[other]:.2f}, {told}")


def _on_one_thread() -> None:
    """Begin anew on one thread, unless that is so already.

    Threads that wait for each other spin: on a busy machine that is most of the processor time of whatever
    uses them, and evidence uses more of them than CAF does.
    """
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OMP_NUM_THREADS": "1"})


def _served(rule: str) -> Algorithm:
    """Return CafCor at n = 100, f = 10, of the largest of `LENGTHS` rounds, with a rule."""
    release = Release(clip=2.25, law=NoiseLaw(1.0, 0.65))
    setup = Setup(100, 10, max(LENGTHS), aggregation.parse(rule.partition(",")[0], f=10), release)
    return staged(algorithms["cafcor"]().build, setup)


def _messages(device: torch.device, rounds: int) -> Iterator[torch.Tensor]:
    """Yield what 100 honest clients without contributions send, round by round; always in the same place."""
    beta, generator = algorithms["cafcor"]().momentum, Key(1).torch(device)
    message = torch.empty(100, NETWORK.dim, device=device).fill_(0.0)
    for _ in range(rounds):
        message.mul_(beta).add_(
            honest_noise(100, NETWORK.dim, NoiseLaw(1.0, 0.65), generator), alpha=1 - beta
        )
        yield message


NETWORK = build("cnn", (1, 28, 28), 10)


def _sent(rule: str, message: torch.Tensor) -> Messages:
    """Return what the server is given; under `SINGLE` it has measured messages in float32."""
    return Messages(message, geometry=aggregation.geometry(message, single=True) if rule == SINGLE else None)


def _memory(rule: str, device: torch.device) -> float:
    """Return the memory that the server takes in four rounds beside the messages, in n d numbers."""
    algorithm = _served(rule)
    state, watched = {}, None
    for round_, message in enumerate(_messages(device, 4)):
        gc.collect()
        watched = watched or PeakMemory(device)
        state = state or _begun(algorithm, device)
        with watched:
            state = algorithm.server(_sent(rule, message), state, round_, Key(2)).state
    assert watched is not None
    return watched.most / (4 * 100 * NETWORK.dim)


def _times(device: torch.device) -> dict[str, list[dict[str, float]]]:
    """Return, by rule and round, the seconds of a step, the least of some, and as shares of each rule's.

    CAF takes a different number of steps in every round; all rules see the same messages, in turn. Nobody
    holds what came out of a step when it is taken again: n d numbers of memory that was not in use before
    cost a processor 0.1 to 0.4 seconds, by how much of it the system has at hand, and a server that goes on
    from round to round does not pay them.
    """
    served = {rule: _served(rule) for rule in RULES}
    states = {rule: _begun(algorithm, device) for rule, algorithm in served.items()}
    taken: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
    for round_, message in enumerate(_messages(device, 16)):
        after, spent = dict[str, dict[str, torch.Tensor]](), {rule: list[float]() for rule in RULES}
        for _ in range((3 if device.type == "cpu" else 15) if round_ >= 4 else 1):
            for rule, algorithm in served.items():
                after.pop(rule, None)
                begin = _clock(device)
                done = algorithm.server(_sent(rule, message), states[rule], round_, Key(2))
                spent[rule].append(_clock(device) - begin)
                after[rule] = dict(done.state)
                assert not done.report.get("expelled")
                del done
        states = after
        least = {rule: min(times) for rule, times in spent.items()}
        for rule, mine in least.items() if round_ >= 4 else ():
            shares = {other: mine / theirs for other, theirs in least.items()}
            taken[rule].append({"spent": mine, "look": round_ in looks(max(LENGTHS)), **shares})
    return taken


def _begun(algorithm: Algorithm, device: torch.device) -> dict[str, torch.Tensor]:
    begun = algorithm.init(NETWORK, tuple(range(100)), Key(1)).server
    return {name: part.to(device) for name, part in begun.items()}


class PeakMemory:
    """The most bytes in use within its blocks, beside those that were when it was made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before, self.most = device, self._now(device), 0

    @staticmethod
    def _now(device: torch.device) -> int:
        on_gpu = device.type == "cuda"
        return torch.cuda.memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.over = threading.Event()
            self.watch = threading.Thread(target=self._watch)
            self.watch.start()

    def _watch(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, self._now(self.device) - self.before)

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.most = max(self.most, torch.cuda.max_memory_allocated(self.device) - self.before)
        else:
            self.over.set()
            self.watch.join()


def _clock(device: torch.device) -> float:
    """Return the processor time so far, or the time at which a GPU has done what it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
