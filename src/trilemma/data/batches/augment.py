"""Changes to training features at the moment they are drawn, each client from its own key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data.batches.streams import each_stream


def horizontal_flip(x: Tensor, keys: Sequence[Key]) -> Tensor:
    """Flip each image left to right with probability one half; client i's coins come from `keys[i]`.

    >>> x = torch.arange(3.0).expand(1, 4, 1, 1, 3)
    >>> horizontal_flip(x, [Key(1)])[0, :, 0, 0, 0].tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    coins = np.stack([stream.random(x.shape[1]) < 0.5 for stream in each_stream(keys)])
    chosen = torch.from_numpy(coins).to(x.device).view(*coins.shape, *[1] * (x.ndim - 2))
    return torch.where(chosen, x.flip(-1), x)
