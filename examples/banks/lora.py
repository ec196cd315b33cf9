"""The same queries, but the encoder learns too: low-rank adapters on its attention, and a head.

    trilemma run examples/banks/lora.toml --task examples/banks/lora.py

`lora.toml` says `[model] train = {lora = 8, …}`: adapters on the Linear layers it names,
and the head. It wants a GPU.
"""

from __future__ import annotations

import numpy as np
from queries import BANKS, LENGTH, VOCABULARY, Encoder, queries
from torch import Tensor, nn

from trilemma import Declaration, Values

INTENTS = 77
SCALE = 20.0
"""What the vectors, of length one, are multiplied by: head and adapters then learn at one learning rate."""

clients = BANKS
metrics = ("accuracy",)
loss = nn.CrossEntropyLoss()
expects = Declaration(
    {
        "input_ids": Values("whole", (LENGTH,), low=0, high=VOCABULARY - 1, varies=True),
        "attention_mask": Values("whole", (LENGTH,), low=0, high=1, varies=True, mask=True),
    },
    Values("whole", low=0, high=INTENTS - 1),
)


class Classifier(nn.Module):
    """The encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(self.encoder.size, INTENTS)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one score per intent."""
        return self.head(SCALE * self.encoder(input_ids, attention_mask))


def model() -> nn.Module:
    """Return the pretrained encoder with a head that starts from zero."""
    return Classifier()


def data(client: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return a bank's queries as columns of token numbers, and their intents."""
    return queries(client)


def test() -> tuple[dict[str, Tensor], np.ndarray]:
    """Return the public test queries."""
    return queries(None)
