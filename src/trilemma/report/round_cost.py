"""What a round will take: the server's pass over the messages and a client's noise, timed here on a sample.

Both grow in proportion to d, so a sample of the coordinates tells the rest. What does not grow with d (how a
rule decides once it knows the distances) is not in it, and neither is training, which depends on the model:
`trilemma check task.py` times that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from trilemma import aggregation
from trilemma.base.keys import Key
from trilemma.privacy import NoiseLaw, SecretNoise

MOST_CLIENTS = 1000
"""With more of them even the sample takes long, and nothing is timed."""

NUMBERS = 1 << 21
"""Numbers in the sample of all clients' messages."""

DRAWS = 1 << 18
"""Numbers in the sample of one client's noise, over all its partners."""


@dataclass(frozen=True)
class Seconds:
    """Of one round, on a machine like this: the server's over all messages, each client's for its noise."""

    rule: float
    noise: float


def expected_seconds(
    rule: str, clients: int, byzantine: int, law: NoiseLaw, dim: int, neighbours: int | None = None
) -> Seconds | None:
    """Return what a round takes; None where there are too many clients to try it.

    >>> found = expected_seconds("caf", clients=10, byzantine=2, law=NoiseLaw(1.0, 0.5), dim=10**6)
    >>> found.rule > 0 and found.noise > 0
    True
    """
    if clients > MOST_CLIENTS:
        return None
    streams = 1 + min(neighbours or clients, clients - 1) if law.sigma_cor > 0 else 1
    messages, noise = NUMBERS // clients, DRAWS // streams
    return Seconds(
        _rule_seconds(rule, clients, byzantine, messages) * dim / messages,
        0.0 if law.silent else _noise_seconds(streams, noise) * dim / noise,
    )


@lru_cache(maxsize=64)
def _rule_seconds(text: str, clients: int, byzantine: int, coordinates: int) -> float:
    rule = aggregation.parse(text, byzantine)
    rule.check(clients)
    messages = torch.randn((clients, coordinates), generator=Key(0).torch())
    if not rule.geometric:
        return _best(lambda: rule(messages))
    weights = torch.full((clients,), 1 / clients)
    return _best(lambda: (aggregation.geometry(messages), weights @ messages))


@lru_cache(maxsize=64)
def _noise_seconds(streams: int, coordinates: int) -> float:
    pairs = {partner: bytes(32) for partner in range(1, streams)}
    law, cpu = NoiseLaw(1.0, 1.0 if pairs else 0.0), torch.device("cpu")
    return _best(lambda: SecretNoise(0, pairs).draw(law, (0,), coordinates, round_=1, device=cpu))


def _best(work: Callable[[], object]) -> float:
    """Return the shortest of three timings: the others include what else the machine did."""
    least = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least
