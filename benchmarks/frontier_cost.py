"""What evidence costs a server, in time and in memory, against the rule it stands before.

python benchmarks/frontier.py cost      --device cuda
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import torch

from trilemma import aggregation
from trilemma.keys import Key
from trilemma.learning import Algorithm, Messages, Setup, algorithms
from trilemma.learning.evidence import guarded
from trilemma.learning.evidence.schedule import looks
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


def cost(where: str) -> None:
    """Time a server step at n = 100, d = 431,080 with and without evidence: processor time, or a GPU's.

    Rounds in which sums are looked at and others are timed apart; what a run costs is both in the proportion
    in which its schedule has them. Memory is the most that was in use during a step, the state included, in
    numbers for each client and coordinate, beside the messages; bars: 1.15 of caf and 3.
    """
    rules, device = ("caf", "evidence+caf", "evidence(correct=0)+caf"), torch.device(where)
    _memory("caf", device)  # whatever is compiled or loaded by the first step
    memory = {rule: _memory(rule, device) for rule in rules}
    taken = _times(rules, device)
    for rule, times in taken.items():
        look, plain = (
            [
                np.mean([one[some] for one in times.values() if one["look"] is kind])
                for some in ("spent", "of caf")
            ]
            for kind in (True, False)
        )
        print(
            f"{rule}: {1e3 * plain[0]:.1f} ms, with a look {1e3 * look[0]:.1f} ms, {memory[rule]:.2f} n d",
            end="",
        )
        shares = {rounds: len(looks(rounds)) / rounds for rounds in LENGTHS}
        ratios = {rounds: share * look[1] + (1 - share) * plain[1] for rounds, share in shares.items()}
        said = ", ".join(f"{ratio:.2f} over {rounds} rounds" for rounds, ratio in ratios.items())
        print("" if rule == "caf" else f"; {plain[1]:.2f} and {look[1]:.2f} of caf, {said}")


def _served(rule: str) -> Algorithm:
    """Return CafCor at n = 100, f = 10, of the largest of `LENGTHS` rounds, with a rule."""
    release = Release(clip=2.25, law=NoiseLaw(1.0, 0.65))
    setup = Setup(100, 10, max(LENGTHS), aggregation.parse(rule, f=10), release)
    return guarded(algorithms["cafcor"]().build, setup)


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


def _memory(rule: str, device: torch.device) -> float:
    """Return the memory that the server takes in four rounds beside the messages, in n d numbers."""
    algorithm = _served(rule)
    state, watched = {}, None
    for round_, message in enumerate(_messages(device, 4)):
        gc.collect()
        watched = watched or Memory(device)
        state = state or _begun(algorithm, device)
        with watched:
            state = algorithm.server(Messages(message), state, round_, Key(2)).state
    assert watched is not None
    return watched.most / (4 * 100 * NETWORK.dim)


def _times(rules: Sequence[str], device: torch.device) -> dict[str, dict[int, dict[str, float]]]:
    """Return, by rule and round, the seconds of a step, the least of three, and as a share of caf's.

    CAF takes a different number of steps in every round; all rules see the same messages, in turn.
    """
    served = {rule: _served(rule) for rule in rules}
    states = {rule: _begun(algorithm, device) for rule, algorithm in served.items()}
    taken: dict[str, dict[int, dict[str, float]]] = {rule: {} for rule in rules}
    for round_, message in enumerate(_messages(device, 16)):
        after, spent = {}, {rule: list[float]() for rule in rules}
        for _ in range(3 if round_ >= 4 else 1):
            for rule, algorithm in served.items():
                begin = _clock(device)
                done = algorithm.server(Messages(message), states[rule], round_, Key(2))
                spent[rule].append(_clock(device) - begin)
                after[rule] = done.state
                assert not done.report.get("expelled")
        states = after
        for rule in rules if round_ >= 4 else ():
            least, look = min(spent[rule]), round_ in looks(max(LENGTHS))
            taken[rule][round_] = {"spent": least, "of caf": least / min(spent["caf"]), "look": look}
    return taken


def _begun(algorithm: Algorithm, device: torch.device) -> dict[str, torch.Tensor]:
    begun = algorithm.init(NETWORK, tuple(range(100)), Key(1)).server
    return {name: part.to(device) for name, part in begun.items()}


class Memory:
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
