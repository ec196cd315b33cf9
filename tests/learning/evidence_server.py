"""A small server with evidence, what clients without data send it, and its start."""

from __future__ import annotations

import pytest
import torch

from trilemma import aggregation, privacy
from trilemma.base.keys import Key
from trilemma.learning import Algorithm, Setup, algorithms
from trilemma.learning.defences.stage import staged
from trilemma.learning.protocol import State
from trilemma.models import build
from trilemma.privacy.types import NoiseLaw, Release

CLIENTS, LIARS, ROUNDS = 20, 4, 30
EVERYBODY = tuple(range(CLIENTS))
LAW = NoiseLaw(1.0, 0.3)
MODEL = build("logistic", (299,), 2)
CPU = torch.device("cpu")
NEEDED = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDED])]


def server(
    rule: str = "evidence+mean", rounds: int = ROUNDS, clip: float = 0.5, law: NoiseLaw = LAW
) -> Algorithm:
    """Byz-Clip-SGD without momentum, steps of −1: the model is the sum of aggregates, less."""
    setup = Setup(CLIENTS, LIARS, rounds, aggregation.parse(rule, f=LIARS), Release(clip=clip, law=law))
    return staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)


def start(algorithm: Algorithm) -> State:
    return algorithm.init(MODEL, EVERYBODY, Key(1)).server


def noise(round_: int, seed: int = 2) -> torch.Tensor:
    """What everybody sends who contributes nothing."""
    return privacy.SimulatedNoise(Key(seed), CLIENTS).draw(LAW, EVERYBODY, MODEL.dim, round_, CPU)
