"""What a run decides apart from its algorithm: which clients are sampled, and which model is returned.

Simulations and real federations both call these functions with the same keys, so they decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from trilemma.base.keys import Key

Returned = Literal["last", "sampled", "average"]
"""The model a run returns: its last, one drawn uniformly from its iterates, or their mean."""


def sampled_clients(clients: Sequence[int], count: int | None, round_: int, key: Key) -> tuple[int, ...]:
    """Return `count` of the `clients`, drawn uniformly for a round; all if there are no more than `count`.

    `key` is the key of the run; `count` None: all clients.

    >>> sampled_clients(range(10), 3, round_=0, key=Key(1))
    (0, 8, 9)
    >>> sampled_clients([4, 7], 3, round_=0, key=Key(1)), sampled_clients([4, 7], None, 0, Key(1))
    ((4, 7), (4, 7))
    """
    if count is None or count >= len(clients):
        return tuple(sorted(clients))
    drawn = key.fold("round", round_, "sampled").numpy().choice(len(clients), count, replace=False)
    return tuple(sorted(clients[int(place)] for place in drawn))


def returned_model(
    how: Returned, before: Tensor, latest: Tensor, finished: int, rounds: int, key: Key
) -> Tensor:
    """Return the model to keep after `finished` of `rounds` rounds, which a run that ends here returns.

    `before` is the model kept after the last round, `latest` that of this one; `key` is the key of the run.

    >>> import torch
    >>> kept = torch.zeros(1)
    >>> for finished, latest in enumerate((2.0, 4.0, 9.0), start=1):
    ...     kept = returned_model("average", kept, torch.tensor([latest]), finished, 3, Key(1))
    >>> kept
    tensor([5.])
    """
    match how:
        case "last":
            return latest
        case "average":
            return before + (latest - before) / finished
        case "sampled":
            picked = int(key.fold("returned").numpy().integers(1, rounds + 1))
            return latest if finished <= picked else before
